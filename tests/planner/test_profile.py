"""The profile file: written and read back, refused in one sentence where it is none, and read without JAX."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from smcjax.decoders import SMC, Autoregressive, Rejection
from smcjax.planner import Cell, Counted, Measured, Profile
from smcjax.planner.laws import as_json, from_json
from smcjax.sparse.verification import SparseVerification
from tests.planner.tables import EXACT, LOADS, OTHERS, measured

MADE = Profile(
    device="a device",
    model="12ab",
    draft="34cd",
    strategies=tuple(measured(one, {n: 1.5 + n for n in LOADS}) for one in (*EXACT, *OTHERS)),
    jax="0.11.2",
    smcjax="0.1.0",
    commit=None,
    date="2026-11-26T07:00:00Z",
    settings={"dtype": "float32"},
    left_out=({"strategy": "rejection, K=64", "why": "no budget was left"},),
)


def test_round_trip(tmp_path: Path) -> None:
    MADE.save(tmp_path / "p.json")
    assert Profile.load(tmp_path / "p.json") == MADE
    assert [path.name for path in tmp_path.iterdir()] == ["p.json"]
    assert json.loads((tmp_path / "p.json").read_text())["strategies"][0]["law"] == "exact"


@pytest.mark.parametrize(
    "decoding",
    [
        *EXACT,
        *OTHERS,
        Rejection(tree=(-1, 0, 0, 1), siblings="top", order="dfs"),
        Rejection(3, sparse=SparseVerification("merged", 8, "dfs", (True, False, True))),
        SMC(4, 2, draft_temperature=0.5, control=0.5, power=2.0),
        Autoregressive(SparseVerification(schedule=4)),
    ],
    ids=str,
)
def test_decodings_come_back(decoding: Any) -> None:
    assert from_json(json.loads(json.dumps(as_json(decoding)))) == decoding


def test_a_stored_decoder_without_a_control_has_none() -> None:
    """As the first profiles were written, when 0 was the default."""
    old = {"decoder": "smc", "n_particles": 4}
    assert from_json(old) == SMC(4, control=0)
    assert as_json(SMC(4, control=0)) == old
    assert as_json(SMC(4)) == {**old, "control": 0.1}
    assert from_json({**old, "pipelined": True}) == SMC(4, pipelined=True)


def edited(*path: Any, to: Any = None, without: bool = False) -> Callable[[Any], None]:
    def edit(value: Any) -> None:
        for step in path[:-1]:
            value = value[step]
        if without:
            del value[path[-1]]
        else:
            value[path[-1]] = to

    return edit


FIRST = ("strategies", 2, "counted", 0)


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (edited("format", to=2), "format must be 1, got 2"),
        (edited("device", to=3), "device must be text, got 3"),
        (edited("draft", to=3), "draft must be text or null, got 3"),
        (edited("strategies", to=[]), "a profile must have at least one strategy"),
        (edited("strategies", to={}), "it must have a list of strategies"),
        (edited("strategies", 0, to=5), "a strategy must be an object with cells, got 5"),
        (edited("strategies", 0, "decoding", to={"decoder": "magic"}), "must name a decoder of smc, rejection,"),
        (edited("strategies", 1, "decoding", "speed", to=9), "Rejection has no option 'speed'"),
        (edited("strategies", 1, "decoding", "gamma", to=0), "gamma must be a whole number from 1 to 64, got 0"),
        (edited("strategies", -2, "decoding", "sparse", "pace", to=1), "SparseVerification has no option 'pace'"),
        (edited(*FIRST, "tokens_per_cycle", to=0), "tokens a cycle must be numbers above 0, got 0"),
        (edited(*FIRST, "tokens_per_cycle", without=True), "tokens_per_cycle"),
        (edited(*FIRST, "prompts", to="x"), "prompts must be a list of numbers"),
        (edited(*FIRST, "context", to=0), "counted context must be a whole number of at least 1, got 0"),
        (edited("strategies", 2, "counted", to=[]), "must have tokens counted at ascending contexts, got []"),
        (edited("strategies", 2, "counted", to=3), "counted must be a list of objects"),
        (edited("strategies", 2, "cells", 0, "ms", to=-1), "a cell's times must be numbers above 0, got (-1"),
        (edited("strategies", 2, "cells", 0, "requests", to=True), "a cell's requests must be a whole number"),
        (edited("strategies", 2, "cells", 0, "watts", to=9), "a cell must have requests, context, ms, windows"),
        (edited("strategies", 2, "cells", 0, "requests", to=3), "was measured at other loads or contexts"),
        (edited("strategies", 2, "cells", 0, "requests", to=2), "must have one cell for each load and context"),
        (edited("left_out", to=3), "left_out must be a list of objects"),
    ],
)
def test_what_is_no_profile_is_refused(edit: Callable[[Any], None], said: str, tmp_path: Path) -> None:
    value = copy.deepcopy(json.loads(json.dumps(MADE.as_json())))
    edit(value)
    path = tmp_path / "p.json"
    path.write_text(json.dumps(value))
    with pytest.raises(ValueError, match=rf"^profile '.*p\.json' is no profile of this version \(.*{re.escape(said)}"):
        Profile.load(path)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^profile '.*none\.json' does not exist; fetch or write it\.$"):
        Profile.load(tmp_path / "none.json")
    (tmp_path / "half.json").write_text('{"format": 1, ')
    with pytest.raises(ValueError, match=r"is not valid JSON .*perhaps cut short"):
        Profile.load(tmp_path / "half.json")


def test_whose_it_is() -> None:
    MADE.check(device="a device", model="12ab", draft="34cd")
    MADE.check(device="a device", model="12ab", draft=None)
    with pytest.raises(ValueError, match=r"^profile is of a device and this device is another; make one"):
        MADE.check(device="another", model="12ab", draft="34cd")
    with pytest.raises(ValueError, match=r"^profile is of another model, or of this one in another"):
        MADE.check(device="a device", model="ffff", draft="34cd")
    with pytest.raises(ValueError, match=r"^profile is of another draft_model"):
        MADE.check(device="a device", model="12ab", draft="ffff")


def test_all_strategies_have_the_same_grid() -> None:
    one, other = (measured(decoding, {1: 1.0, 2: 2.0}) for decoding in EXACT[:2])
    shorter = dataclasses.replace(other, cells=other.cells[:1])
    with pytest.raises(ValueError, match="was measured at other loads or contexts than target alone"):
        dataclasses.replace(MADE, strategies=(one, shorter))
    with pytest.raises(ValueError, match="one strategy twice"):
        dataclasses.replace(MADE, strategies=(one, one))
    hole = (Cell(1, 64, 1.0), Cell(2, 128, 1.0))
    with pytest.raises(ValueError, match="must have every load at every context"):
        dataclasses.replace(MADE, strategies=(Measured(EXACT[0], (Counted(64, 1.0),), hole),))


def test_planning_needs_no_jax() -> None:
    code = (
        "import sys; from smcjax.planner import Planner, Profile, Switch; import smcjax.planner.report\n"
        "print(sorted({'jax', 'numpy', 'transformers'} & sys.modules.keys()))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert result.stdout == "[]\n"
