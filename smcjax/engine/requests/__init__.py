"""Checks what a user asks for and arranges it as a batch's arrays, without JAX."""
