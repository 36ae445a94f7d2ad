"""SMC on a toy language model with every draw and every resampling outcome integrated, in float64.

The two models are tables of probabilities by prefix. Everything else is the package's own: increments, cuts, weights,
the end of a group, ESS, the decision to resample, ancestors, forking, log Ẑ. Only the draws are replaced by sums:

    tokens        every block of every row, with its probability under the draft (and, for the bonus, the power rule);
                  with a control, every fate of its drafts: uniforms between the jumps of the decision, with their mass
    resampling    the ancestors are piecewise constant in the uniforms; every piece, with its volume

Equal populations are merged, so what is carried is a measure over populations.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from smcjax import smc
from smcjax.decoding.sequences import Requests, Sequences
from smcjax.kv import CacheSpec, KVCache, PageArray, PagePool
from smcjax.smc import acceptance, chosen_parts, cycle, lifecycle, resampling, weights
from smcjax.smc.acceptance import Acceptance, NewBlock, RejectionControl
from smcjax.smc.control import at
from smcjax.smc.resampling import ancestors
from tests.smc.mutations import mutated

CHUNK = 1024  # populations a call: one compiled shape
HIDDEN = 3  # numbers of a hidden state
Tokens = tuple[int, ...]
Row = tuple[Tokens, bool, float]  # tokens, finished, log weight


@dataclasses.dataclass(frozen=True)
class Toy:
    """Next-token laws that depend on the whole prefix. `cap` tokens at most, `stop` ends a row earlier."""

    vocab: int
    cap: int
    stop: int | None = None
    impossible: bool = False  # some target probabilities are zero
    seed: int = 0
    minimum: int = 0  # tokens before which no stop is possible

    @functools.cache  # noqa: B019
    def logprobs(self, model: str, prefix: Tokens) -> np.ndarray:
        """log p ("p", the target) or log q ("q", the draft) of the next token."""
        rng = np.random.default_rng([self.seed, model == "p", len(prefix), *prefix])
        law = 0.9 * rng.dirichlet(np.full(self.vocab, 0.8)) + 0.1 / self.vocab
        if model == "p" and self.impossible and rng.random() < 0.4:
            law[rng.integers(self.vocab)] = 0.0
        if self.stop is not None and len(prefix) < self.minimum:
            law[self.stop] = 0.0
        with np.errstate(divide="ignore"):
            return np.log(law / law.sum())

    def hidden(self, prefix: Tokens) -> np.ndarray:
        """The target's hidden state behind a prefix."""
        return np.random.default_rng([self.seed, 2, len(prefix), *prefix]).normal(size=HIDDEN)

    def laws_along(self, prefix: Tokens, config: smc.SMC) -> tuple[np.ndarray, ...]:
        """log p [m, C, V] and log q [m, K, V] along all m = V^K drafts behind a prefix, and these [m, K]."""
        drafts = np.array(list(itertools.product(range(self.vocab), repeat=config.gamma)), np.int32)
        p, q = (
            np.array([[self.logprobs(model, (*prefix, *d[:i])) for i in range(columns)] for d in drafts.tolist()])
            for model, columns in (("p", config.tokens_per_cycle), ("q", config.gamma))
        )
        return p, q, drafts

    def ends(self, tokens: Tokens) -> bool:
        """Returns True if `tokens` are a whole output: as long as the cap, or with the stop token at the end."""
        return len(tokens) == self.cap or (len(tokens) > 0 and tokens[-1] == self.stop)

    def outcomes(self, alpha: float, behind: Tokens = ()) -> dict[Tokens, float]:
        """The x of Ω that begin with `behind`, each with ∏ p(x_t)^α of the tokens behind that."""
        result: dict[Tokens, float] = {}
        stack: list[tuple[Tokens, float]] = [(behind, 1.0)]
        while stack:
            prefix, mass = stack.pop()
            if self.ends(prefix):
                result[prefix] = mass
            else:
                p = np.exp(self.logprobs("p", prefix)) ** alpha
                stack += [((*prefix, v), mass * p[v]) for v in range(self.vocab)]
        return result


