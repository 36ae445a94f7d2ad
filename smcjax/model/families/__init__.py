"""The families of models that are read and written: one file each, and one line here."""

from smcjax.model.families.family import Family
from smcjax.model.families.gemma import GEMMA3
from smcjax.model.families.llama import LLAMA
from smcjax.model.families.mistral import MISTRAL
from smcjax.model.families.nsa import NSA
from smcjax.model.families.olmo import OLMO2
from smcjax.model.families.qwen import QWEN2, QWEN3

FAMILIES = (LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA3, OLMO2, NSA)  # in the order in which one is sought to write a config

__all__ = ["FAMILIES", "Family"]
