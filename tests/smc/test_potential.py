"""Potentials: law 2 for p^α·∏ φ by exact enumeration, in float64, and what the running step makes of them.

Of answers of a form it is law 25: E[Ẑ·Σ W_i·1{x_i = x}] = p(x)^α·∏ φ(x) for x that match, and 0 for all others.
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
from smcjax.model.decoder import forward
from smcjax.smc import cycle
from tests import exact
from tests.helpers import Ask, assert_pages_sound, finish, outputs, published, start, step, tiny_pair
from tests.smc import reference
from tests.smc.enumeration import Enumeration, Tokens, Toy, deviation
from tests.smc.test_constraints import LONG, RARE, Constrained, FormToy, mistaken


@dataclasses.dataclass(frozen=True)
class Alternating:
    """e^strength for each token that differs from the one before it, and a beginning of odd length is worth less."""

    strength: float = 0.7

    def log_value(self, answers: smc.Answers) -> Any:
        inside = answers.counted[:, 1:] & answers.counted[:, :-1]
        differ = jnp.sum(inside & (answers.tokens[:, 1:] != answers.tokens[:, :-1]), axis=1, dtype=float)
        odd = (answers.end - answers.begin) % 2
        return self.strength * differ - 0.9 * jnp.where(answers.finished, 0, odd).astype(float)

    def of(self, answer: Tokens) -> float:
        """φ of a whole answer."""
        return float(np.exp(self.strength * sum(a != b for a, b in itertools.pairwise(answer))))


STOP = Toy(vocab=2, cap=5, stop=1)
WIDE = Toy(vocab=3, cap=4, stop=2, impossible=True, seed=3)
KILLER = smc.TokenPotential(((0, 0.4), (1, -np.inf)))
CASES: dict[str, tuple[Toy, dict[str, Any]]] = {
    "two": (STOP, {"n_particles": 2, "gamma": 2, "ess_threshold": 0.95, "potentials": (Alternating(),)}),
    "power, three": (STOP, {"n_particles": 3, "gamma": 1, "power": 1.5, "potentials": (Alternating(-0.5),)}),
    "control": (WIDE, {"n_particles": 2, "gamma": 2, "control": 0.3, "potentials": (Alternating(),)}),
    "early end": (STOP, {"n_particles": 2, "gamma": 1, "early_end": True, "potentials": (Alternating(),)}),
    "deadly": (WIDE, {"n_particles": 2, "gamma": 1, "ess_threshold": 1.0, "potentials": (KILLER,)}),
    "a product": (
        STOP,
        {"n_particles": 2, "gamma": 2, "potentials": (Alternating(), smc.TokenPotential(((0, -0.6),)))},
    ),
    "form": (LONG, {"n_particles": 2, "gamma": 2, "ess_threshold": 0.95, "potentials": (Alternating(),)}),
    "form, control": (RARE, {"n_particles": 2, "gamma": 2, "control": 0.3, "potentials": (Alternating(),)}),
}


def enumerated(toy: Toy, config: dict[str, Any]) -> Enumeration:
    """SMC on a toy, under its form where it has one."""
    return (Constrained if isinstance(toy, FormToy) else Enumeration)(toy, published(**config)).run()


def factor(potentials: tuple[Any, ...], answer: Tokens) -> float:
    """∏ φ of a whole answer, in plain Python."""
    result = 1.0
    for one in potentials:
        if isinstance(one, Alternating):
            result *= one.of(answer)
        else:
            result *= float(np.exp(sum(dict(one.log_factors).get(token, 0.0) for token in answer)))
    return result


def steered(done: Enumeration) -> dict[Tokens, float]:
    """∏ p^α·∏ φ over Ω."""
    law = done.toy.outcomes(done.config.power)
    return {x: mass * factor(done.config.potentials, x) for x, mass in law.items()}


@pytest.mark.parametrize("case", CASES)
def test_unbiased(case: str) -> None:
    """To 1e-12, whatever beginnings of answers are worth."""
    toy, config = CASES[case]
    done = enumerated(toy, config)
    assert deviation(done, steered(done)) < 1e-12
    assert max(abs(factor(config["potentials"], x) - 1) for x in toy.outcomes(1.0)) > 0.1, "it steers at all"


def forgets(state: Any, *rest: Any) -> Any:
    """Planted: weights gain a beginning's value and keep it."""
    return _steer(dataclasses.replace(state, log_potential=jnp.zeros_like(state.log_potential)), *rest)


def drops_the_end(state: Any, potentials: Any, live: Any, *rest: Any) -> Any:
    """Planted: a row that ends keeps what its beginning was worth, and has nothing of the whole answer."""
    return _steer(state, potentials, live & ~state.sequences.finished, *rest)


_steer = cycle.steer


