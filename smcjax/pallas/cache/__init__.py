"""Kernels that write, copy and account for the pages of the KV cache."""
