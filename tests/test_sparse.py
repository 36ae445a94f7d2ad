"""How drafts are verified on sparse targets: what is refused, which layers select, and what that makes of the model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from smcjax.sparse import SparseVerification


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"mode": "forced"}, r"mode must be one of per_query, merged, shared, shared_forced, got 'forced'\."),
        ({"mode": "merged", "order": "rows"}, r"order must be one of bfs, dfs, position, got 'rows'\."),
        ({"mode": "merged", "group": 0}, r"group must be a whole number of queries from 1 to 64, got 0\."),
        ({"mode": "merged", "group": True}, r"group must be a whole number of queries from 1 to 64, got True\."),
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
    with pytest.raises(ValueError, match=r"^schedule has 2 flags and the target 3 sparse layers; give one for each"):
        flags.check(["nsa"] * 3)
    with pytest.raises(ValueError, match=r"^schedule is \(True, False\) and the target's sparse layers differ in"):
        flags.check(["nsa", "another"])
    flags.check(["nsa", "nsa"])
    SparseVerification("merged").check(["nsa", "another"])


def test_words() -> None:
    assert str(SparseVerification()) == "every query by itself"
    assert str(SparseVerification("merged", 8, "dfs", 2)) == "merged by 8, dfs; selecting layers 2 apart"
    assert str(SparseVerification(schedule=(True, False, True))) == "selecting layers 0, 2"
