"""The operations around attention in a layer are RMS norm, SwiGLU and products of few rows."""
