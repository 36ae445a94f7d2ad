"""What a user asks for, checked, and the arrays of a batch of it. Without JAX."""
