"""Native Sparse Attention: golden cases, a plain NumPy implementation of all options, and pages against no pages."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smcjax.kv import TRASH, Copies, KVCache, LayerCache
from smcjax.model import LayerSpec, ModelConfig, Rope, config_from_hf, load_checkpoint, save_checkpoint
from smcjax.model.attention import FULL, AttentionKind, Full, Projection, SlidingWindow
from smcjax.model.decoder import linear, rope_angles
from smcjax.model.files.export import written_config
from smcjax.model.view import BatchView
from smcjax.pallas import copy_pages
from smcjax.sparse.nsa import NSA
from tests.helpers import noisy_params, tiny_config
from tests.model import nsa_oracle

GOLDEN = Path(__file__).parents[1] / "data" / "nsa_golden"
LAYERS = ("paper_gqa4", "shorter_than_l")
RENAMED = {"wg": "gate", "bg": "gate_bias", "pe_k": "position_k", "pe_v": "position_v"}
PARTS = {"1": "_in", "b1": "_in_bias", "2": "_out", "b2": "_out_bias", "": ""}
RENAMED |= {f"phi_{of}{part}": f"phi_{of}{name}" for of in "kv" for part, name in PARTS.items()}
SMALL = {"heads": 4, "kv_heads": 2, "dim": 4, "width": 6, "l": 4, "d": 2, "block": 8, "n": 3, "w": 5, "init": 1}
SMALL |= {"local": 1, "kv": "per_branch", "phi": "mlp", "theta": 100.0}
SHARED = {"kv": "shared", "phi": "linear"}
WHOLE_BLOCKS = {"l": 4, "d": 4, "block": 4}  # a compressed token a block
Options = dict[str, Any]
Arrays = dict[str, Any]


def golden(name: str) -> tuple[Options, Arrays]:
    with np.load(GOLDEN / f"{name}.npz") as file:
        arrays = dict(file)
    return json.loads(str(arrays.pop("options"))), arrays


def kind_of(o: Options) -> NSA:
    return NSA(
        kernel_size=o["l"],
        kernel_stride=o["d"],
        block_size=o["block"],
        num_blocks=o["n"],
        window=o["w"],
        init_blocks=o["init"],
        local_blocks=o["local"],
        kv=o["kv"],
    )


def config_of(o: Options) -> ModelConfig:
    shape = {"num_heads": o["heads"], "num_kv_heads": o["kv_heads"], "head_dim": o["dim"], "hidden_size": o["width"]}
    return tiny_config(11, layers=(LayerSpec(kind_of(o), Rope(o["theta"])),), **shape)


def random_weights(o: Options, seed: int) -> Arrays:
    """A layer's weights of the golden cases' names, such that all parts matter."""
    rng, heads, dim, width = np.random.default_rng(seed), o["heads"], o["dim"], o["width"]
    pairs = 1 if o["kv"] == "shared" else 3
    shapes = {"wq": (heads, dim, width), "wk": (pairs, o["kv_heads"], dim, width)}
    shapes["wv"] = shapes["wk"]
    own = kind_of(o).param_shapes(config_of(o), jnp.float32)
    shapes |= {theirs: own[ours].shape for theirs, ours in RENAMED.items() if ours in own}
    scale = {name: shape[-1] ** -0.5 for name, shape in shapes.items()} | {"wq": 1.0}
    return {name: (scale[name] * rng.standard_normal(shape)).astype(np.float32) for name, shape in shapes.items()}


def layer_weights(arrays: Arrays, prefix: str = "w.") -> Arrays:
    return {name.removeprefix(prefix): value for name, value in arrays.items() if name.startswith(prefix)}


def projected(o: Options, w: Arrays, x: jax.Array, positions: jax.Array) -> Projection:
    """Returns the projection that the decoder hands to a layer's attention, made with a golden case's weights."""
    matrix = jnp.concatenate([w[name].reshape(-1, o["width"]) for name in ("wq", "wk", "wv")])
    angles = functools.partial(rope_angles, Rope(o["theta"]), o["dim"])
    qkv = linear(x, matrix, None).reshape(*x.shape[:2], -1, o["dim"])
    kv_heads = w["wk"].shape[0] * o["kv_heads"]
    weights = {RENAMED[name]: value for name, value in w.items() if name in RENAMED}
    return Projection(qkv, *angles(positions), kv_heads, None, None, x, weights, angles)


@functools.partial(jax.jit, static_argnums=0)
def _dense(key: str, w: Arrays, x: jax.Array) -> Any:
    o = json.loads(key)
    positions = jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape[:2])
    branches = kind_of(o).dense_branches(projected(o, w, x, positions), positions)
    return branches, branches.gated()


def dense(o: Options, w: Arrays, x: np.ndarray) -> Any:
    """Branches and output of one row x [T, E], without pages."""
    return jax.tree.map(lambda leaf: np.asarray(leaf[0]), _dense(json.dumps(o), w, jnp.asarray(x[None])))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _paged(key: str, kind: NSA, w: Arrays, cache: Any, view: BatchView, x: jax.Array) -> Any:
    view = dataclasses.replace(view, lengths=view.written())
    projection = projected(json.loads(key), w, x, view.positions)
    branches, cache = kind.paged_branches(projection, cache, view)
    return branches.gated(), branches, cache


class Pages:
    """One layer's pages, full of NaN where nothing is written, and forwards over them."""

    def __init__(self, o: Options, w: Arrays, table: np.ndarray, page_size: int, kind: NSA | None = None) -> None:
        self.o, self.w, self.table, self.page_size, self.kind = o, w, table, page_size, kind or kind_of(o)
        spec, pages = self.kind.cache(config_of(o)), int(table.max()) + 1
        cache = KVCache.create([spec], num_pages=pages, page_size=page_size, dtype=jnp.float32).layers[0]
        self.cache = {name: jnp.full_like(array, jnp.nan) for name, array in cache.items()}

    def forward(self, x: np.ndarray, start: int, copies: Copies | None = None) -> np.ndarray:
        """Outputs of new positions `start` … of every row; x [R, T, E]."""
        positions = start + np.arange(x.shape[1]) + 0 * x[:, :, 0].astype(int)
        pages = np.take_along_axis(self.table, positions // self.page_size, axis=1)
        ends = jnp.asarray(positions[:, -1] + 1)
        arrays = [jnp.asarray(a, jnp.int32) for a in (positions, positions, self.table, pages)]
        view = BatchView(*arrays, lengths=ends, num_immutable=ends, copies=copies, page_size=self.page_size)
        out, _, self.cache = _paged(json.dumps(self.o), self.kind, self.w, self.cache, view, jnp.asarray(x))
        return np.asarray(out)


def assert_like(found: Any, got: Any, tolerance: float = 1e-4) -> None:
    """Outputs and selections like the oracle's, where its ranking leaves no doubt."""
    branches, out = got
    sure = found["margin"] > 1e-4
    of_heads = sure.repeat(out.shape[1] // sure.shape[1], axis=1)
    np.testing.assert_allclose(branches.outputs[of_heads], found["branches"][of_heads], atol=tolerance)
    np.testing.assert_allclose(branches.gates, found["gates"], atol=tolerance)
    np.testing.assert_allclose(out[of_heads], found["out"][of_heads], atol=tolerance)
    blocks = np.arange(branches.selected.shape[-1])
    wanted = (found["selected"][..., None] == blocks).any(axis=2)
    np.testing.assert_array_equal(branches.selected[sure], wanted[sure])
    ranked = np.isfinite(found["score"])
    np.testing.assert_allclose(branches.scores[ranked], found["score"][ranked], atol=tolerance)


@pytest.mark.parametrize("name", LAYERS)
def test_golden_layers(name: str) -> None:
    o, arrays = golden(name)
    assert_like(arrays, dense(o, layer_weights(arrays), arrays["x"]))


@pytest.mark.parametrize("name", LAYERS)
def test_golden_layers_by_the_oracle(name: str) -> None:
    o, arrays = golden(name)
    found = nsa_oracle.layer(o, layer_weights(arrays), arrays["x"])
    for field in dataclasses.fields(found):
        np.testing.assert_allclose(getattr(found, field.name), arrays[field.name], atol=1e-5, err_msg=field.name)


@pytest.mark.parametrize("fault", nsa_oracle.FAULTS)
def test_golden_layers_tell_a_fault(fault: str) -> None:
    """Control: each mistake that NSA invites changes outputs by much more than the tolerance."""
    o, arrays = golden("paper_gqa4")
    found = nsa_oracle.layer(o, layer_weights(arrays), arrays["x"], fault)
    assert np.abs(found.out - arrays["out"]).max() > 1e-2


def test_golden_ties_go_to_the_earlier_block() -> None:
    o, arrays = golden("select_ties")
    kind, t = kind_of(o), jnp.asarray(arrays["t"])[:, None]
    blocks = arrays["score"].shape[-1]
    ends = np.arange(arrays["p"].shape[2]) * o["d"] + o["l"] - 1
    complete = jnp.asarray(ends <= arrays["t"][:, None])
    p = jnp.where(complete[:, None], arrays["p"], 0).reshape(len(t), 1, o["kv_heads"], -1, len(ends))
    scores = kind.block_scores(p, blocks)
    ranked = np.isfinite(arrays["score"])
    np.testing.assert_array_equal(np.asarray(scores)[:, 0][ranked], arrays["score"][ranked])
    selected = np.asarray(kind.select(scores, t))[:, 0]
    np.testing.assert_array_equal(selected, (arrays["selected"][..., None] == np.arange(blocks)).any(axis=2))


@st.composite
def options(draw: st.DrawFn) -> Options:
    """All that can be combined, at sizes at which every branch leaves something out."""
    d = draw(st.integers(1, 3))
    init, local = draw(st.integers(0, 2)), draw(st.integers(0, 2))
    return {
        **SMALL,
        "kv_heads": draw(st.sampled_from([1, 2, 4])),
        "l": d * draw(st.integers(1, 3)),
        "d": d,
        "block": d * draw(st.integers(1, 3)),
        "init": init,
        "local": local,
        "n": max(1, init + local) + draw(st.integers(0, 2)),
        "w": draw(st.integers(1, 9)),
        **draw(st.sampled_from([{}, SHARED])),
    }


@pytest.mark.slow
@settings(max_examples=4)
@given(o=options(), length=st.integers(1, 24), chunk=st.integers(1, 6), data=st.data(), seed=st.integers(0, 99))
def test_any_options_equal_the_oracle(o: Options, length: int, chunk: int, data: st.DataObject, seed: int) -> None:
    """Without pages, and in chunks over pages of any divisor or multiple of the block."""
    w, rng = random_weights(o, seed), np.random.default_rng(seed)
    x = rng.standard_normal((length, o["width"])).astype(np.float32)
    found = nsa_oracle.layer(o, w, x)
    assert_like(vars(found), dense(o, w, x))
    sizes = [size for size in range(1, 65) if size % o["block"] == 0 or o["block"] % size == 0]
    page_size = data.draw(st.sampled_from(sizes))
    width = -(-(length + chunk) // page_size)
    paged = Pages(o, w, 1 + rng.permutation(width)[None], page_size)
    padded = np.concatenate([x, x[:1].repeat(chunk, axis=0)])
    parts = [paged.forward(padded[None, start : start + chunk], start)[0] for start in range(0, length, chunk)]
    sure = (found.margin > 1e-4).all(axis=1)
    np.testing.assert_allclose(np.concatenate(parts)[:length][sure], found.out[sure], atol=1e-4)


@pytest.mark.parametrize(("changes", "page_size"), [({}, 1), (SHARED, 2), (WHOLE_BLOCKS, 8), ({}, 16)], ids=str)
def test_a_token_at_a_time_equals_the_whole(page_size: int, changes: Options) -> None:
    """Lengths 1 … 2l′ + 1, in pages of 1, d, l′ and 2l′ positions."""
    o = SMALL | changes
    length, w, rng = 2 * 8 + 1, random_weights(o, 0), np.random.default_rng(0)
    x = rng.standard_normal((length, o["width"])).astype(np.float32)
    _, want = dense(o, w, x)
    paged = Pages(o, w, 1 + rng.permutation(-(-length // page_size))[None], page_size)
    got = [paged.forward(x[None, t : t + 1], t)[0, 0] for t in range(length)]
    np.testing.assert_allclose(np.array(got), want, atol=1e-5)


class AllThere(NSA):
    """Reads values of slots that nobody has written."""

    def read(self, cache: LayerCache, view: BatchView) -> Any:
        return super().read(cache, dataclasses.replace(view, lengths=jnp.full_like(view.lengths, 1000)))


@pytest.mark.parametrize("kind", [NSA, AllThere])
def test_queries_beyond_what_is_written_are_finite(kind: type[NSA]) -> None:
    """Columns behind a sequence's end see what it has, and no slot of NaN; control: slots that count as written."""
    w, x = random_weights(SMALL, 0), np.ones((1, 6, SMALL["width"]), np.float32)
    pages = Pages(SMALL, w, np.array([[1, 2]]), 8, kind(**dataclasses.asdict(kind_of(SMALL))))
    pages.forward(x, 0)
    pages.table = np.array([[1, TRASH]])
    out = pages.forward(x, 6)  # positions 8 … 11 have no page
    assert np.isfinite(out).all() == (kind is NSA)


class AtFirst(NSA):
    """Compressed tokens in the page of their first position."""

    def home(self, starts: Any) -> Any:
        return starts


class RawCopies(NSA):
    """A copied page is without its compressed tokens."""

    def paged_branches(self, projection: Projection, cache: LayerCache, view: BatchView, earlier: Any = None) -> Any:
        if view.copies is not None:
            copied = {name: copy_pages(cache[name], view.copies) for name in cache if "compressed" not in name}
            cache, view = cache | copied, dataclasses.replace(view, copies=None)
        return super().paged_branches(projection, cache, view, earlier)


@pytest.mark.slow
@pytest.mark.parametrize("shared", [5])
def test_forks_are_like_rows_alone(shared: int) -> None:
    """Two rows go their ways behind `shared` common positions.

    Controls: compressed tokens where they begin, and such as stay behind when a page is copied.
    """
    o = SMALL | {"n": 2}
    w, rng, size = random_weights(o, 1), np.random.default_rng(1), 4
    x = rng.standard_normal((2, 16, o["width"])).astype(np.float32)
    x[1, :shared] = x[0, :shared]
    want = np.stack([dense(o, w, row)[1] for row in x])
    common = -(-shared // size)
    table = np.array([[1, 2, 3, 4], [1, 2, 3, 4]])
    table[1, shared // size :] += 4
    copies = None
    if shared % size:
        copied = common - 1
        copies = Copies(jnp.asarray([TRASH, table[0, copied]]), jnp.asarray([TRASH, table[1, copied]]))

    def last_outputs(kind: NSA) -> np.ndarray:
        pages = Pages(o, w, table, size, kind)
        whole, pages.table = pages.table, pages.table[:1]
        pages.forward(x[:1, :shared], 0)
        pages.table = whole
        first = pages.forward(x[:, shared : shared + 2], shared, copies)
        return np.concatenate([first, pages.forward(x[:, shared + 2 :], shared + 2)], axis=1)

    np.testing.assert_allclose(last_outputs(kind_of(o)), want[:, shared:], atol=1e-5)

    def goes_wrong(fault: type[NSA]) -> bool:
        difference = np.abs(last_outputs(fault(**dataclasses.asdict(kind_of(o)))) - want[:, shared:]).max()
        return not difference < 1e-3

    full = shared // size * size
    assert goes_wrong(AtFirst) == any(start < full <= shared <= start + 3 for start in range(0, 16, 2)), "control"
    assert goes_wrong(RawCopies) == any(full <= start + 3 < shared for start in range(0, 16, 2)), "control"


REFUSED = {
    "kernel_size must be a multiple of kernel_stride = 16, got 24.": {"kernel_size": 24},
    "block_size must be a multiple of kernel_stride = 16, got 40.": {"block_size": 40},
    "num_blocks must be at least init_blocks + local_blocks = 3, which are always selected, got 2.": {"num_blocks": 2},
    "kv must be one of per_branch, shared, got None.": {"kv": None},
    "window must be an integer from 1 to 1048576, got 0.": {"window": 0},
    "init_blocks must be an integer from 0 to 1048576, got True.": {"init_blocks": True},
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_unknown_and_contradictory_options_are_refused(sentence: str) -> None:
    with pytest.raises(ValueError, match=r"\.$") as refused:
        NSA(**REFUSED[sentence])
    assert str(refused.value) == sentence


def test_pages_that_cut_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match=r"page_size must be a multiple or a divisor of 8, the block of .*, got 12\."):
        Pages(SMALL, {}, np.array([[1]]), 12)


@functools.partial(jax.jit, static_argnums=0)
def _small_model(key: str, w: Arrays, caches: list[Any], view: BatchView) -> Any:
    """Logits of the golden cases' own small model over pages."""
    o = json.loads(key)
    view = dataclasses.replace(view, lengths=view.written())

    def norm(x: jax.Array) -> jax.Array:
        return x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)

    x, written, selected = w["emb"][view.tokens], [], []
    for index, cache in enumerate(caches):
        of_layer = layer_weights(w, f"layers.{index}.")
        projection = projected(o, layer_weights(of_layer, "nsa."), norm(x), view.positions)
        branches, cache = kind_of(o).paged_branches(projection, cache, view)
        x = linear(branches.gated().reshape(*x.shape[:2], -1), of_layer["wo"], None, add_to=x)
        x = linear(jax.nn.relu(linear(norm(x), of_layer["w1"], None)), of_layer["w2"], None, add_to=x)
        written.append(cache)
        selected.append(branches.selected)
    return linear(norm(x), w["emb"], None), jnp.stack(selected), written


class SmallModel:
    """One row of the golden cases' small model."""

    def __init__(self, o: Options, w: Arrays, page_size: int) -> None:
        self.o, self.w, self.page_size = o, w, page_size
        self.table = 1 + np.random.default_rng(0).permutation(-(-72 // page_size))[None]
        layers = len({name.split(".")[1] for name in w if name.startswith("layers")})
        spec = kind_of(o).cache(config_of(o))
        cache = KVCache.create([spec] * layers, num_pages=80, page_size=page_size, dtype=jnp.float32)
        self.caches = [{name: jnp.full_like(array, jnp.nan) for name, array in layer.items()} for layer in cache.layers]

    def forward(self, tokens: Any, start: int) -> tuple[np.ndarray, np.ndarray]:
        """Logits and selections behind each token."""
        tokens = np.asarray(tokens)[None]
        positions = start + np.arange(tokens.shape[1])[None]
        pages = np.take_along_axis(self.table, positions // self.page_size, axis=1)
        ends = jnp.asarray(positions[:, -1] + 1)
        arrays = [jnp.asarray(a, jnp.int32) for a in (tokens, positions, self.table, pages)]
        view = BatchView(*arrays, lengths=ends, num_immutable=ends, page_size=self.page_size)
        logits, selected, self.caches = _small_model(json.dumps(self.o), self.w, self.caches, view)
        return np.asarray(logits[0]), np.asarray(selected[:, 0])


@pytest.mark.slow
def test_golden_chains() -> None:
    """A block of drafts behind a prompt of each length, all accepted and another token fed; and greedy decoding."""
    o, arrays = golden("chain_C1to4")
    w, tokens, drafts = layer_weights(arrays), arrays["tokens"], arrays["node_tokens"]
    lengths = sorted({int(name[1:3]) for name in arrays if name.startswith("P")})
    assert len(lengths) > 2
    for length in lengths:
        model = SmallModel(o, w, page_size=2)
        whole = length - length % 16
        for at in range(0, whole, 16):
            model.forward(tokens[at : at + 16], at)
        for at in range(whole, length):  # of a length that is compiled anyway
            model.forward([tokens[at]], at)
        # The rejected drafts of a round before leave what they wrote.
        model.forward(drafts[::-1], length)
        got, selected = model.forward(drafts, length)
        np.testing.assert_allclose(got, arrays[f"P{length}.strict.logits"], atol=1e-3)
        wanted = arrays[f"P{length}.strict.selected"][..., None] == np.arange(selected.shape[-1])
        np.testing.assert_array_equal(selected, wanted.any(axis=3))
        after, _ = model.forward([5], length + len(drafts))
        np.testing.assert_allclose(after, arrays[f"P{length}.strict.after_commit.logits"], atol=1e-3)
    model = SmallModel(o, w, page_size=2)
    token, greedy = int(model.forward(tokens, 0)[0][-1].argmax()), []
    for at in range(12):
        greedy.append(token)
        token = int(model.forward([token], len(tokens) + at)[0][-1].argmax())
    assert greedy == arrays["greedy.strict"].tolist()


@pytest.mark.parametrize("changes", [{}, SHARED], ids=str)
def test_checkpoints_go_round(changes: Options, tmp_path: Path) -> None:
    """config.json, names of tensors and weights; an absent option has its default."""
    config = dataclasses.replace(config_of(SMALL | changes), eos_token_ids=(2,))
    params = noisy_params(config)
    save_checkpoint(config, params, tmp_path, dtype="float32")
    read, loaded = load_checkpoint(tmp_path, dtype="float32")
    assert read == config
    chex.assert_trees_all_equal(loaded, params)
    written = json.loads((tmp_path / "config.json").read_text())
    del written["native_sparse_attention"]
    assert config_from_hf(written).layer(1).attention == NSA()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"window": 0}, "window must be an integer"),
        ({"windows": 7}, "native_sparse_attention.windows is 7"),
        ({"score": "logit"}, "native_sparse_attention.score is 'logit' in .* only 'prob' is implemented; use a model"),
        ({"phi": "linear"}, "phi is 'linear' in .* only 'mlp' is implemented with kv 'per_branch'"),
        ({"kv": "shared", "phi": "mlp"}, "phi is 'mlp' in .* only 'linear' is implemented with kv 'shared'"),
    ],
)
def test_config_keys_are_refused_by_name(options: dict[str, Any], words: str) -> None:
    _, written = written_config(config_of(SMALL))
    with pytest.raises(ValueError, match=words):
        config_from_hf(written | {"native_sparse_attention": options})


def test_earlier_files_name_choices_of_which_one_is_left() -> None:
    """Such as those of the bundled recall pair."""
    _, written = written_config(config_of(SMALL))
    named = {
        "kv": "shared",
        "phi": "linear",
        "compressed_rope": "block",
        "score": "prob",
        "share": "group",
        "gate": "x",
    }
    read = config_from_hf(written | {"native_sparse_attention": named})
    assert read.layer(0).attention == NSA(kv="shared")


def mixed(*others: AttentionKind) -> ModelConfig:
    """A sparse layer, one layer of each other kind, and so on."""
    config = config_of(SMALL)
    kinds = [config.layer(0).attention, *others]
    layers = tuple(dataclasses.replace(config.layer(0), attention=kind) for kind in kinds)
    return dataclasses.replace(config, layers=layers, num_layers=len(layers) + 1, eos_token_ids=(2,))


@pytest.mark.parametrize("others", [(FULL,), (SlidingWindow(5),), (FULL, SlidingWindow(5))], ids=str)
def test_layers_of_other_kinds_beside_go_round(others: tuple[AttentionKind, ...], tmp_path: Path) -> None:
    config = mixed(*others)
    params = noisy_params(config)
    save_checkpoint(config, params, tmp_path, dtype="float32")
    read, loaded = load_checkpoint(tmp_path, dtype="float32")
    assert [read.layer(index) for index in range(config.num_layers)] == [*config.layers, config.layers[0]]
    chex.assert_trees_all_equal(loaded, params)


def test_which_layers_are_sparse_is_read_or_refused_by_name() -> None:
    _, written = written_config(mixed(FULL, SlidingWindow(5)))
    sparse, *others = written["layer_types"][:3]
    assert (sparse, others) == ("native_sparse_attention", ["full_attention", "sliding_attention"])
    turned = config_from_hf(written | {"layer_types": [*others, sparse, sparse]})
    assert [type(turned.layer(index).attention) for index in range(4)] == [Full, SlidingWindow, NSA, NSA]
    with pytest.raises(ValueError, match=r"layer_types is \['sparse'.*only native_sparse_attention and full_attention"):
        config_from_hf(written | {"layer_types": ["sparse"] * 4})
    with pytest.raises(ValueError, match=r"sliding_window is None .* needed"):
        config_from_hf(written | {"sliding_window": None})
    with pytest.raises(ValueError, match=r"attention is NSA.*, but .*ForCausalLM, .*, has "):
        written_config(mixed(dataclasses.replace(kind_of(SMALL), window=6)))
