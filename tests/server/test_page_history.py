"""The page's history of a population, in node: what cycles make of its columns. Skipped without node."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
from pathlib import Path
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


def test_cycles_resample_their_own_columns() -> None:
    """A column has the weights and the words of its cycle; copies go on from their ancestors' texts, as log Ẑ says."""
    told = history_of(
        [
            event(0, ["a", "b"], [1, 1], [0, 1]),
            event(1, ["c", "de"], [2, 3], [1, 1], log_weights=[None, 0.5], resampled=True, ess=1.0),
            event(2, ["f", "g"], [4, 4], [0, 1], log_weights=[0.25, 0.25], ess=2.0, log_potentials=[1.5, None]),
        ]
    )
    first, second, last = told["columns"]
    assert [first["ancestors"], first["weights"], first["rows"]] == [[0, 1], [0.5, 0.5], ["a", "b"]]
    assert [second["ancestors"], second["weights"], second["rows"]] == [[1, 1], [0, 1], ["bde", "bde"]]
    assert [second["words"], second["after"]] == [["c", "de"], [0.5, 0.5]]
    assert [column["resampled"] for column in told["columns"]] == [False, True, False]
    assert told["texts"] == ["bdef", "bdeg"]
    assert told["line"] == [1, 1, 0]
    assert second["evidence"] == pytest.approx(0.5 - math.log(2))
    assert last["evidence"] == pytest.approx(0.75 - math.log(2))
    assert [column["potentials"] for column in told["columns"]] == [None, None, [1.5, None]]
    assert told["events"] == 3, "what is stored is what was sent"


@pytest.mark.parametrize("name", sorted(path.name for path in PAGE.glob("*.js")))
def test_scripts_are_modules(name: str, tmp_path: Path) -> None:
    """No browser is needed to see what it could not read: a name that is declared twice, say."""
    (tmp_path / "script.mjs").write_text((PAGE / name).read_text())
    checked = subprocess.run(
        ["node", "--check", str(tmp_path / "script.mjs")], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stderr
