"""The families of models that are read and written: one file each, and one name here.

A family may lie above this package, as that of Native Sparse Attention does, whose kind is built on `smcjax.model`. So
families are imported by name when they are first asked for.
"""

import functools
import importlib

from smcjax.model.families.family import Family

NAMES = (  # module and value, in the order in which a family is sought to write a config
    "smcjax.model.families.llama.LLAMA",
    "smcjax.model.families.mistral.MISTRAL",
    "smcjax.model.families.qwen.QWEN2",
    "smcjax.model.families.qwen.QWEN3",
    "smcjax.model.families.gemma.GEMMA3",
    "smcjax.model.families.olmo.OLMO2",
    "smcjax.sparse.family.FAMILY",
)

__all__ = ["Family", "families"]


@functools.cache
def families() -> tuple[Family, ...]:
    """Returns all families, in the order of `NAMES`."""
    places = (name.rsplit(".", 1) for name in NAMES)
    return tuple(getattr(importlib.import_module(module), value) for module, value in places)