def _state(rows: int, n: int, vocab: int, cap: int) -> smc.State:
    """A state of which only lengths, ends and weights matter; prompts are one token long."""
    groups = rows // n
    sequences = Sequences.create(rows, max_tokens=2 * cap + 8, max_pages=1)
    spec = CacheSpec({name: PageArray(heads=1, dim=1) for name in ("keys", "values")})
    cache = KVCache.create([spec], num_pages=2, page_size=1, dtype=jnp.float32)
    return smc.State(
        requests=Requests(
            prompt_length=jnp.ones(groups, jnp.int32),
            limit=jnp.full(groups, 1 + cap, jnp.int32),
            min_tokens=jnp.zeros(groups, jnp.int32),
            temperature=jnp.ones(groups),
            top_k=jnp.full(groups, vocab, jnp.int32),
            top_p=jnp.ones(groups),
            stops=jnp.zeros((groups, vocab), bool),
            control=jnp.zeros(groups),
            key=jax.vmap(jax.random.key)(jnp.arange(groups)),
        ),
        sequences=sequences,
        log_weight=jnp.zeros((groups, n)),
        log_evidence=jnp.zeros(groups),
        log_potential=jnp.zeros((groups, n)),
        log_text_potential=jnp.zeros((groups, n)),
        parent=jnp.zeros((groups, n), jnp.int32),
        cycle=jnp.zeros(groups, jnp.int32),
        running=jnp.ones(groups, bool),
        failed=jnp.zeros(groups, bool),
        memory=smc.Memory(PagePool.create(2), cache, cache),
    )


@functools.partial(jax.jit, static_argnames=("mutation", "cap", "potentials"))
def weigh(
    mutation: str,
    cap: int,
    tokens: Any,
    increments: Any,
    last: Any,
    length: Any,
    stops: Any,
    before: Any = None,
    logprobs: tuple[Any, Any] | None = None,
    hidden: tuple[Any, Any] | None = None,
    potentials: tuple[smc.Potential, ...] = (),
) -> tuple[Any, ...]:
    """`cycle.commit` on rows that are each a group of their own.

    For potentials: `before` [R, T] are their tokens, `logprobs` the target's of these and of the block's, and `hidden`
    the states of the newest of these [R, E] and of the block's [R, C, E].
    """
    state = _state(tokens.shape[0], 1, stops.shape[0], cap)
    sequences = dataclasses.replace(state.sequences, length=length, finished=jnp.zeros(length.shape, bool))
    of_block, states = jnp.zeros(tokens.shape, jnp.float32), None
    if potentials:
        assert logprobs is not None
        assert hidden is not None
        newest, states = hidden
        of_tokens, of_block = logprobs
        width = before.shape[1]
        sequences = dataclasses.replace(
            sequences,
            tokens=sequences.tokens.at[:, :width].set(before),
            logprobs=jnp.zeros(sequences.tokens.shape).at[:, :width].set(of_tokens),
        )
        ends = (jnp.ones_like(length), length, sequences.finished)
        so_far = smc.Answers(sequences.tokens, *ends, sequences.logprobs, hidden=newest)
        asked = sum((one.log_value(so_far) for one in potentials), jnp.zeros(1))
        # Nothing was asked of a row without a token.
        state = dataclasses.replace(state, log_potential=jnp.where(length > 1, asked, 0.0)[:, None])
    requests = dataclasses.replace(state.requests, stops=jnp.broadcast_to(stops, state.requests.stops.shape))
    state = dataclasses.replace(state, sequences=sequences, requests=requests)
    with mutated(mutation):
        state = cycle.commit(state, NewBlock(tokens, increments, of_block, last, hidden=states), potentials)
    return state.sequences.length, state.sequences.finished, state.log_weight[:, 0]


