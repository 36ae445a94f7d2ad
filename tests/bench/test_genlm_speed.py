"""The benchmark beside genlm-control: figures of known populations, and the sentence where it is missing."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import genlm_speed as bench
import pytest


def population(seconds: float, evidence: float, **changes: Any) -> bench.Population:
    fields: dict[str, Any] = {"wall": 2 * seconds, "tokens": 80, "answer": 10.0, "satisfied": 1.0, **changes}
    return bench.Population(seconds=seconds, evidence=evidence, **fields)


def test_figures_of_known_populations() -> None:
    """Medians over windows of tokens over seconds; log Ẑ of each prompt, and the interval of their mean."""
    windows = [
        [population(1.0, 0.2), population(3.0, 0.4)],
        [population(2.0, 0.4), population(2.0, 0.4, satisfied=0.0)],
        [population(8.0, 0.6), population(8.0, 0.4)],
    ]
    found = bench.summarized(windows)
    assert found["tokens_per_second"] == pytest.approx(40)
    assert found["answer_tokens_per_second"] == pytest.approx(5)
    assert found["seconds"] == pytest.approx(2.0)
    assert found["satisfied"] == pytest.approx(5 / 6)
    assert found["log_evidences"] == pytest.approx([math.log(0.4)] * 2)
    assert found["log_evidence"] == pytest.approx(math.log(0.4))
    assert found["halves"] == pytest.approx([bench.Z_95 * 0.2 / math.sqrt(3) / 0.4, 0.0])
    assert found["half"] == pytest.approx(found["halves"][0] / 2)
    assert found["raw_wall"] == [8.0, 8.0, 32.0]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("genlm") is None, reason="needs genlm-control: see the script")
@pytest.mark.filterwarnings("ignore")
def test_all_contenders_have_one_law(tmp_path: Path) -> None:
    """Run by hand, as `tests/examples/test_genlm_potential.py`."""
    file = tmp_path / "rows.json"
    assert bench.main(["--prompts", "1", "--windows", "6", "--n", "4", "--save", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [row["contender"] for row in rows] == ["genlm-control", "response_format", "TextPotential"]
    for row in rows[1:]:
        assert abs(row["log_evidence"] - rows[0]["log_evidence"]) < 2 * math.hypot(row["half"], rows[0]["half"])
