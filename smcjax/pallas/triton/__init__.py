"""What the Triton kernels of all rooms share: their launch, and an interpreter that runs them on a CPU."""
