"""The launch that the Triton kernels of all rooms share."""
