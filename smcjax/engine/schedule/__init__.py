"""Which requests run in the next round, in how many lanes and on which pages. Without JAX."""
