"""Counting the memory's bytes: structures as the driver has them, figures by hand, refusals; NVML is a stand-in."""

from __future__ import annotations

import ctypes
import time
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from smcjax.bench import dram
from smcjax.bench.dram import MemoryCounter, MemoryCounterError, Traffic


class Library:
    """NVML with one GPU, whose memory is used by `share` percent."""

    def __init__(self, share: float = 50.0, supported: int = 1, **statuses: int) -> None:
        self.share, self.supported, self.statuses = share, supported, statuses
        self.calls: list[str] = []
        self.taken: list[tuple[float, Any]] = []
        self.given = 0
        self.open = 0

        def nvmlErrorString(status: int) -> bytes:
            return f"error {status}".encode()

        self.nvmlErrorString = nvmlErrorString

    def _status(self, name: str) -> int:
        self.calls.append(name)
        return self.statuses.get(name, 0)

    def nvmlInit_v2(self) -> int:
        self.open += 1
        return self._status("nvmlInit_v2")

    def nvmlShutdown(self) -> int:
        self.open -= 1
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: ctypes.c_uint, device: Any) -> int:
        device._obj.value = 0x7FFF_0000_0000 + index.value
        return self._status("nvmlDeviceGetHandleByIndex_v2")

    def nvmlGpmQueryDeviceSupport(self, device: ctypes.c_void_p, support: Any) -> int:
        assert device.value == 0x7FFF_0000_0000
        assert support._obj.version == 1
        support._obj.is_supported = self.supported
        return self._status("nvmlGpmQueryDeviceSupport")

    def nvmlGpmSampleAlloc(self, sample: Any) -> int:
        self.given += 1
        sample._obj.value = 0x7FFF_1234_0000 + self.given
        return self._status("nvmlGpmSampleAlloc")

    def nvmlGpmSampleFree(self, sample: ctypes.c_void_p) -> int:
        self.given -= 1
        return 0

    def nvmlGpmSampleGet(self, device: ctypes.c_void_p, sample: ctypes.c_void_p) -> int:
        self.taken.append((time.perf_counter(), sample.value))
        return self._status("nvmlGpmSampleGet")

    def nvmlGpmMetricsGet(self, asked: Any) -> int:
        asked = asked._obj
        assert (asked.version, asked.number) == (1, 2)
        assert [asked.first, asked.second] == [sample for _, sample in self.taken[-2:]]
        for one in asked.metrics[: asked.number]:
            one.value = {10: self.share, 2: 90.0}[one.metric]
            one.status = self.statuses.get(f"metric {one.metric}", 0)
        assert asked.metrics[asked.number].metric == 0
        return self._status("nvmlGpmMetricsGet")


def test_structures_are_the_drivers() -> None:
    """On 64 bits: two numbers and two pointers, then 40 bytes a metric, of which the value is the third field."""
    assert ctypes.sizeof(dram.Names) == 24
    assert ctypes.sizeof(dram.Metric) == 40
    assert (dram.Metric.status.offset, dram.Metric.value.offset, dram.Metric.names.offset) == (4, 8, 16)
    assert (dram.Metrics.first.offset, dram.Metrics.second.offset, dram.Metrics.metrics.offset) == (8, 16, 24)
    assert ctypes.sizeof(dram.Metrics) == 24 + 40 * 1024
    assert ctypes.sizeof(dram.Support) == 8


def test_bytes_of_a_call() -> None:
    """Half of 4 TB/s for a millisecond is 2 GB."""
    assert Traffic(0.5, 1.0, 1e-3).bytes(4e12) == 2e9
    # 8 GB in 4 ms are 2 TB/s, which the counter calls half: 100% is 4 TB/s.
    assert dram.Calibration("reads", 8_000_000_000, Traffic(0.5, 1.0, 4e-3)).scale == pytest.approx(4e12)


def test_a_program_runs_throughout() -> None:
    """Samples are taken while programs follow each other; a call's seconds are those of their ends."""
    library, started = Library(), list[float]()

    def run() -> Any:
        started.append(time.perf_counter())
        time.sleep(0.01)
        return jnp.zeros(1)

    with MemoryCounter(nvml=library) as counter:
        found = counter.during(run, calls=5, seconds=0.3)
    (first, one), (second, other) = library.taken[-2:]
    assert one != other
    assert second - first >= 0.3
    assert started[1] < first
    assert started[-2] > first
    assert (found.share, found.busy) == (0.5, 0.9)
    apart = np.diff([at for at in started if first <= at <= second])
    assert found.seconds == pytest.approx(apart.mean() / 5, rel=0.5)
    assert found.seconds >= 0.002
    assert (library.given, library.open) == (0, 0)


