"""Parts that all decoders share: rows of tokens, sampling, proposers of drafts, prefill, the target's scores."""
