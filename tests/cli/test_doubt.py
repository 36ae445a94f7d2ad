"""The doubt that a prompt is of the bundled pair's kind: by the yield of cycles, or by evidence without a control."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from smcjax.cli.answers import Doubt, yield_of_cycles
from smcjax.tasks.word_problems import generate
from tests.cli.conftest import Command

DOUBT = "does not look like a word problem"


@pytest.mark.slow
def test_a_prompt_of_another_kind_is_doubted(smcjax: Command, tmp_path: Path) -> None:
    """By the bundled pair and the default decoder; the word problem before it is not."""
    problem, asked = generate(seed=5, n=1, split="eval")[0].question, tmp_path / "i.jsonl"
    asked.write_text("".join(json.dumps({"prompt": one}) + "\n" for one in (problem, "What is the capital of France?")))
    done = smcjax(
        "generate", "--input-file", str(asked), "--max-tokens", "40", "--max-model-len", "256", "--max-num-seqs", "1"
    )
    assert done.code == 0
    assert done.err.count(DOUBT) == 1
    assert f"warning: the prompt of line 2 {DOUBT}" in done.err
    assert re.search(r"\(its cycles brought \d\d?% of the tokens that they can, and 65% or more is usual\)", done.err)


def answer(tokens: int, cycles: int, gamma: int, control: float | None = 0.1, evidence: float = 0.0) -> Any:
    """Makes the part of an output that a doubt reads, of a population of two."""
    metrics = SimpleNamespace(generated_tokens=tokens, cycles=cycles, drafted=2 * gamma * cycles)
    smc = SimpleNamespace(control=control, log_evidence=evidence, particles=[0, 1])
    return SimpleNamespace(metrics=metrics, smc=smc)


def test_yield_is_of_all_that_cycles_can_bring() -> None:
    """Three cycles of K = 4 bring at most 15 tokens, and up to 4 of the last cycle may have been cut."""
    assert yield_of_cycles(answer(15, 3, 4)) == pytest.approx(19 / 15)
    assert yield_of_cycles(answer(5, 3, 4)) == pytest.approx(9 / 15)
    assert yield_of_cycles(answer(1, 2, 4)) is None
    assert yield_of_cycles(SimpleNamespace(metrics=answer(5, 3, 4).metrics, smc=None)) is None


@pytest.mark.parametrize("gamma", [1, 8, 64])
def test_no_end_of_an_answer_is_doubted_whose_drafts_are_kept(gamma: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Wherever a cap, an end token or a stop string cuts, the last of which a cycle later."""
    doubt = Doubt(bundled=True)
    for tokens in range(1, 5 * (gamma + 1)):
        cycles = -(-(tokens - 1) // (gamma + 1))  # one token is drawn before the first
        for more in (0, 1):
            doubt.consider(answer(tokens, cycles + more, gamma))
    assert DOUBT not in capsys.readouterr().err
    doubt.consider(answer(20 * (gamma + 1) // 2, 20, gamma))
    assert DOUBT in capsys.readouterr().err


@pytest.mark.parametrize(
    ("control", "yields", "evidence"), [(0.1, True, False), (1.0, True, False), (0.0, False, True)]
)
def test_which_of_the_two_decides(
    control: float, yields: bool, evidence: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    for foreign, decides in (
        (answer(60, 20, 8, control), yields),
        (answer(180, 20, 8, control, evidence=-180.0), evidence),
    ):
        Doubt(bundled=True, power=2.0).consider(foreign)
        Doubt(bundled=False).consider(foreign)
        assert DOUBT not in capsys.readouterr().err
        Doubt(bundled=True).consider(foreign)
        assert (DOUBT in capsys.readouterr().err) == decides
