"""Drafts trained for SMC, on the target's own samples (docs/tuning.md). Needs optax, by the extra `train`."""
