"""Parts of `SMC` by their own names, and by the short spellings whose places they take."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from smcjax import SMC, SamplingParams
from smcjax.smc import KeepAll, RejectionControl, Roulette


@dataclasses.dataclass(frozen=True)
class Everyone:
    """A resampler by which each particle has one offspring."""

    def num_uniforms(self, n: int) -> int:
        return 0

    def offspring(self, uniforms: Any, weights: Any) -> Any:
        return weights.size * [1]


PARTS: dict[str, tuple[str, Any, Any]] = {
    "acceptance": ("control", KeepAll(), 0.3),
    "ending": ("early_end", Roulette(), True),
    "resampler": ("resampling", Everyone(), "residual"),
}


@pytest.mark.parametrize(("name", "spelling"), PARTS.items(), ids=PARTS)
def test_a_part_takes_the_place_of_its_short_spelling(name: str, spelling: tuple[str, Any, Any]) -> None:
    field, part, short = spelling
    decoding = SMC(**{name: part})
    assert getattr(decoding, field) == part
    assert decoding == SMC(**{field: part}) != SMC(**{field: short})
    assert getattr(dataclasses.replace(decoding, gamma=3), field) == part  # and stays


@pytest.mark.parametrize(("name", "spelling"), PARTS.items(), ids=PARTS)
def test_a_part_beside_its_short_spelling_is_refused(name: str, spelling: tuple[str, Any, Any]) -> None:
    field, part, short = spelling
    with pytest.raises(ValueError, match=f"^{name} and {field} .* say the same; leave one of them out.$"):
        SMC(**{name: part, field: short})
    with pytest.raises(ValueError, match=f"^{name} must be a smcjax.smc.{name.title()}, got 0.1.$"):
        SMC(**{name: 0.1})
    with pytest.raises(ValueError, match=f"^{name} is the class {type(part).__name__}; pass an object of it"):
        SMC(**{name: type(part)})
    with pytest.raises(ValueError, match=f"^{field} must be"):
        SMC(**{field: type(part)})


def test_rejection_control_by_either_name_is_one_rule() -> None:
    assert str(SMC(control=0.2)) == "SMC, N=8, K=8, control 0.2"
    assert SMC(acceptance=RejectionControl(0.2)).ragged


def test_decoders_that_differ_in_what_they_draw_have_other_words() -> None:
    changes = ({}, {"power": 2.0}, {"draft_temperature": 0.5}, {"ess_threshold": 0.25}, {"resampling": "residual"})
    changes += ({"defer_bonus": False}, {"bonus": False, "control": 0.0})
    said = [str(SMC(**change)) for change in changes]
    assert len(set(said)) == len(said)
    assert said[0] == "SMC, N=8, K=8, control 0.1"
    assert said[3] == "SMC, N=8, K=8, control 0.1, threshold 0.25"


@pytest.mark.parametrize(
    ("cut", "said"),
    [
        ({"top_k": 1}, "top_k is 1"),
        ({"top_p": 0.9}, "top_p is 0.9"),
        ({"top_k": 5, "top_p": 0.5}, "top_k is 5 and top_p is 0.5"),
        ({"top_k": -1, "top_p": 0.5}, "top_p is 0.5"),
    ],
)
def test_a_refused_cut_is_named_as_it_was_given(cut: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=f"^{said}, and draft tokens outside"):
        SMC().check(SamplingParams(**cut))
