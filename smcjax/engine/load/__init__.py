"""Brings a pair of models from disk to the device, and finds the decoder that suits them."""
