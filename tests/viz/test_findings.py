"""Titles of pictures: they say what the data are, and other data have another title."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from smcjax.viz.charts import draw_acceptance, draw_frontier, draw_latency, draw_tuning

SVG = "{http://www.w3.org/2000/svg}"


def speeds(smc: float) -> list[dict[str, Any]]:
    return [
        {"decoder": "target", "gamma": 0, "acceptance": None, "n_particles": 1, "tokens_per_second": [100.0]},
        {"decoder": "rejection", "gamma": 4, "acceptance": [0.5, 0.7, 0.9], "n_particles": 1,
         "tokens_per_second": [120.0, 200.0, 320.0]},
        {"decoder": "SMC", "gamma": 4, "acceptance": None, "n_particles": 8, "tokens_per_second": [smc]},
    ]  # fmt: skip


def decoders(difference: float) -> list[dict[str, Any]]:
    rows = [("target", True, 0.7, 2.0, 1.0), ("rejection", True, 0.69, 1.4, 3.1), ("SMC", False, 0.68, 0.5, 5.0)]
    return [
        {"decoder": name, "exact": exact, "accuracy": accuracy, "ci_low": accuracy - 0.05, "ci_high": accuracy + 0.05,
         "difference_high": difference if name == "SMC" else 0.03, "device_seconds_per_question": seconds,
         "tokens_per_cycle": tokens}
        for name, exact, accuracy, seconds, tokens in rows
    ]  # fmt: skip


def latencies(scale: float) -> list[dict[str, Any]]:
    return [
        {"request_throughput": rate,
         **{f"{s}_{n}_ms": scale * rate * k * (2 if s == "p99" else 1)
            for s in ("median", "p99") for k, n in ((10, "first_cycle"), (12, "ttft"), (90, "e2el"))}}
        for rate in (20.0, 5.0)
    ]  # fmt: skip


def training(accepted: float) -> dict[str, Any]:
    def point(accepted: float) -> dict[str, list[float]]:
        figures = {"weight_variance": 3.0, "token_divergence": 0.4, "kl": 0.5, "acceptance": accepted}
        return {name: [value, 0.9 * value, 1.1 * value] for name, value in figures.items()}

    course = [{"step": 100, **point(0.66)}, {"step": 200, **point(accepted)}]
    loss = [[50, 2.1], [100, 1.8], [150, 1.7], [200, 1.65]]
    return {"before": point(0.6), "after": point(accepted), "loss": loss, "held_out": course}


@pytest.mark.parametrize(
    ("draw", "made", "titles"),
    [
        (draw_acceptance, speeds, {260.0: "rejection is as fast as SMC from an acceptance of 0.80 on",
                                   999.0: "No exact decoder is as fast as SMC up to an acceptance of 0.9"}),
        (draw_frontier, decoders, {0.01: "SMC: no less accurate than target, within noise, at 25% of its device time",
                                   -0.01: "rejection: no less accurate than target, within noise, at 70% of its "
                                          "device time"}),
        (draw_latency, latencies, {1.0: "99% of requests end within 3,600 ms at 20 requests a second, 900 ms at 5",
                                   2.0: "99% of requests end within 7,200 ms at 20 requests a second, 1,800 ms at 5"}),
        (draw_tuning, training, {0.7: "30% of drafts are rejected, 40% before; KL 0.5 nats a token, 0.5 before",
                                 0.5: "50% of drafts are rejected, 40% before; KL 0.5 nats a token, 0.5 before"}),
    ],
)  # fmt: skip
def test_a_title_says_the_finding(
    tmp_path: Path, draw: Callable[..., None], made: Callable[[float], Any], titles: dict[float, str]
) -> None:
    """It stands in the picture and is what screen readers say; lines have their names beside them, without a legend."""
    for figure, title in titles.items():
        draw(made(figure), tmp_path / "a.svg")
        drawn = ElementTree.parse(tmp_path / "a.svg").getroot()
        assert drawn.findtext(f"{SVG}title") == title
        assert title in " ".join(text.text or "" for text in drawn.iter(f"{SVG}text"))  # which may take two lines
        assert not [one for one in drawn.iter(f"{SVG}g") if (one.get("id") or "").startswith("legend")]
