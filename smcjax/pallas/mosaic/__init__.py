"""The toolkit of kernels: threads, tiles, tensor-core products, draws and cache policies; it has no operation."""
