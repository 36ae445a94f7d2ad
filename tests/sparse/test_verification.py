"""How drafts are verified on sparse targets: what is refused, which layers select, and what that makes of the model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from smcjax.decoders import SMC, Autoregressive, Decoding, Rejection
from smcjax.sparse.verification import SparseVerification


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"mode": "forced"}, r"mode must be one of per_query, merged, shared, shared_forced, got 'forced'\."),
        ({"mode": "merged", "order": "rows"}, r"order must be one of bfs, dfs, position, got 'rows'\."),
        ({"mode": "merged", "group": 0}, r"group must be a whole number of queries from 1 to 128, got 0\."),
        ({"mode": "merged", "group": True}, r"group must be a whole number of queries from 1 to 128, got True\."),
        ({"group": 2}, r"group is 2 and order 'bfs', which mode='per_query' has no use for; use mode='merged', or .*"),
        ({"order": "dfs"}, r"group is 1 and order 'dfs', which mode='per_query' has no use for; .*"),
        ({"schedule": 0}, r"schedule must be a spacing of at least 1, or True or False for .*, got 0\."),
        ({"schedule": (1, 0)}, r"schedule must be a spacing of at least 1, .*, got \(1, 0\)\."),
        ({"schedule": ()}, r"schedule must be a spacing of at least 1, .*, got \(\)\."),
        ({"schedule": (False, True)}, r"schedule must begin with True, because no .*, got \(False, True\)\."),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=f"^{words}$"):
        SparseVerification(**arguments)


def test_which_layer_selects() -> None:
    assert SparseVerification(schedule=(True, False, False, True, False)).sources(5) == (0, 0, 0, 3, 3)
    assert SparseVerification(schedule=2).sources(5) == (0, 0, 2, 2, 4)
    assert SparseVerification().sources(3) == SparseVerification(schedule=1).sources(3) == (0, 1, 2)
    assert SparseVerification(schedule=np.array([True, False])) == SparseVerification(schedule=(True, False))


def test_classes_of_precision() -> None:
    """Groups of one query are exact in every mode; a schedule whose layers all select is none."""
    assert {SparseVerification(mode, 1).precision for mode in ("merged", "shared", "shared_forced")} == {"strict"}
    assert {SparseVerification("merged", 4, schedule=schedule).precision for schedule in (None, 1, (True,))} == {
        "strict"
    }
    assert {SparseVerification(schedule=schedule).precision for schedule in (2, (True, False))} == {"reuse"}
    assert {SparseVerification(mode, 2, schedule=2).precision for mode in ("shared", "shared_forced")} == {
        "approximate"
    }


def test_targets_that_cannot_be_verified_so_are_refused() -> None:
    for schedule in (None, 2):
        with pytest.raises(ValueError, match=r"no layer that selects any; leave it out, or use a target with Native"):
            SparseVerification(schedule=schedule).check([])
    flags = SparseVerification(schedule=(True, False))
    with pytest.raises(ValueError, match=r"^schedule must have a flag for each of .*, 3 in all, got 2; give as many"):
        flags.check(["nsa"] * 3)
    with pytest.raises(ValueError, match=r"^schedule is \(True, False\) and the target's sparse layers differ in"):
        flags.check(["nsa", "another"])
    flags.check(["nsa", "nsa"])
    SparseVerification("merged").check(["nsa", "another"])


def test_words() -> None:
    assert str(SparseVerification()) == "every query by itself"
    assert str(SparseVerification("merged", 8, "dfs", 2)) == "merged by 8, dfs; selecting layers 2 apart"
    assert str(SparseVerification(schedule=(True, False, True))) == "selecting layers 0, 2"


MERGED, SHARED = SparseVerification("merged", 4), SparseVerification("shared", 4)


@pytest.mark.parametrize(
    ("decoding", "arguments", "words"),
    [
        (Rejection, {"sparse": "merged"}, r"sparse must be SparseVerification\(\.\.\.\) or None, got 'merged'\."),
        (
            Autoregressive,
            {"sparse": MERGED},
            r"sparse has mode 'merged' for groups of 4, and the target alone has one query .*",
        ),
        (
            SMC,
            {"sparse": SHARED},
            r"sparse has mode 'shared' for groups of 4, where .* or allow it by approximate=True\.",
        ),
        (SMC, {"sparse": MERGED, "approximate": True}, r"approximate is True and nothing is; give sparse a shared .*"),
        (SMC, {"approximate": True}, r"approximate is True and nothing is; .* or leave it out\."),
    ],
)
def test_decoders_refuse_what_they_cannot_honour(
    decoding: type[Decoding], arguments: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=f"^{words}$"):
        decoding(**arguments)


def test_what_decoders_take_and_say() -> None:
    """SMC shares blocks where it is told to, and as it is where groups are single queries."""
    chosen = SMC(sparse=SHARED, approximate=True), SMC(sparse=SparseVerification("shared", 1)), Rejection(sparse=SHARED)
    assert [one.speculation.sparse for one in chosen] == [SHARED, SparseVerification("shared", 1), SHARED]
    assert str(chosen[2]) == "rejection, K=4, shared by 4, bfs"
    assert str(Autoregressive(SparseVerification(schedule=2))) == "target alone, selecting layers 2 apart"
