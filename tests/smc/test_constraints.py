"""Law 25: SMC's weights under a constraint, by exact enumeration (tests/smc/enumeration.py), in float64.

E[Ẑ·Σ W_i f(x_i)] = Σ_{x ∈ Ω, x matches} f(x)·∏ p^α      for every f, and so E[Ẑ] = P(x matches) at α = 1

Texts are judged by Python's `re`, over letters that tokens spell; the package walks its automata.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smcjax.decoding import constraints
from smcjax.decoding.constraints import AutomatonTables, RowConstraint, masked
from smcjax.engine.run.constraints import make_tables
from smcjax.smc import acceptance, weights
from smcjax.structured.automaton import Automaton
from smcjax.structured.automaton_child import token_automaton
from smcjax.structured.grammar import expression_automaton
from tests.helpers import published
from tests.lazily import program_patches
from tests.smc.enumeration import Enumeration, Proposals, Tokens, Toy, controlled, deviation

Q_OF_ALL = "drafts weighed by q of all tokens"
SPELLED = (b"a", b"b", b"ab", b"")  # the last one is the stop


@functools.cache
def tables(regex: str, spelled: tuple[bytes, ...] = SPELLED) -> AutomatonTables:
    """One automaton over the tokens."""
    made = token_automaton(*expression_automaton(regex, 100), list(spelled), 1000)
    return make_tables({0: Automaton(**made)}, 1, len(spelled), most_cells=1000, most_states=100)


@functools.partial(jax.jit, static_argnames=("cap", "stop"))
def _walked(tables: AutomatonTables, cap: int, stop: int, tokens: Any) -> Any:
    row = RowConstraint(
        tables,
        automaton=jnp.zeros(1, jnp.int32),
        stops=(jnp.arange(tables.classes.shape[1]) == stop)[None],
        state=jnp.zeros(1, jnp.int32),
        left=jnp.full(1, cap, jnp.int32),
    )
    return row.behind(tokens[None]).allowed()[0]


@dataclasses.dataclass(frozen=True)
class FormToy(Toy):
    """A toy whose answers have a form."""

    regex: str = "(a|b)*"
    spelled: tuple[bytes, ...] = SPELLED

    masks: bool = True  # the draft; False: as a mistake

    @functools.cache  # noqa: B019
    def logprobs(self, model: str, prefix: Tokens) -> np.ndarray:
        """The target's own law, and the draft's of allowed tokens."""
        law = Toy.logprobs.__wrapped__(self, model, prefix)
        if model == "p" or not self.masks:
            return law
        return np.asarray(jax.nn.log_softmax(masked(jnp.asarray(law), jnp.asarray(self.allowed(prefix)))))

    @functools.cache  # noqa: B019
    def allowed(self, prefix: Tokens) -> np.ndarray:
        """The tokens that the package allows behind a prefix."""
        padded = np.full(self.cap + 4, self.vocab, np.int32)
        padded[: len(prefix)] = prefix
        return np.asarray(_walked(tables(self.regex, self.spelled), self.cap, self.stop, jnp.asarray(padded)))

    def matches(self, tokens: Tokens) -> bool:
        """Says of a whole output, without automata, that it has the form."""
        text = b"".join(self.spelled[token] for token in tokens if token != self.stop)
        return re.fullmatch(self.regex.encode(), text) is not None

    def outcomes(self, alpha: float, behind: Tokens = ()) -> dict[Tokens, float]:
        return {x: mass for x, mass in super().outcomes(alpha, behind).items() if self.matches(x)}


class Constrained(Enumeration):
    """Runs SMC on a toy whose answers have a form, the package's masks and increments in place of the plain ones."""

    toy: FormToy
    mistake = "none"

    def _first(self, prefix: Tokens) -> Proposals:
        alpha, logits = self.config.power, jnp.asarray(self.toy.logprobs("p", prefix))
        allowed = jnp.asarray(self.toy.allowed(prefix))
        law = np.asarray(jax.nn.softmax(masked(alpha * logits, allowed)))
        increment = np.asarray(weights.bonus_increment(alpha, logits, allowed))
        size = self.toy.vocab
        return Proposals(np.arange(size)[:, None], np.full((size, 1), increment), law)

    def _block(self, prefix: Tokens) -> Proposals:
        proposals = super()._block(prefix)
        if self.mistake != Q_OF_ALL:
            return proposals
        mistaken = Constrained(dataclasses.replace(self.toy, masks=False), self.config)._block(prefix)
        return proposals._replace(increments=mistaken.increments)

    def _controlled_block(self, prefix: Tokens) -> Proposals:
        config = self.config
        p, q, drafts = self.toy.laws_along(prefix, config)
        columns = range(config.tokens_per_cycle)
        allowed = np.array([[self.toy.allowed((*prefix, *d[:i])) for i in columns] for d in drafts.tolist()])
        terms = (self.mutation, config.power, np.float64(config.control), p, q, drafts, allowed)
        tokens, increments, chance, last = map(np.asarray, controlled(*terms))
        possible = chance > 0
        return Proposals(tokens[possible], increments[possible], chance[possible], last[possible])


