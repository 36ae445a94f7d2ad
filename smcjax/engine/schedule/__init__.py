"""Decides which requests run in the next round, in how many slots and on which pages, without JAX."""
