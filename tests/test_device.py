"""One description of each device that is known, and of others what JAX says of them."""

from __future__ import annotations

import types
from typing import Any

import jax
import pytest

from smcjax.device import HOPPER, KNOWN, Device, this_device
from smcjax.pallas.dispatch import is_hopper


def found(monkeypatch: pytest.MonkeyPatch, **what: Any) -> Device:
    """`this_device`, where JAX's default device says this of itself."""
    monkeypatch.setattr(jax, "devices", lambda: [types.SimpleNamespace(**what)])
    return this_device()


@pytest.mark.parametrize("device", KNOWN.values(), ids=KNOWN)
def test_a_known_device_is_its_data_sheet(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    assert found(monkeypatch, platform="gpu", device_kind=device.kind) == device
    assert min(device.multiprocessors, device.shared_memory, device.bandwidth, device.flops) > 0


@pytest.mark.parametrize(("multiprocessors", "kernels"), [(132, True), (114, False), (78, False)])
def test_kernels_run_on_a_hopper_whose_multiprocessors_hold_all_their_blocks(
    monkeypatch: pytest.MonkeyPatch, multiprocessors: int, kernels: bool
) -> None:
    """What is not known of another GPU is 0, which is no roofline."""
    said: dict[str, Any] = {"device_kind": "NVIDIA H800", "compute_capability": "9.0", "core_count": multiprocessors}
    device = found(monkeypatch, platform="gpu", **said)
    assert device == Device("gpu", "NVIDIA H800", "sm90", multiprocessors, HOPPER.shared_memory)
    assert is_hopper(device) == kernels


@pytest.mark.parametrize(
    ("platform", "capability", "arch", "shared_memory"),
    [("gpu", "8.9", "sm89", 99 << 10), ("gpu", "13.0", "sm130", 0), ("gpu", "", None, 0), ("cpu", "9.0", None, 0)],
)
def test_other_devices(
    monkeypatch: pytest.MonkeyPatch, platform: str, capability: str, arch: str | None, shared_memory: int
) -> None:
    device = found(monkeypatch, platform=platform, device_kind="another", compute_capability=capability)
    assert device == Device(platform, "another", arch, shared_memory=shared_memory)
    assert not is_hopper(device)
