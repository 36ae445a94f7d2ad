"""LLVM's passes on a CPU, which take longer than what they save in most tests."""

from __future__ import annotations

import jax


def leave_llvm_passes_out(whether: bool) -> None:
    """Programs compiled from now on go without LLVM's passes, or with them; on a GPU always with them."""
    jax.config.update("jax_disable_most_optimizations", whether and jax.default_backend() == "cpu")
