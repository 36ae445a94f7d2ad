"""One description of each device that is known, and of others what JAX says of them."""

from __future__ import annotations

import types

import jax
import pytest

from smcjax.device import HOPPER, KNOWN, Device, this_device


def found(monkeypatch: pytest.MonkeyPatch, **what: str) -> Device:
    """`this_device`, where JAX's default device says this of itself."""
    monkeypatch.setattr(jax, "devices", lambda: [types.SimpleNamespace(**what)])
    return this_device()


@pytest.mark.parametrize("device", KNOWN.values(), ids=KNOWN)
def test_a_known_device_is_its_data_sheet(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    capability = {"sm90": "9.0", "sm100": "10.0"}[device.arch or ""]
    assert found(monkeypatch, platform="gpu", device_kind=device.kind, compute_capability=capability) == device


def test_of_another_hopper_kernels_know_all_that_they_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    device = found(monkeypatch, platform="gpu", device_kind="NVIDIA H800", compute_capability="9.0")
    assert (device.arch, device.multiprocessors) == ("sm90", HOPPER.multiprocessors)
    assert device.shared_memory == HOPPER.shared_memory
    assert device.bandwidth == device.flops == 0  # which nobody may take for a roofline


@pytest.mark.parametrize(
    ("platform", "capability", "arch"), [("gpu", "8.9", "sm89"), ("gpu", "", None), ("cpu", "9.0", None)]
)
def test_other_devices(monkeypatch: pytest.MonkeyPatch, platform: str, capability: str, arch: str | None) -> None:
    device = found(monkeypatch, platform=platform, device_kind="another", compute_capability=capability)
    assert device == Device(platform, "another", arch)
