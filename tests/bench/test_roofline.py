"""The roofline by hand: DESIGN.md's bytes and times, and how they grow; what sparse queries must read."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from smcjax.bench.roofline import cycle_phases, least_kv_bytes, streamed_weights
from smcjax.bench.shapes import SHAPES
from smcjax.decoders import SMC, Autoregressive, Decoding, Rejection
from smcjax.device import H200
from smcjax.model import LayerSpec, ModelConfig
from smcjax.model.attention import AttentionKind, Full, SlidingWindow
from smcjax.model.params import param_shapes
from smcjax.sparse.nsa import NSA

DRAFT, TARGET = SHAPES["llama-3.2-1b"], SHAPES["llama-3.1-8b"]
SPARSE = dataclasses.replace(TARGET, layers=(LayerSpec(NSA()),))
GB = 1e9


def totals(decoding: Decoding, groups: int = 1, context: int = 256) -> tuple[int, int, int]:
    """Bytes of weights, bytes of KV and FLOPs of a cycle."""
    phases = cycle_phases(TARGET, DRAFT, decoding.speculation, groups=groups, context=context)
    return (
        sum(phase.times * phase.weight_bytes for phase in phases),
        sum(phase.times * phase.kv_bytes for phase in phases),
        sum(phase.times * phase.flops for phase in phases),
    )


@pytest.mark.parametrize("name", [*SHAPES, "sparse"])
def test_streamed_weights_are_the_matrices(name: str) -> None:
    config: ModelConfig = {**SHAPES, "sparse": SPARSE}[name]
    shapes = jax.tree_util.tree_leaves_with_path(param_shapes(config, config.dtype))
    matrices = 0
    for path, leaf in shapes:
        where = jax.tree_util.keystr(path)
        if ".attention" not in where and len(leaf.shape) == 2 and (where != ".embed" or config.tie_embeddings):
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
    assert DRAFT.page_bytes(1) == 32_768
    assert TARGET.page_bytes(1) == 131_072


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
    assert phase.kv_bytes == 300 * TARGET.page_bytes(1)
    assert phase.flops == 2 * streamed_weights(TARGET) * 3
    assert phase.seconds(1e12, 1e30) == pytest.approx((phase.weight_bytes + phase.kv_bytes) / 1e12)


@pytest.mark.parametrize(
    ("context", "dense", "sparse", "shared", "tokens"),
    [
        (8192, 33.6, 8.4, 6.3, 2047),
        (16_384, 67.1, 10.5, 8.4, 2559),
        (32_768, 134, 14.7, 12.6, 3583),
        (65_536, 268, 23.1, 21.0, 5631),
    ],
)
def test_bytes_and_tokens_of_the_specification(
    context: int, dense: float, sparse: float, shared: float, tokens: int
) -> None:
    """Megabytes a layer at the 8B model's shape, and how many positions and compressed tokens a query reads."""
    assert least_kv_bytes(TARGET, context) / 32e6 == pytest.approx(dense, rel=5e-3)
    assert least_kv_bytes(SPARSE, context) / 32e6 == pytest.approx(sparse, abs=0.05)
    read = NSA().least_read(context)
    assert sum(count for name, count in read.items() if "keys" in name) == tokens
    assert sum(count for name, count in read.items() if "values" in name) == tokens
    # Of one pair of keys and values for all branches, the window's 8 blocks are the last two and six of the free ones.
    one_pair = NSA(kv="shared").least_read(context)
    assert one_pair["keys"] == 512 + 8 * 64
    assert one_pair["compressed_keys"] == read["compressed_keys"] == (context - 32) // 16 + 1
    config = dataclasses.replace(TARGET, layers=(LayerSpec(NSA(kv="shared")),))
    assert least_kv_bytes(config, context) / 32e6 == pytest.approx(shared, abs=0.05)
    assert (SPARSE.page_bytes(16), config.page_bytes(16)) == (32 * 16 * 12_544, 32 * 16 * 4352)


