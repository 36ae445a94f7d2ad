"""Predicted cycles: what was measured comes out as measured, and what is known of n devices holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from smcjax.bench.predict import TARGETS, Pieces, markdown, predict, predictions
from smcjax.bench.shapes import SHAPES
from smcjax.decoders import SMC, Autoregressive, Decoding
from smcjax.device import H100, H200
from smcjax.markdown import table
from smcjax.pallas.collectives.peer_memory import MAX_PUSHED_BYTES

SMALL, DRAFT, LARGE = "llama-3.1-8b", "llama-3.2-1b", "llama-3.1-70b"
DOCS = Path(__file__).parents[2] / "docs" / "explanation" / "tensor-parallelism.md"
MEASURED: list[tuple[str, int, Decoding, str, float]] = [  # ms, of that page, each device with all of the draft
    (LARGE, 2, SMC(8, 8, control=0), "peers", 27.84),
    (LARGE, 2, SMC(8, 8, control=0), "XLA's", 30.93),
    (LARGE, 2, SMC(8, 16, control=0), "peers", 37.26),
    (LARGE, 2, SMC(8, 16, control=0), "XLA's", 39.15),
    (LARGE, 2, Autoregressive(), "peers", 18.96),
    (LARGE, 2, Autoregressive(), "XLA's", 20.83),
    (LARGE, 4, SMC(8, 8, control=0), "XLA's", 24.16),
    (SMALL, 1, SMC(8, 8, control=0), "–", 10.48),
    (SMALL, 1, Autoregressive(), "–", 4.00),
    (SMALL, 2, SMC(8, 8, control=0), "peers", 9.36),
    (SMALL, 2, SMC(8, 8, control=0), "XLA's", 10.68),
    (SMALL, 2, Autoregressive(), "XLA's", 3.75),
]


def test_one_device_is_what_was_measured() -> None:
    """The prediction meets docs/explanation/performance.md: 10.63 and 10.73 ms a cycle, 4.12 ms of the target alone."""
    cycle = predict(H200, SMALL, DRAFT, 1, SMC(8, 8, control=0), Pieces())
    alone = predict(H200, SMALL, DRAFT, 1, Autoregressive(), Pieces())
    assert cycle.sum_seconds == alone.sum_seconds == (0.0, 0.0)
    assert cycle.seconds == pytest.approx((10.63e-3, 10.63e-3), rel=0.03)
    assert alone.seconds == pytest.approx((4.12e-3, 4.12e-3), rel=0.01)


def test_sums_over_two_devices_are_the_measured_ones() -> None:
    pieces = Pieces()
    for data, seconds in pieces.sums:
        assert pieces.sum_seconds(2, data) == pytest.approx((seconds, seconds))
    # 144 rows fill two slots, so a line through the smaller ones' times says 13.2 where 17.6 µs were measured.
    assert pieces.sum_seconds(2, 144 * 8192 * 2) == pytest.approx((17.6e-6, 17.6e-6), rel=0.04)
    least, most = pieces.sum_seconds(8, pieces.sums[1][0])
    assert pieces.sums[1][1] < least < most
    for data, seconds in pieces.by_xla:
        assert pieces.sum_seconds(2, data) < (seconds, seconds)
        assert pieces.sum_seconds(16, data)[0] > seconds, "left to XLA, of more bytes on the way"
    assert pieces.sum_seconds(2, 2 * MAX_PUSHED_BYTES)[0] > 2 * pieces.sum_seconds(2, MAX_PUSHED_BYTES)[0]


@pytest.mark.parametrize("target", TARGETS)
def test_devices_divide_the_target_and_nothing_else(target: str) -> None:
    alone, two, four = (predict(H200, target, DRAFT, size, Autoregressive(), Pieces()) for size in (1, 2, 4))
    assert two.weight_seconds == pytest.approx(alone.weight_seconds / 2, rel=1e-3)
    assert four.weight_seconds == pytest.approx(alone.weight_seconds / 4, rel=1e-3)
    drafted = predict(H200, target, DRAFT, 4, SMC(8, 8, control=0), Pieces())
    assert drafted.held_bytes - four.held_bytes == predict(H200, DRAFT, DRAFT, 1, Autoregressive(), Pieces()).held_bytes
    sums = 2 * SHAPES[target].num_layers + 1
    assert four.sum_seconds[0] > sums * 4e-6
    assert not alone.fits


def test_what_does_not_fit_is_left_out() -> None:
    found = list(predictions(H100, sizes=(1, 2, 3), gammas=(8,)))
    assert {(one.target, one.size) for one in found} == {("llama-3.1-70b", 2)}
    assert len(markdown(found).splitlines()) == 2 + 2
    with pytest.raises(ValueError, match=r"shape 'llama-4' is unknown; use one of llama-3\.2-1b, "):
        predict(H100, "llama-4", DRAFT, 2, Autoregressive(), Pieces())


def test_the_page_shows_how_far_predictions_are_from_what_was_measured() -> None:
    rows = []
    for target, size, decoding, collectives, measured in MEASURED:
        said = predict(H200, target, DRAFT, size, decoding, Pieces(peers=collectives != "XLA's")).seconds
        least, most = (1e3 * seconds for seconds in said)
        times = f"{least:.2f}" if size < 3 else f"{least:.2f} to {most:.2f}"
        errors = dict.fromkeys(f"{100 * (one / measured - 1):+.0f}%" for one in (least, most))
        rows.append((target, f"{size}", f"{decoding}", collectives, f"{measured:.2f}", times, " to ".join(errors)))
    heads = ("target", "devices", "decoder", "collectives", "measured, ms", "predicted, ms", "error")
    assert table(heads, rows) in DOCS.read_text()
