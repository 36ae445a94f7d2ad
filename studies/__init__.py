"""Kernel studies that the engine does not need; no part of the wheel. Nothing in `smcjax/` imports them."""
