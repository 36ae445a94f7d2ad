"""`smcjax bench predict`: what cycles of large targets would take on several devices. Predicted, from measured pieces.

    cycle = Σ bytes on a device / (bandwidth · measured fraction of it) + sums · t(bytes) + gathered logits + the rest

A fraction is what a forward of this package reached of its weight stream on one device
(docs/explanation/performance.md). A sum over n devices of b bytes takes latency + slope · bytes that a device sends, by
two measured points at n = 2. These are b(n − 1) where devices write to each other
(`smcjax.pallas.collectives.peer_memory`), with a latency for every slot that b bytes fill, and b · 2(n − 1)/n of sums
that are left to XLA. What more devices cost was not measured, so every time is a range, from a latency that stays to n
− 1 of them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

from smcjax.bench.roofline import Phase, cycle_phases
from smcjax.bench.shapes import SHAPES
from smcjax.decoders import SMC, Autoregressive, Decoding
from smcjax.device import H100, H200, Device
from smcjax.markdown import table
from smcjax.model.config import ModelConfig
from smcjax.model.parallel import fits, held_by_one
from smcjax.model.params import num_params
from smcjax.pallas.collectives.peer_memory import MAX_DEVICES, MAX_PUSHED_BYTES, PIECES

MEMORY = {H100.kind: 80e9, H200.kind: 141e9}  # bytes, of the data sheets
SIZES = (1, 2, 4, 8, 16)
Points = tuple[tuple[int, float], tuple[int, float]]
TARGETS = ("llama-3.1-70b", "llama-3.1-405b")


@dataclasses.dataclass(frozen=True)
class Pieces:
    """Measured on H200s: forwards (docs/explanation/performance.md, 2026-11-25), sums on two (2026-11-27, kernels.md).

    Attributes:
        draft: of the weight stream, that a draft step of the persistent kernel reaches: 515 of 694 µs.
        verify: that a verify of 72 rows reaches, all its kernels together: 3,127 of 4,703 µs.
        step: that a step of the target alone reaches, with all that is no stream.
        rest: seconds a cycle of sampling, weighing, resampling and pages.
        sums: two sums over two devices, in a chain of products: bytes and seconds.
        by_xla: bytes and seconds of two sums that are left to XLA.
        peers: whether devices write to each other; otherwise all sums and gathers are left to XLA.
    """

    draft: float = 0.742
    verify: float = 0.665
    step: float = 0.760
    rest: float = 137e-6
    sums: Points = ((8 * 8192 * 2, 4.5e-6), (72 * 8192 * 2, 8.6e-6))
    by_xla: Points = ((8 * 8192 * 2, 13.4e-6), (72 * 8192 * 2, 23.3e-6))
    peers: bool = True

    def sum_seconds(self, size: int, data: float) -> tuple[float, float]:
        """Least and most seconds of a sum of `data` bytes over `size` devices."""
        if not self._by_peers(size) or data * (size - 1) > MAX_PUSHED_BYTES:
            return _seconds(self.by_xla, size, data * 2 * (size - 1) / size)
        return _seconds(self.sums, size, data * (size - 1), calls=math.ceil(data / PIECES))

    def gather_seconds(self, size: int, data: float) -> tuple[float, float]:
        """Least and most seconds until each of `size` devices has all of `data` bytes that they hold together."""
        sent = data * (size - 1) / size
        if not self._by_peers(size):
            return _seconds(self.by_xla, size, sent)
        return _seconds(self.sums, size, sent, calls=math.ceil(data / size / PIECES))

    def _by_peers(self, size: int) -> bool:
        return self.peers and size <= MAX_DEVICES


def _seconds(points: Points, size: int, sent: float, calls: int = 1) -> tuple[float, float]:
    """By a line through two measured points: least with its latency a call, most with that for each other device."""
    (few, quick), (many, slow) = points
    slope = (slow - quick) / (many - few)
    latency = (quick - few * slope) * calls
    return (latency + sent * slope, latency * (size - 1) + sent * slope) if size > 1 else (0.0, 0.0)


@dataclasses.dataclass(frozen=True)
class Prediction:
    """One target on so many devices, each of which has all of the draft. Seconds are from least to most."""

    device: str
    target: str
    size: int
    decoding: str
    held_bytes: int  # weights on each device
    fits: bool  # into the device's memory
    weight_seconds: float  # of streaming, as fast as was measured
    sum_seconds: tuple[float, float]  # of all sums and the gathered logits
    seconds: tuple[float, float]  # a cycle
    tokens_per_second: tuple[float, float]  # from least to most
    roofline_fraction: tuple[float, float]  # of the weight stream at the datasheet's bandwidth, from least to most


def predict(
    device: Device, target: str, draft: str, size: int, decoding: Decoding, pieces: Pieces, *, context: int = 256
) -> Prediction:
    """Predicts a cycle of one request with `context` tokens. Raises ValueError for shapes that are unknown."""
    for name in (target, draft):
        if name not in SHAPES:
            raise ValueError(f"shape {name!r} is unknown; use one of {', '.join(SHAPES)}.")
    config, own = SHAPES[target], held_by_one(SHAPES[target], size)
    phases = cycle_phases(own, SHAPES[draft], decoding.speculation, groups=1, context=context)
    stream = sum(_streamed(phase, device, pieces) for phase in phases)
    rows = decoding.rows * decoding.speculation.scored
    of_layer = pieces.sum_seconds(size, rows * config.hidden_size * config.itemsize)
    logits = pieces.gather_seconds(size, rows * config.vocab_size * 4)
    sums = tuple((2 * config.num_layers + 1) * each + gather for each, gather in zip(of_layer, logits, strict=True))
    rest = pieces.rest if decoding.drafts else 0.0
    least, most = (stream + seconds + rest for seconds in sums)
    roofline = sum(phase.times * phase.weight_bytes for phase in phases) / device.bandwidth
    held = weights(own) + (weights(SHAPES[draft]) if decoding.drafts else 0)
    return Prediction(
        device=device.kind,
        target=target,
        size=size,
        decoding=str(decoding),
        held_bytes=held,
        fits=held < MEMORY[device.kind],
        weight_seconds=stream,
        sum_seconds=(sums[0], sums[1]),
        seconds=(least, most),
        tokens_per_second=(decoding.tokens_per_cycle / most, decoding.tokens_per_cycle / least),
        roofline_fraction=(roofline / most, roofline / least),
    )


def weights(config: ModelConfig) -> int:
    """Bytes of all matrices."""
    return num_params(config) * config.itemsize


def _streamed(phase: Phase, device: Device, pieces: Pieces) -> float:
    reached = {"verify": pieces.verify, "step": pieces.step}.get(phase.name, pieces.draft)
    return phase.times * (phase.weight_bytes + phase.kv_bytes) / (device.bandwidth * reached)


def predictions(
    device: Device,
    *,
    targets: Sequence[str] = TARGETS,
    draft: str = "llama-3.2-1b",
    sizes: Sequence[int] = SIZES,
    n_particles: int = 8,
    gammas: Sequence[int] = (8, 16),
    pieces: Pieces | None = None,
) -> Iterator[Prediction]:
    """Predicts each target alone and by SMC, on the numbers of devices that divide it and hold it."""
    decodings: list[Decoding] = [Autoregressive(), *(SMC(n_particles, gamma, control=0) for gamma in gammas)]
    for target in targets:
        for size in sizes:
            if fits(SHAPES[target], size):
                for decoding in decodings:
                    found = predict(device, target, draft, size, decoding, pieces or Pieces())
                    if found.fits:
                        yield found


def markdown(found: Sequence[Prediction]) -> str:
    """The table, with each decoder's tokens a second over those of the target alone."""
    heads = ["predicted", "devices", "GB of weights each", "ms streaming", "ms summing", "ms a cycle", "tokens/s"]
    heads += ["over the target alone", "of the weight roofline"]
    rows = []
    alone: dict[tuple[str, int], Prediction] = {}
    for one in found:
        if one.decoding == str(Autoregressive()):
            alone[one.target, one.size] = one
        peer = alone.get((one.target, one.size))
        over = "–"
        if peer is not None and peer is not one:
            ratios = [mine / theirs for mine, theirs in zip(one.tokens_per_second, peer.tokens_per_second, strict=True)]
            over = f"{_range(sorted(ratios), '{:.1f}')}×"
        cells = (
            f"{one.target}, {one.decoding}",
            f"{one.size}",
            f"{one.held_bytes / 1e9:.0f}",
            f"{one.weight_seconds * 1e3:.1f}",
            _range([seconds * 1e3 for seconds in one.sum_seconds], "{:.1f}"),
            _range([seconds * 1e3 for seconds in one.seconds], "{:.1f}"),
            _range(one.tokens_per_second, "{:.0f}"),
            over,
            f"{_range([100 * fraction for fraction in one.roofline_fraction], '{:.0f}')}%",
        )
        rows.append(cells)
    return table(heads, rows)


def _range(values: Sequence[float], form: str) -> str:
    texts = list(dict.fromkeys(form.format(value) for value in values))
    return " to ".join(texts)
