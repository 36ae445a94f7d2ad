"""Operations take the kernel that supports their arguments on this device, and the reference elsewhere."""

from __future__ import annotations

import contextlib
import importlib.metadata

import jax
import jax.numpy as jnp
import pytest

from smcjax.device import HOPPER, KNOWN, Device
from smcjax.pallas import dispatch
from smcjax.pallas.dispatch import Kernel, Op, implementations, runs_mosaic, runs_triton, runs_triton_beside_mosaic
from tests.lazily import program_patches


def doubled(x: jax.Array) -> jax.Array:
    """Adds x to itself."""
    return x + x


def make_op() -> Op[[jax.Array], jax.Array]:
    op = Op(doubled)
    op.register(Kernel(runs_mosaic, lambda x: 200 * x, lambda x: x.ndim == 1))
    op.register(Kernel(runs_mosaic, lambda x: 300 * x, lambda x: x.ndim <= 2))
    op.register(Kernel(lambda device: device.arch == "sm100", lambda x: 400 * x, lambda x: True))
    return op


def test_the_first_kernel_that_takes_the_arguments_runs() -> None:
    op, row, matrix, cube = make_op(), jnp.ones(1), jnp.ones((1, 1)), jnp.ones((1, 1, 1))
    with implementations("mosaic"):
        assert op(row) == 200
        assert op(matrix) == 300
        assert op(cube) == 2  # the third kernel is for another architecture
        assert op.kernel_for(cube) is None
    with implementations("xla"):
        assert op(row) == 2
        assert op.kernel_for(row) is None


def test_auto_means_the_kernels_of_the_default_device() -> None:
    op = make_op()
    with implementations("auto"):
        with program_patches(dispatch, "this_device", lambda: HOPPER):
            assert dispatch.active_implementation() == "mosaic"
            assert op(jnp.ones(1)) == 200
        if jax.default_backend() == "cpu":
            assert dispatch.active_implementation() == "xla"
            assert op(jnp.ones(1)) == 2


def test_a_jitted_function_is_traced_anew_for_another_choice() -> None:
    compute = jax.jit(make_op())
    with implementations("mosaic"):
        assert compute(jnp.ones(1)) == 200
    with implementations("xla"):
        assert compute(jnp.ones(1)) == 2


def test_another_name_is_refused_in_one_sentence() -> None:
    with pytest.raises(ValueError, match=r"implementation must be one of auto, mosaic, triton, xla, got 'cuda'\."):
        implementations("cuda")


def triton_op() -> Op[[jax.Array], jax.Array]:
    op = Op(doubled)
    op.register(Kernel(runs_mosaic, lambda x: 200 * x, lambda x: x.ndim == 1))
    op.register(Kernel(runs_triton_beside_mosaic, lambda x: 500 * x, lambda x: x.ndim == 2))
    op.register(Kernel(runs_triton, lambda x: 600 * x, lambda x: x.ndim <= 3))
    return op


@pytest.mark.parametrize(
    ("chosen", "kind", "installed", "found"),
    [
        ("triton", "NVIDIA H200", False, (600, 500, 600)),  # by name it need not be looked for
        ("auto", "NVIDIA H200", True, (200, 500, 2)),
        ("auto", "NVIDIA H200", False, (200, 2, 2)),
        ("auto", "NVIDIA L4", True, (600, 500, 600)),
        ("auto", "NVIDIA L4", False, (2, 2, 2)),
        ("mosaic", "NVIDIA L4", True, (200, 2, 2)),
        ("xla", "NVIDIA L4", True, (2, 2, 2)),
    ],
)
def test_triton_serves_gpus_without_mosaic_and_what_mosaic_does_not_take(
    chosen: str, kind: str, installed: bool, found: tuple[int, int, int]
) -> None:
    op = triton_op()
    with (
        program_patches(dispatch, "this_device", lambda: KNOWN[kind]),
        program_patches(dispatch, "has_triton", lambda: installed),
        implementations(chosen),
    ):
        assert tuple(int(op(jnp.ones((1,) * rank)).sum()) for rank in (1, 2, 3)) == found


@pytest.mark.parametrize(("installed", "found"), [("0.3.1", True), ("0.4.1", False), (None, False)])
def test_triton_needs_the_bridge_that_launches_go_by(
    installed: str | None, found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")

    def version(name: str) -> str:
        if name != "jax-triton" or installed is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert dispatch.has_triton.__wrapped__() is found


def test_gpus_before_ampere_have_no_triton_kernels() -> None:
    old = Device("gpu", "NVIDIA T4", "sm75", 40, 64 << 10)
    with program_patches(dispatch, "this_device", lambda: old), implementations("triton"):
        assert dispatch.active_implementation() == "xla"
        assert int(triton_op()(jnp.ones(1)).sum()) == 2


@pytest.mark.parametrize(
    ("name", "device", "installed", "said"),
    [
        ("mosaic", KNOWN["NVIDIA H100 PCIe"], True, "x mosaic needs a Hopper GPU with 132 multiprocessors and the def"),
        ("triton", Device("gpu", "NVIDIA T4", "sm75"), True, "compute capability 8.0 or more and .* is NVIDIA T4; use"),
        ("triton", Device("cpu"), True, "x triton needs an NVIDIA GPU of .* and the default device is cpu; use auto"),
        ("triton", KNOWN["NVIDIA L4"], False, "x triton needs jax-triton 0.3, which is not installed; add the extra"),
        ("triton", KNOWN["NVIDIA L4"], True, None),
        ("mosaic", HOPPER, False, None),
        ("auto", Device("cpu"), False, None),
        ("xla", Device("cpu"), False, None),
    ],
)
def test_kernels_that_cannot_run_here_are_refused_by_name(
    name: str, device: Device, installed: bool, said: str | None
) -> None:
    with (
        program_patches(dispatch, "this_device", lambda: device),
        program_patches(dispatch, "has_triton", lambda: installed),
        contextlib.nullcontext() if said is None else pytest.raises(ValueError, match=said),
    ):
        dispatch.check_runs_here("x", name)
