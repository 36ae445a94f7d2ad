"""What all decoders share: rows of tokens, drawing tokens, and writing a prompt's KV."""
