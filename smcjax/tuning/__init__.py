"""Drafts trained for SMC, on the target's own samples (docs/how-to/tune-a-draft.md). Needs optax (extra `train`)."""
