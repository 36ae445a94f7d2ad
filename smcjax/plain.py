"""Options as users pass them."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np


def use_plain_numbers(options: Any) -> None:
    """Replaces NumPy's scalars in the fields of a frozen dataclass by Python's: np.int64(8) is as good as 8."""
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if isinstance(value, np.generic):
            object.__setattr__(options, field.name, value.item())


def is_unicode(text: str) -> bool:
    """Whether a text is free of lone surrogates, which stand for undecodable bytes of a command line."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
