"""Branching: law 2 by exact enumeration (tests/smc/branching_enumeration.py), where it is exact, and the running step.

That the running step equals plain Python token for token is `test_reference.py`.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smcjax import smc
from smcjax.decoding.ngram import NGram
from smcjax.engine.page_budget import Footprint
from smcjax.smc import branching, history
from smcjax.smc.history import alarmed_after
from tests.helpers import finish, start, with_nan_behind
from tests.smc.branching_enumeration import Branching, ConstrainedBranching
from tests.smc.enumeration import Tokens, Toy
from tests.smc.mutations import BRANCHING_MUTATIONS
from tests.smc.test_constraints import LONG
from tests.smc.test_control import ASKS, MAX_MODEL_LEN, PAIR, answers
from tests.smc.test_unbiased import deviation

STOP = Toy(vocab=2, cap=4, stop=1)
WIDE = Toy(vocab=3, cap=3, stop=2, impossible=True, seed=3, minimum=1)


@dataclasses.dataclass(frozen=True)
class Certain(Toy):
    """A toy whose draft is sure of one token, as "ngram" is."""

    @functools.cache  # noqa: B019
    def logprobs(self, model: str, prefix: Tokens) -> np.ndarray:
        law = Toy.logprobs.__wrapped__(self, model, prefix)
        return law if model == "p" else np.where(np.arange(self.vocab) == np.argmax(law), 0.0, -np.inf)


@dataclasses.dataclass(frozen=True)
class Alike(Toy):
    """A toy whose draft is the target."""

    @functools.cache  # noqa: B019
    def logprobs(self, model: str, prefix: Tokens) -> np.ndarray:
        return Toy.logprobs.__wrapped__(self, "p", prefix)


CASES: dict[str, tuple[Toy, dict[str, Any]]] = {
    "one particle, K=3": (
        dataclasses.replace(WIDE, cap=4, minimum=2),
        {"n_particles": 1, "gamma": 3, "branching": 1.0},
    ),
    "two": (WIDE, {"n_particles": 2, "gamma": 2, "branching": 2.0}),
    "power, no bonus": (WIDE, {"n_particles": 2, "gamma": 2, "branching": 5.0, "power": 1.5, "bonus": False}),
    "K=3, power": (STOP, {"n_particles": 2, "gamma": 3, "branching": 2.0, "power": 0.5, "resampling": "multinomial"}),
    "three": (STOP, {"n_particles": 3, "gamma": 1, "branching": 1.0, "resampling": "stratified"}),
    "a certain draft": (
        Certain(vocab=3, cap=3, stop=2, seed=3),
        {"n_particles": 2, "gamma": 2, "branching": 2.0},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_unbiased(case: str) -> None:
    """E[Ẑ·Σ W f] to 1e-12; stops, the cap and the minimum fall inside blocks, and rows finish at different times."""
    toy, config = CASES[case]
    done = Branching(toy, smc.SMC(**config)).run()
    assert deviation(done) < 1e-12
    assert done.resampled > 0.5
    if config["branching"] == 1.0:
        assert done.failed == 0, "at λ = 1 some child of every row weighs more than 0"


def test_unbiased_under_a_constraint() -> None:
    """Likewise for answers of a form, whose tokens both laws are of."""
    toy = dataclasses.replace(LONG, cap=4)
    done = ConstrainedBranching(toy, smc.SMC(n_particles=2, gamma=2, branching=2.0, power=1.5)).run()
    assert deviation(done) < 1e-12
    assert 0 < sum(done.measure.values()) < 0.9


@pytest.mark.parametrize("mutation", BRANCHING_MUTATIONS)
def test_controls(mutation: str) -> None:
    """Known mistakes break the law, at α = 2 all of them."""
    config = smc.SMC(n_particles=2, gamma=2, branching=1.3, power=2.0)
    assert deviation(Branching(dataclasses.replace(STOP, cap=3), config, mutation).run()) > 1e-3


def test_where_it_is_exact() -> None:
    """At λ = 1 one particle is no exact sample: its children do not sum to 1. Under two kinds of drafts they do."""
    fields = {"vocab": 2, "cap": 4, "stop": 1}
    law = Toy(**fields).outcomes(1.0)
    for toy, lam, exact in ((STOP, 1.0, False), (Alike(**fields), 1.0, True), (Certain(**fields), 2.0, True)):
        done = Branching(toy, smc.SMC(n_particles=1, gamma=2, branching=lam)).run()
        assert deviation(done) < 1e-12
        assert not done.config.exact
        off = max(abs(done.selected.get(x, 0.0) - mass) for x, mass in law.items())
        assert off < 1e-12 if exact else off > 1e-3


# The children that are chosen.


def test_of_siblings_the_longest_come_first() -> None:
    """Counts are the scheme's, rows with offspring stay, and of one row's children an upper row has the longer one."""
    rng = np.random.default_rng(0)
    n, columns = 5, 4
    several = 0
    for method in smc.SCHEMES:
        draw = jax.jit(functools.partial(branching.chosen, method))
        for _ in range(40):
            weights = rng.gamma(0.2, size=(n, columns))
            uniforms = jnp.asarray(rng.random(1 if method == "systematic" else n), jnp.float32)
            source, child = map(np.asarray, draw(uniforms, jnp.log(jnp.asarray(weights, jnp.float32))))
            counts = np.zeros((n, columns), int)
            np.add.at(counts, (source, child), 1)
            expected = n * weights / weights.sum()
            if method == "systematic":
                assert (np.abs(counts - expected) < 1 + 1e-4).all()
            assert (source[np.unique(source)] == np.unique(source)).all()
            for row in np.unique(source):
                own = child[source == row]
                assert (np.diff(own) <= 0).all()
                several += len(set(own.tolist())) > 1
            assert (weights[source, child] > 0).all()
    assert several > 20


# The running step.

BASE = PAIR.program(MAX_MODEL_LEN, page_size=4, branching=2.0, power=1.2)


@pytest.fixture(scope="module")
def base() -> tuple[list[Any], list[smc.Info]]:
    return answers(BASE)


def test_rows_branch(base: tuple[list[Any], list[smc.Info]]) -> None:
    """Siblings differ in length, rows fork in every cycle in which some weigh little, and all weigh the same after."""
    uneven = 0
    for info in base[1]:
        ran = np.asarray(info.ran)
        assert (np.asarray(info.resampled) == ran).all()
        for ancestors, length in zip(np.asarray(info.ancestors)[ran], np.asarray(info.length)[ran], strict=True):
            uneven += any(np.ptp(length[ancestors == row]) > 0 for row in np.unique(ancestors))
    assert uneven > 3


def test_pages_and_schedule_do_not_matter(base: tuple[list[Any], list[smc.Info]]) -> None:
    """Pages of 7 tokens, no more of them than the requests' worst cases, and a bonus shown to the draft at once."""
    size, n = 7, BASE.decoding.n_particles
    bound = sum(Footprint(n, size, 1).worst_case(len(ask.prompt), ask.limit(MAX_MODEL_LEN)) for ask in ASKS)
    undeferred = dataclasses.replace(BASE.decoding, defer_bonus=False)
    program = dataclasses.replace(BASE, page_size=size, decoding=undeferred)
    assert answers(program, num_pages=bound + 1)[0] == base[0]