@pytest.mark.parametrize("mistake", [forgets, drops_the_end], ids=lambda one: one.__name__)
@pytest.mark.parametrize("case", ["two", "form"])
def test_control_a_weight_that_is_not_the_whole_answers_breaks_the_law(
    case: str, mistake: Any, patch_programs: Any
) -> None:
    """Negative control, with and without a form."""
    jax.clear_caches()
    patch_programs(cycle, "steer", mistake)
    done = enumerated(*CASES[case])
    assert deviation(done, steered(done)) > 1e-3
    jax.clear_caches()


def test_control_the_mass_of_a_form_left_out_beside_a_potential_is_seen() -> None:
    """Negative control: p renormalised over the tokens that the form allows."""
    with mistaken("mass left out"):
        done = enumerated(*CASES["form"])
    assert deviation(done, steered(done)) > 1e-3


@dataclasses.dataclass(frozen=True)
class Likelier:
    """p(x)^strength, of the log-probabilities that answers bring."""

    strength: float = 0.5
    shift: int = 0  # a mistake: those of other tokens

    def log_value(self, answers: smc.Answers) -> Any:
        logprobs = jnp.roll(answers.logprobs, self.shift, axis=1)
        return self.strength * jnp.sum(jnp.where(answers.counted, logprobs, 0.0), axis=1)


POWERS: dict[str, tuple[Toy, dict[str, Any]]] = {
    "two": (STOP, {"n_particles": 2, "gamma": 2, "ess_threshold": 0.95}),
    "a power beside it, early end": (STOP, {"n_particles": 2, "gamma": 1, "power": 0.8, "early_end": True}),
}


@pytest.mark.parametrize("case", POWERS)
def test_log_probabilities_are_a_power(case: str) -> None:
    """With the potential p(x)^s the target p^α is p^(α + s), to 1e-12; with those of other tokens it is not."""
    toy, config = POWERS[case]

    def off(potential: Likelier) -> float:
        done = enumerated(toy, {**config, "potentials": (potential,)})
        return deviation(done, toy.outcomes(done.config.power + potential.strength))

    assert off(Likelier()) < 1e-12
    if case == "two":
        assert off(Likelier(shift=1)) > 1e-3


@dataclasses.dataclass(frozen=True)
class Probe:
    """e^(direction·h), h behind all tokens but the newest; beginnings are worth the square of what answers are."""

    direction: tuple[float, ...] = (0.5, -0.4, 0.3)

    @property
    def hidden_size(self) -> int:
        return len(self.direction)

    def log_value(self, answers: smc.Answers) -> Any:
        value = answers.hidden @ jnp.asarray(self.direction, answers.hidden.dtype)
        return jnp.where(answers.finished, 1.0, 2.0) * value


HIDDEN: dict[str, tuple[Toy, dict[str, Any]]] = {
    "two": (STOP, {"n_particles": 2, "gamma": 2, "ess_threshold": 0.95}),
    "control": (WIDE, {"n_particles": 2, "gamma": 2, "control": 0.3}),
    "power, no bonus": (STOP, {"n_particles": 2, "gamma": 2, "power": 1.5, "bonus": False}),
}


def off_by_hidden(toy: Toy, config: dict[str, Any]) -> float:
    """The largest over Ω of |E[Ẑ·Σ W_i·1{x_i = x}] − p(x)^α·φ(x)|, φ by the state behind x without its last token."""
    done = Enumeration(toy, published(**config, potentials=(Probe(),))).run()
    law = toy.outcomes(done.config.power)
    return deviation(done, {x: mass * float(np.exp(toy.hidden(x[:-1]) @ Probe().direction)) for x, mass in law.items()})


@pytest.mark.parametrize("case", HIDDEN)
def test_hidden_states_are_a_factor(case: str) -> None:
    """To 1e-12: the state of an answer is that which its last token was drawn from, wherever its block was cut."""
    assert off_by_hidden(*HIDDEN[case]) < 1e-12


def test_control_hidden_states_of_another_token_break_the_law(patch_programs: Any) -> None:
    """Negative control: the state of the block's last column, though the answer ends before it."""
    jax.clear_caches()
    right = cycle.newest_hidden
    patch_programs(
        cycle,
        "newest_hidden",
        lambda new, block: right(new, dataclasses.replace(block, counted=jnp.ones_like(block.counted))),
    )
    assert off_by_hidden(*HIDDEN["two"]) > 1e-3
    jax.clear_caches()


PAIR = tiny_pair()
dense = jax.jit(forward, static_argnums=0)
ASKS = [
    Ask((1, 3, 0, 2, 2), max_tokens=11, stops=(4,), seed=41),
    Ask((2,), max_tokens=14, stops=(4,), min_tokens=5, temperature=0.7, seed=42),
]


