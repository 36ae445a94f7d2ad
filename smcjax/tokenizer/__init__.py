"""Reads a model directory's tokenizer, GGUF's among them, and renders its chat template."""
