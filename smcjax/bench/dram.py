"""Bytes that a GPU's memory moves while a program runs, by the driver's counters: NVML's GPM, Hopper and later.

    with MemoryCounter() as counter:
        scale = calibrations(counter)[0].scale      # bytes a second that 100% stands for, by reads of known bytes
        found = counter.during(program, calls=64)   # a jitted program of 64 calls
        found.seconds, found.bytes(scale)           # of a call

GPM says which part of its bandwidth the memory used between two samples, for reads and writes together; what the L2
gives is not among it. Samples are a tenth of a second apart at least, so a program runs again and again, each started
before the last one has ended, and both samples are taken meanwhile. Other programs on the GPU count as well.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import threading
import time
from collections.abc import Callable
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np

LIBRARY = "libnvidia-ml.so.1"
NOT_SUPPORTED, NO_PERMISSION = 3, 4  # NVML's, as the next three
SM_UTIL, DRAM_BW_UTIL = 2, 10
VERSION = 1  # of both structures
MOST_METRICS = 1024  # more than any driver knows: it fills as many as it is asked for

SECONDS = 0.6  # between samples
LEAST_SECONDS = 0.2
PATIENCE = 3  # times as long an interval, if a program has not ended twice
LEAD = 0.3  # that a program runs before the first: the driver refreshes what it says every tenth of a second
LEAST_SHARE = 0.1  # of the bandwidth, that a calibration uses on the GPU that is counted


class MemoryCounterError(RuntimeError):
    """Memory traffic cannot be counted here; the message is one sentence that says why."""


class Names(ctypes.Structure):
    """`nvmlGpmMetric_t.metricInfo`: what a metric is called."""

    _fields_: ClassVar = [(name, ctypes.c_char_p) for name in ("short_name", "long_name", "unit")]


class Metric(ctypes.Structure):
    """`nvmlGpmMetric_t`: a metric that is asked for, and its value."""

    _fields_: ClassVar = [
        ("metric", ctypes.c_uint),
        ("status", ctypes.c_uint),
        ("value", ctypes.c_double),
        ("names", Names),
    ]


class Metrics(ctypes.Structure):
    """`nvmlGpmMetricsGet_t`: two samples, and what is asked about the time between them."""

    _fields_: ClassVar = [
        ("version", ctypes.c_uint),
        ("number", ctypes.c_uint),
        ("first", ctypes.c_void_p),
        ("second", ctypes.c_void_p),
        ("metrics", Metric * MOST_METRICS),
    ]


class Support(ctypes.Structure):
    """`nvmlGpmSupport_t`: whether a device has these counters."""

    _fields_: ClassVar = [("version", ctypes.c_uint), ("is_supported", ctypes.c_uint)]


@dataclasses.dataclass(frozen=True)
class Traffic:
    """The memory's use while a program ran.

    Attributes:
        share: of the memory's bandwidth, from 0 to 1.
        busy: part of the multiprocessors that had work, from 0 to 1.
        seconds: a call, by the programs that ended between the samples.
    """

    share: float
    busy: float
    seconds: float

    def bytes(self, scale: float) -> float:
        """Bytes that a call moved, read and written, where the whole bandwidth is `scale` bytes a second."""
        return self.share * scale * self.seconds


class MemoryCounter:
    """The counters of one GPU. Raises MemoryCounterError where there are none, or this process may not read them.

    Args:
        index: NVML's number of the GPU: of the host's, whichever JAX may use.
        nvml: the library, loaded; None: the driver's.
    """

    def __init__(self, index: int = 0, nvml: Any = None) -> None:
        self._nvml = _loaded() if nvml is None else nvml
        self._samples: list[ctypes.c_void_p] = []
        self._call("nvmlInit_v2")
        try:
            self._device = ctypes.c_void_p()
            self._call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(self._device))
            support = Support(version=VERSION)
            self._call("nvmlGpmQueryDeviceSupport", self._device, ctypes.byref(support))
            if not support.is_supported:
                raise MemoryCounterError(_unsupported("nvmlGpmQueryDeviceSupport"))
            for _ in range(2):
                sample = ctypes.c_void_p()
                self._call("nvmlGpmSampleAlloc", ctypes.byref(sample))
                self._samples.append(sample)
            self._sample(0)  # which is where a driver says that it may not be read
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Gives the samples back. The counter is of no use afterwards."""
        while self._samples:
            self._nvml.nvmlGpmSampleFree(self._samples.pop())
        self._nvml.nvmlShutdown()

    def during(self, run: Callable[[], Any], *, calls: int = 1, seconds: float = SECONDS) -> Traffic:
        """Runs a program over and over and returns the traffic of one of its `calls`, over `seconds` at least.

        `run` starts the program and returns arrays of its own: they are waited for. It should take a few hundredths of
        a second. The interval lasts until it has ended twice; ValueError if that takes three times as long.
        """
        if seconds < LEAST_SECONDS:
            raise ValueError(f"seconds must be at least {LEAST_SECONDS}, got {seconds}.")
        jax.block_until_ready(run())  # compiled
        stop, ends, failures = threading.Event(), list[float](), list[BaseException]()

        def feed() -> None:
            try:
                before = run()
                while not stop.is_set():
                    after = run()
                    jax.block_until_ready(before)
                    ends.append(time.perf_counter())
                    before = after
                jax.block_until_ready(before)
            except BaseException as failure:
                failures.append(failure)

        thread = threading.Thread(target=feed)
        thread.start()
        try:
            time.sleep(LEAD)
            began = time.perf_counter()
            self._sample(0)
            time.sleep(seconds)
            while time.perf_counter() < began + PATIENCE * seconds and sum(end >= began for end in ends) < 2:
                time.sleep(seconds / 10)
            self._sample(1)
            ended = time.perf_counter()
        finally:
            stop.set()
            thread.join()
        if failures:
            raise failures[0]
        within = [end for end in ends if began <= end <= ended]
        if len(within) < 2:
            raise ValueError(
                f"a program must end twice within {PATIENCE * seconds:.1f} seconds, and {len(within)} have; "
                "give it fewer calls, or more seconds."
            )
        share, busy = self._between(DRAM_BW_UTIL, SM_UTIL)
        return Traffic(share / 100, busy / 100, (within[-1] - within[0]) / (len(within) - 1) / calls)

    def _sample(self, number: int) -> None:
        self._call("nvmlGpmSampleGet", self._device, self._samples[number])

    def _between(self, *metrics: int) -> list[float]:
        """Values of metrics, in percent, between the two samples."""
        asked = Metrics(VERSION, len(metrics), *self._samples)
        for at, metric in enumerate(metrics):
            asked.metrics[at].metric = metric
        self._call("nvmlGpmMetricsGet", ctypes.byref(asked))
        for one in asked.metrics[: len(metrics)]:
            if one.status:
                raise MemoryCounterError(self._said("nvmlGpmMetricsGet", one.status))
        return [one.value for one in asked.metrics[: len(metrics)]]

    def _call(self, name: str, *arguments: Any) -> None:
        try:
            function = getattr(self._nvml, name)
        except AttributeError:
            raise MemoryCounterError(
                f"this driver's NVML has no {name}, by which memory traffic is counted; install driver 525 or later."
            ) from None
        if status := function(*arguments):
            raise MemoryCounterError(self._said(name, status))

    def _said(self, name: str, status: int) -> str:
        if status == NOT_SUPPORTED:
            return _unsupported(name)
        if status == NO_PERMISSION:
            return (
                f"this process may not read the GPU's counters ({name}); run it as root, on a GPU that is all its own."
            )
        describe = self._nvml.nvmlErrorString
        describe.restype = ctypes.c_char_p
        return f"the GPU's counters cannot be read, {name} says: {describe(status).decode()}."


