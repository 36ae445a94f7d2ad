"""A model directory's tokenizer: its files, GGUF's among them, its texts and its chat template."""
