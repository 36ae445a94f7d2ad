"""When programs are compiled: at the start, or when a batch size is first needed, and never again."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from typing import Any

import jax
import pytest

from smcjax import LLM, Autoregressive, SamplingParams
from smcjax.engine.run.programs import shown
from tests.checkpoints import Pair
from tests.engine.conftest import llm_arguments, smc_llm
from tests.engine.test_engine import add, drain

pytestmark = [pytest.mark.all_sizes, pytest.mark.compiled_at_once]


def alone(pair: Pair, **changes: Any) -> LLM:
    """The target alone, whose programs are compiled in half the time of a pair's."""
    return LLM(**llm_arguments(pair, draft_model=None, decoding=Autoregressive(), max_num_seqs=2, **changes))


def coming_and_going(llm: LLM) -> None:
    """Batches that grow and shrink while requests run."""
    for numbers in ([10], [10, 3], [6], [11, 10]):
        for number in numbers:
            add(llm, number)
            llm.engine.step()
    drain(llm.engine)
    for count in (2, 1, 3):
        llm.generate(["ab"] * count, SamplingParams(seed=1, max_tokens=5), use_tqdm=False)


@pytest.mark.slow
def test_at_the_start_and_never_again(
    pair: Pair, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with alone(pair, compile_at_start=True) as llm:
        programs = llm.metrics()["compilations"]
        assert f"Compiling: {programs} of {programs} programs" in capfd.readouterr().err
        llm.warm_up()
        assert "Compiling" not in capfd.readouterr().err  # nothing is left
        sizes = set()
        resize = llm.engine.runner.resize
        llm.engine.runner.resize = lambda size, sources: (sizes.add(size), resize(size, sources))[1]
        coming_and_going(llm)
        assert sizes == {1, 2}
        assert llm.metrics()["compilations"] == programs


@pytest.mark.parametrize(("terminal", "use_tqdm"), [(True, True), (True, False), (False, True), (False, False)])
def test_a_bar_is_for_a_terminal(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, terminal: bool, use_tqdm: bool
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    with contextlib.ExitStack() as stack:
        heard = shown(stack, use_tqdm)
        for done in range(3):
            heard(done, 2)
    assert ("\rCompiling" in capfd.readouterr().err) == (terminal and use_tqdm)


@pytest.mark.slow
def test_the_first_answer_shows_what_it_waits_for(
    pair: Pair, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in a notebook, whose standard error is no terminal; and not where no progress is wanted."""
    for notebook, use_tqdm in ((True, True), (True, False), (False, True)):
        (monkeypatch.setitem if notebook else monkeypatch.delitem)(sys.modules, "ipykernel", *([sys] * notebook))
        with alone(pair, compile_at_start=False) as llm:
            llm.generate("ab", SamplingParams(max_tokens=2), use_tqdm=use_tqdm)
        assert ("Compiling: 0 of " in capfd.readouterr().err) == (notebook and use_tqdm)


@pytest.mark.slow
def test_when_needed_and_never_for_a_smaller_batch(pair: Pair) -> None:
    """Shrinking waits for no compilation, in whatever order the sizes came."""
    with alone(pair, compile_at_start=False) as llm:
        assert llm.metrics()["compilations"] == 0
        llm.generate("ab", SamplingParams(max_tokens=2), use_tqdm=False)
        one = llm.metrics()["compilations"]
        llm.generate(["ab"] * 2, SamplingParams(max_tokens=2), use_tqdm=False)
        both = llm.metrics()["compilations"]
        assert 0 < one < both
        params = [SamplingParams(seed=i, max_tokens=1 + 9 * i, ignore_eos=True) for i in range(2)]
        llm.generate(["ab"] * 2, params, use_tqdm=False)
        llm.generate("ab", SamplingParams(max_tokens=2), use_tqdm=False)
        assert llm.metrics()["compilations"] == both


@pytest.mark.parametrize(("backend", "at_start"), [("cpu", False), ("gpu", True)])
def test_by_default_at_the_start_on_a_gpu(
    pair: Pair, backend: str, at_start: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[bool] = []
    monkeypatch.setattr(LLM, "warm_up", lambda self: called.append(True))
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    with alone(pair):
        assert bool(called) is at_start


def test_what_is_neither_is_refused(pair: Pair) -> None:
    with pytest.raises(ValueError, match=r"^compile_at_start must be True, False or None, got 'yes'\.$"):
        alone(pair, compile_at_start="yes")


@dataclasses.dataclass(frozen=True)
class Raises:
    """A potential of tokens with a mistake of its author."""

    def log_value(self, answers: Any) -> Any:
        raise KeyError("a mistake")


def test_a_mistake_in_a_potential_ends_its_request_alone(pair: Pair) -> None:
    with smc_llm(pair, {"n_particles": 2, "gamma": 1}, max_num_seqs=2) as llm:
        params = [SamplingParams(max_tokens=4, potentials=own) for own in ([Raises()], [])]
        own, beside = llm.generate(["ab"] * 2, params, use_tqdm=False)
    assert own.error is not None
    assert "failed, KeyError: 'a mistake'" in own.error
    assert (beside.error, len(beside.outputs[0].token_ids) > 0) == (None, True)
