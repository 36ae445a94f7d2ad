"""A model that eight virtual devices hold together: its logits are those of one device, and each gets its pieces alone.

Run by `tests/engine/test_parallel.py` in a process of its own, for XLA is told the number of devices when it starts.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import smcjax.matmul
from smcjax.decoding.drafts import fused_step
from smcjax.matmul import Quantized, matrix
from smcjax.model import ModelConfig, init_params, logits
from smcjax.model.attention import SlidingWindow
from smcjax.model.config import LayerSpec
from smcjax.model.files.checkpoint import load_checkpoint
from smcjax.model.parallel import (
    AXIS,
    Layout,
    TensorParallel,
    devices_of_host,
    layouts,
)
from smcjax.model.quantize import quantize_params
from smcjax.pallas import PeerMemory
from smcjax.sparse.nsa import NSA
from tests.checkpoints import write_model

SHAPE: dict[str, Any] = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 4, "intermediate_size": 32, "num_layers": 2}


def split_params(params: Any, config: ModelConfig, parallel: TensorParallel) -> Any:
    """Plain weights of one device, divided among several."""

    def split(leaf: Any, layout: Layout) -> jax.Array:
        return parallel.place(np.asarray(leaf), layout)

    return jax.tree.map(split, params, layouts(config, parallel.size, parallel.vocabulary))


@pytest.fixture(scope="module", autouse=True)
def _eight_devices() -> None:
    assert jax.device_count() >= 8, "XLA_FLAGS=--xla_force_host_platform_device_count=8"


# Of 7 positions, in 4 blocks, two are selected: the query's own, and the best of the others.
SPARSE = NSA(kernel_size=2, kernel_stride=1, block_size=2, num_blocks=2, window=2, local_blocks=1, init_blocks=0)

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-tied": {"tie_embeddings": True},
    "multi-head": {"num_kv_heads": 8},
    "multi-query": {"num_kv_heads": 1},
    "qwen2-bias": {"layers": (LayerSpec(qkv_bias=True, o_bias=True, mlp_bias=True),)},
    "qwen3-norms": {"layers": (LayerSpec(qk_norm="head"),), "tie_embeddings": True},
    "gemma": {
        "layers": (
            LayerSpec(qk_norm="head", post_norms=True, activation="gelu_tanh", attention=SlidingWindow(3)),
            LayerSpec(qk_norm="head", post_norms=True, activation="gelu_tanh"),
        ),
        "embed_scale": 4.0,
        "tie_embeddings": True,
    },
    "sparse": {"layers": (LayerSpec(SPARSE), LayerSpec())},
    "sparse-shared": {"layers": (LayerSpec(dataclasses.replace(SPARSE, kv="shared")),)},
}


def model(**changes: Any) -> tuple[ModelConfig, Any]:
    """A model of 2 layers and 45 tokens whose arrays are all random, norms and biases too."""
    fields = {**SHAPE, "vocab_size": 45, "hidden_size": 16, "max_position_embeddings": 64, **changes}
    config = ModelConfig(**fields)
    leaves, tree = jax.tree.flatten(init_params(config, jax.random.key(0)))
    keys = jax.random.split(jax.random.key(1), len(leaves))
    noisy = [x + 0.3 * jax.random.normal(key, x.shape) for x, key in zip(leaves, keys, strict=True)]
    return config, jax.tree.unflatten(tree, noisy)


TOKENS = np.random.default_rng(0).integers(0, 45, (2, 7))


def logits_of(config: ModelConfig, params: Any, size: int, peer_memory: PeerMemory | None = None) -> jax.Array:
    """Logits of `TOKENS` by `size` devices, whose pieces `params` are."""
    parallel = devices_of_host(size)
    specs = jax.tree.map(lambda leaf: leaf.sharding.spec, params)

    def on_each(params: Any) -> jax.Array:
        return logits(parallel.local(config), parallel.local_params(config, params, peer_memory), TOKENS)[None]

    by_device = jax.sharding.PartitionSpec(AXIS)
    spread = jax.shard_map(on_each, mesh=parallel.mesh, in_specs=(specs,), out_specs=by_device, check_vma=False)
    every = jax.jit(spread)(params)
    np.testing.assert_array_equal(np.asarray(every), np.broadcast_to(np.asarray(every[0]), every.shape))
    return every[0]


def close(got: Any, want: Any) -> bool:
    return np.allclose(np.asarray(got), np.asarray(want), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("family", "size"), [*((family, 4) for family in FAMILIES), ("llama", 2), ("llama", 8)])
def test_logits_are_those_of_one_device(family: str, size: int) -> None:
    config, params = model(**FAMILIES[family])
    want = logits(config, params, TOKENS)
    divided = split_params(params, config, devices_of_host(size))
    assert close(logits_of(config, divided, size), want)


def test_peers_leave_to_collectives_what_they_do_not_take() -> None:
    """All of it on a CPU, where none of their kernels is made."""
    config, params = model()
    divided = split_params(params, config, devices_of_host(2))
    np.testing.assert_array_equal(logits_of(config, divided, 2, PeerMemory(None, 2)), logits_of(config, divided, 2))


def test_heads_that_select_together_sum_their_weights_over_devices(patch_programs: Any) -> None:
    """Without that sum the four devices of a key-value head select different blocks, and logits are others."""
    config, params = model(layers=(LayerSpec(SPARSE),))
    divided, want = split_params(params, config, devices_of_host(8)), logits(config, params, TOKENS)
    assert close(logits_of(config, divided, 8), want)
    patch_programs(NSA, "partition", lambda kind, devices, axis: kind)
    assert not close(logits_of(config, divided, 8), want)


@pytest.mark.parametrize(
    "wrong",
    ["no sum", "order of heads", "kv heads", "rows as they lie", "vocabulary", "gates", "compression", "branches"],
)
def test_controls_of_the_layout(wrong: str, patch_programs: Any) -> None:
    of_sparse = {"gates": {}, "compression": {"num_kv_heads": 4}, "branches": {"num_kv_heads": 4}}
    config, params = model(**({"layers": (LayerSpec(SPARSE),), **of_sparse[wrong]} if wrong in of_sparse else {}))
    size = 4
    want = logits(config, params, TOKENS)
    right = Layout.pieces

    def pieces(layout: Layout, array: np.ndarray, size: int) -> list[np.ndarray]:
        runs, q = layout.runs, config.num_heads * config.head_dim
        if wrong == "order of heads" and layout.axis == 1 and runs[0][0] == q:
            return right(layout, array, size)[::-1]
        if wrong == "kv heads" and len(runs) == 3:  # device i has head i mod Hkv, not ⌊i · Hkv / n⌋
            return [right(layout, array, size)[i] for i in (0, 2, 1, 3)]
        if wrong == "rows as they lie" and len(runs) == 2:  # of gate and up
            return right(Layout(0, ((array.shape[0], size),)), array, size)
        if wrong == "gates" and layout.axis == 0 and runs == ((config.num_heads, size),):
            return right(layout, array, size)[::-1]
        if wrong == "compression" and layout.axis == 0 and runs == ((config.num_kv_heads, size),):
            return right(layout, array, size)[::-1]
        if wrong == "branches" and len(runs) == 7:  # all keys of a device's head, then all its values, by one run each
            whole = config.num_kv_heads * config.head_dim * 3
            return right(Layout(0, ((q, size), (whole, size), (whole, size))), array, size)
        if wrong == "vocabulary" and layout.axis == 0 and runs[0][0] == config.vocab_size:
            return right(layout, array, size)[::-1]
        return right(layout, array, size)

    patch_programs(Layout, "pieces", pieces)
    if wrong == "no sum":
        patch_programs(
            smcjax.matmul, "_sum_over", lambda axis, x, peer_memory, add_to=None: x if add_to is None else x + add_to
        )
    parallel = devices_of_host(size)
    divided = split_params(params, config, parallel)
    assert not close(logits_of(config, divided, size), want)


@pytest.mark.parametrize("size", [2, 4])
def test_int8_has_the_numbers_of_one_device(size: int) -> None:
    """Rounded where it lies, a matrix split by columns too has the scales of whole rows."""
    config, params = model(head_dim=8, intermediate_size=64, hidden_size=32)
    parallel = devices_of_host(size)
    whole = quantize_params(params)
    divided = parallel.placed(config, quantize_params(split_params(params, config, parallel)))
    for name in ("qkv", "o", "gate_up", "down"):
        one, of_all = getattr(whole.layers[1], name), getattr(divided.layers[1], name)
        layout = getattr(layouts(config, size).layers[1], name)
        pieces = layout.pieces(np.asarray(matrix(one).rows(slice(None))), size)
        for piece, values in zip(pieces, of_all.values.addressable_shards, strict=True):
            scale = next(s for s in of_all.scale.addressable_shards if s.device == values.device)
            own = Quantized(values.data, scale.data, one.compute_dtype, one.quantization)
            np.testing.assert_array_equal(np.asarray(own.rows(slice(None))), piece)
    assert close(logits_of(config, divided, size), logits(config, whole, TOKENS))


def test_whole_rows_of_a_matrix_that_is_split_by_columns() -> None:
    config, params = model()
    parallel = devices_of_host(4)
    down = params.layers[0].down
    pieces = split_params(params, config, parallel).layers[0].down

    def rows(piece: jax.Array) -> jax.Array:
        return smcjax.matmul.RowParallel(piece, AXIS).rows(jnp.array([3, 0]))

    spec = pieces.sharding.spec
    whole = jax.shard_map(rows, mesh=parallel.mesh, in_specs=spec, out_specs=jax.P(), check_vma=False)(pieces)
    np.testing.assert_array_equal(np.asarray(whole), np.asarray(down[jnp.array([3, 0])]))


def test_the_persistent_kernel_refuses_a_part_of_a_model() -> None:
    config, params = model()
    parallel = devices_of_host(2)
    assert fused_step.accepts(config, params)
    assert not fused_step.accepts(parallel.local(config), parallel.local_params(config, params))
    peer_memory = PeerMemory(None, 2)
    sums = parallel.local_params(config, params, peer_memory)  # of whole rows of embedding and LM head
    assert fused_step.accepts(parallel.local(config), sums), "which sums tiles over devices by itself"
    wide = dataclasses.replace(parallel.local(config), hidden_size=8208)
    assert not fused_step.accepts(wide, sums), "more tiles than a workspace has"
    assert fused_step.accepts(dataclasses.replace(config, hidden_size=8208), params)
    first, second = sums.layers
    for name in fused_step.MATRICES:  # one whole among parts, or a part among those that are read whole
        other = getattr(first, name)
        other = other.part if name in fused_step.SUMMED else smcjax.matmul.RowParallel(other, AXIS, peer_memory)
        mixed = dataclasses.replace(sums, layers=(dataclasses.replace(first, **{name: other}), second))
        assert not fused_step.accepts(parallel.local(config), mixed), name
    gathers = smcjax.matmul.VocabularyParallel(params.embed, AXIS, config.vocab_size, peer_memory)
    assert not fused_step.accepts(parallel.local(config), dataclasses.replace(sums, embed=gathers))
    assert not fused_step.accepts(
        parallel.local(config), parallel.local_params(config, quantize_params(params), peer_memory)
    )


def test_no_device_is_sent_more_than_its_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As files are read, not only in the end."""
    target = write_model(tmp_path, 271, 1, **{**SHAPE, "num_layers": 1, "hidden_size": 16})
    sent: dict[Any, int] = {}
    put = jax.device_put

    def counted(x: Any, device: Any = None, **options: Any) -> Any:
        assert isinstance(device, jax.Device), "each array is sent to one device by its name"
        if isinstance(x, np.ndarray):
            sent[device] = sent.get(device, 0) + x.nbytes
        return put(x, device, **options)

    monkeypatch.setattr(jax, "device_put", counted)
    _, params = load_checkpoint(target, "float32", parallel=devices_of_host(4))
    held = dict.fromkeys(sent, 0)
    for leaf in jax.tree.leaves(params):
        for shard in leaf.addressable_shards:
            held[shard.device] += shard.data.nbytes
    assert sent == held
    assert len(sent) == 4
    # Of 272 rows of embedding and head 68; of a layer 2 query heads, a whole key-value head, 8 of the MLP's entries.
    elements = 2 * 68 * 16 + (2 + 1 + 1) * 4 * 16 + 16 * 2 * 4 + 3 * 8 * 16 + 3 * 16
    assert set(held.values()) == {4 * elements}
