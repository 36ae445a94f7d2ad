"""Potentials that are heads on the target's hidden states: they cost no forward and no KV of their own.

A `ValueHead` is the head of a reward model or classifier: its score is log Φ.

A `Twist` guesses what an answer will be worth. A population that hears of a potential Φ late resamples late. The best
value of a beginning x_1:t is E[Φ(x) | x_1:t], the optimal twist (Zhao et al. 2024, arXiv 2404.17546). A `Twist` is a
small function log ψ of the target's hidden state behind x_<t and of x_t, trained for one Φ by `smcjax tune-twist`. It
stands beside Φ among a request's potentials, and is 1 for whole answers: a bad one costs particles, and no law.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from safetensors import SafetensorError
from safetensors.numpy import load, save

from smcjax.checks import is_number, is_whole
from smcjax.device import product_precision
from smcjax.errors import CheckpointError
from smcjax.files import MIB, Unreadable, read_bytes
from smcjax.model.files.classifier import load_head
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


class HeadParams(NamedTuple):
    """The weights of a linear head, float32: scores are weight · hidden + bias."""

    weight: Float[Array | np.ndarray, "labels E"]
    bias: Float[Array | np.ndarray, " labels"]


@dataclasses.dataclass(frozen=True)
class _Head[P: tuple[Any, ...]]:
    """A potential whose arrays are constants of the programs that it is compiled into.

    Raises ValueError for numbers that are not finite.
    """

    params: P = dataclasses.field(repr=False, compare=False)
    digest: str = dataclasses.field(init=False)  # of the arrays, which it stands for in comparisons

    def __post_init__(self) -> None:
        params = type(self.params)(*(np.asarray(leaf, np.float32) for leaf in self.params))
        if not all(np.isfinite(leaf).all() for leaf in params):
            raise ValueError(f"a {type(self).__name__} has numbers that are not finite; train it anew.")
        object.__setattr__(self, "params", params)
        digest = hashlib.sha256(b"".join(np.ascontiguousarray(leaf).tobytes() for leaf in params))
        object.__setattr__(self, "digest", digest.hexdigest()[:16])


@dataclasses.dataclass(frozen=True)
class ValueHead(_Head[HeadParams]):
    """A potential that is a reward model's or classifier's linear head on the target's own hidden states.

    log Φ is `exponent` times the score of a head of one label, or times the log-probability of `label` of several.
    Beginnings and whole answers are scored alike. The state is the one behind all of an answer but its newest token,
    which the target has made to score that token: no model runs for it, and there are no pages but the particle's own.
    So an answer that ends by its end token is scored without that, and one that ends by its limit without its last
    token.

    The head must have been trained on this target's states. A head that was trained together with a decoder needs that
    decoder, which `smcjax.Judge` runs. Raises ValueError for arguments that do not go together.
    """

    label: int | None = None
    exponent: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        shapes = [leaf.shape for leaf in self.params]
        labels = self.params.bias.size
        if not labels or shapes != [(labels, self.params.weight.size // labels), (labels,)]:
            raise ValueError(f"a head has arrays of shapes (labels, E), (labels,), got {shapes}; read it anew.")
        if labels == 1 and self.label is not None:
            raise ValueError(f"label is {self.label!r} and the head has one, whose score is the value; leave it out.")
        if labels > 1 and not is_whole(self.label, 0, labels - 1):
            raise ValueError(f"label must be a whole number from 0 to {labels - 1}, got {self.label!r}.")
        if not is_number(self.exponent, 0.0, 1e6):
            raise ValueError(f"exponent must be a number from 0 to 1,000,000, got {self.exponent!r}.")

    @property
    def hidden_size(self) -> int:
        """E of the target that it was trained on."""
        return int(self.params.weight.shape[1])

    @classmethod
    def load(cls, directory: str | os.PathLike[str], *, label: int | None = None, exponent: float = 1.0) -> ValueHead:
        """Reads the head alone of a Hugging Face directory or hub id; nothing in it is executed.

        It is a classifier's or reward model's `score`, or the `v_head` of TRL's models. Raises CheckpointError for a
        directory without one, or whose numbers cannot be used.
        """
        return cls(HeadParams(*load_head(directory)), label, exponent)

    def log_value(self, answers: Answers) -> Float[Array, " R"]:
        """Each row's score, or its log-probability of the label, times the exponent."""
        assert answers.hidden is not None
        weight, bias = (jnp.asarray(leaf, answers.hidden.dtype) for leaf in self.params)
        scores = jnp.matmul(answers.hidden, weight.T, precision=product_precision(weight.dtype)) + bias[None]
        of_label = scores[:, 0] if self.label is None else jax.nn.log_softmax(scores)[:, self.label]
        return self.exponent * of_label


@dataclasses.dataclass(frozen=True)
class Twist(_Head[TwistParams]):
    """A potential that is log ψ of a beginning by `TwistParams`, and 0 of a whole answer.

    Raises ValueError for arrays of other shapes than `TwistParams` has, or numbers that are not finite.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        shapes = [leaf.shape for leaf in self.params]
        (e, h), v = (*self.params.up.shape, 0, 0)[:2], self.params.token_bias.size
        if shapes != [(e, h), (h,), (v, h), (v,)]:
            raise ValueError(f"a twist has arrays of shapes (E, H), (H,), (V, H), (V,), got {shapes}; train it anew.")

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
