"""The rule by which a particle keeps its drafts, and the weight of every token that it emits.

A cycle gives a rule the target's scores of K drafts a row (`Scored`) and takes a block of new tokens with their weights
(`NewBlock`). Let p be the target's distribution of a token (to the power α) and q the draft's. A rule keeps a draft
d ~ q with `probability` a(d). The first draft that it does not keep is replaced by a token drawn from `residual` r, and
the block ends there. Where all drafts are kept, a bonus token drawn from p follows them. An emitted token x has the
distribution

    m(x) = q(x)·a(x) + R·r(x),        R = Σ q·(1 − a),

and the weight p(x)/m(x), so that every rule keeps the target's expectations, provided m > 0 wherever p > 0. A rule of
one's own is a frozen dataclass that derives from `Acceptance` and has `probability`, and `smcjax.testing.battery`
checks it.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from smcjax import noise
from smcjax.decoding.constraints import RowConstraint, masked
from smcjax.decoding.drafts.proposer import Drafts
from smcjax.decoding.sampling import draw
from smcjax.decoding.scores import Scores
from smcjax.smc import control
from smcjax.smc.control import at
from smcjax.smc.weights import bonus_increment, draft_increment, log_mass, logprob_at


@dataclasses.dataclass(frozen=True)
class NewBlock:
    """A block of C new tokens a row, with what each adds to the row's log weight."""

    tokens: Int[Array, "R C"]
    increments: Float[Array, "R C"]
    logprobs: Float[Array, "R C"]  # log p_T at power 1
    last: Int[Array, " R"] | None = None  # the column behind which the block ends; None: all C columns count
    scores: Scores | None = None  # of all columns, where the program reports them
    # The target's hidden states that each column's logits are of; None where no potential may ask for them.
    hidden: Float[Array, "R C E"] | None = None


class Distributions(NamedTuple):
    """The normalised distributions of a block's columns; under a constraint, those of the allowed tokens."""

    target: Float[Array, "R C V"]  # log of p_T^α/Σ p_T^α
    draft: Float[Array, "R K V"]  # log q
    log_normalizer: Float[Array, "R C"]  # log Σ p_T^α
    logits: Float[Array, "R C V"]  # whose softmax is p_T

    @classmethod
    def of(
        cls,
        power: float,
        logits: Float[Array, "R C V"],
        draft_logits: Float[Array, "R K V"],
        allowed: Bool[Array, "R C V"] | None = None,
    ) -> Distributions:
        """Normalises the target's tempered logits and the draft's, which give allowed tokens alone a probability."""
        scaled = power * logits
        draft = jax.nn.log_softmax(draft_logits, axis=-1)
        if allowed is None:
            target = scaled - log_mass(scaled)[..., None]
        else:  # any distribution of the allowed tokens where all are impossible: `log_normalizer` is −inf there
            some = masked(scaled, allowed)
            impossible = jnp.isneginf(jnp.max(some, axis=-1, keepdims=True))
            target = jax.nn.log_softmax(jnp.where(impossible, masked(jnp.zeros_like(scaled), allowed), some), axis=-1)
        return cls(target, draft, bonus_increment(power, logits, allowed), logits)


