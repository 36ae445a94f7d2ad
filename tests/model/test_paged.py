"""The paged forward, in chunks and over scattered pages, gives the dense forward's logits: for every kind of layer."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smcjax.kv import TRASH, CacheSpec, Copies, LayerCache, PageArray
from smcjax.model import LayerSpec, ModelConfig, Params, Rope, logits
from smcjax.model.attention import AttentionKind, Full, HeadShape, Projection, SlidingWindow
from smcjax.model.decoder import unembed
from smcjax.model.paged import create_cache, paged_hidden_states, plan_attention
from smcjax.model.view import BatchView, TreeView
from smcjax.model.visible_kv import grouped, scaled_scores, tree_kv
from smcjax.pallas import attention, copy_pages
from smcjax.sparse.nsa import NSA
from tests.helpers import noisy_params, tiny_config

VOCAB, PAGE = 11, 4
_paged = jax.jit(paged_hidden_states, static_argnums=0)
_dense = jax.jit(logits, static_argnums=0)
LOCAL = LayerSpec(SlidingWindow(3), Rope(100.0))
GLOBAL = LayerSpec(Full(), Rope(5000.0))
SPARSE = NSA(kernel_size=4, kernel_stride=2, block_size=4, num_blocks=3, window=3, local_blocks=1)
GEMMA = LayerSpec(SlidingWindow(5, scale=0.1), qk_norm="head", post_norms=True, activation="gelu_tanh")


@dataclasses.dataclass(frozen=True)
class Blocks(AttentionKind):
    """A kind of another sort, all of it in this class: sees its own block's tokens and the means of earlier blocks.

    Its pages hold means beside keys and values; its plan is not None.
    """

    size: int

    def cache(self, config: HeadShape) -> CacheSpec:
        of_token = PageArray(config.num_kv_heads, config.head_dim)
        of_block = of_token._replace(stride=self.size, size=self.size)
        arrays = {"keys": of_token, "values": of_token, "mean_keys": of_block, "mean_values": of_block}
        return CacheSpec(arrays, block=self.size)

    def least_read(self, context: int, first: int = 0) -> dict[str, int]:
        own, means = (context - 1) // self.size * self.size, (context - 1) // self.size
        counts = context - max(own, first), max(0, means - first // self.size)
        return dict(zip(("keys", "values", "mean_keys", "mean_values"), np.repeat(counts, 2).tolist(), strict=True))

    def plan(self, config: HeadShape, view: BatchView, *, columns: int, dtype: Any) -> Any:
        return {"table": view.block_table}

    def _visible(self, positions: Any, slots: int, blocks: int) -> Any:
        slot, block, position = *(jnp.arange(n)[None, None] for n in (slots, blocks)), positions[:, :, None]
        first = position // self.size * self.size
        return jnp.concatenate([(slot >= first) & (slot <= position), block * self.size < first], axis=2)

    def _attend(self, q: Any, positions: Any, keys: Any, values: Any, mean_keys: Any, mean_values: Any) -> Any:
        seen = self._visible(positions, keys.shape[1], mean_keys.shape[1])
        return attention(q, *(jnp.concatenate(x, axis=1) for x in ((keys, mean_keys), (values, mean_values))), seen)

    def dense(self, projection: Projection, positions: Any) -> Any:
        q, k, v = projection.heads()

        def means(x: Any) -> Any:
            blocks = x.shape[1] // self.size
            return x[:, : blocks * self.size].reshape(x.shape[0], blocks, self.size, *x.shape[2:]).mean(axis=2)

        return self._attend(q, positions, k, v, means(k), means(v))

    def __call__(
        self, projection: Projection, cache: LayerCache, plan: Any, view: BatchView, earlier: None = None
    ) -> Any:
        q, k, v = projection.heads()
        ends = view.slots % self.size == self.size - 1
        pages = jnp.where(ends, view.write_pages, TRASH)
        of_block = view.slots[..., None] - jnp.arange(self.size)[None, None]
        rows, names = plan["table"].shape[0], (("keys", "mean_keys", k), ("values", "mean_values", v))
        written = jnp.arange(plan["table"].shape[1] * view.page_size)[None] < view.lengths[:, None]
        cache, seen = dict(cache), []
        for name, mean, new in names:
            if view.copies is not None:
                cache[name], cache[mean] = (copy_pages(cache[array], view.copies) for array in (name, mean))
            cache[name] = cache[name].at[view.write_pages, view.slots].set(new)
            of_blocks = cache[name][view.write_pages[..., None], of_block].mean(axis=2)
            cache[mean] = cache[mean].at[pages, view.slots // self.size].set(of_blocks)
            for array, stride in ((name, 1), (mean, self.size)):
                read = cache[array][plan["table"]].reshape(rows, -1, *new.shape[2:])
                seen.append(jnp.where(written[:, stride - 1 :: stride, None, None], read, 0))
        keys, mean_keys, values, mean_values = seen
        return self._attend(q, view.positions, keys, values, mean_keys, mean_values), cache, None

    def over_tree(
        self, projection: Projection, cache: LayerCache, scratch: LayerCache, view: TreeView, earlier: None = None
    ) -> Any:
        q, k, v = projection.heads()
        scratch = view.put(scratch, {"keys": k, "values": v})
        of_block = view.positions[..., None] - jnp.arange(self.size)[None, None]
        seen = {}
        for name in ("keys", "values"):
            means = view.at(cache[name], scratch[name], of_block).mean(axis=2)
            scratch = view.put(scratch, {f"mean_{name}": means})
            seen[name] = tree_kv(view, cache[name], scratch[name])
            of_blocks = {"stride": self.size, "size": self.size}
            seen[f"mean_{name}"] = tree_kv(view, cache[f"mean_{name}"], scratch[f"mean_{name}"], **of_blocks)
        slots, blocks = seen["keys"].shape[1], seen["mean_keys"].shape[1]
        grouped_q = grouped(q, k.shape[2])
        scores = [scaled_scores(grouped_q, seen[name]) for name in ("keys", "mean_keys")]
        visible = self._visible(view.positions, slots, blocks)[:, :, None, None]
        weights = jax.nn.softmax(jnp.where(visible, jnp.concatenate(scores, axis=-1), -jnp.inf), axis=-1)
        of_slots, of_means = weights[..., :slots], weights[..., slots:]
        return (seen["values"].sums(of_slots) + seen["mean_values"].sums(of_means)).reshape(q.shape), scratch, None


LAYERS: dict[str, tuple[LayerSpec, ...]] = {
    "local, local, global": (LOCAL, LOCAL, GLOBAL),
    "means of blocks": (LayerSpec(Blocks(2)), GLOBAL),
    "sparse": (LayerSpec(SPARSE, qk_norm="head"),),
    "sparse, local, global, sparse": (LayerSpec(SPARSE), LOCAL, GLOBAL, LayerSpec(SPARSE)),
    "sparse with shared keys": (LayerSpec(dataclasses.replace(SPARSE, kv="shared"), Rope(100.0)),),
    "olmo": (LayerSpec(qk_norm="all", pre_norms=False, post_norms=True),),
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
            lengths=jnp.asarray(lengths[:, 0], jnp.int32),  # at the plan's end: a forward reads what it has itself
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


@pytest.mark.parametrize(("window", "heads"), [(1, (2, 1)), (PAGE, (2, 2)), (PAGE + 1, (4, 2)), (100, (2, 1))], ids=str)
def test_windows(window: int, heads: tuple[int, int]) -> None:
    shape = {"num_heads": heads[0], "num_kv_heads": heads[1]}
    config = tiny_config(VOCAB, layers=windowed(window), **shape)
    params, rows = noisy_params(config), random_rows(13, 1, 18)
    got = paged_logits(config, params, rows, chunk=5)
    assert difference(got, dense_logits(config, params, rows)) < 1e-4
    if window < 18:
        wider = tiny_config(VOCAB, layers=windowed(window + 1), **shape)
        assert difference(got, dense_logits(wider, params, rows)) > 1e-2, "control: a slot more matters"


@pytest.mark.parametrize("name", [name for name in LAYERS if name != "sparse"])
def test_patterns_of_layers(name: str) -> None:
    """Layers that are one like another would be are seen: the pattern turned round gives other logits."""
    config = tiny_config(VOCAB, layers=LAYERS[name], num_layers=4, embed_scale=3.0)
    params, rows = noisy_params(config), random_rows(13, 2, 18)
    got = paged_logits(config, params, rows, chunk=5)
    assert difference(got, dense_logits(config, params, rows)) < 1e-3
    if len(config.layers) > 1:
        turned = dataclasses.replace(config, layers=config.layers[::-1])
        assert difference(got, dense_logits(turned, params, rows)) > 1e-2, "control"


@pytest.mark.parametrize("name", ["means of blocks", "sparse"])
def test_a_row_that_leaves_a_shared_page_takes_a_copy(name: str) -> None:
    """Two rows share five tokens; the second's part-filled page is copied as it goes another way."""
    config = tiny_config(VOCAB, layers=LAYERS[name], num_layers=2)
    params, (shared, *ends) = noisy_params(config), random_rows(5, 4, 3)
    cache = create_cache(config, params, num_pages=8, page_size=PAGE)

    def view(tokens: list[list[int]], start: int, table: list[list[int]], copies: Copies | None = None) -> BatchView:
        positions = start + np.arange(len(tokens[0])) + 0 * np.array(tokens)
        pages = np.take_along_axis(np.array(table), positions // PAGE, axis=1)
        ends = jnp.asarray(positions[:, -1] + 1)
        arrays = (jnp.asarray(x, jnp.int32) for x in (tokens, positions, table, pages))
        return BatchView(*arrays, lengths=ends, num_immutable=ends, copies=copies, page_size=PAGE)

    def run(cache: Any, view: BatchView) -> tuple[jax.Array, Any]:
        return _paged(config, params, cache, view, plan_attention(config, params, view, columns=view.tokens.shape[1]))

    _, cache = run(cache, view([shared], 0, [[3, 5, 0]]))
    tokens = [ends[0][:3], ends[1]]
    copies = Copies(jnp.asarray([TRASH, 5]), jnp.asarray([TRASH, 2]))
    hidden, _ = run(cache, view(tokens, 5, [[3, 5, 0], [3, 2, 0]], copies))
    want = dense_logits(config, params, [shared + new for new in tokens])
    assert difference([*np.asarray(unembed(params, hidden))], [logits[5:] for logits in want]) < 1e-4
    hidden, _ = run(cache, view(tokens, 5, [[3, 5, 0], [3, 2, 0]]))
    assert difference([*np.asarray(unembed(params, hidden))], [logits[5:] for logits in want]) > 1e-2, "control"


def test_pages_hold_whole_blocks() -> None:
    config = tiny_config(VOCAB, layers=LAYERS["means of blocks"])
    assert config.page_bytes(2) == 2 * 4 * 4 * (2 + 1 + 2)
    with pytest.raises(ValueError, match=r"page_size must be a multiple or a divisor of 2, the block of .*, got 3\."):
        create_cache(config, noisy_params(config), num_pages=2, page_size=3)


def test_a_window_of_512() -> None:
    """Prompts in chunks of 512, rows at unlike places."""
    config = tiny_config(VOCAB, layers=windowed(512), num_layers=1, max_position_embeddings=2048)
    params, rows = noisy_params(config), random_rows(1300, 700)
    got = paged_logits(config, params, rows, chunk=512, page_size=16)
    assert difference(got, dense_logits(config, params, rows)) < 1e-4
