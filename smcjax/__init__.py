"""Large-language-model inference by Sequential Monte Carlo speculative decoding, in JAX."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from smcjax.auto import Auto
    from smcjax.decoders import SMC, Autoregressive, Rejection
    from smcjax.decoders.text_potential import TextPotential
    from smcjax.engine.async_llm import AsyncLLM
    from smcjax.engine.judge import Judge
    from smcjax.engine.llm import LLM
    from smcjax.engine.requests.sampling_params import SamplingParams
    from smcjax.engine.results.majority import majority
    from smcjax.engine.results.outputs import (
        CompletionOutput,
        Cycle,
        Particle,
        RequestOutput,
        SMCOutput,
        StreamChunk,
        TokenLogprob,
        Trace,
    )
    from smcjax.errors import CheckpointError
    from smcjax.sparse.verification import SparseVerification

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "SMC",
    "AsyncLLM",
    "Auto",
    "Autoregressive",
    "CheckpointError",
    "CompletionOutput",
    "Cycle",
    "Judge",
    "Particle",
    "Rejection",
    "RequestOutput",
    "SMCOutput",
    "SamplingParams",
    "SparseVerification",
    "StreamChunk",
    "TextPotential",
    "TokenLogprob",
    "Trace",
    "majority",
]

_HOME = {
    "AsyncLLM": "engine.async_llm",
    "Auto": "auto",
    "Judge": "engine.judge",
    "LLM": "engine.llm",
    "Rejection": "decoders",
    "SMC": "decoders",
    "Autoregressive": "decoders",
    "CheckpointError": "errors",
    "SamplingParams": "engine.requests.sampling_params",
    "SparseVerification": "sparse.verification",
    "TextPotential": "decoders.text_potential",
    "majority": "engine.results.majority",
}
_SUBPACKAGES = ("kv", "model", "pallas", "rejection", "smc")


def __getattr__(name: str) -> Any:
    """Imports what is asked for: JAX takes a second, and `smcjax --help` needs none of it."""
    if name in _SUBPACKAGES:
        return importlib.import_module(f"smcjax.{name}")
    if name not in __all__:
        raise AttributeError(f"module 'smcjax' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"smcjax.{_HOME.get(name, 'engine.results.outputs')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, *_SUBPACKAGES, "__version__"])
