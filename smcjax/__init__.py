"""Large-language-model inference by Sequential Monte Carlo speculative decoding, in JAX."""

from smcjax.autoregressive import Autoregressive
from smcjax.engine.llm import LLM
from smcjax.engine.outputs import CompletionOutput, Particle, RequestOutput, SMCOutput, Trace
from smcjax.engine.sampling_params import SamplingParams
from smcjax.errors import CheckpointError
from smcjax.smc import SMC

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "SMC",
    "Autoregressive",
    "CheckpointError",
    "CompletionOutput",
    "Particle",
    "RequestOutput",
    "SMCOutput",
    "SamplingParams",
    "Trace",
]
