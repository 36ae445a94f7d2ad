"""The roofline by hand: DESIGN.md's bytes and times, and how they grow."""

from __future__ import annotations

import math

import jax
import pytest

from smcjax.bench.roofline import cycle_phases, streamed_weights
from smcjax.bench.shapes import SHAPES
from smcjax.decoders import SMC, Autoregressive, Decoding, Rejection
from smcjax.device import H200
from smcjax.model import ModelConfig
from smcjax.model.params import param_shapes

DRAFT, TARGET = SHAPES["llama-3.2-1b"], SHAPES["llama-3.1-8b"]
GB = 1e9


def totals(decoding: Decoding, groups: int = 1, context: int = 256) -> tuple[int, int, int]:
    """Bytes of weights, bytes of KV and FLOPs of a cycle."""
    phases = cycle_phases(TARGET, DRAFT, decoding.speculation, groups=groups, context=context)
    return (
        sum(phase.times * phase.weight_bytes for phase in phases),
        sum(phase.times * phase.kv_bytes for phase in phases),
        sum(phase.times * phase.flops for phase in phases),
    )


@pytest.mark.parametrize("name", SHAPES)
def test_streamed_weights_are_the_matrices(name: str) -> None:
    config: ModelConfig = SHAPES[name]
    shapes = jax.tree_util.tree_leaves_with_path(param_shapes(config, config.dtype))
    matrices = 0
    for path, leaf in shapes:
        where = jax.tree_util.keystr(path)
        if len(leaf.shape) == 2 and (where != ".embed" or config.tie_embeddings):
            matrices += math.prod(leaf.shape)
    assert streamed_weights(config) == matrices


def test_the_numbers_of_the_design() -> None:
    assert 2 * streamed_weights(DRAFT) / GB == pytest.approx(2.471, abs=6e-4)
    assert 2 * streamed_weights(TARGET) / GB == pytest.approx(15.009, abs=6e-4)
    weights, kv, _ = totals(SMC(8, 8))
    assert weights / GB == pytest.approx(34.8, abs=0.05)
    assert weights / H200.bandwidth * 1e3 == pytest.approx(7.25, abs=0.01)
    assert 9 / (weights / H200.bandwidth) == pytest.approx(1241, abs=2)
    assert kv / 256 == 393_216
    assert DRAFT.kv_bytes_per_token == 32_768
    assert TARGET.kv_bytes_per_token == 131_072


def test_an_undeferred_bonus_costs_one_draft_forward() -> None:
    one_draft = 2 * streamed_weights(DRAFT)
    deferred, undeferred = totals(SMC(8, 8)), totals(SMC(8, 8, defer_bonus=False))
    without = totals(SMC(8, 8, bonus=False))
    assert undeferred[0] - deferred[0] == one_draft
    assert undeferred[2] == deferred[2]  # the same tokens go through the draft, one forward later
    assert without[0] == deferred[0]
    assert without[2] < deferred[2]
    names = [
        (phase.name, phase.times) for phase in cycle_phases(TARGET, DRAFT, SMC(8, 1).speculation, groups=1, context=1)
    ]
    assert names == [("draft head", 1), ("draft", 0), ("verify", 1)]


def test_groups_and_context_scale_kv_and_not_weights() -> None:
    one, many = totals(SMC(8, 8)), totals(SMC(8, 8), groups=5)
    assert many[0] == one[0]
    assert many[1] == 5 * one[1]
    assert many[2] == 5 * one[2]
    assert totals(SMC(8, 8), context=512)[1] == 2 * one[1]
    # Particles share the context's pages: more of them cost FLOPs alone.
    assert totals(SMC(16, 8))[:2] == one[:2]
    assert totals(SMC(16, 8))[2] == 2 * one[2]


def test_many_groups_are_bound_by_arithmetic() -> None:
    bandwidth, rate = 4.8e12, 7e14

    def verify(groups: int) -> tuple[float, float, float]:
        phase = cycle_phases(TARGET, DRAFT, SMC(8, 8).speculation, groups=groups, context=256)[-1]
        memory = (phase.weight_bytes + phase.kv_bytes) / bandwidth
        return phase.seconds(bandwidth, rate), memory, phase.flops / rate

    seconds, memory, arithmetic = verify(1)
    assert seconds == memory > arithmetic
    seconds, memory, arithmetic = verify(32)
    assert seconds == arithmetic > memory
    assert arithmetic == 2 * streamed_weights(TARGET) * 32 * 8 * 9 / rate


def test_the_target_alone() -> None:
    (phase,) = cycle_phases(TARGET, DRAFT, Autoregressive().speculation, groups=3, context=100)
    assert phase.times == 1
    assert phase.weight_bytes == 2 * streamed_weights(TARGET)
    assert phase.kv_bytes == 300 * TARGET.kv_bytes_per_token
    assert phase.flops == 2 * streamed_weights(TARGET) * 3
    assert phase.seconds(1e12, 1e30) == pytest.approx((phase.weight_bytes + phase.kv_bytes) / 1e12)


def test_a_tree_costs_its_nodes() -> None:
    """21 nodes of three levels stream the weights as often as a chain of three, and go through them one by one."""
    chain, tree = totals(Rejection(gamma=3)), totals(Rejection(tree=(4, 2, 1)))
    assert tree[:2] == chain[:2]
    assert totals(Rejection(tree=(1, 1, 1))) == chain
    drafted, scored = (4 + 8) - 2, 21 - 4  # more than the chain
    assert tree[2] - chain[2] == 2 * (drafted * streamed_weights(DRAFT) + scored * streamed_weights(TARGET))
