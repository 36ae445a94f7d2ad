"""Tensor parallelism: the files of laws in a process that has eight devices; and refusals where there is one."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import types
from pathlib import Path

import jax
import pytest

from smcjax.bench.shapes import ATTENTIONS, SHAPES
from smcjax.model.config import LayerSpec
from smcjax.model.parallel import check_split, devices_of_host, fits
from smcjax.quantization import COLUMNS

TESTS = Path(__file__).parents[1]
LAWS = [
    str(TESTS / file)
    for file in (
        "model/parallel_laws.py",
        "engine/parallel_laws.py",
        "engine/parallel_requests_laws.py",
        "engine/parallel_drafts_laws.py",
        "engine/separate_laws.py",
    )
]


@pytest.mark.slow
def test_laws_on_eight_virtual_devices() -> None:
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}  # of this run
    environment |= {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "--no-header", *LAWS]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment, check=False)
    assert ran.returncode == 0, ran.stdout[-8000:] + ran.stderr[-2000:]
    assert " passed" in ran.stdout
    assert "skipped" not in ran.stdout


def test_more_devices_than_there_are() -> None:
    size = jax.local_device_count() + 1
    with pytest.raises(
        ValueError, match=rf"^tensor_parallel_size is {size} and JAX has {size - 1} device.*; use at most"
    ):
        devices_of_host(size)


def test_one_of_several_processes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match=r"^tensor_parallel_size is 2 and this is one of 2 JAX processes"):
        devices_of_host(2)


def test_devices_that_differ_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = [types.SimpleNamespace(platform="gpu", device_kind=kind) for kind in ("NVIDIA H100", "NVIDIA H200")]
    monkeypatch.setattr(jax, "local_devices", lambda: kinds)
    with pytest.raises(ValueError, match=r"^tensor_parallel_size is 2 and those devices are not alike \(NVIDIA H100, "):
        devices_of_host(2)


def test_what_divides_real_models() -> None:
    assert [n for n in range(1, 129) if fits(SHAPES["llama-3.1-70b"], n)] == [1, 2, 4, 8, 16, 32, 64]
    assert [n for n in range(1, 17) if fits(SHAPES["llama-3.2-1b"], n, COLUMNS)] == [1, 2, 4, 8, 16]
    message = (
        r"^tensor_parallel_size is 6 and a has 64 attention heads, 8 key-value heads and intermediate size 28672, "
        r"which 6 devices cannot divide evenly; use 1, 2, 4, 8, 16, 32 or 64\.$"
    )
    with pytest.raises(ValueError, match=message):
        check_split(SHAPES["llama-3.1-70b"], 6, "a", "tensor_parallel_size")
    sparse = SHAPES["llama-3.1-8b"].with_layers([LayerSpec(), LayerSpec(ATTENTIONS["nsa"])])
    check_split(sparse, 16, "the target", "tensor_parallel_size")
    with pytest.raises(ValueError, match=r"^tensor_parallel_size is 3 and the target has 32 attention heads, 8 key-va"):
        check_split(sparse, 3, "the target", "tensor_parallel_size")


def test_norms_of_all_heads_are_not_divided() -> None:
    """OLMo 2 is refused, as a device would take its own heads' mean. Negative control: a head's own norm is divided."""
    layer = LayerSpec(qk_norm="head")
    config = dataclasses.replace(SHAPES["llama-3.2-1b"], layers=(layer,))
    check_split(config, 2, "the target", "tensor_parallel_size")
    config = dataclasses.replace(config, layers=(dataclasses.replace(layer, qk_norm="all"), layer))
    check_split(config, 1, "the target", "tensor_parallel_size")
    message = (
        r"^tensor_parallel_size is 2 and the target norms the queries and keys of all heads at once, of which each "
        r"device would have its own only; use 1\.$"
    )
    for quantization in (None, "int8", "float8"):
        with pytest.raises(ValueError, match=message):
            check_split(config, 2, "the target", "tensor_parallel_size", quantization=quantization)


def test_what_int8_divides() -> None:
    """48 columns divide evenly by two; 24 are no multiple of the 16 within which int8 columns have an order."""
    config = dataclasses.replace(SHAPES["llama-3.2-1b"], intermediate_size=48)
    for ordered in (None, "float8"):
        check_split(config, 2, "the target", "tensor_parallel_size", quantization=ordered)
    message = (
        r"^tensor_parallel_size is 2 and the target has matrices of 2048 and 48 columns in int8, of which each device "
        r"must hold a multiple of 16; use 1, or no int8\.$"
    )
    with pytest.raises(ValueError, match=message):
        check_split(config, 2, "the target", "tensor_parallel_size", quantization="int8")
    with pytest.raises(ValueError, match=r"intermediate size 48, which 5 devices cannot divide evenly; use 1\.$"):
        check_split(config, 5, "the target", "tensor_parallel_size", quantization="int8")
