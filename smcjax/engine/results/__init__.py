"""What becomes of a program's results: tokens, text, scores, streams, ends and outputs."""
