"""The pipelined cycle: its law by exact enumeration, and what the program does with pending blocks.

That the program computes this algorithm, token for token, is shown by tests/smc/test_reference.py.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smcjax import smc
from smcjax.smc import cycle, pipelined, weights
from tests.helpers import Ask, assert_pages_sound, finish, outputs, start, step, tiny_pair
from tests.smc.enumeration import Enumeration, Toy, _add, deviation, weigh
from tests.smc.mutations import MUTATIONS, mutated

STOP = Toy(vocab=2, cap=4, stop=1)
WIDE = Toy(vocab=3, cap=4, stop=2, impossible=True, seed=3)
FREE = Toy(vocab=2, cap=4, seed=2)
Tokens = tuple[int, ...]


@dataclasses.dataclass
class Pipelined(Enumeration):
    """Populations whose rows have a fourth entry, the block of drafts that no target has seen; None: there is none.

    `stays`: the mistake of copies that keep the pending blocks of the rows in whose places they come.
    """

    stays: bool = False

    @functools.cache  # noqa: B019
    def _drafts(self, prefix: Tokens) -> list[tuple[Tokens, float]]:
        """Every block of K drafts behind a prefix, with its chance."""
        blocks = itertools.product(range(self.toy.vocab), repeat=self.config.gamma)
        return [(block, float(np.exp(sum(self._log("q", prefix, block))))) for block in blocks]

    def _log(self, model: str, prefix: Tokens, block: Tokens) -> list[float]:
        return [self.toy.logprobs(model, (*prefix, *block[:i]))[token] for i, token in enumerate(block)]

    @functools.cache  # noqa: B019
    def _committed(self, prefix: Tokens, block: Tokens) -> tuple[Tokens, bool, float]:
        """The tokens, the end and the increment of a row whose pending block has been scored."""
        p, q = (jnp.asarray(self._log(model, prefix, block)) for model in "pq")
        with mutated(self.mutation):
            increments = weights.draft_increment(self.config.power, p, q)
        stops = np.arange(self.toy.vocab) == (-1 if self.toy.stop is None else self.toy.stop)
        arrays = np.array([block], np.int32), increments[None], np.array([len(block) - 1], np.int32)
        length, done, w = weigh(
            self.mutation, self.toy.cap, *arrays, np.array([1 + len(prefix)], np.int32), jnp.asarray(stops)
        )
        return (*prefix, *block)[: int(length[0]) - 1], bool(done[0]), float(w[0])

    def _extend(self, populations: dict, propose: Any) -> dict:
        if propose == self._first:
            first = super()._extend(populations, propose)
            return {tuple((*row, None) for row in rows): mass for rows, mass in first.items()}
        result: dict = {}
        for rows, (measure, chance) in populations.items():
            ways = [self._ways(*row) for row in rows]
            for way in itertools.product(*ways):
                p = float(np.prod([chance_of for _, chance_of in way]))
                _add(result, tuple(row for row, _ in way), measure * p, chance * p)
        return result

    def _ways(self, tokens: Tokens, finished: bool, w: float, pending: Tokens | None) -> list[tuple[Any, float]]:
        """A row after a cycle: its pending block committed, and drafts in its place."""
        if finished:
            return [((tokens, True, w, None), 1.0)]
        prefix = (*tokens, *(pending or ()))
        if pending is not None:
            tokens, finished, increment = self._committed(tokens, pending)
            w += increment
        if finished:
            return [((tokens, True, w, None), 1.0)]
        return [((tokens, False, w, block), chance) for block, chance in self._drafts(prefix)]

    def _copies(self, rows: tuple[Any, ...], source: list[int], fresh: list[float]) -> tuple[Any, ...]:
        copies = super()._copies(rows, source, fresh)
        if not self.stays:
            return copies
        kept = [old[3] or new[3] for old, new in zip(rows, copies, strict=True)]
        return tuple((*new[:3], block) for new, block in zip(copies, kept, strict=True))

    __hash__ = object.__hash__


def enumerated(toy: Toy, mutation: str = "none", stays: bool = False, **config: Any) -> Pipelined:
    done = Pipelined(toy, smc.SMC(pipelined=True, **config), mutation, stays=stays)
    done.run()
    return done


@pytest.mark.parametrize(
    ("toy", "config"),
    [
        (STOP, {"n_particles": 2, "gamma": 2, "ess_threshold": 0.9}),
        (STOP, {"n_particles": 2, "gamma": 1, "ess_threshold": 1.0, "power": 0.5, "resampling": "multinomial"}),
        (STOP, {"n_particles": 2, "gamma": 1, "ess_threshold": 0.9, "early_end": True}),
        (FREE, {"n_particles": 2, "gamma": 2, "ess_threshold": 1.0, "resampling": "residual"}),
        (WIDE, {"n_particles": 2, "gamma": 1, "ess_threshold": 0.9, "resampling": "stratified"}),
    ],
    ids=["stop", "multinomial", "early end", "cap", "impossible"],
)
def test_exact(toy: Toy, config: dict[str, Any]) -> None:
    done = enumerated(toy, **config)
    assert deviation(done) < 1e-12
    assert done.resampled > 0.01


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_control_mistakes_break_the_law(mutation: str) -> None:
    done = enumerated(STOP, mutation, n_particles=2, gamma=2, ess_threshold=0.9, power=2.0)
    assert (deviation(done) < 1e-12) == (mutation == "none")


def test_control_copies_must_have_the_pending_block() -> None:
    config = {"n_particles": 2, "gamma": 1, "ess_threshold": 1.0}
    assert deviation(enumerated(FREE, stays=True, **config)) > 1e-4
    assert deviation(enumerated(FREE, **config)) < 1e-12


PAIR = tiny_pair()
ASKS = [Ask((1, 3, 0, 2, 2), max_tokens=11, stops=(4,), seed=11), Ask((2,), max_tokens=14, seed=12)]


CONFIG: dict[str, Any] = {"pipelined": True, "ess_threshold": 1.0, "gamma": 2}


@pytest.mark.slow
def test_pages_are_counted_and_given_back() -> None:
    """Law 5 after every cycle, and no page is left behind; a group drafts once before it grows."""
    program, infos = PAIR.program(24, **CONFIG), []
    state = start(program, PAIR.params, ASKS)
    while bool(state.running.any()):
        state, info = step(program, PAIR.params, state)
        infos.append(info)
        assert_pages_sound(state.sequences.block_table, state.memory.pool)
    first, second = infos[0].length - infos[0].weighed, infos[1].weighed - infos[0].length
    assert not first.any()
    assert (second[~infos[0].finished] > 0).all()
    _, memory = jax.jit(smc.conclude, static_argnames="program")(program, state)
    assert int(memory.pool.num_free) == memory.pool.refcount.shape[0] - 1


@pytest.mark.slow
@pytest.mark.parametrize("forgotten", [False, True])
def test_copies_are_asked_for_with_their_pending_blocks(patch_programs: Any, forgotten: bool) -> None:
    """Kernels copy no more of a row than they are told to; what else it has is scrambled here.

    Control: were pending blocks forgotten, answers would be others.
    """
    program = PAIR.program(24, **CONFIG)
    right = outputs(finish(program, PAIR.params, start(program, PAIR.params, ASKS))[0])
    copied = cycle.fork_rows

    def scrambling(pool: Any, table: Any, rows: Any, source: Any, *rest: Any, end: Any, **named: Any) -> Any:
        pool, table, (tokens, logprobs) = copied(pool, table, rows, source, *rest, end=end, **named)
        beyond = jnp.arange(tokens.shape[1])[None] >= end[source][:, None]
        return pool, table, (jnp.where(beyond, 0, tokens), jnp.where(beyond, -1.0, logprobs))

    resample = pipelined.resample
    patch_programs(cycle, "fork_rows", scrambling)
    patch_programs(pipelined, "resample", lambda *args, pending: resample(*args, pending=0 if forgotten else pending))
    advance = jax.jit(lambda state: smc.step(program, PAIR.params, state))
    state = start(program, PAIR.params, ASKS)
    while bool(state.running.any()):
        state, _ = advance(state)
    assert (outputs(state) == right) != forgotten