@dataclasses.dataclass(frozen=True)
class Scored:
    """K drafts of each of R = G·N rows as the target has scored them, and the keys for what is drawn about them."""

    power: float
    logits: Float[
        Array, "R C V"
    ]  # the target's tempered ones behind each of the frontier, d₀ …; C = K + 1 with a bonus
    drafts: Drafts
    constraint: RowConstraint | None  # of each row behind its committed tokens; None: every token is allowed
    accept_keys: Key[Array, " G"]
    next_keys: Key[Array, " R"]  # for the token behind the drafts that are kept

    def distributions(self) -> Distributions:
        """The distributions of all columns, along the drafts."""
        columns, size = self.logits.shape[1:]
        allowed = None
        if self.constraint is not None:
            allowed = self.constraint.allowed_along(self.drafts.tokens[:, : columns - 1])
        return Distributions.of(self.power, self.logits, self.drafts.whole(size), allowed)

    def uniforms(self) -> Float[Array, "R K"]:
        """A uniform in (0, 1) for each draft."""
        rows, gamma = self.drafts.tokens.shape
        return noise.uniforms(self.accept_keys, (rows // self.accept_keys.shape[0], gamma)).reshape(rows, gamma)


class Acceptance(abc.ABC):
    """A rule about drafts. Subclasses are frozen dataclasses: a rule is a static part of a compiled program.

    Attributes:
        rejects: whether the rule can reject drafts, for which the draft's distributions are kept whole; rows then
            advance by 1 to K + 1 tokens a cycle.
    """

    rejects: ClassVar[bool] = True

    @property
    def suits_any_draft(self) -> bool:
        """True where emitted tokens have all of the target's support even if the draft has not."""
        return False

    @abc.abstractmethod
    def probability(
        self, log_p: Float[Array, " R *shape"], log_q: Float[Array, " R *shape"]
    ) -> Float[Array, " R *shape"]:
        """The probability, in [0, 1], of keeping a draft that has log p and log q, elementwise."""

    def residual(
        self, log_p: Float[Array, "R *shape V"], log_q: Float[Array, "R *shape V"]
    ) -> Float[Array, "R *shape V"]:
        """The logits of the token that replaces a rejected draft: log max(p − q, 0), unless a subclass has others."""
        return control.residual(log_p, log_q)

    def increment(
        self, log_p: Float[Array, "R K V"], log_q: Float[Array, "R K V"], tokens: Int[Array, "R K"]
    ) -> Float[Array, "R K"]:
        """log p/m of emitted tokens, m being what `probability` and `residual` make of q."""
        never = jnp.isneginf(log_q)  # drafted: a rule is not asked, as p/q may be 0/0 there
        kept = self.probability(jnp.where(never, 0.0, log_p), jnp.where(never, 0.0, log_q))
        rejected = jnp.sum(jnp.exp(log_q) * (1 - kept), axis=-1)
        replaced = jnp.log(rejected)[..., None] + jax.nn.log_softmax(self.residual(log_p, log_q), axis=-1)
        emitted = jnp.logaddexp(log_q + jnp.log(kept), replaced)
        return at(log_p - emitted, tokens)

    def judge(self, scored: Scored) -> NewBlock:
        """The block of new tokens that a cycle commits."""
        distributions, drafts = scored.distributions(), scored.drafts.tokens
        accepted, logits = decide(self, distributions, drafts, scored.uniforms())
        return block_of(self, distributions, drafts, accepted, draw(scored.next_keys, logits))


def decide(
    rule: Acceptance, distributions: Distributions, drafts: Int[Array, "R K"], uniforms: Float[Array, "R K"]
) -> tuple[Int[Array, " R"], Float[Array, "R V"]]:
    """How many of each row's drafts are kept, from the first on, and the logits of the token behind them.

    These are the residual's behind a rejected draft, and p's behind all K drafts if C = K + 1; if C = K the latter are
    stale.
    """
    target, draft, gamma = distributions.target, distributions.draft, drafts.shape[1]
    chance = rule.probability(at(target[:, :gamma], drafts), at(draft, drafts))
    accepted = jnp.sum(jnp.cumprod(uniforms < chance, axis=1, dtype=jnp.int32), axis=1)
    row, column = jnp.arange(drafts.shape[0]), jnp.minimum(accepted, gamma - 1)
    logits = rule.residual(target[row, column], draft[row, column])
    if target.shape[1] > gamma:
        logits = jnp.where((accepted == gamma)[:, None], target[:, gamma], logits)
    return accepted, logits


def block_of(
    rule: Acceptance,
    distributions: Distributions,
    drafts: Int[Array, "R K"],
    accepted: Int[Array, " R"],
    following: Int[Array, " R"],
) -> NewBlock:
    """The drafts that are kept and the token behind them, as a block that ends there, with its weights.

    Where all of K = C drafts are kept there is no token behind them.
    """
    gamma, columns = drafts.shape[1], distributions.target.shape[1]
    padded = jnp.pad(drafts, ((0, 0), (0, columns - gamma)))
    tokens = jnp.where(jnp.arange(columns)[None] == accepted[:, None], following[:, None], padded)
    increments = rule.increment(distributions.target[:, :gamma], distributions.draft, tokens[:, :gamma])
    return NewBlock(
        tokens=tokens,
        increments=distributions.log_normalizer.at[:, :gamma].add(increments),
        logprobs=logprob_at(distributions.logits, tokens),
        last=jnp.minimum(accepted, columns - 1),
    )


@dataclasses.dataclass(frozen=True)
class KeepAll(Acceptance):
    """Keeps every draft, as SMC-SD was published: a draft weighs p_T^α/q, of which log q at the draft is enough."""

    rejects: ClassVar[bool] = False

    def probability(
        self, log_p: Float[Array, " R *shape"], log_q: Float[Array, " R *shape"]
    ) -> Float[Array, " R *shape"]:
        """1."""
        return jnp.ones_like(log_q)

    def judge(self, scored: Scored) -> NewBlock:
        """The drafts and, where the program scores K + 1 columns, the bonus token."""
        drafts, gamma = scored.drafts, scored.drafts.tokens.shape[1]
        logprobs = logprob_at(scored.logits[:, :gamma], drafts.tokens)
        block = NewBlock(drafts.tokens, draft_increment(scored.power, logprobs, drafts.logprobs), logprobs)
        if scored.logits.shape[1] == gamma:
            return block
        last, constraint = scored.logits[:, -1], scored.constraint
        allowed = None if constraint is None else constraint.behind(drafts.tokens).allowed()
        bonus = draw(scored.next_keys, masked(scored.power * last, allowed))
        return NewBlock(
            jnp.concatenate([block.tokens, bonus[:, None]], axis=1),
            jnp.concatenate([block.increments, bonus_increment(scored.power, last, allowed)[:, None]], axis=1),
            jnp.concatenate([logprobs, logprob_at(last, bonus)[:, None]], axis=1),
        )


@dataclasses.dataclass(frozen=True)
class RejectionControl(Acceptance):
    """Keeps a draft with probability min(1, p/(c·q)), so that no token weighs less than c: `smcjax.smc.control`.

    Attributes:
        control: c in [0, 1], one number or, within a program, one of each row. 0 keeps all drafts; 1 is speculative
            sampling, under which every weight is 1 at power 1.
    """

    control: float | Float[Array, " R"] = 0.1

    @property
    def suits_any_draft(self) -> bool:
        """True at c = 1: rejected drafts are replaced by whatever the draft lacks."""
        return isinstance(self.control, float) and self.control == 1.0

    def probability(
        self, log_p: Float[Array, " R *shape"], log_q: Float[Array, " R *shape"]
    ) -> Float[Array, " R *shape"]:
        """min(1, p/(c·q))."""
        return control.acceptance(log_p, log_q, self._per_row(log_p))

    def increment(
        self, log_p: Float[Array, "R K V"], log_q: Float[Array, "R K V"], tokens: Int[Array, "R K"]
    ) -> Float[Array, "R K"]:
        """log p/m in the closed form of `smcjax.smc.control.increment`, exactly 0 at c = 1."""
        c = self._per_row(log_p[..., 0])
        return control.increment(at(log_p, tokens), at(log_q, tokens), c, control.correction(log_p, log_q, c))

    def _per_row(self, array: Float[Array, " R *shape"]) -> Float[Array, " R *ones"]:
        """c, with axes of length 1 beside those of an array behind its first."""
        c = jnp.asarray(self.control, array.dtype)
        return c.reshape(c.shape + (1,) * (array.ndim - c.ndim))
