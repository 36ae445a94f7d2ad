"""The decoders that a user chooses from: static, hashable, checked once, and without JAX, which takes a second.

`smcjax.engine.load.loading.make_decoder` builds the `smcjax.decoding.decoder.Decoder` of each, which computes.
"""

from smcjax.decoders.autoregressive import Autoregressive
from smcjax.decoders.base import COLDEST, MAX_ALTERNATIVES, Decoding, NeedsExact, Speculation
from smcjax.decoders.rejection import SIBLINGS, Rejection
from smcjax.decoders.smc import ALARM, SCHEMES, SELECTIONS, SHARPEST, SMC, WARNING_RATE

DECODINGS: dict[str, type[Decoding]] = {one.name: one for one in (SMC, Rejection, Autoregressive)}

__all__ = [
    "ALARM",
    "COLDEST",
    "DECODINGS",
    "MAX_ALTERNATIVES",
    "SCHEMES",
    "SELECTIONS",
    "SHARPEST",
    "SIBLINGS",
    "SMC",
    "WARNING_RATE",
    "Autoregressive",
    "Decoding",
    "NeedsExact",
    "Rejection",
    "Speculation",
]
