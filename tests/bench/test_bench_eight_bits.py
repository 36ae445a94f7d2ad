"""The benchmark of eight bits: divergences by their definition, and that the command runs."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bench_eight_bits as bench
import jax.numpy as jnp
import numpy as np
import pytest

from smcjax.bench.accuracy import Evaluation
from smcjax.model import load_checkpoint
from smcjax.model.files.hub import bundled_model
from smcjax.tasks.questions import Question

DRAFT = str(bundled_model("draft"))


def test_divergences_are_those_of_the_definition() -> None:
    """Control: a law against itself has none."""
    rng = np.random.default_rng(0)
    of, to = (np.log(rng.dirichlet(np.ones(7), 5)).astype(np.float32) for _ in range(2))
    kl, same = bench.compared(of, to)
    for row in range(5):
        expected = sum(np.exp(of[row, token]) * (of[row, token] - to[row, token]) for token in range(7))
        assert float(kl[row]) == pytest.approx(expected, rel=1e-5)
        assert bool(same[row]) == (of[row].argmax() == to[row].argmax())
    kl, same = bench.compared(of, of)
    assert float(jnp.abs(kl).max()) == 0.0
    assert bool(same.all())


@pytest.mark.slow
def test_padding_changes_nothing_and_more_rounding_more() -> None:
    config, params = load_checkpoint(DRAFT, "float32")
    ids = list(range(5, 25))
    alone = bench.measured(DRAFT, ("bfloat16", "int8", "float8"), [(ids, 4)])
    beside = bench.measured(DRAFT, ("bfloat16", "int8", "float8"), [(ids, 4), ([*ids, *ids], 39)])
    assert [row["tokens"] for row in alone] == [16, 16, 16]
    assert [row["tokens"] for row in beside] == [17, 17, 17]
    assert 0 < alone[0]["kl"] < alone[1]["kl"] < alone[2]["kl"]
    laws = np.asarray(bench.laws(config, params, jnp.asarray(ids, jnp.int32)))
    padded = np.asarray(bench.laws(config, params, jnp.asarray(ids + [0] * 20, jnp.int32)))
    np.testing.assert_allclose(padded[:20], laws, atol=1e-5)


@pytest.mark.slow
def test_the_command_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "figures.json"
    words = ["--models", "words-draft", "--texts", "2", "--tokens", "8", "--problems", "0", "--save", str(file)]
    assert bench.main(words) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [row["weights"] for row in rows] == ["bfloat16", "int8", "float8"]
    assert "| words-draft | int8 |" in capsys.readouterr().out


def test_accuracies_are_compared_on_the_same_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each decoder's first row is float32's, from which the others differ; engines are told what they hold."""
    held: list[dict[str, Any]] = []
    right = {None: [True, True, True, False], "int8": [True, True, False, False], "float8": [True, False, False, False]}

    @contextlib.contextmanager
    def llm(**how: Any) -> Iterator[dict[str, Any]]:
        held.append(how)
        yield how

    def evaluate(engine: dict[str, Any], asked: list[Question], *_: Any, **__: Any) -> Evaluation:
        assert len(asked) == 4
        parts = [[one] for one in right[engine["quantization"]]]
        outputs: list[Any] = [SimpleNamespace(smc=None, error=None)] * 4
        return Evaluation(parts, ["", "", "", ""], outputs, 1.0, 1.0, 4, 4, 4, 0)

    monkeypatch.setattr(bench, "LLM", llm)
    monkeypatch.setattr(bench, "evaluate", evaluate)
    rows: list[dict[str, Any]] = []
    bench.accuracies(("a", "b"), 4, 1, rows.append)
    assert [row["weights"] for row in rows] == ["float32", "int8", "float8"] * 2
    assert [row["accuracy"] for row in rows] == [0.75, 0.5, 0.25] * 2
    assert [row["difference"] for row in rows] == [0, -0.25, -0.5] * 2
    assert [how.get("draft_quantization") for how in held] == [None, None, None, None, "int8", "float8"]
    assert all(how["dtype"] == "float32" for how in held)
    printed = bench.markdown(rows)
    assert "| 50.0% (15.0 to 85.0) | -25.0 (" in printed
