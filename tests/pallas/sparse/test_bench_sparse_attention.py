"""The benchmark of grouped attention runs where no GPU is, and its sets overlap as it says."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "scripts"))

import bench_sparse_attention as bench


@pytest.mark.parametrize("overlap", [0.0, 0.5, 0.75, 1.0])
def test_sets_overlap(overlap: float) -> None:
    """Each has n blocks, and as many of the one's before it as ρ says, the forced three at least."""
    layer = bench.Layer()
    sets = bench.sets_of(bench.Case(65_536, 9, 9, overlap), layer)
    assert (sets.sum(axis=-1) == layer.num_blocks).all()
    common = (sets[:, 1:] & sets[:, :-1]).sum(axis=-1)
    assert (common == max(layer.forced, round(overlap * layer.num_blocks))).all()
    assert sets[..., [0, -2, -1]].all()


def test_bytes_by_hand() -> None:
    """Two queries at the end of 256 positions of one head: both sets, the window's 33 positions, 15 tokens."""
    layer = bench.Layer(heads=1, kv_heads=1, window=32, num_blocks=3)
    case = bench.Case(256, 2, 2, 1.0)
    inputs = bench.Inputs(case, layer, "merged", {})
    assert inputs.unique_bytes() == (3 * 64 + 15) * layer.slot
    inputs.sets = inputs.sets.at[..., -1].set(False)
    assert inputs.unique_bytes() == (2 * 64 + 33 + 15) * layer.slot


def test_it_runs_interpreted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--tiny", "--modes", "merged", "--json", str(tmp_path / "out.json")]) == 0
    assert "1 of 1 agree with the reference" in capsys.readouterr().out
    lines = json.loads((tmp_path / "out.json").read_text())["lines"]
    assert [line["mode"] for line in lines] == ["merged"]
    assert np.isfinite(lines[0]["us"])
    assert lines[0]["unique_bytes"] <= lines[0]["issued_bytes"]
