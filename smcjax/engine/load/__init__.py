"""A pair of models from disk to the device, and the decoder that suits them."""
