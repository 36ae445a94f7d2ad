"""The baseline of `bench.py`: verification and packing in PyTorch eager, as one writes them first.

    echo '[{"rows": 32, "gamma": 128, "alpha": 0.9, "dim": 2048}]' | python -m studies.verification.torch_eager

Scan: an operation after the other, about seven launches. Pack: `kv[mask]`, which waits for the number of rows on the
host. Two times a call: host-visible (call and wait) and on the device (the profiler's sum over kernels). A line a case:
`RESULT {"scan": {"host": µs, "device": µs}, "pack": …, "verify": …}`. Inputs rotate as there. Each method's results
are the oracle's, bit for bit, before it is timed.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from studies.verification.synthetic import Synthetic, rotations, synthetic

WARMUP = 20
CALLS = 200


def scan(draft: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Lengths, has_mismatch, next tokens."""
    rows, gamma = draft.shape
    mismatch = draft != target[:, :gamma]
    has_mismatch = mismatch.any(dim=1)
    lengths = torch.where(has_mismatch, mismatch.int().argmax(dim=1), gamma)
    return lengths, has_mismatch, target[torch.arange(rows, device=draft.device), lengths]


def pack(kv: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Accepted rows, one after the other; no tail."""
    return kv[torch.arange(kv.shape[1], device=kv.device) < lengths[:, None]]


def verify(draft: torch.Tensor, target: torch.Tensor, kv: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Both."""
    lengths, has_mismatch, following = scan(draft, target)
    return lengths, has_mismatch, following, torch.cumsum(lengths, 0) - lengths, pack(kv, lengths)


def main() -> None:
    """Times the cases that come on stdin."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(torch.__version__, device, flush=True)
    for case in json.load(sys.stdin):
        print("RESULT " + json.dumps(measured(case, device)), flush=True)


def measured(case: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Both times of each method that the case has data for."""
    rows, gamma, dim = case["rows"], case["gamma"], case["dim"]
    copies = rotations(rows, gamma, dim)
    batches = []
    oracles = [synthetic(rows, gamma, case["alpha"], seed=7 + seed) for seed in range(copies)]
    for ids in oracles:
        kv = torch.randn(rows, gamma, dim, device=device, dtype=torch.bfloat16) if dim else None
        batches.append((*(torch.from_numpy(part).to(device) for part in ids), kv))
    methods: dict[str, tuple[Callable[..., Any], list[Any]]] = {"scan": (scan, [b[:2] for b in batches])}
    if dim:
        methods["pack"] = pack, [(b[3], b[2]) for b in batches]
        methods["verify"] = verify, [(b[0], b[1], b[3]) for b in batches]
    for name, (call, inputs) in methods.items():
        check(name, call(*inputs[0]), oracles[0], batches[0][3])
    return {name: timed(call, inputs, device) for name, (call, inputs) in methods.items()}


def check(name: str, got: Any, ids: Synthetic, kv: torch.Tensor | None) -> None:
    """Raises unless the results of a method are those that the generator promised."""
    lengths = [int(length) for length in ids.lengths]
    following = [int(row[length]) for row, length in zip(ids.target, lengths, strict=True)]
    want: list[Any] = [lengths, [length < ids.draft.shape[1] for length in lengths], following]
    if kv is not None:
        packed = torch.cat([row[:length] for row, length in zip(kv, lengths, strict=True)])
        offsets = [sum(lengths[:row]) for row in range(len(lengths))]
        want = {"scan": want, "pack": [packed], "verify": [*want, offsets, packed]}[name]
    for number, (ours, theirs) in enumerate(zip(got if isinstance(got, tuple) else [got], want, strict=True)):
        same = torch.equal(ours, theirs) if isinstance(theirs, torch.Tensor) else ours.tolist() == theirs
        if not same:
            raise AssertionError(f"{name}: result {number} is not the oracle's")


def timed(call: Callable[..., Any], inputs: list[Any], device: torch.device) -> dict[str, float | None]:
    """Medians in µs."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    kept: list[Any] = [None] * len(inputs)  # so that results rotate too
    for i in range(WARMUP):
        kept[i % len(inputs)] = call(*inputs[i % len(inputs)])
    wait()
    times = []
    for i in range(CALLS):
        began = time.perf_counter()
        kept[i % len(inputs)] = call(*inputs[i % len(inputs)])
        wait()
        times.append(time.perf_counter() - began)
    p95 = statistics.quantiles(times, n=20)[-1]
    out: dict[str, float | None] = {"host": statistics.median(times) * 1e6, "host, p95": p95 * 1e6, "device": None}
    if device.type == "cuda":
        out["device"] = profiled(call, inputs)
    return out


def profiled(call: Callable[..., Any], inputs: list[Any]) -> float:
    """µs of kernels and copies a call."""
    kept: list[Any] = [None] * len(inputs)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for i in range(CALLS):
            kept[i % len(inputs)] = call(*inputs[i % len(inputs)])
        torch.cuda.synchronize()
    on_device = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return sum(e.time_range.elapsed_us() for e in on_device) / CALLS


if __name__ == "__main__":
    main()