@functools.partial(jax.jit, static_argnames=("mutation", "power", "rule"))
def controlled(
    mutation: str,
    power: float,
    c: Any,
    p: Any,
    q: Any,
    drafts: Any,
    allowed: Any = None,
    rule: Acceptance | None = None,
) -> tuple[Any, ...]:
    """Tokens, increments, chance and last column of every run of these drafts and every token behind it.

    The rule about drafts is `rule` or, without one, rejection control, `c` being one number or each row's own. What is
    returned has rows within tokens within runs.
    """
    (rows, gamma), size = drafts.shape, p.shape[-1]
    if rule is None:
        rule = RejectionControl(jnp.broadcast_to(c, rows))
    with mutated(mutation):
        distributions = acceptance.Distributions.of(power, p, q, allowed)
        drawn = jnp.exp(at(q, drafts).sum(axis=1))
        accepts = rule.probability(at(distributions.target[:, :gamma], drafts), at(q, drafts))
        found = []
        for run in range(gamma + 1):
            column = jnp.arange(gamma)[None]
            uniforms = jnp.where(column < run, accepts / 2, (1 + accepts) / 2)
            fate = jnp.where(column < run, accepts, jnp.where(column == run, 1 - accepts, 1.0)).prod(axis=1)
            accepted, logits = acceptance.decide(rule, distributions, drafts, uniforms)
            following = jax.nn.softmax(logits)
            for token in range(size):
                block = acceptance.block_of(rule, distributions, drafts, accepted, jnp.full(rows, token, jnp.int32))
                chance = jnp.where((drawn > 0) & (accepted == run), drawn * fate * following[:, token], 0)
                found.append((block.tokens, block.increments, chance, block.last))
    return tuple(jnp.concatenate(column) for column in zip(*found, strict=True))


@functools.partial(jax.jit, static_argnames=("mutation", "config"))
def outcomes(mutation: str, config: smc.SMC, log_weight: Any, finished: Any) -> tuple[Any, Any]:
    """The chances [P, B] of every outcome of the rule about ends, and its log weights [P, B, N]."""
    with mutated(mutation):
        found = chosen_parts.ending_of(config).outcomes(log_weight, finished)
    chosen = found.probability[:, :-1]  # the last outcome takes what these leave
    return jnp.concatenate([chosen, 1 - chosen.sum(axis=1, keepdims=True)], axis=1), found.log_weight


@functools.partial(jax.jit, static_argnames=("mutation", "threshold"))
def settle(mutation: str, threshold: float, log_weight: Any, finished: Any) -> tuple[Any, ...]:
    """Which populations go on, fail, resample; and, should they end here, log Ẑ and the weights to select by."""
    state = _state(log_weight.size, log_weight.shape[1], 1, 1)
    sequences = dataclasses.replace(state.sequences, finished=finished.reshape(-1))
    with mutated(mutation):
        state = cycle.update_running(dataclasses.replace(state, sequences=sequences, log_weight=log_weight))
        ess = weights.effective_sample_size(log_weight)
        low = state.running & weights.must_resample(ess, log_weight.shape[1], threshold)
        return state.running, state.failed, low, lifecycle.log_evidence(state), weights.normalized_weights(log_weight)


@functools.partial(jax.jit, static_argnames=("mutation", "method"))
def fork(mutation: str, method: str, log_weight: Any, uniforms: Any) -> tuple[Any, ...]:
    """Where each row's copy comes from, and what goes into log Ẑ."""
    groups, n = log_weight.shape
    state = dataclasses.replace(_state(groups * n, n, 1, 1), log_weight=log_weight)
    sequences = dataclasses.replace(state.sequences, length=jnp.arange(groups * n, dtype=jnp.int32) % n)
    chosen = jax.vmap(functools.partial(ancestors, method))(uniforms, log_weight)
    with mutated(mutation):
        plan = resampling.decided(log_weight, jnp.ones(groups, bool), chosen)
        state = cycle.fork(dataclasses.replace(state, sequences=sequences), plan)
    return state.sequences.length.reshape(groups, n), state.log_evidence, state.log_weight


def chunked(function: Callable[..., Any], *arrays: np.ndarray) -> list[np.ndarray]:
    """Applies a jitted function to arrays with one leading axis, in chunks of one compiled shape."""
    size = len(arrays[0])
    chunk = CHUNK if size > 64 else 64
    parts = []
    for begin in range(0, size, chunk):
        piece = [a[begin : begin + chunk] for a in arrays]
        filled = [np.concatenate([a, np.repeat(a[:1], chunk - len(a), axis=0)]) for a in piece]
        parts.append([np.asarray(out)[: len(piece[0])] for out in function(*filled)])
    return [np.concatenate(column) for column in zip(*parts, strict=True)]


