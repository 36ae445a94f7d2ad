"""Attention over contiguous and paged keys and values: the references, the XLA path for CPUs and the Hopper kernels."""
