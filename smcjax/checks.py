"""Checks of the options of decoders: each raises one sentence that names the option and the value seen."""

from __future__ import annotations

from smcjax.sparse.verification import SparseVerification

_MOST = {"n_particles": 1024, "n_candidates": 1024, "gamma": 64}


def check_sizes(options: object, *names: str) -> None:
    """Raises ValueError where one of these attributes of `options` is no whole number within its bounds."""
    for name in names:
        value = getattr(options, name)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MOST[name]:
            raise ValueError(f"{name} must be a whole number from 1 to {_MOST[name]}, got {value!r}.")


def check_draft_temperature(value: object, coldest: float) -> None:
    """Raises ValueError for what is neither None nor a temperature from `coldest` on."""
    if value is not None and not is_number(value, coldest, 1e3):
        raise ValueError(
            f"draft_temperature must be a number from {coldest:g} to 1000, or None to follow the request's "
            f"temperature, got {value!r}."
        )


def check_sparse(value: object) -> None:
    """Raises ValueError for what does not say how a sparse target verifies."""
    if not isinstance(value, SparseVerification | None):
        raise ValueError(f"sparse must be SparseVerification(...) or None, got {value!r}.")


def is_number(value: object, least: float, most: float) -> bool:
    """True for a number within these bounds, which NaN is not."""
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most
