"""The Triton kernel that rotates, copies and writes: interpreted, against the plain version; and compiled."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import pytest

from smcjax.pallas.cache.rotate_and_write import (
    Write,
    rotate_and_write,
    rotate_and_write_triton,
)
from smcjax.pallas.dispatch import implementations
from tests.pallas.cache.test_rotate_and_write import case, compare, copying
from tests.pallas.triton.cubins import MAX_REGISTERS, TARGETS, compiled, lowered
from tests.pallas.triton.interpreter import interpreted

pytest.importorskip("jax_triton")

SHAPES: list[dict[str, Any]] = [
    {},
    {"dim": 128, "columns": 3},
    {"page_size": 1, "columns": 1, "heads": 14, "kv_heads": 2},
    {"hidden": 96, "dim": 32, "norms": True},
]
NORMED = {"columns": 3, "heads": 4, "kv_heads": 4, "norms": True}


@pytest.mark.parametrize(
    ("make", "shape"),
    [*((case, shape) for shape in SHAPES), (copying, NORMED)],
)
def test_against_the_reference(make: Any, shape: dict[str, Any]) -> None:
    """Control: the pages were others before."""
    inputs = make(**shape)
    got = rotate_and_write_triton(**inputs, interpret=interpreted)
    compare(inputs, got)
    assert (np.asarray(got[1]) != np.asarray(inputs["key_pages"])).any()


def given_to(**shape: Any) -> tuple[Any, tuple[jax.Array, ...]]:
    inputs = copying(**shape)
    fixed = {name: inputs.pop(name) for name in ("norms", "pending", "copies")}
    return functools.partial(rotate_and_write, **fixed), tuple(inputs.values())


REAL: dict[str, dict[str, Any]] = {
    "8B verify": {"columns": 9, "heads": 32, "kv_heads": 8, "dim": 128, "page_size": 16, "hidden": 4096},
    "Gemma": {"columns": 1, "heads": 8, "kv_heads": 4, "dim": 256, "page_size": 16, "norms": True},
}


def test_a_program_has_one_custom_call() -> None:
    function, arrays = given_to(**REAL["8B verify"])
    assert lowered(lambda *given: function(*given[:7]), *arrays).count("custom_call @triton_kernel_call_ffi") == 1


@pytest.mark.parametrize(
    ("name", "capability"), [*(("8B verify", target) for target in TARGETS), ("Gemma", 80), ("Gemma", 120)]
)
def test_the_kernel_is_compiled_for_every_target(name: str, capability: int) -> None:
    function, arrays = given_to(**REAL[name])
    (cubin,) = compiled(capability, lambda *given: function(*given[:7]), *arrays)
    assert cubin.spilled <= 8, cubin  # of one number, for 120
    assert cubin.registers <= MAX_REGISTERS, cubin
    assert cubin.shared_memory <= cubin.limit, cubin


@pytest.mark.gpu
@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize("make", [case, copying])
def test_on_the_gpu(make: Any, name: str) -> None:
    inputs = make(**REAL[name])
    fixed = {key: inputs[key] for key in ("norms", "pending")}
    arrays = {key: each for key, each in inputs.items() if key not in fixed}
    with implementations("triton"):
        assert rotate_and_write.kernel_for(*Write(**inputs)) is not None
        compare(inputs, jax.jit(functools.partial(rotate_and_write, **fixed))(**arrays))
