"""Decides which requests run in the next round, in how many lanes and on which pages, without JAX."""
