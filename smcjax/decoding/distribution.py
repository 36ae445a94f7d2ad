"""The distribution that each row's next token is sampled from, and sampling from it."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, UInt

from smcjax.decoding.adjustments import row_adjustments
from smcjax.decoding.constraints import row_constraint
from smcjax.decoding.groups import Groups
from smcjax.decoding.row_feature import RowFeature, tokens_before
from smcjax.decoding.sampling import draw, forbid_stops, likeliest, log_softmax_at, truncate
from smcjax.model.decoder import unembed
from smcjax.model.params import Params
from smcjax.noise import words_of
from smcjax.pallas.decode_step.op import Embedded
from smcjax.pallas.head.sampled_head import sampled_head


@dataclasses.dataclass(frozen=True)
class SamplingDistribution:
    """softmax(logits / temperature), as features change it, without stop tokens within the minimum, and truncated."""

    temperature: Float[Array, " R"]  # above 0
    stops: Bool[Array, "R V"]  # impossible within the minimum
    minimum: Int[Array, " R"]
    greedy: Bool[Array, " R"] | None = None  # rows that take the likeliest token; None: none does
    truncation: tuple[Int[Array, " R"], Float[Array, " R"]] | None = None  # top_k and top_p; None: nothing is cut off
    features: tuple[RowFeature, ...] = ()  # of the rows' requests, behind the tokens so far

    @property
    def follows_logits(self) -> bool:
        """True where the model's own logits, a temperature and which tokens may come say all: kernels may draw."""
        return self.truncation is None and all(feature.only_forbids for feature in self.features)

    def forbidden(self, token_number: Int[Array, " R"]) -> Bool[Array, "R V"]:
        """The tokens that may not come: by the minimum of `token_number`-th tokens, and by features."""
        forbidden = self.stops & (token_number <= self.minimum)[:, None]
        for feature in self.features:
            if feature.only_forbids:
                forbidden |= ~feature.allowed()
        return forbidden

    @property
    def context(self) -> tuple[Any, ...]:
        """The part of the features that depends on the tokens so far."""
        return tuple(feature.context for feature in self.features)

    def within(self, context: tuple[Any, ...]) -> SamplingDistribution:
        """The distribution with the context of other tokens."""
        walked = zip(self.features, context, strict=True)
        return dataclasses.replace(self, features=tuple(feature.within(part) for feature, part in walked))

    def at(self, temperature: float | None) -> SamplingDistribution:
        """The distribution at one temperature for all rows; None: as it is."""
        if temperature is None:
            return self
        return dataclasses.replace(self, temperature=jnp.full_like(self.temperature, temperature))

    def behind(self, tokens: Int[Array, "R T"] | None) -> SamplingDistribution:
        """The distribution behind T more tokens a row, ids of V and beyond standing for none. None: as it is."""
        if tokens is None:
            return self
        return dataclasses.replace(self, features=tuple(feature.behind(tokens) for feature in self.features))

    def after(self, token: Int[Array, " R"]) -> SamplingDistribution:
        """The distribution behind one more token a row."""
        return self.behind(token[:, None])

    def before(self, tokens: Int[Array, "R T"], columns: Sequence[Sequence[int]]) -> Int[Array, "R C most"] | None:
        """Returns the tokens that `behind` takes for each of C columns; `columns` names the places before each.

        None where no distribution depends on them.
        """
        return tokens_before(tokens, columns, self.stops.shape[1]) if self.features else None

    def noise_scale(self) -> Float[Array, " R"]:
        """1, or 0 for greedy rows: kernels multiply their Gumbel noise by it."""
        return jnp.ones_like(self.temperature) if self.greedy is None else jnp.where(self.greedy, 0.0, 1.0)


def distribution_of(groups: Groups, *, rows: int, features: Collection[object]) -> SamplingDistribution:
    """The distribution of each of `rows` rows a request, greedy at temperature 0, behind each group's first row.

    It is truncated, and has a `RowFeature`, where programs of these `features` serve requests that bring one.
    """
    requests = groups.requests

    def each(per_group: jax.Array) -> jax.Array:
        return jnp.repeat(per_group, rows, axis=0)

    greedy = requests.temperature == 0
    return SamplingDistribution(
        temperature=each(jnp.where(greedy, 1.0, requests.temperature)),
        stops=each(requests.stops),
        minimum=each(requests.min_tokens),
        greedy=each(greedy),
        truncation=(each(requests.top_k), each(requests.top_p)) if "truncation" in features else None,
        features=row_features(groups, rows, features),
    )