def pieces(method: str, w: np.ndarray) -> list[tuple[list[float], float]]:
    """A point and the volume of every cell of the cube of uniforms on which the offspring counts are constant."""
    n = len(w)
    edges = np.cumsum(w)
    if method == "systematic":
        cuts = [n * edges % 1.0]
    elif method == "stratified":
        cuts = [n * edges - k for k in range(n)]
    elif method == "multinomial":
        cuts = [edges] * n
    else:
        rest = n * w - np.floor(n * w)
        used = n - int(np.floor(n * w).sum())
        cuts = [np.cumsum(rest) / rest.sum() if used else edges] * used + [np.empty(0)] * (n - used)
    axes = []
    for cut in cuts:
        points = np.unique(np.concatenate([[0.0, 1.0], np.clip(cut, 0.0, 1.0)]))
        axes.append([((a + b) / 2, b - a) for a, b in itertools.pairwise(points) if b - a > 1e-14])
    return [([u for u, _ in cell], float(np.prod([v for _, v in cell]))) for cell in itertools.product(*axes)]


class Proposals(NamedTuple):
    """Every block that may follow a prefix."""

    tokens: np.ndarray  # [m, C]
    increments: np.ndarray  # [m, C]
    chance: np.ndarray  # [m]
    last: np.ndarray | None = None  # [m] the column behind which the block ends; None: it is whole


