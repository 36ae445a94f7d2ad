"""Turns what programs report into tokens, text, scores, streams and outputs."""
