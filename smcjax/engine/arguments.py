"""Checks of the arguments of `LLM`: each raises one sentence that names the argument and the value seen."""

from __future__ import annotations

import numbers
import os
from collections.abc import Sequence


def check_range(name: str, value: object, least: int, most: int) -> None:
    """Raises ValueError where argument `name` is no whole number within these bounds."""
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


def is_share(value: object) -> bool:
    """True for a number above 0 and at most 1."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 1
