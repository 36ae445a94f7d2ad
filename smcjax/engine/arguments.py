"""Checks of the arguments of `LLM`: each raises one sentence that names the argument and the value seen."""

from __future__ import annotations

import numbers
import os
from collections.abc import Sequence

from smcjax.device import on_cpu


def check_range(name: str, value: object, least: int, most: int, *, or_none: bool = False) -> None:
    """Raises ValueError where argument `name` is no whole number within these bounds, nor, if that may be, None."""
    if or_none and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or not least <= int(value) <= most:
        raise ValueError(f"{name} must be a whole number from {least} to {most}, got {value!r}.")


def check_path(name: str, value: object) -> None:
    """Raises ValueError where argument `name` cannot name a model."""
    if not isinstance(value, str | os.PathLike | None):
        raise ValueError(
            f"{name} must be a model directory, a GGUF file or a hub id, or None for the bundled pair, got {value!r}."
        )


def check_revision(name: str, value: object) -> None:
    """Raises ValueError where argument `name` is no name of a revision."""
    if value is not None and (not isinstance(value, str) or not value):
        raise ValueError(f"{name} must be a branch, a tag or a commit, or None, got {value!r}.")


def check_layers(name: str, value: object) -> None:
    """Raises ValueError where argument `name` is no sequence of layer numbers."""
    if value is None:
        return
    whole = isinstance(value, Sequence) and all(
        isinstance(layer, numbers.Integral) and not isinstance(layer, bool) for layer in value
    )
    if not whole or not value:
        raise ValueError(f"{name} must be numbers of layers such as (3, 12), or None, got {value!r}.")


def check_share(name: str, value: object) -> None:
    """Raises ValueError where argument `name` is no number above 0 and at most 1."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise ValueError(f"{name} must be above 0 and at most 1, got {value!r}.")


def check_choice(name: str, value: object, *known: str) -> None:
    """Raises ValueError where argument `name` is none of the known values."""
    if value not in known:
        raise ValueError(f"{name} must be {' or '.join(map(repr, known))}, got {value!r}.")


def check_flag(name: str, value: object, *, or_none: bool = False) -> None:
    """Raises ValueError where argument `name` is neither True nor False nor, if that may be, None."""
    if not isinstance(value, bool) and not (or_none and value is None):
        raise ValueError(f"{name} must be {'True, False or None' if or_none else 'True or False'}, got {value!r}.")


def check_devices(size: object, of_draft: object, separate_draft: object) -> None:
    """Raises ValueError where the two models cannot be held by so many devices."""
    check_flag("separate_draft", separate_draft)
    if separate_draft and (size != 1 or of_draft is not None):
        name = "draft_tensor_parallel_size" if size == 1 else "tensor_parallel_size"
        raise ValueError(
            f"separate_draft is True and {name} is {of_draft if size == 1 else size}, but devices of their own have "
            "each model whole; leave one of them out."
        )
    check_range("tensor_parallel_size", size, 1, 1 << 10)
    check_range("draft_tensor_parallel_size", of_draft, 1, 1 << 10, or_none=True)
    if of_draft not in (None, 1, size):
        raise ValueError(f"draft_tensor_parallel_size must be 1 or tensor_parallel_size = {size}, got {of_draft}.")


def compiles_at_start(requested: bool | None) -> bool:
    """True where all programs are compiled at once: as requested, and for None on a GPU alone."""
    return not on_cpu() if requested is None else requested
