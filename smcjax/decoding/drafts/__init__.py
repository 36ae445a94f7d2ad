"""Ways to draft: by a model, a head, a tree, or text that was there before."""
