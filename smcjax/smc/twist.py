"""Twists: learned guesses of what an answer will be worth, which steer a population towards a potential.

A population that hears of a potential Φ late resamples late. The best value of a beginning x_1:t is E[Φ(x) | x_1:t],
the optimal twist (Zhao et al. 2024, arXiv 2404.17546). A `Twist` is a small function log ψ of the target's hidden state
behind x_<t and of x_t, trained for one Φ by `smcjax tune-twist`. It stands beside Φ among a request's potentials, and
is 1 for whole answers: a bad one costs particles, and no law.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from safetensors import SafetensorError
from safetensors.numpy import load, save

from smcjax.errors import CheckpointError
from smcjax.files import MIB, Unreadable, read_bytes
from smcjax.smc.potential import Answers

MAX_BYTES = 1024 * MIB
KIND = "smcjax twist"


class TwistParams(NamedTuple):
    """The weights of a twist with one hidden layer of H units, float32."""

    up: Float[Array | np.ndarray, "E H"]
    up_bias: Float[Array | np.ndarray, " H"]
    tokens: Float[Array | np.ndarray, "V H"]  # of the newest token
    token_bias: Float[Array | np.ndarray, " V"]

    def __call__(self, hidden: Float[Array, "*shape E"], newest: Int[Array, "*shape"]) -> Float[Array, "*shape"]:
        """log ψ of beginnings whose newest token was drawn from these hidden states, in their dtype."""
        up, up_bias, tokens, token_bias = (jnp.asarray(leaf, hidden.dtype) for leaf in self)
        bias = up_bias.reshape((1,) * (hidden.ndim - 1) + up_bias.shape)
        return jnp.sum(jnp.tanh(jnp.matmul(hidden, up) + bias) * tokens[newest], axis=-1) + token_bias[newest]


@dataclasses.dataclass(frozen=True)
class Twist:
    """A potential that is log ψ of a beginning by `TwistParams`, and 0 of a whole answer.

    Its arrays are constants of the programs that it is compiled into. Raises ValueError for arrays of other shapes than
    `TwistParams` has, or numbers that are not finite.
    """

    params: TwistParams = dataclasses.field(repr=False, compare=False)
    digest: str = dataclasses.field(init=False)  # of the arrays, which it stands for in comparisons

    def __post_init__(self) -> None:
        params = TwistParams(*(np.asarray(leaf, np.float32) for leaf in self.params))
        shapes = [leaf.shape for leaf in params]
        (e, h), v = (*params.up.shape, 0, 0)[:2], params.token_bias.size
        if shapes != [(e, h), (h,), (v, h), (v,)]:
            raise ValueError(f"a twist has arrays of shapes (E, H), (H,), (V, H), (V,), got {shapes}; train it anew.")
        if not all(np.isfinite(leaf).all() for leaf in params):
            raise ValueError("a twist has numbers that are not finite; train it anew, with a lower learning rate.")
        object.__setattr__(self, "params", params)
        digest = hashlib.sha256(b"".join(np.ascontiguousarray(leaf).tobytes() for leaf in params))
        object.__setattr__(self, "digest", digest.hexdigest()[:16])

    @property
    def hidden_size(self) -> int:
        """E of the target that it was trained for."""
        return int(self.params.up.shape[0])

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Twist:
        """Reads a file of `save`. Raises CheckpointError for other files; nothing in a file is executed."""
        try:
            content = read_bytes(path, MAX_BYTES)
        except Unreadable as error:
            raise CheckpointError(f"{os.fspath(path)} {error}; {error.mend}.") from None
        try:
            arrays = load(content)
            return cls(TwistParams(**arrays))
        except (SafetensorError, ValueError, TypeError) as error:
            raise CheckpointError(
                f"{os.fspath(path)} holds no twist ({error}); name a file that smcjax tune-twist wrote."
            ) from None

    def content(self, facts: dict[str, Any]) -> bytes:
        """The bytes of a file for `load`: safetensors, whose header keeps `facts` as JSON."""
        return save(self.params._asdict(), metadata={"kind": KIND, "facts": json.dumps(facts)})

    def log_value(self, answers: Answers) -> Float[Array, " R"]:
        """log ψ of each row's beginning; 0 of whole answers and of empty ones."""
        assert answers.hidden is not None
        last = jnp.maximum(answers.end - 1, 0)
        newest = jnp.take_along_axis(answers.tokens, last[:, None], axis=1)[:, 0]
        value = self.params(answers.hidden, newest)
        return jnp.where(answers.finished | (answers.end <= answers.begin), 0.0, value)
