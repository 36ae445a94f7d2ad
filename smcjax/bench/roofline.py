"""The least time a cycle can take on a device, from its configuration alone.

    roofline = Σ over draft head, the other draft forwards, verify of  max(bytes / bandwidth, FLOPs / rate)

bytes = weights that the forward streams + the KV that its queries must read, each shared page counted once; FLOPs = two
per weight and token. Both from the configuration; bandwidth from the datasheet, rate measured in the same run.

Each kind of attention says what a query must read (`AttentionKind.least_read`). No configuration says which blocks
sparse queries select: all of a request are taken to select alike, and what adds least to their window. So their bytes
are a bound from below, where those of full attention are a count.
"""

from __future__ import annotations

import dataclasses

from smcjax.decoders import Speculation
from smcjax.model.config import ModelConfig


def streamed_weights(config: ModelConfig) -> int:
    """Weights that every token goes through: all but an untied embedding and those of kinds of attention alone.

    Left out with the latter are gates and what makes compressed tokens, which not every forward does.
    """
    e, f, d = config.hidden_size, config.intermediate_size, config.head_dim
    pairs = sum(config.layer(index).attention.kv_pairs for index in range(config.num_layers))
    attention = 2 * (config.num_layers * config.num_heads + pairs * config.num_kv_heads) * d * e
    return attention + config.num_layers * 3 * e * f + config.vocab_size * e


def least_kv_bytes(config: ModelConfig, context: int, *, first: int = 0) -> int:
    """Bytes of pages that the last of `context` positions reads at least, in all layers.

    What was written at positions before `first` is left out.
    """
    layers = zip(map(config.layer, range(config.num_layers)), config.cache_specs, strict=True)
    return sum(spec.bytes_of(layer.attention.least_read(context, first), config.itemsize) for layer, spec in layers)


@dataclasses.dataclass(frozen=True)
class Phase:
    """One kind of forward in a cycle."""

    name: str
    times: int  # forwards of this kind a cycle
    weight_bytes: int  # a forward
    kv_bytes: int  # a forward
    flops: int  # a forward

    def seconds(self, bandwidth: float, flop_rate: float) -> float:
        """The bound of all `times` forwards."""
        return self.times * max((self.weight_bytes + self.kv_bytes) / bandwidth, self.flops / flop_rate)


def _phase(
    name: str, config: ModelConfig, times: int, tokens: int, kv_bytes: int, quantization: str | None = None
) -> Phase:
    weights = streamed_weights(config)
    return Phase(
        name=name,
        times=times,
        weight_bytes=weights * (config.itemsize if quantization is None else 1),
        kv_bytes=kv_bytes,
        flops=2 * weights * tokens,
    )


def cycle_phases(
    target: ModelConfig,
    draft: ModelConfig,
    speculation: Speculation,
    *,
    groups: int,
    context: int,
    private: int = 0,
    quantization: str | None = None,
    draft_quantization: str | None = None,
) -> list[Phase]:
    """The phases of one cycle of `groups` requests with `context` tokens of KV.

    Rows of a request share all of it but the last `private` tokens, of which each has its own; of a row's queries one
    counts, at the last token. A quantised model's weights count a byte each. Without drafts there is one phase, the
    target's step.
    """
    rows = groups * speculation.rows

    def kv_bytes(config: ModelConfig) -> int:
        others = (speculation.rows - 1) * least_kv_bytes(config, context, first=context - private)
        return groups * (least_kv_bytes(config, context) + others)

    of_target = kv_bytes(target)
    if not speculation.gamma:
        return [_phase("step", target, 1, rows, of_target, quantization)]
    of_draft = kv_bytes(draft)
    single_forwards = speculation.gamma - 1 + (speculation.bonus and not speculation.defers)
    # Of a tree a forward a depth, over all inner nodes of that depth: here each over their mean.
    drafted = single_forwards if speculation.tree is None else len(speculation.tree.inner) - 1
    tokens = -(-rows * drafted // max(1, single_forwards))
    return [
        _phase("draft head", draft, 1, rows * (2 if speculation.defers else 1), of_draft, draft_quantization),
        _phase("draft", draft, single_forwards, tokens, of_draft, draft_quantization),
        _phase("verify", target, 1, rows * speculation.scored, of_target, quantization),
    ]