@dataclasses.dataclass
class Enumeration:
    """`measure[x]` = E[Ẑ·Σ W_i·1{x_i = x}]; `selected[x]` = probability that x is the answer (`select="sample"`)."""

    toy: Toy
    config: smc.SMC
    mutation: str = "none"
    beside: tuple[float, ...] = ()  # controls of other requests in the same program, which so can reject
    measure: dict[Tokens, float] = dataclasses.field(default_factory=dict)
    selected: dict[Tokens, float] = dataclasses.field(default_factory=dict)
    resampled: float = 0.0  # expected number of resamplings
    failed: float = 0.0  # probability that no weight is left
    stopped: float = 0.0  # probability that a rule ends the population
    _seen: dict = dataclasses.field(default_factory=dict)

    def run(self) -> Enumeration:
        """Every history to its end."""
        with jax.enable_x64(True):
            block = self._controlled_block if self.config.ragged or self.beside else self._block
            populations = self._end(
                self._extend({(((), False, 0.0),) * self.config.n_particles: (1.0, 1.0)}, self._first)
            )
            while populations:
                extended = self._extend(populations, block)
                parted = self._parted(extended) if self.config.early_end else extended
                populations = self._end(self._resample(parted))
        return self

    def _first(self, prefix: Tokens) -> Proposals:
        """x₀, or a bonus token, by the bonus rule."""
        alpha, logits = self.config.power, self.toy.logprobs("p", prefix)
        law = np.exp(alpha * logits)
        with mutated(self.mutation):
            increment = np.asarray(weights.bonus_increment(alpha, jnp.asarray(logits)))
        size = self.toy.vocab
        return Proposals(np.arange(size)[:, None], np.full((size, 1), increment), law / law.sum())

    def _block(self, prefix: Tokens) -> Proposals:
        """Every block: drafts from q, then the bonus token."""
        size = self.toy.vocab
        drafts = np.array(list(itertools.product(range(size), repeat=self.config.gamma)))
        p, q = (
            np.array(
                [[self.toy.logprobs(model, (*prefix, *d[:i]))[token] for i, token in enumerate(d)] for d in drafts]
            )
            for model in "pq"
        )
        with mutated(self.mutation):
            increments = np.asarray(weights.draft_increment(self.config.power, jnp.asarray(p), jnp.asarray(q)))
        chance = np.exp(q.sum(axis=1))
        if not self.config.speculation.bonus:
            return Proposals(drafts, increments, chance)
        bonuses = [self._first((*prefix, *d)) for d in drafts]
        return Proposals(
            np.concatenate([np.repeat(drafts, size, axis=0), np.concatenate([b.tokens for b in bonuses])], axis=1),
            np.concatenate(
                [np.repeat(increments, size, axis=0), np.concatenate([b.increments for b in bonuses])], axis=1
            ),
            np.repeat(chance, size) * np.concatenate([b.chance for b in bonuses]),
        )

    def _controlled_block(self, prefix: Tokens) -> Proposals:
        """Every block with every fate of its drafts under the rule."""
        p, q, drafts = self.toy.laws_along(prefix, self.config)
        own = self.config.control if isinstance(self.config.control, Acceptance) else None
        controls = np.repeat((0.0 if own else self.config.control, *self.beside), len(drafts))
        p, q, drafts = (np.concatenate([x] * (1 + len(self.beside))) for x in (p, q, drafts))
        outs = map(np.asarray, controlled(self.mutation, self.config.power, controls, p, q, drafts, rule=own))
        first = np.arange(len(drafts)) * (1 + len(self.beside)) < len(drafts)
        tokens, increments, chance, last = (x[np.resize(first, len(x))] for x in outs)
        return Proposals(tokens, increments, chance, last)

    def _row_outcomes(self, prefix: Tokens, propose: Callable[..., Proposals]) -> list[tuple[Row, float]]:
        """Returns a live row's possible states after one block, cut at its end, with chances; equal ones are merged."""
        if (prefix, propose) not in self._seen:
            proposals = propose(prefix)
            stops = np.arange(self.toy.vocab) == (-1 if self.toy.stop is None else self.toy.stop)
            length = np.full(len(proposals.chance), 1 + len(prefix), np.int32)
            tokens, last = np.asarray(proposals.tokens, np.int32), proposals.last
            last = np.full(len(tokens), tokens.shape[1] - 1, np.int32) if last is None else last
            before = np.tile(np.array([0, *prefix], np.int32), (len(tokens), 1))
            given = self._logprobs, self._hidden
            seen = [of(prefix, tokens) if self.config.potentials else None for of in given]
            terms = (tokens, proposals.increments, last, length, stops, before, *seen, self.config.potentials)
            ends = weigh(self.mutation, self.toy.cap, *terms)
            merged: dict[Row, float] = {}
            for block, chance, end, done, w in zip(
                tokens.tolist(), proposals.chance, *map(np.asarray, ends), strict=True
            ):
                if not chance:
                    continue
                row = ((*prefix, *block)[: end - 1], bool(done), round(float(w), 14))
                merged[row] = merged.get(row, 0.0) + float(chance)
            self._seen[prefix, propose] = list(merged.items())
        return self._seen[prefix, propose]

    def _logprobs(self, prefix: Tokens, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """log p of the tokens of one row, and of each block behind them; the row begins with a token of the prompt."""

        def along(begin: Tokens, tokens: Tokens) -> list[float]:
            return [self.toy.logprobs("p", (*begin, *tokens[:at]))[token] for at, token in enumerate(tokens)]

        of_row = np.array([0.0, *along((), prefix)])
        of_blocks = np.array([along(prefix, tuple(block)) for block in blocks.tolist()])
        return np.tile(of_row, (len(blocks), 1)), of_blocks

    def _hidden(self, prefix: Tokens, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The states that predict the newest token of one row, and each token of the blocks behind it."""
        along = [[self.toy.hidden((*prefix, *block[:at])) for at in range(len(block))] for block in blocks.tolist()]
        return np.tile(self.toy.hidden(prefix[:-1]), (len(blocks), 1)), np.array(along)

    def _extend(self, populations: dict, propose: Callable[..., Proposals]) -> dict:
        result: dict = {}
        for rows, (measure, chance) in populations.items():
            ways: list[Sequence[tuple[Row, float]]] = []
            for tokens, finished, log_weight in rows:
                if finished:
                    ways.append([((tokens, True, log_weight), 1.0)])
                else:
                    outcomes = self._row_outcomes(tokens, propose)
                    ways.append([((t, f, log_weight + w), p) for (t, f, w), p in outcomes])
            for way in itertools.product(*ways):
                probability = 1.0
                for _, p in way:
                    probability *= p
                _add(result, tuple(row for row, _ in way), measure * probability, chance * probability)
        return result

    def _end(self, populations: dict) -> dict:
        """Takes out the populations that have ended and adds them to the result."""
        going = {}
        for rows, (measure, chance), (running, failed, _, log_evidence, w) in self._judge(populations):
            if running:
                going[rows] = (measure, chance)
            elif failed:
                self.failed += chance
            else:
                for (tokens, *_), weight in zip(rows, w, strict=True):
                    if weight > 0:
                        self.measure[tokens] = self.measure.get(tokens, 0.0) + measure * np.exp(log_evidence) * weight
                        self.selected[tokens] = self.selected.get(tokens, 0.0) + chance * weight
        return going

    def _parted(self, populations: dict) -> dict:
        """Populations after every outcome of the rule about ends."""
        result: dict = {}
        log_weight, finished = (np.array([[row[at] for row in rows] for rows in populations]) for at in (2, 1))
        found = chunked(functools.partial(outcomes, self.mutation, self.config), log_weight, finished)
        for (rows, (measure, chance)), shares, after in zip(populations.items(), *found, strict=True):
            if all(after[0][i] == row[2] for i, row in enumerate(rows)):
                _add(result, rows, measure, chance)  # nothing to decide
                continue
            self.stopped += chance * float(shares[0])
            for share, new in zip(shares.tolist(), after.tolist(), strict=True):
                kept = tuple((*row[:2], w, *row[3:]) for row, w in zip(rows, new, strict=True))
                if share > 0:
                    _add(result, kept, measure * share, chance * share)
        return result

    def _resample(self, populations: dict) -> dict:
        result: dict = {}
        jobs = []
        for rows, (measure, chance), (_, _, low, _, w) in self._judge(populations):
            if low:
                self.resampled += chance
                cells = pieces(self.config.resampling, w)
                jobs += [(rows, measure * volume, chance * volume, uniforms) for uniforms, volume in cells]
            else:
                _add(result, rows, measure, chance)
        if jobs:
            log_weight = np.array([[row[2] for row in rows] for rows, *_ in jobs])
            uniforms = np.array([u for *_, u in jobs])
            outs = chunked(functools.partial(fork, self.mutation, self.config.resampling), log_weight, uniforms)
            for (rows, measure, chance, _), source, log_evidence, fresh in zip(jobs, *outs, strict=True):
                copies = self._copies(rows, source.tolist(), fresh.tolist())
                _add(result, copies, measure * np.exp(log_evidence), chance)
        return result

    def _copies(self, rows: tuple[Any, ...], source: list[int], fresh: list[float]) -> tuple[Any, ...]:
        """Rows that are copies of these, with new log weights."""
        return tuple((*rows[i][:2], w, *rows[i][3:]) for i, w in zip(source, fresh, strict=True))

    def _judge(self, populations: dict) -> Iterator[tuple[Any, ...]]:
        if populations:
            log_weight = np.array([[row[2] for row in rows] for rows in populations])
            finished = np.array([[row[1] for row in rows] for rows in populations])
            judge = functools.partial(settle, self.mutation, self.config.ess_threshold)
            verdicts = zip(*chunked(judge, log_weight, finished), strict=True)
            yield from ((key, mass, v) for (key, mass), v in zip(populations.items(), verdicts, strict=True))


def deviation(done: Enumeration, law: Mapping[Tokens, float] | None = None) -> float:
    """The largest |E[Ẑ·Σ W_i·1{x_i = x}] − law(x)| over all x; without a law it is ∏ p^α over Ω."""
    law = done.toy.outcomes(done.config.power) if law is None else law
    return max(abs(done.measure.get(x, 0.0) - law.get(x, 0.0)) for x in done.measure.keys() | law.keys())


def _add(populations: dict, rows: tuple[Any, ...], measure: float, chance: float) -> None:
    """Adds mass to a population, known by its log weights to 1e-13."""
    key = tuple((tokens, finished, round(w, 13), *rest) for tokens, finished, w, *rest in rows)
    old = populations.get(key, (0.0, 0.0))
    populations[key] = (old[0] + measure, old[1] + chance)
