"""Programs that wait for their first call are those that would have been compiled when an engine asked for them."""

from __future__ import annotations

import unittest.mock
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from smcjax.engine import programs as engine_programs
from smcjax.engine.programs import Job, Programs
from tests import test_lazily as module
from tests.lazily import Later, lazily

traced: list[float] = []


def amount() -> float:
    return 1.0


def add(x: jax.Array) -> jax.Array:
    traced.append(module.amount())
    return x + module.amount()


@pytest.fixture
def asked() -> Programs:
    """Programs one of which nobody calls; they could be shared."""
    module.traced.clear()
    engine_programs._shared.clear()
    return programs()


def programs() -> Programs:
    made = Programs()
    with lazily():
        shape = jax.ShapeDtypeStruct((), jnp.float32)
        made.compile("a test", {key: Job(add, (), (shape,), identity=(module.__name__, key)) for key in ("one", "two")})
    return made


def value(made: Programs) -> float:
    return float(made["one"](jnp.float32(0)))


def test_nothing_is_traced_before_its_first_call(asked: Programs) -> None:
    assert "two" in asked
    assert module.traced == []
    assert [value(asked), value(asked)] == [1.0, 1.0]
    assert module.traced == [1.0]


@pytest.mark.parametrize("kind", ["monkeypatch", "mock"])
def test_a_program_has_the_patches_of_the_time_it_was_asked_for(asked: Programs, kind: str) -> None:
    """Before a patch, within it, and after it: neither a patch nor its end is lost, whenever the program is called."""

    def patched() -> Any:
        return unittest.mock.patch.object(module, "amount", return_value=2.0)

    if kind == "mock":
        with patched():
            within = programs()
            assert value(asked) == 1.0
    else:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "amount", lambda: 2.0)
            within = programs()
            assert value(asked) == 1.0
    after = programs()
    assert [value(within), value(after), value(asked)] == [2.0, 1.0, 1.0]


def test_control_a_patch_that_nobody_is_told_of_is_lost(asked: Programs) -> None:
    before, module.amount = module.amount, lambda: 2.0
    try:
        assert value(asked) == 2.0
    finally:
        module.amount = before


def test_an_error_of_the_compiler_reaches_the_caller() -> None:
    def broken(x: jax.Array) -> jax.Array:
        raise ValueError("no such program")

    made = Programs()
    with lazily():
        made.compile("a test", {"one": Job(broken, (), (jax.ShapeDtypeStruct((), jnp.float32),))})
    for _ in range(2):
        with pytest.raises(ValueError, match="no such program"):
            made["one"](jnp.float32(0))
    Later._pending.clear()  # nobody else shall find it
