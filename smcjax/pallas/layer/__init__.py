"""What stands around attention in a layer: RMS norm, SwiGLU and products of few rows."""