def test_certain_drafts_are_exact() -> None:
    """At power 1 a row's children sum to 1 under a draft that is certain, which SMC refuses without branching."""
    program = dataclasses.replace(BASE, draft=NGram(), decoding=smc.SMC(3, 3, branching=2.0))
    params = dataclasses.replace(PAIR.params, draft=None)
    state, infos = finish(program, params, start(program, params, ASKS))
    assert not state.failed.any()
    np.testing.assert_allclose(smc.log_evidence(state), 0, atol=1e-5)
    assert any(np.ptp(np.asarray(info.length), axis=1).any() for info in infos)
    with pytest.raises(ValueError, match=r"SMC\(branching=2\), which is unbiased with any"):
        dataclasses.replace(program, decoding=smc.SMC(3, 3))


def test_nan_ends_its_group_alone() -> None:
    """A target that gives NaN behind token 3 ends the groups that meet it, and no other."""
    params = with_nan_behind(PAIR.params, 3)
    asks = [dataclasses.replace(ask, prompt=(1, 2), stops=(3,), min_tokens=100) for ask in ASKS[:3]]
    asks.append(dataclasses.replace(asks[0], prompt=(1, 3)))
    state, _ = finish(BASE, params, start(BASE, params, asks))
    assert state.failed.tolist() == [False, False, False, True]
    assert (state.log_weight[:3] == 0).all()
    assert (state.release().pool.refcount == 0).all()


def test_a_fall_is_seen_by_the_copies_own_tokens(base: tuple[list[Any], list[smc.Info]]) -> None:
    """The tokens that a cycle adds are those behind the copied row, with all rows weighing alike."""
    rate, found = 0.02, []
    for group, ask in enumerate(ASKS):
        of_group = [jax.tree.map(lambda leaf, g=group: np.asarray(leaf)[g], info) for info in base[1]]
        own = [info for info in of_group if info.ran]
        begin, excess, told = np.full(3, len(ask.prompt) + 1), 0.0, None
        for cycle, info in enumerate(own, 1):
            tokens = float(np.mean(info.length - begin[info.ancestors]))
            excess = max(0.0, excess - float(np.log(np.mean(np.exp(info.log_weight)))) - rate * tokens)
            told = cycle if told is None and excess > 0.2 else told
            begin = info.length
        found.append(told)
        with mock.patch.object(history, "ALARM", 0.2):
            assert alarmed_after(own, len(ask.prompt), rate, branched=True) == told
    assert any(found)
