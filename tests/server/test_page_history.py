"""The page's history of a population, in node: what branched cycles make of its columns. Skipped without node."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
from typing import Any

import pytest

from smcjax.server.app import PAGE

pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="no node to run the page's files")
SCRIPT = """
const { History } = await import(process.argv[1]);
const history = new History();
for (const event of JSON.parse(process.argv[2])) history.add(event);
const { columns, events } = history;
const texts = history.textsAt(columns.length);
console.log(JSON.stringify({ columns, texts, line: history.lineage(0, columns.length), events: events.length }));
"""


def history_of(events: list[dict[str, Any]]) -> dict[str, Any]:
    command = ["node", "--input-type=module", "-e", SCRIPT, (PAGE / "history.js").as_uri(), json.dumps(events)]
    found: dict[str, Any] = json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout)
    return found


def event(cycle: int, texts: list[str], lengths: list[int], ancestors: list[int], **fields: Any) -> dict[str, Any]:
    plain = {"finished": [False, False], "resampled": False, "ess": None, "log_weights": None}
    return {"cycle": cycle, "texts": texts, "lengths": lengths, "ancestors": ancestors, **plain, **fields}


def test_a_branched_cycle_resamples_the_column_before() -> None:
    """Its weights and edges are of the rows that were copied, its words of the copies; log Ẑ is the sum of both."""
    weighed = {"branched": True, "resampled": True, "ess": 1.0}
    told = history_of(
        [
            event(0, ["a", "b"], [1, 1], [0, 1]),
            event(1, ["cd", "e"], [3, 2], [1, 1], log_weights=[None, 0.5], **weighed),
            event(2, ["f", "g"], [4, 3], [0, 1], log_weights=[0.25, 0.25], **weighed),
        ]
    )
    first, second, last = told["columns"]
    assert [first["ancestors"], first["weights"], first["rows"]] == [[1, 1], [0, 1], ["b", "b"]]
    assert first["resampled"]
    assert [second["words"], second["ancestors"], second["weights"]] == [["cd", "e"], [0, 1], [0.5, 0.5]]
    assert told["texts"] == ["bcdf", "beg"]
    assert told["line"] == [1, 0, 0]
    assert first["evidence"] == pytest.approx(0.5 - math.log(2))
    assert last["evidence"] == pytest.approx(0.75 - math.log(2))
    assert not last["resampled"]
    assert told["events"] == 3, "what is stored is what was sent"


def test_other_cycles_resample_their_own() -> None:
    told = history_of(
        [
            event(0, ["a", "b"], [1, 1], [0, 1]),
            event(1, ["c", "d"], [2, 2], [1, 1], log_weights=[None, 0.5], resampled=True, ess=1.0),
        ]
    )
    assert told["columns"][0]["ancestors"] == [0, 1]
    assert told["columns"][1]["weights"] == [0, 1]
    assert told["texts"] == ["bd", "bd"]