def _unsupported(name: str) -> str:
    return (
        f"NVML does not count this GPU's memory traffic ({name}); it does on Hopper and later GPUs that are neither "
        "divided nor virtual."
    )


def _loaded() -> Any:
    try:
        return ctypes.CDLL(LIBRARY)
    except OSError:
        raise MemoryCounterError(
            f"there is no {LIBRARY} here, by which memory traffic is counted; it comes with NVIDIA's driver."
        ) from None


@dataclasses.dataclass(frozen=True)
class Calibration:
    """A program of known bytes, and what the counter says of it."""

    name: str
    known: int  # bytes a call
    traffic: Traffic

    @property
    def scale(self) -> float:
        """Bytes a second that the whole bandwidth would be by this program alone."""
        return self.known / self.traffic.seconds / self.traffic.share


def calibrations(counter: MemoryCounter, gigabytes: float = 4.0, seconds: float = SECONDS) -> list[Calibration]:
    """Measures programs of known bytes: reads first, which say what 100% stands for; the others test that.

    They are copies, reads of little at a time between others of what the L2 holds, and such of the L2 alone. Raises
    MemoryCounterError where the counter sees nothing of the reads.
    """
    many = max(1, round(gigabytes * 2**30 / 4096)) * 1024
    large, few, small = (jnp.zeros(size, jnp.uint32) for size in (many, max(1, many // 16), max(1, many // 256)))
    programs: dict[str, tuple[Callable[[], Any], int, int]] = {
        "reads": (functools.partial(_read, large, 16), 16, large.nbytes),
        "copies": (functools.partial(_copied, jnp.uint32(1), many, 16), 1, (2 * 16 + 1) * large.nbytes),
        "reads of a sixteenth between others of the L2": (functools.partial(_read, few, 64, small), 64, few.nbytes),
        "reads of the L2": (functools.partial(_read, small, 2048), 2048, 0),
    }
    found = []
    for name, (run, calls, known) in programs.items():
        found.append(Calibration(name, known, counter.during(run, calls=calls, seconds=seconds)))
        if not found[0].traffic.share > LEAST_SHARE:
            raise MemoryCounterError(
                f"the counter says {found[0].traffic.share:.1%} of the memory's bandwidth while it is read without a "
                "pause, so it counts another GPU than JAX uses, or nothing; let this process see one GPU."
            )
    return found


@functools.partial(jax.jit, static_argnums=1)
def _read(x: jax.Array, times: int, between: jax.Array | None = None) -> jax.Array:
    """Reads x so many times, and `between` sixteen times after each; sums differ, so that each is made."""

    def once(number: jax.Array, total: jax.Array) -> jax.Array:
        total += jnp.sum(x ^ number.astype(jnp.uint32), dtype=jnp.uint32)
        if between is None:
            return total

        def again(other: jax.Array, total: jax.Array) -> jax.Array:
            return total + jnp.sum(between ^ (number + other).astype(jnp.uint32), dtype=jnp.uint32)

        return jax.lax.fori_loop(0, 16, again, total)

    return jax.lax.fori_loop(0, times, once, jnp.uint32(0))


@functools.partial(jax.jit, static_argnums=(1, 2))
def _copied(first: jax.Array, size: int, times: int) -> jax.Array:
    """Writes an array and, so many times, reads and writes it."""
    made = jax.lax.fori_loop(0, times, lambda _, x: x * np.uint32(3) + first, jnp.full(size, first))
    return made[:1]
