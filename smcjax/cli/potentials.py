"""Potentials that a command line names as MODULE:OBJECT."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from smcjax.checks import short

if TYPE_CHECKING:
    from smcjax.decoders.parts import Potential
    from smcjax.decoders.text_potential import TextPotential


def is_place(place: str) -> bool:
    """True of MODULE:OBJECT."""
    module, _, attribute = place.partition(":")
    return bool(module and attribute)


def imported_potential(told: str, place: str) -> TextPotential | Potential:
    """The object at `place`, a function as a `TextPotential`; the option --potential has the value `told`.

    Raises ValueError for what cannot be imported, or is no potential.
    """
    from smcjax.decoders.parts import Potential, is_part
    from smcjax.decoders.text_potential import TextPotential

    module, _, attribute = place.partition(":")
    sys.path.insert(0, "")  # a module in the current directory, as for python -m
    try:
        value: Any = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"--potential {short(told)} cannot be imported: {error}; mend the name.") from None
    finally:
        sys.path.remove("")
    if is_part(value, TextPotential | Potential):
        return value
    if isinstance(value, type) or not callable(value):
        raise ValueError(f"--potential {short(told)} is {short(value)}; it must be a potential or a function.")
    return TextPotential(value)
