"""Speed over assumed acceptance: what a cycle gives by enumeration, where speeds are equal, and one small run."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest

from smcjax.bench import cycle as bench_cycle
from smcjax.bench.acceptance import acceptance_cases, break_even, expected_tokens, markdown, rival, rows_of
from smcjax.bench.cycle import CycleResult
from smcjax.cli.main import main
from smcjax.decoders import SMC, Autoregressive
from smcjax.rejection import Rejection

SHAPES = ["--target-shape", "tiny-target", "--draft-shape", "tiny-draft"]


def result(decoding: str, n: int, gamma: int, ms: float, groups: int = 1) -> CycleResult:
    fields: dict[str, Any] = {field.name: 1.0 for field in dataclasses.fields(CycleResult)}
    options = {"smc": SMC(n, gamma or 1, control=0), "rejection": Rejection(gamma or 1, n_candidates=n)}
    described = str(options.get(decoding, Autoregressive()))
    fields |= {
        "decoding": decoding,
        "described": described,
        "n_particles": n,
        "gamma": gamma,
        "ms": ms,
        "groups": groups,
    }
    return CycleResult(**fields)


@pytest.mark.parametrize("gamma", [1, 2, 5])
@pytest.mark.parametrize("rate", [0.0, 0.3, 0.75, 1.0])
def test_expected_tokens_are_those_of_all_outcomes(gamma: int, rate: float) -> None:
    mean = total = 0.0
    for accepts in itertools.product([True, False], repeat=gamma):
        probability = math.prod(rate if accept else 1 - rate for accept in accepts)
        run = len(list(itertools.takewhile(bool, accepts)))
        total += probability
        mean += probability * (run + 1)  # the token behind the run
    assert total == pytest.approx(1)
    assert expected_tokens(rate, gamma) == pytest.approx(mean, rel=1e-12)


@pytest.mark.parametrize(("gamma", "ms"), [(1, 6.0), (4, 2.01), (4, 9.0), (8, 9.99), (64, 5.0)])
def test_speeds_are_equal_where_it_breaks_even(gamma: int, ms: float) -> None:
    rate = break_even(gamma, ms, smc_ms=10.0)
    assert rate is not None
    assert 0 < rate < 1
    assert expected_tokens(rate, gamma) / ms == pytest.approx((gamma + 1) / 10.0, rel=1e-12)


def test_the_rival() -> None:
    particles = (4, 8, 16)
    results = [result("smc", n, gamma, 1.0) for gamma in (4, 8) for n in particles]
    for candidates, expected in {1: 8, 4: 4, 16: 16, 3: 8, 64: 8}.items():
        found = rival(result("rejection", candidates, 8, 1.0), results)
        assert found is not None
        assert (found.n_particles, found.gamma) == (expected, 8)
    found = rival(result("rejection", 1, 4, 1.0), results[::2])
    assert found is not None
    assert found.n_particles == 4  # 8 was not timed, 16 is farther from it
    assert rival(result("rejection", 1, 2, 1.0), results) is None


def test_cases() -> None:
    given = [Rejection(2), Rejection(2, n_candidates=5), SMC(4, 2, control=0)]
    cases = acceptance_cases([*given, given[0]], requests=2, context=300)
    assert [case.decoding for case in cases] == [Autoregressive(), *given]
    assert all(case.synthetic_kv and (case.groups, case.context) == (2, 300) for case in cases)
    (longest,) = {case.max_model_len for case in acceptance_cases([SMC(8, 64)])} - {1024}
    assert longest == 1792  # 256 + 1 + (4 + 16) · 65 = 1,557 tokens fit


def test_what_the_table_says() -> None:
    results = [
        result("autoregressive", 1, 0, 4.0, groups=2),
        result("rejection", 1, 2, 5.0, groups=2),
        result("rejection", 8, 2, 10.0, groups=2),
        result("smc", 8, 2, 10.0, groups=2),
    ]
    rows = rows_of(results, [0.5, 1.0, 0.5])
    assert [row["tokens_per_cycle"] for row in rows] == [[1], [1.75, 3], [1.75, 3], [3]]
    assert [row["acceptance"] for row in rows] == [None, [0.5, 1.0], [0.5, 1.0], None]
    lines = markdown(rows).splitlines()
    assert lines[0] == "| decoder | ms a cycle | tokens/s | at a = 0.5 | at a = 1 | as fast as SMC from a = |"
    assert lines[1] == "|---|---|---|---|---|---|"
    assert lines[2] == "| target alone | 4.00 | 500 | – | – | – |"
    # 1 + a + a² = 3 · 5/10 at a = (√3 − 1)/2
    assert lines[3] == "| rejection, K=2 | 5.00 | – | 700 | 1,200 | 0.366 (N=8) |"
    assert lines[4] == "| rejection, K=2, 8 candidates | 10.00 | – | 350 | 600 | – |"
    assert lines[5] == "| SMC, N=8, K=2 | 10.00 | 600 | – | – | – |"


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No cycle runs; those of these decoders do in `test_cycle.py` and `test_serving.py`."""
    monkeypatch.setattr(bench_cycle, "compile_together", lambda benches: None)
    monkeypatch.setattr(bench_cycle.Bench, "time_window", lambda bench: 1.5)
    plot, saved = tmp_path / "acceptance.svg", tmp_path / "acceptance.json"
    small = ["--decoding", "Rejection(gamma=2)", "Rejection(gamma=2, n_candidates=2)"]
    small += ["SMC(n_particles=2, gamma=2, control=0)", "--context", "8", "--windows", "1"]
    small += ["--cycles", "2", "--page-size", "4", "--bandwidth", "10", "--acceptance", "0.9", "0.25"]
    assert main(["bench", "acceptance", *SHAPES, *small, "--save", str(saved), "--plot", str(plot)]) == 0
    out, err = capsys.readouterr()
    rows = json.loads(saved.read_text())["rows"]
    assert [row["decoder"] for row in rows] == [
        "target alone",
        "rejection, K=2",
        "rejection, K=2, 2 candidates",
        "SMC, N=2, K=2",
    ]
    for row in rows:
        assert (row["target"], row["draft"], row["context"], row["groups"]) == ("tiny-target", "tiny-draft", 8, 1)
        assert row["ms"] > 0
        assert row["tokens_per_second"] == pytest.approx([1e3 * each / row["ms"] for each in row["tokens_per_cycle"]])
    assert rows[1]["tokens_per_cycle"] == pytest.approx([2.71, 1.3125])
    assert [row["break_even_particles"] for row in rows] == [None, 2, 2, None]
    assert markdown(rows) in out
    assert "a is assumed, not measured" in out
    assert "rejection, K=2, 2 candidates, 1 request, context 8: " in err
    assert "<svg" in plot.read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--acceptance", "0.5", "1.5"], "--acceptance: must be a number from 0 to 1, got 1.5"),
        (["--acceptance", "-0.1"], "--acceptance: must be a number from 0 to 1, got -0.1"),
        (["--acceptance", "nan"], "--acceptance: must be a number from 0 to 1, got nan"),
        (
            ["--decoding", "SMC()", "Rejection(gamma=65)"],
            "--decoding: gamma must be a whole number from 1 to 64, got 65",
        ),
        (["--requests", "0"], "--requests: must be a whole number from 1"),
        (["--plot", "x.txt"], "--plot must end in .svg, .png or .pdf, got x.txt"),
        (["--target-shape", "gpt-9"], "'gpt-9' is not one of llama-3.2-1b"),
    ],
)
def test_bad_options(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_cycle, "run_cases", lambda *_, **__: pytest.fail("work began"))
    assert main(["bench", "acceptance", *SHAPES, *arguments]) == 2
    out, err = capsys.readouterr()
    assert message in err
    assert out == ""
