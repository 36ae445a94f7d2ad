"""Decoders written as in Python are those that Python would make, and nothing of them is run."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smcjax.auto import CHOICES, Auto
from smcjax.decoders import SMC, Autoregressive, Rejection
from smcjax.decoders.written import read_decoder
from smcjax.sparse.verification import SparseVerification

MADE: list[tuple[str, Any]] = [
    ("smc", SMC()),
    (" SMC ", SMC()),
    ("SMC(n_particles=32, early_end=True, resampling='residual')", SMC(32, early_end=True, resampling="residual")),
    ("Rejection(tree=(4, 2, 1), siblings='top')", Rejection(tree=(4, 2, 1), siblings="top")),
    ("Rejection(tree=[-1, 0])", Rejection(tree=(-1, 0))),
    ("Autoregressive()", Autoregressive()),
    ("auto(power=2.0)", Auto(power=2.0)),
    (
        "SMC(sparse=SparseVerification(mode='shared', group=8, schedule=(True, False)), approximate=True)",
        SMC(sparse=SparseVerification("shared", 8, schedule=(True, False)), approximate=True),
    ),
]


@pytest.mark.parametrize(("text", "decoding"), MADE, ids=[text[:20] for text, _ in MADE])
def test_as_python_makes_it(text: str, decoding: Any) -> None:
    assert read_decoder(text, CHOICES).make() == decoding


def test_what_the_text_says_holds_for_what_it_does_not_say_more_is_taken() -> None:
    assert read_decoder("SMC(gamma=2)", CHOICES).make(gamma=8, n_particles=4) == SMC(4, 2)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "must be smc, rejection, autoregressive, auto, or one with options as in Python"),
        ("beam", "got 'beam'"),
        ("SMC(", "got 'SMC('"),
        ("smc:n=3", "got 'smc:n=3'"),
        ("SMC() or SMC()", "must be smc"),
        ("__import__('os').system('true')", "must be smc"),
        ("SMC(8)", "must have its options as name=value, got '8' without a name"),
        ("SMC(**{})", "must have its options as name=value"),
        ("SMC(control=open('x'))", "which is no literal of Python"),
        ("SMC(gamma=2*3)", "has gamma='2 * 3', which is no literal"),
        ("SMC(gama=2)", "SMC has no argument gama; did you mean gamma?"),
        ("SMC(sparse=SparseVerification(mod='x'))", "SparseVerification has no argument mod; did you mean mode?"),
        ("SMC(sparse=SMC())", "which is no literal"),
        ("SMC(gamma=0)", "gamma must be a whole number from 1 to 64, got 0"),
        ("(" * 5000, "must be smc"),
    ],
)
def test_one_sentence_for_everything_else(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=r"must|has") as error:
        read_decoder(text, CHOICES).make()
    assert said in str(error.value)
    assert len(str(error.value)) < 300


@given(st.text(max_size=30))
def test_any_text_is_read_or_refused(text: str) -> None:
    with contextlib.suppress(ValueError):
        assert read_decoder(f"SMC(select={text})", CHOICES).kind is SMC
