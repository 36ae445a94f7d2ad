"""The least time a cycle can take on a device, from its configuration alone.

    roofline = Σ over draft head, the other draft forwards, verify of  max(bytes / bandwidth, FLOPs / rate)

bytes = weights that the forward streams + the KV that its queries see, each shared page counted once; FLOPs = two per
weight and token. Both from the configuration; bandwidth from the datasheet, rate measured in the same run.
"""

from __future__ import annotations

import dataclasses

from smcjax.decoders import Speculation
from smcjax.model.config import ModelConfig


def streamed_weights(config: ModelConfig) -> int:
    """Weights that one forward reads: all but an untied embedding, of which it reads a few rows."""
    e, f, d = config.hidden_size, config.intermediate_size, config.head_dim
    attention = (config.num_heads + 2 * config.num_kv_heads) * d * e + config.num_heads * d * e
    return config.num_layers * (attention + 3 * e * f) + config.vocab_size * e


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
    name: str, config: ModelConfig, times: int, tokens: int, kv_tokens: int, quantization: str | None = None
) -> Phase:
    weights = streamed_weights(config)
    return Phase(
        name=name,
        times=times,
        weight_bytes=weights * (config.itemsize if quantization is None else 1),
        kv_bytes=kv_tokens * config.kv_bytes_per_token,
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

    Rows of a request share all of it but the last `private` tokens, of which each has its own. A quantised model's
    weights count a byte each. Without drafts there is one phase, the target's step.
    """
    rows = groups * speculation.rows
    if not speculation.gamma:
        return [_phase("step", target, 1, rows, groups * context, quantization)]
    kv_tokens = groups * (context - private + speculation.rows * private)
    single_forwards = speculation.gamma - 1 + (speculation.bonus and not speculation.defers)
    # Of a tree a forward a depth, over all inner nodes of that depth: here each over their mean.
    drafted = single_forwards if speculation.tree is None else len(speculation.tree.inner) - 1
    tokens = -(-rows * drafted // max(1, single_forwards))
    return [
        _phase("draft head", draft, 1, rows * (2 if speculation.defers else 1), kv_tokens, draft_quantization),
        _phase("draft", draft, single_forwards, tokens, kv_tokens, draft_quantization),
        _phase("verify", target, 1, rows * speculation.scored, kv_tokens, quantization),
    ]
