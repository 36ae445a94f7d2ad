"""LLVM's passes on a CPU, which take longer than what they save in most tests."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax

_left_out = False


def leave_llvm_passes_out(whether: bool) -> None:
    """Programs compiled from now on go without LLVM's passes, or with them; on a GPU always with them."""
    global _left_out
    _left_out = whether
    jax.config.update("jax_disable_most_optimizations", whether and jax.default_backend() == "cpu")


@contextlib.contextmanager
def with_llvm_passes() -> Iterator[None]:
    """Programs compiled within have LLVM's passes: for a test that draws thousands of answers."""
    before = _left_out
    leave_llvm_passes_out(False)
    try:
        yield
    finally:
        leave_llvm_passes_out(before)
