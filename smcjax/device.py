"""The machine that programs run on: what kernels, tuning, memory plans and rooflines ask of it."""

from __future__ import annotations

import dataclasses

import jax


@dataclasses.dataclass(frozen=True)
class Device:
    """One device as its programs see it.

    Attributes:
        platform: "cpu", "gpu" or "tpu", as JAX names it.
        kind: the vendor's name, such as "NVIDIA H200".
        arch: of an NVIDIA GPU, "sm90" and the like; None elsewhere.
        multiprocessors: of a GPU; 0 where it is not known.
        shared_memory: bytes that one block of a kernel may have.
        bandwidth: bytes a second of the device's memory by its data sheet; None where it is not known.
    """

    platform: str
    kind: str = ""
    arch: str | None = None
    multiprocessors: int = 0
    shared_memory: int = 0
    bandwidth: float | None = None


CPU = Device("cpu")
H100 = Device("gpu", "NVIDIA H100 80GB HBM3", "sm90", 132, 227 << 10, 3.35e12)
H200 = dataclasses.replace(H100, kind="NVIDIA H200", bandwidth=4.8e12)
HOPPER = H200  # the one that kernels are tuned for; both have the same multiprocessors and shared memory

BANDWIDTH = {device.kind: device.bandwidth for device in (H100, H200) if device.bandwidth is not None}


def this_device() -> Device:
    """JAX's default device."""
    found = jax.devices()[0]
    kind = str(found.device_kind)
    capability = str(getattr(found, "compute_capability", "")) if found.platform == "gpu" else ""
    arch = f"sm{capability.replace('.', '')}" if capability else None
    known = HOPPER if arch == "sm90" else Device(found.platform)
    return dataclasses.replace(known, platform=found.platform, kind=kind, arch=arch, bandwidth=BANDWIDTH.get(kind))


def on_cpu() -> bool:
    """True where JAX's default device is a CPU."""
    return jax.default_backend() == "cpu"
