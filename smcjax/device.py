"""The machine that programs run on: what kernels, tuning, memory plans and rooflines ask of it."""

from __future__ import annotations

import dataclasses

import jax


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


H100 = Device("gpu", "NVIDIA H100 80GB HBM3", "sm90", 132, 227 << 10, 3.35e12, 989e12)
H200 = dataclasses.replace(H100, kind="NVIDIA H200", bandwidth=4.8e12)
GH200 = dataclasses.replace(H100, kind="NVIDIA GH200 480GB", bandwidth=4.0e12)
B200 = Device("gpu", "NVIDIA B200", "sm100", bandwidth=8.0e12)
HOPPER = H200  # the one that kernels are tuned for; all of its architecture have its multiprocessors and shared memory

KNOWN = {device.kind: device for device in (H100, H200, GH200, B200)}


def this_device() -> Device:
    """Describes JAX's default device."""
    found = jax.devices()[0]
    kind = str(found.device_kind)
    if kind in KNOWN:
        return KNOWN[kind]
    capability = str(getattr(found, "compute_capability", "")) if found.platform == "gpu" else ""
    arch = f"sm{capability.replace('.', '')}" if capability else None
    like = HOPPER if arch == HOPPER.arch else Device(found.platform)
    return dataclasses.replace(like, platform=found.platform, kind=kind, arch=arch, bandwidth=0.0, flops=0.0)


def on_cpu() -> bool:
    """True where JAX's default device is a CPU."""
    return jax.default_backend() == "cpu"
