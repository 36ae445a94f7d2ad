"""The LM head fused with the draw of the next token."""
