"""The serving benchmark: every request is answered, and the figures are of those requests."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from smcjax.bench import serving
from smcjax.bench.models import Models
from smcjax.bench.serving import Load, figures, make_engine, make_requests, markdown, serve
from smcjax.cli.main import main
from smcjax.decoders import Autoregressive
from smcjax.engine.requests.requests import Request

TINY = Models("tiny-target", "tiny-draft")
SHAPES = ["--target-shape", "tiny-target", "--draft-shape", "tiny-draft"]


def test_arrivals() -> None:
    at_once = make_requests(TINY, Load(Autoregressive(), num_prompts=5))
    assert [at for at, _ in at_once] == [0.0] * 5
    poisson = np.array(
        [at for at, _ in make_requests(TINY, Load(Autoregressive(), num_prompts=4000, request_rate=8.0, input_len=1))]
    )
    gaps = np.diff(poisson)
    assert (gaps >= 0).all()
    assert gaps.mean() == pytest.approx(1 / 8, rel=0.1)
    assert gaps.std() == pytest.approx(1 / 8, rel=0.1)


@pytest.mark.slow
def test_figures() -> None:
    load = Load(Autoregressive(), num_prompts=7, input_len=20, output_len=9, max_num_seqs=2, request_rate=200.0)
    engine = make_engine(TINY, load)
    compiled = len(engine.runner.programs)
    counts: list[int] = []
    served = serve(engine, make_requests(TINY, load), counts.append)
    assert sum(counts) == len(served) == 7
    assert len(engine.runner.programs) == compiled
    assert engine.metrics()["kv_pages_free"] == engine.metrics()["kv_pages_total"]
    result = figures(load, served)
    assert (result["completed"], result["total_output_tokens"], result["total_input_tokens"]) == (7, 63, 140)
    assert result["output_throughput"] == pytest.approx(63 / result["duration"])
    assert 0 < result["median_first_cycle_ms"] <= result["median_ttft_ms"] + 1e-6 <= result["median_e2el_ms"] + 1e-5
    assert 0 <= result["median_queue_ms"] <= result["p99_queue_ms"]
    assert result["median_tpot_ms"] > 0
    assert result["median_itl_ms"] > 0
    for one in served:
        assert one.output_tokens == 9
        times = [one.began, *one.received, one.ended]
        assert times == sorted(times)
    assert markdown([result]).count("\n") == 2


@pytest.mark.slow
def test_the_commands(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = ["--decoding", "autoregressive", "--num-prompts", "3", "--max-num-seqs", "2"]
    small += ["--input-len", "20", "--output-len", "9"]  # the programs of `test_figures`
    assert main(["bench", "throughput", *SHAPES, *small, "--save", str(tmp_path / "load.json")]) == 0
    (last,) = json.loads((tmp_path / "load.json").read_text())["rows"]
    assert last["completed"] == 3
    assert last["request_rate"] == "inf"
    plot = tmp_path / "latency.svg"
    prompts: list[tuple[int, ...]] = []
    make = serving.make_requests

    def remembering(models: Models, load: Load) -> list[tuple[float, Request]]:
        requests = make(models, load)
        prompts.extend(tuple(request.token_ids) for _, request in requests)
        return requests

    monkeypatch.setattr(serving, "make_requests", remembering)
    capsys.readouterr()
    assert main(["bench", "latency", *SHAPES, *small, "--rates", "50", "100", "--plot", str(plot)]) == 0
    assert capsys.readouterr().out.count("\n| ") == 2
    assert "<svg" in plot.read_text()
    # Warm-up and two rates: no prompt is in the prefix cache when its time is taken.
    assert len(set(prompts)) == len(prompts) == 2 + 3 + 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["latency", "--rates", "0"], "--rates: must be a number above 0, got 0"),
        (["latency", "--rates", "1", "nan"], "--rates: must be a number above 0, got nan"),
        (["latency", "--plot", "x.txt"], "--plot must end in .svg, .png or .pdf, got x.txt"),
        (["throughput", "--num-prompts", "0"], "--num-prompts: must be a whole number from 1"),
        (["throughput", "--max-num-seqs", "5000"], "--max-num-seqs: must be a whole number from 1 to 4096"),
    ],
)
def test_bad_options(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *arguments, *SHAPES]) == 2
    assert message in capsys.readouterr().err