def run(**config: Any) -> tuple[smc.State, list[smc.Info]]:
    program = PAIR.program(24, page_size=4, **config)
    state, infos = start(program, PAIR.params, ASKS), []
    while state.running.any():
        state, info = step(program, PAIR.params, state)
        assert_pages_sound(state.sequences.block_table, state.memory.pool)
        infos.append(info)
    return state, infos


@pytest.mark.parametrize("config", [{"control": 0.3, "early_end": True}, {"pipelined": True}], ids=str)
def test_values_are_of_the_targets_own_and_telescope_through_forks(config: dict[str, Any]) -> None:
    """The state keeps for each row, copies too, the log value of that row's own tokens, of their log-probabilities by
    the request's temperature and minimum, and of the dense forward's hidden state behind all but the newest.
    """
    direction = tuple(np.random.default_rng(0).normal(size=PAIR.target.hidden_size).tolist())
    potential = smc.TokenPotential(((0, 0.4), (2, -0.3), (4, 1.0)))
    state, infos = run(**config, ess_threshold=1.0, potentials=(potential, Likelier(0.5), Probe(direction)))
    assert any(bool(info.resampled.any()) for info in infos)
    after = reference.language_model(PAIR.target, PAIR.params.target, 24)
    for group, (rows, ask) in enumerate(zip(outputs(state), ASKS, strict=True)):
        for row, found, finished in zip(
            rows, state.log_potential[group], state.by_group(state.sequences.finished)[group], strict=True
        ):
            laws = [exact.next_law(after, ask, tuple(row[:at]))[row[at]] for at in range(len(row))]
            others = sum(dict(potential.log_factors).get(token, 0.0) for token in row) + 0.5 * np.log(laws).sum()
            tokens, end = np.zeros((1, 24), np.int32), len(ask.prompt) + len(row)
            tokens[0, :end] = [*ask.prompt, *row]
            hidden = np.asarray(dense(PAIR.target, PAIR.params.target, tokens))[0]
            want, newest = (float(hidden[at] @ np.asarray(direction, hidden.dtype)) for at in (end - 2, end - 1))
            assert abs(float(found) - others - (1 if finished else 2) * want) < 1e-3
            assert abs(want - newest) > 1e-2, "another token's state would be seen"


def test_a_constant_moves_the_evidence_and_nothing_else() -> None:
    """The law of answers is that without it, to 1e-12."""
    config = {"n_particles": 2, "gamma": 2, "control": 0.3}
    plain, moved = (enumerated(STOP, {**config, "potentials": one}) for one in ((), (smc.ConstantPotential(0.5),)))
    assert deviation(moved, {x: mass * np.exp(0.5) for x, mass in STOP.outcomes(1.0).items()}) < 1e-12
    assert max(abs(moved.selected[x] - mass) for x, mass in plain.selected.items()) < 1e-12


def test_hidden_states_cost_nothing_where_nothing_asks(patch_programs: Any) -> None:
    """For other potentials none is picked from a block, and the state has no array for those that ask either."""
    picked, right = [], cycle.newest_hidden
    patch_programs(cycle, "newest_hidden", lambda *args: picked.append(args) or right(*args))
    states = {}
    for potential in (KILLER, Probe((1.0,) * PAIR.target.hidden_size)):
        program = PAIR.program(24, page_size=4, potentials=(potential,))
        states[potential] = jax.eval_shape(lambda program=program: start(program, PAIR.params, ASKS))
        jax.eval_shape(functools.partial(cycle.step, program), PAIR.params, states[potential])
        assert bool(picked) == (potential is not KILLER)
    plain, asking = states.values()
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), plain) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), asking
    )


def test_hidden_states_of_another_model_are_refused() -> None:
    size = PAIR.target.hidden_size
    with pytest.raises(ValueError, match=rf"reads hidden states of 3 numbers and the target's have {size}; use one"):
        PAIR.program(24, page_size=4, potentials=(Probe(),))


@pytest.mark.slow
def test_a_potential_that_is_no_number_ends_its_request_alone() -> None:
    """NaN in one group's answers: that group has failed, the other has not."""

    @dataclasses.dataclass(frozen=True)
    class Broken:
        def log_value(self, answers: smc.Answers) -> Any:
            return jnp.where(answers.tokens[:, 0] == 2, jnp.nan, 0.0)

    program = PAIR.program(24, page_size=4, potentials=(Broken(),))
    state, _ = finish(program, PAIR.params, start(program, PAIR.params, ASKS))
    assert state.failed.tolist() == [False, True]


def test_what_is_no_potential_is_refused() -> None:
    with pytest.raises(ValueError, match=r"potentials must be a tuple of Potentials, got \(3,\)"):
        smc.SMC(potentials=(3,))
    assert smc.SMC(potentials=[KILLER]).potentials == (KILLER,)
    assert not smc.SMC(control=1.0, potentials=(KILLER,)).exact
