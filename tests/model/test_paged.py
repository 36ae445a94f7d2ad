"""The paged forward, in chunks and over scattered pages, gives the dense forward's logits: for every kind of layer."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smcjax.kv import TRASH
from smcjax.model import LayerSpec, ModelConfig, Params, Rope, logits
from smcjax.model.attention import Full, SlidingWindow
from smcjax.model.decoder import unembed
from smcjax.model.paged import create_cache, paged_hidden_states, plan_attention
from smcjax.model.view import BatchView
from tests.helpers import noisy_params, tiny_config

VOCAB, PAGE = 11, 4
_paged = jax.jit(paged_hidden_states, static_argnums=0)
_dense = jax.jit(logits, static_argnums=0)
LOCAL = LayerSpec(SlidingWindow(3), Rope(100.0))
GLOBAL = LayerSpec(Full(), Rope(5000.0))
GEMMA = LayerSpec(SlidingWindow(5, scale=0.1), qk_norm=True, post_norms=True, activation="gelu_tanh")
LAYERS: dict[str, tuple[LayerSpec, ...]] = {
    "local, local, global": (LOCAL, LOCAL, GLOBAL),
    "global, local": (GLOBAL, LOCAL),
    "two windows": (LOCAL, dataclasses.replace(LOCAL, attention=SlidingWindow(7))),
    "scale": (dataclasses.replace(GLOBAL, attention=Full(0.2)),),
    "gemma": (GEMMA, dataclasses.replace(GEMMA, attention=Full(0.1), rope=Rope(1e6))),
}


def paged_logits(
    config: ModelConfig, params: Params, rows: list[list[int]], *, chunk: int, page_size: int = PAGE
) -> list[np.ndarray]:
    """Logits of all positions. Each row starts a chunk after the one before; what holds no KV is full of NaN."""
    count, longest = len(rows), max(map(len, rows))
    width = -(-longest // page_size) + 1
    table = 1 + np.random.default_rng(0).permutation(count * width).reshape(count, width)
    cache = create_cache(config, params, num_pages=1 + count * width, page_size=page_size)
    cache = jax.tree.map(lambda pages: jnp.full_like(pages, jnp.nan), cache)
    lengths = np.array([[len(row)] for row in rows])
    tokens = np.array([row + [0] * (longest - len(row)) for row in rows])
    found: list[list[np.ndarray]] = [[] for _ in rows]
    for start in range(0, longest + count * chunk, chunk):
        positions = start - chunk * np.arange(count)[:, None] + np.arange(chunk)
        new = (positions >= 0) & (positions < lengths)
        places = np.clip(positions, 0, longest - 1)
        view = BatchView(
            tokens=jnp.asarray(np.take_along_axis(tokens, places, axis=1), jnp.int32),
            positions=jnp.asarray(np.maximum(positions, np.arange(chunk)), jnp.int32),
            block_table=jnp.asarray(table, jnp.int32),
            write_pages=jnp.asarray(np.where(new, np.take_along_axis(table, places // page_size, axis=1), TRASH)),
            lengths=jnp.asarray(np.max(np.where(new, positions + 1, 0), axis=1), jnp.int32),
            num_immutable=jnp.asarray(np.maximum(positions[:, 0], 0), jnp.int32),
            page_size=page_size,
        )
        plans = plan_attention(config, params, view, columns=chunk)
        hidden, cache = _paged(config, params, cache, view, plans)
        out = np.asarray(unembed(params, hidden))
        for row, kept in enumerate(found):
            kept.extend(out[row, new[row]])
    return [np.array(kept) for kept in found]


def dense_logits(config: ModelConfig, params: Params, rows: list[list[int]]) -> list[np.ndarray]:
    """Logits of all positions, each row by itself."""
    longest = max(map(len, rows))
    padded = jnp.asarray([row + [0] * (longest - len(row)) for row in rows])
    return [np.asarray(out[: len(row)]) for out, row in zip(_dense(config, params, padded), rows, strict=True)]


def random_rows(*lengths: int) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, VOCAB, length).tolist() for length in lengths]


def difference(some: list[np.ndarray], others: list[np.ndarray]) -> float:
    """The largest between any two logits."""
    return max(float(np.abs(one - other).max()) for one, other in zip(some, others, strict=True))


def windowed(window: int) -> tuple[LayerSpec, ...]:
    return (dataclasses.replace(LOCAL, attention=SlidingWindow(window)),)


@pytest.mark.parametrize("window", [1, 3, PAGE - 1, PAGE, PAGE + 1, 100])
@pytest.mark.parametrize("heads", [(2, 1), (4, 2), (2, 2)], ids=str)
def test_windows(window: int, heads: tuple[int, int]) -> None:
    shape = {"num_heads": heads[0], "num_kv_heads": heads[1]}
    config = tiny_config(VOCAB, layers=windowed(window), **shape)
    params, rows = noisy_params(config), random_rows(13, 1, 18)
    got = paged_logits(config, params, rows, chunk=5)
    assert difference(got, dense_logits(config, params, rows)) < 1e-4
    if window < 18:
        wider = tiny_config(VOCAB, layers=windowed(window + 1), **shape)
        assert difference(got, dense_logits(wider, params, rows)) > 1e-2, "control: a slot more matters"


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("head_dim", [4, 256])
def test_patterns_of_layers(name: str, head_dim: int) -> None:
    """Layers that are one like another would be are seen: the pattern turned round gives other logits."""
    config = tiny_config(VOCAB, layers=LAYERS[name], num_layers=4, head_dim=head_dim, embed_scale=3.0)
    params, rows = noisy_params(config), random_rows(13, 2, 18)
    got = paged_logits(config, params, rows, chunk=5)
    assert difference(got, dense_logits(config, params, rows)) < 1e-3
    if len(config.layers) > 1:
        turned = dataclasses.replace(config, layers=config.layers[::-1])
        assert difference(got, dense_logits(turned, params, rows)) > 1e-2, "control"


def test_a_window_of_512() -> None:
    """Prompts in chunks of 512, rows at unlike places."""
    config = tiny_config(VOCAB, layers=windowed(512), num_layers=1, max_position_embeddings=2048)
    params, rows = noisy_params(config), random_rows(1300, 700)
    got = paged_logits(config, params, rows, chunk=512, page_size=16)
    assert difference(got, dense_logits(config, params, rows)) < 1e-4


@pytest.mark.slow
@settings(max_examples=20)
@given(
    kinds=st.lists(
        st.sampled_from([Full(), Full(0.3), *map(SlidingWindow, (1, 2, 3, 4, 5, 9))]), min_size=1, max_size=3
    ),
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=3),
    chunk=st.integers(1, 6),
    page_size=st.integers(1, 6),
)
def test_any_layers_lengths_chunks_and_pages(kinds: list[Any], lengths: list[int], chunk: int, page_size: int) -> None:
    config = tiny_config(VOCAB, layers=tuple(LayerSpec(kind) for kind in kinds), num_layers=3)
    params, rows = noisy_params(config), random_rows(*lengths)
    got = paged_logits(config, params, rows, chunk=chunk, page_size=page_size)
    assert difference(got, dense_logits(config, params, rows)) < 1e-4
