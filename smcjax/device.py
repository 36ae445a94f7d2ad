"""The machine that programs run on: what kernels, tuning, memory plans and rooflines ask of it."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Device:
    """One device as its programs see it.

    A figure of 0 is not known.

    Attributes:
        platform: "cpu", "gpu" or "tpu", as JAX names it.
        kind: the vendor's name, such as "NVIDIA H200".
        arch: of an NVIDIA GPU, "sm90" and the like; None elsewhere.
        multiprocessors: of a GPU.
        shared_memory: bytes that one block of a kernel may have.
        bandwidth: bytes a second of the device's memory by its data sheet.
        flops: floating-point operations a second of dense bfloat16 products by its data sheet.
    """

    platform: str
    kind: str = ""
    arch: str | None = None
    multiprocessors: int = 0
    shared_memory: int = 0
    bandwidth: float = 0.0
    flops: float = 0.0

    @property
    def capability(self) -> int:
        """Compute capability of an NVIDIA GPU times ten, such as 90; 0 of anything else."""
        return int(self.arch.removeprefix("sm")) if self.arch else 0


# Bytes of shared memory that a block may have, by architecture (CUDA C++ Programming Guide, "Compute Capabilities").
SHARED_MEMORY = {
    "sm75": 64 << 10,
    "sm80": 163 << 10,
    "sm86": 99 << 10,
    "sm89": 99 << 10,
    "sm90": 227 << 10,
    "sm100": 227 << 10,
    "sm103": 227 << 10,
    "sm120": 99 << 10,
    "sm121": 99 << 10,
}


def _gpu(kind: str, arch: str, multiprocessors: int, bandwidth: float, flops: float) -> Device:
    return Device("gpu", kind, arch, multiprocessors, SHARED_MEMORY[arch], bandwidth, flops)


# Of NVIDIA's data sheets: multiprocessors, bytes and dense bfloat16 operations a second.
H100 = _gpu("NVIDIA H100 80GB HBM3", "sm90", 132, 3.35e12, 989e12)
H200 = _gpu("NVIDIA H200", "sm90", 132, 4.8e12, 989e12)
HOPPER = H200  # the one that kernels are tuned for
KNOWN = {
    device.kind: device
    for device in (
        H100,
        H200,
        _gpu("NVIDIA GH200 480GB", "sm90", 132, 4.0e12, 989e12),
        _gpu("NVIDIA H100 NVL", "sm90", 132, 3.9e12, 835e12),
        _gpu("NVIDIA H100 PCIe", "sm90", 114, 2.0e12, 756e12),
        _gpu("NVIDIA H20", "sm90", 78, 4.0e12, 148e12),
        _gpu("NVIDIA B200", "sm100", 148, 8.0e12, 2250e12),
        _gpu("NVIDIA A100-SXM4-40GB", "sm80", 108, 1.555e12, 312e12),
        _gpu("NVIDIA A100-SXM4-80GB", "sm80", 108, 2.039e12, 312e12),
        _gpu("NVIDIA A100 80GB PCIe", "sm80", 108, 1.935e12, 312e12),
        _gpu("NVIDIA A10", "sm86", 72, 600e9, 125e12),
        _gpu("NVIDIA GeForce RTX 3090", "sm86", 82, 936e9, 71e12),
        _gpu("NVIDIA L4", "sm89", 58, 300e9, 121e12),
        _gpu("NVIDIA L40S", "sm89", 142, 864e9, 362e12),
        _gpu("NVIDIA GeForce RTX 4090", "sm89", 128, 1008e9, 165e12),
        _gpu("NVIDIA GeForce RTX 5090", "sm120", 170, 1792e9, 209e12),
    )
}


def this_device() -> Device:
    """Describes JAX's default device: a known one by its data sheet, another by what JAX says of it."""
    found = jax.devices()[0]
    kind = str(found.device_kind)
    if kind in KNOWN:
        return KNOWN[kind]
    capability = str(getattr(found, "compute_capability", "")) if found.platform == "gpu" else ""
    if not capability:
        return Device(found.platform, kind)
    arch = f"sm{capability.replace('.', '')}"
    return Device(found.platform, kind, arch, getattr(found, "core_count", 0), SHARED_MEMORY.get(arch, 0))


def on_cpu() -> bool:
    """True where JAX's default device is a CPU."""
    return jax.default_backend() == "cpu"


def product_precision(dtype: Any) -> jax.lax.Precision | None:
    """float32 products in full float32, which GPUs would else round to TF32; None (the default) for other dtypes."""
    return jax.lax.Precision.HIGHEST if jnp.dtype(dtype) == jnp.float32 else None