def row_features(groups: Groups, rows: int, features: Collection[object]) -> tuple[RowFeature, ...]:
    """The features of `rows` rows a request in the order in which they change logits: adjustments, then grammars."""
    found = (row_adjustments(groups, rows) if "adjustments" in features else None, row_constraint(groups, rows))
    return tuple(feature for feature in found if feature is not None)


def processed_logits(
    distribution: SamplingDistribution, token_number: Int[Array, " R"], logits: Float[Array, "R V"]
) -> Float[Array, "R V"]:
    """Applies features, temperature, the minimum's mask of stops and top-k/top-p.

    They are those of each row's `token_number`-th token, counted from 1. The token of a row that is not greedy is
    sampled from softmax of the result.
    """
    for feature in distribution.features:
        logits = feature(logits)
    logits = logits / distribution.temperature[:, None]
    logits = forbid_stops(logits, distribution.stops, token_number, distribution.minimum)
    return logits if distribution.truncation is None else truncate(logits, *distribution.truncation)


def within_reach(
    distribution: SamplingDistribution, token_number: Int[Array, " R"], logits: Float[Array, "R V"]
) -> Float[Array, "R V"]:
    """The logits of a draft that has a part of the vocabulary, 0 for all tokens where none of its own may come.

    Without that there would be no law to draw from; `processed_logits` makes it one of all tokens that may.
    """
    if not any(feature.only_forbids for feature in distribution.features):
        return logits
    has = ~jnp.isneginf(logits) & ~distribution.forbidden(token_number)  # NaN stays, so that it is seen
    return jnp.where(has.any(axis=-1, keepdims=True), logits, 0.0)


class DeferredLogits(NamedTuple):
    """Logits not yet made, as the fused step makes its own: the product's operand, rounded before it is scaled.

    A verifier must be told the distribution that was sampled from, to more than bfloat16's accuracy.
    """

    operand: Float[Array, "*shape E"]  # x∘g in the weights' dtype
    scale: Float[Array, "*shape"]  # 1/rms(x), f32

    @classmethod
    def from_residual(cls, params: Params, residual: Float[Array, "R E"], eps: float) -> DeferredLogits:
        """The operands that the residual stream behind the last layer gives."""
        x = residual.astype(jnp.float32)
        operand = (x * params.final_norm.astype(jnp.float32)[None]).astype(residual.dtype)
        return cls(operand, jax.lax.rsqrt(jnp.mean(x * x, axis=-1) + eps))

    def logits(self, params: Params) -> Float[Array, "*shape V"]:
        """Makes all logits by one product."""
        return unembed(params, self.operand) * self.scale[..., None]


class Drawn(NamedTuple):
    """One drawn token a row."""

    token: Int[Array, " R"]
    logprob: Float[Array, " R"]  # under the distribution; of rows that are greedy at temperature 1
    # Where the distribution was asked for whole, one of:
    logits: Float[Array, "R V"] | None = None  # processed
    deferred: DeferredLogits | None = None
    following: Embedded | None = None  # where the next step begins if it is fused


def sample(
    distribution: SamplingDistribution,
    keys: Key[Array, " R"],
    token_number: Int[Array, " R"],
    logits: Float[Array, "R V"],
    *,
    keep_logits: bool = False,
) -> Drawn:
    """Draws a token a row; its log-probability is NaN where a logit is."""
    logits = processed_logits(distribution, token_number, logits)
    token = draw(keys, logits)
    if distribution.greedy is not None:
        token = jnp.where(distribution.greedy, likeliest(logits), token)
    return Drawn(token, log_softmax_at(logits, token), logits if keep_logits else None)


def sample_in_head(
    distribution: SamplingDistribution,
    keys: Key[Array, " R"],
    token_number: Int[Array, " R"],
    hidden: Float[Array, "R E"],
    unembed: Float[Array, "V E"],
    stop_words: UInt[Array, "R words"],
) -> Drawn:
    """Draws as `sample` from these hidden states' logits, kept nowhere; `stop_words` are the stops, packed."""
    forbids = token_number <= distribution.minimum
    if distribution.features:
        stop_words, forbids = pack_bits(distribution.forbidden(token_number)), jnp.ones_like(forbids)
    terms = (words_of(keys), distribution.temperature, distribution.noise_scale(), stop_words.T, forbids)
    return Drawn(*sampled_head(hidden, unembed, *terms))


def pack_bits(mask: Bool[Array, "R V"]) -> UInt[Array, "R words"]:
    """32 flags to a word, the first in the lowest bit; V is a multiple of 32."""
    bits = mask.reshape(mask.shape[0], -1, 32).astype(jnp.uint32)
    return jnp.sum(bits << jnp.arange(32, dtype=jnp.uint32)[None, None], axis=-1, dtype=jnp.uint32)
