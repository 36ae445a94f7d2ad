"""The launch that the Triton kernels of all rooms share, and an interpreter that runs them on a CPU."""