@st.composite
def kinds(draw: st.DrawFn) -> NSA:
    """Small ones, whose selections can be counted."""
    stride, init, local = draw(st.integers(1, 3)), draw(st.integers(0, 2)), draw(st.integers(0, 2))
    return NSA(
        kernel_size=stride * draw(st.integers(1, 3)),
        kernel_stride=stride,
        block_size=stride * draw(st.integers(1, 3)),
        num_blocks=max(1, init + local) + draw(st.integers(0, 2)),
        window=draw(st.integers(1, 9)),
        init_blocks=init,
        local_blocks=local,
        kv=draw(st.sampled_from(["per_branch", "shared"])),
    )


def reads(kind: NSA, context: int, first: int) -> list[dict[str, int]]:
    """Counts of what the last query reads under every selection that it can make, position by position."""
    t, blocks = context - 1, (context - 1) // kind.block_size + 1
    forced = {j for j in range(blocks) if j < kind.init_blocks or j > blocks - 1 - kind.local_blocks}
    window = {r for r in range(context) if r > t - kind.window}
    ends = range(kind.kernel_size - 1, context, kind.kernel_stride)
    compressed = sum(end >= first for end in ends)
    found = []
    for chosen in itertools.combinations(range(blocks), min(kind.num_blocks, blocks)):
        if forced <= set(chosen):
            selected = {r for r in range(context) if r // kind.block_size in chosen}
            arrays = {"": selected | window} if kind.kv == "shared" else {"": selected, "window_": window}
            found.append({"compressed_keys": compressed, "compressed_values": compressed})
            for name, positions in arrays.items():
                number = sum(r >= first for r in positions)
                found[-1] |= {f"{name}keys": number, f"{name}values": number}
    return found


@given(kind=kinds(), context=st.integers(1, 24), data=st.data())
def test_least_read_is_that_of_the_cheapest_selection(kind: NSA, context: int, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, context))
    found = reads(kind, context, first)
    assert kind.least_read(context, first) == min(found, key=lambda read: read["keys"])
    assert set(kind.least_read(context)) <= set(kind.cache(TARGET).arrays)


def test_control_selections_differ_in_what_they_read() -> None:
    kind = NSA(kernel_size=2, kernel_stride=2, block_size=2, num_blocks=3, window=4, local_blocks=1, kv="shared")
    assert len({read["keys"] for read in reads(kind, 16, 0)}) > 1
    assert kind.least_read(16)["keys"] < max(read["keys"] for read in reads(kind, 16, 0))


@pytest.mark.parametrize(
    ("kind", "read"), [(Full(), 100), (SlidingWindow(30), 30), (SlidingWindow(100), 100), (SlidingWindow(300), 100)]
)
def test_dense_kinds_read_what_they_see(kind: AttentionKind, read: int) -> None:
    assert kind.least_read(100) == {"keys": read, "values": read}
    assert kind.least_read(100, 90) == {"keys": 10, "values": 10}
    assert kind.least_read(100, 60) == dict.fromkeys(("keys", "values"), min(read, 40))
    assert kind.least_read(100, 100) == {"keys": 0, "values": 0}


def phases(target: ModelConfig, **case: Any) -> list[int]:
    found = cycle_phases(target, DRAFT, SMC(8, 8).speculation, context=8192, **case)
    return [phase.kv_bytes for phase in found]


def test_a_sparse_targets_cycle() -> None:
    """Its verification reads what one query of a request does, and of private pages what one of each row does."""
    *of_draft, verify = phases(SPARSE, groups=3)
    assert of_draft == phases(TARGET, groups=3)[:-1]
    assert verify == 3 * 32 * 2047 * 4096
    # Of the last 1,024 tokens each row reads its window, its last two blocks, 64 compressed tokens; the rest is shared.
    private = phases(SPARSE, groups=3, private=1024)[-1]
    assert private == verify + 3 * 32 * 7 * (512 + 2 * 64 + 64) * 4096


def test_a_tree_costs_its_nodes() -> None:
    """21 nodes of three levels stream the weights as often as a chain of three, and go through them one by one."""
    chain, tree = totals(Rejection(gamma=3)), totals(Rejection(tree=(4, 2, 1)))
    assert tree[:2] == chain[:2]
    assert totals(Rejection(tree=(1, 1, 1))) == chain
    drafted, scored = (4 + 8) - 2, 21 - 4  # more than the chain
    assert tree[2] - chain[2] == 2 * (drafted * streamed_weights(DRAFT) + scored * streamed_weights(TARGET))
