"""One decode step of a whole decoder as one persistent kernel: `op.py` is its entrance, `kernel.py` its body."""
