"""Kernels of native sparse attention: gates, compression, block selection and attention of query groups."""
