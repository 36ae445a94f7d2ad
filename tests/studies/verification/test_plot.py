"""Pictures of a verification benchmark from results that look like one's."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from studies.verification.plot import draw_all, main

PICTURES = ["over_gamma", "over_alpha", "pack_over_width", "scan_ratio", "ratio", "crossover"]


def made_up(*, device: bool) -> dict[str, Any]:
    cases = []
    methods = {
        "scan": ("xla", "a thread a row", "ours"),
        "pack": ("xla", "a block a row", "ours"),
        "verify": ("two launches", "one launch", "one block"),
    }
    for rows, gamma, alpha, dim in itertools.product((1, 32), (8, 128), (0.3, 0.9), (0, 128, 2048)):
        kinds = ("pack", "verify") if dim else ("scan",)
        times = {
            f"{kind}: {name}": {"host": 30.0 + number, "host, p95": 33.0 + number}
            | ({"device": 3.0 + number + dim / 500} if device else {})
            for kind in kinds
            for number, name in enumerate(methods[kind])
        }
        point = {"rows": rows, "gamma": gamma, "alpha": alpha, "dim": dim}
        cases.append({**point, "accepted": rows * gamma * alpha, "floor": 0.1 + dim / 1000, "times": times})
    return {"device": "a GPU", "cases": cases}


@pytest.mark.slow
def test_without_device_times_only_host_visible_lines(tmp_path: Path) -> None:
    paths = draw_all(made_up(device=False), tmp_path / "new")
    assert [path.name for path in paths] == [f"verify_{name}.svg" for name in PICTURES[:3]]
    assert all(path.read_text().lstrip().startswith("<?xml") for path in paths)


@pytest.mark.slow
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "r.json").write_text(json.dumps(made_up(device=True)))
    main([str(tmp_path / "r.json"), "-o", str(tmp_path), "--format", "png"])
    paths = [tmp_path / f"verify_{name}.png" for name in PICTURES]
    assert capsys.readouterr().out.splitlines() == [str(path) for path in paths]
    assert all(path.stat().st_size > 5000 for path in paths)


def test_a_file_that_is_no_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "r.json").write_text("{")
    for name, reason in (("r.json", "is not valid JSON"), ("nothing.json", "does not exist")):
        with pytest.raises(SystemExit, match="2"):
            main([str(tmp_path / name)])
        assert f"{tmp_path / name} {reason}" in capsys.readouterr().err