def test_calibrations_read_and_copy_known_bytes() -> None:
    with MemoryCounter(nvml=Library(25.0)) as counter:
        found = dram.calibrations(counter, gigabytes=1 / 256, seconds=0.2)
    reads, copies, mixed, of_l2 = found
    assert [one.known for one in found] == [1 << 22, 33 << 22, 1 << 18, 0]
    assert reads.scale == pytest.approx((1 << 22) / reads.traffic.seconds * 4)
    assert copies.traffic.bytes(copies.scale) == pytest.approx(33 << 22)
    assert mixed.traffic.seconds > of_l2.traffic.seconds > 0


def test_calibration_sums_are_those_of_all_reads() -> None:
    """Each of the reads counts: the sums of x ^ 0, x ^ 1, …, and of what lies between."""
    x, small = jnp.arange(64, dtype=jnp.uint32), jnp.arange(8, dtype=jnp.uint32)
    whole = sum(int((x ^ number).sum()) for number in range(3))
    assert int(dram._read(x, 3)) == whole
    between = sum(int((small ^ (number + other)).sum()) for number in range(3) for other in range(16))
    assert int(dram._read(x, 3, small)) == whole + between
    assert dram._copied(jnp.uint32(1), 8, 2).tolist() == [13]


def test_another_gpu_is_not_believed() -> None:
    with MemoryCounter(nvml=Library(0.4)) as counter, pytest.raises(MemoryCounterError, match=r"counter says 0\.4%"):
        dram.calibrations(counter, gigabytes=1 / 4096, seconds=0.2)


@pytest.mark.parametrize(
    ("library", "said"),
    [
        (
            Library(supported=0),
            r"^NVML does not count this GPU's memory traffic \(nvmlGpmQueryDeviceSupport\); it does",
        ),
        (Library(nvmlGpmSampleGet=3), r"^NVML does not count this GPU's memory traffic \(nvmlGpmSampleGet\)"),
        (Library(nvmlGpmSampleGet=4), r"^this process may not read the GPU's counters \(nvmlGpmSampleGet\); run it as"),
        (Library(nvmlInit_v2=9), "^the GPU's counters cannot be read, nvmlInit_v2 says: error 9.$"),
    ],
)
def test_refusals(library: Library, said: str) -> None:
    with pytest.raises(MemoryCounterError, match=said) as refused:
        MemoryCounter(nvml=library)
    assert "\n" not in str(refused.value)
    assert library.given == 0


def test_old_drivers_and_no_driver_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library()
    monkeypatch.delattr(Library, "nvmlGpmQueryDeviceSupport")
    with pytest.raises(MemoryCounterError, match=r"^this driver's NVML has no nvmlGpmQueryDeviceSupport"):
        MemoryCounter(nvml=library)
    monkeypatch.setattr(dram, "LIBRARY", "libnvidia-ml-of-nobody.so.1")
    with pytest.raises(MemoryCounterError, match=r"^there is no libnvidia-ml-of-nobody\.so\.1 here"):
        MemoryCounter()


def test_programs_that_fail_or_last_too_long_are_said() -> None:
    def fails() -> Any:
        if len(ran) == 2:
            raise RuntimeError("out of memory")
        ran.append(1)
        return jnp.zeros(1)

    def lasts() -> Any:
        time.sleep(0.7)
        return jnp.zeros(1)

    ran: list[int] = []
    with MemoryCounter(nvml=Library()) as counter:
        with pytest.raises(RuntimeError, match="out of memory"):
            counter.during(fails, seconds=0.2)
        with pytest.raises(ValueError, match=r"must end twice within 0\.6 seconds, and [01] have"):
            counter.during(lasts, seconds=0.2)
        with pytest.raises(ValueError, match="seconds must be at least"):
            counter.during(fails, seconds=0.05)
    with (
        MemoryCounter(nvml=Library(**{"metric 10": 3})) as counter,
        pytest.raises(MemoryCounterError, match="nvmlGpmMetricsGet"),
    ):
        counter.during(lambda: (time.sleep(0.01), jnp.zeros(1))[1], seconds=0.2)