def enumerate_smc(toy: FormToy, mistake: str = "none", **config: Any) -> Enumeration:
    enumeration = Constrained(toy, published(**config))
    enumeration.mistake = mistake
    return enumeration.run()


LETTERS = (b"a", b"b", b"")
TWO = FormToy(vocab=4, cap=5, stop=3, regex="(ab)+")  # of two spellings, and never a lone b
LONG = FormToy(vocab=3, cap=5, stop=2, seed=3, regex="(a|bb)*b", spelled=LETTERS)
RARE = FormToy(vocab=3, cap=5, stop=2, seed=5, regex="b|a(a|b)*a", spelled=LETTERS, impossible=True)
CASES: dict[str, tuple[FormToy, dict[str, Any]]] = {
    "two, power": (TWO, {"n_particles": 2, "gamma": 1, "power": 0.5, "ess_threshold": 0.95}),
    "power, no bonus": (LONG, {"n_particles": 2, "gamma": 2, "bonus": False, "power": 2.0, "ess_threshold": 1.0}),
    "three, K=3": (RARE, {"n_particles": 3, "gamma": 3, "bonus": False, "ess_threshold": 0.95}),
    "control, power": (TWO, {"n_particles": 2, "gamma": 2, "control": 0.1, "power": 1.5, "ess_threshold": 0.9}),
    "control 1": (RARE, {"n_particles": 2, "gamma": 2, "control": 1.0, "bonus": False, "ess_threshold": 1.0}),
}


@pytest.mark.parametrize("case", CASES)
def test_unbiased(case: str) -> None:
    toy, config = CASES[case]
    expected = toy.outcomes(1.0)
    assert 0 < sum(expected.values()) < 0.9, "the form matters"
    done = enumerate_smc(toy, **config)
    assert deviation(done) < 1e-12
    assert done.resampled > 0.01
    power = config.get("power", 1.0)
    assert sum(done.measure.values()) == pytest.approx(sum(toy.outcomes(power).values()), abs=1e-12)


def test_every_answer_has_the_form_and_all_of_them_are_said() -> None:
    """Each step allows exactly the tokens that can still become an answer, whatever the cap."""
    for regex, cap in itertools.product(("(ab)+", "a?b{2}", "b|aaa", "", "(a|b){2,3}", "ab|b"), (1, 2, 3, 4)):
        toy = FormToy(vocab=4, cap=cap, stop=3, regex=regex)
        answers = set(toy.outcomes(1.0))
        beginnings = {x[:n] for x in answers for n in range(len(x))}
        for prefix in beginnings:
            said = {v for v in range(4) if (*prefix, v) in beginnings | answers}
            assert set(np.flatnonzero(toy.allowed(prefix))) == said, (regex, cap, prefix)


@pytest.mark.slow
def test_the_answers_law_nears_the_conditional() -> None:
    """The selected answer's law tends to p(x | form) like 1/N; one particle has that of the masks, which is another."""
    total = sum(LONG.outcomes(1.0).values())
    law, distances = {x: mass / total for x, mass in LONG.outcomes(1.0).items()}, []
    for n in (1, 2, 3):
        selected = enumerate_smc(LONG, n_particles=n, gamma=2, control=1.0, ess_threshold=0.5).selected
        distances.append(sum(abs(selected.get(x, 0.0) - law.get(x, 0.0)) for x in law.keys() | selected.keys()) / 2)
    assert distances[0] > 0.02
    assert distances[2] < distances[1] < distances[0]


def _local(power: float, logits: Any, allowed: Any = None) -> Any:
    """A mistake: p renormalised over the allowed tokens, as masked decoding has it, and the mass forgotten."""
    return _INCREMENT(power, logits if allowed is None else masked(logits, allowed))


def _everywhere(here: RowConstraint) -> Any:
    """A mistake: an answer may end anywhere."""
    return _ALLOWED(here) | here.stops


def _without_the_cap(here: RowConstraint) -> Any:
    """A mistake: nobody looks whether what is left suffices."""
    return _ALLOWED(dataclasses.replace(here, left=here.left + 100))


_INCREMENT, _ALLOWED = weights.bonus_increment, RowConstraint.allowed
MISTAKES: dict[str, tuple[Any, ...]] = {
    "mass left out": (weights, "bonus_increment", _local),
    "mass left out under a control": (acceptance, "bonus_increment", _local),
    "ends anywhere": (constraints.RowConstraint, "allowed", _everywhere),
    "no eye on the cap": (constraints.RowConstraint, "allowed", _without_the_cap),
    Q_OF_ALL: (),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_controls(mistake: str) -> None:
    config: dict[str, Any] = {"n_particles": 2, "gamma": 2, "ess_threshold": 0.9}
    config |= {"control": 0.5} if "control" in mistake else {}
    with mistaken(mistake):
        assert deviation(enumerate_smc(dataclasses.replace(LONG, seed=7), mistake, **config)) > 1e-3


@contextlib.contextmanager
def mistaken(name: str) -> Iterator[None]:
    """The package with one mistake, for the enumeration to meet anew."""
    cached = (FormToy.allowed.cache_clear, FormToy.logprobs.cache_clear, jax.clear_caches)
    for clear in cached:
        clear()
    with program_patches(*MISTAKES[name]):
        yield
    for clear in cached:
        clear()
