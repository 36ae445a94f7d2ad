"""Replayed sets of a benchmark's verification: their overlap, the selection's laws, and that routing stays computed."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import bench_sparse as bench
import calibrate_reuse
import jax
import jax.numpy as jnp
import measure_block_overlap as measure
import numpy as np
import pytest
from block_overlap import Tally, added, chosen_by_rank
from replayed_sets import Counted, Replay, watched, watching
from sparse_cycle_bytes import issued_bytes, unique_bytes
from sparse_rows import ONE_BY_ONE

from smcjax.decoders import Rejection
from smcjax.model.paged import paged_hidden_states
from smcjax.model.view import BatchView
from smcjax.sparse.nsa import NSA
from smcjax.sparse.verification import SparseVerification
from smcjax.trees import ORDERS, DraftTree
from tests.helpers import noisy_params, tiny_config

KIND = NSA(kv="shared")  # the paper's: 16 blocks, three of them always
QUERIES = 9


def stored(overlap: float, first: int = 65_536) -> Replay:
    return Replay.of(KIND, layers=2, requests=2, queries=QUERIES, sets=2, first=first, overlap=overlap)


def at(replay: Replay, first: int) -> Counted:
    """Both layers' sets of queries from `first` on, whatever the routing has selected."""
    positions = jnp.asarray([first + np.arange(QUERIES), first + 200 + np.arange(QUERIES)], jnp.int32)
    routed = jnp.ones((2, QUERIES, 2, (first + 300) // KIND.block_size + 1), bool)
    sets = jnp.stack([replay(layer, routed, positions) for layer in range(2)])
    return Counted(KIND, np.asarray(sets), np.asarray(positions))


def obeys(counted: Counted) -> bool:
    """True where sets have first and last blocks, none behind their query's own, and as many as a query has."""
    block, own = np.arange(counted.selected.shape[-1]), counted.positions[:, :, None, None] // KIND.block_size
    sets, forced = counted.selected, KIND.forced(block, own) & (block <= own)
    right = sets.sum(-1) == np.minimum(KIND.num_blocks, own[..., 0] + 1)
    return bool((sets | ~forced).all() and (~sets | (block <= own)).all() and right.all())


@pytest.mark.parametrize(("overlap", "new"), [(0.75, 4), (0.9, 2), (1.0, 0), (0.0, 13)])
def test_sets_have_the_stated_overlap(overlap: float, new: int) -> None:
    """A set of 16 blocks has `new` that the query's before has not, and three always.

    Control: sets of another overlap.
    """
    found = at(stored(overlap), 65_536)
    assert found.tally.whole[0] == pytest.approx(1 - new / 16)
    assert found.tally.by_rank[0] == pytest.approx(1 - new / 13)
    assert 16 <= found.union(QUERIES) <= 16 + (QUERIES - 1) * new
    assert found.union(1) == 16
    assert at(stored(0.5), 65_536).tally.whole[0] == 0.5


@pytest.mark.parametrize("first", [65_536, 65_536 + 59, 65_536 + 64 * 21, 2048, 500])
def test_sets_obey_the_selections_laws(first: int) -> None:
    """At and behind the first position, across a block's edge, and where a query has no more blocks than it may have.

    Control: the blocks that are stored alone.
    """
    replay = stored(0.75, min(first, 65_536))
    found = at(replay, first)
    assert obeys(found)
    bits = np.unpackbits(replay.words.view(np.uint8), axis=-1, bitorder="little")[..., : found.selected.shape[-1]]
    alone = np.zeros(found.selected.shape, bool)
    alone[..., : bits.shape[-1]] = bits
    assert not obeys(dataclasses.replace(found, selected=alone))


def test_sets_are_of_one_shape() -> None:
    with pytest.raises(ValueError, match="sets are stored for"):
        stored(0.75)(0, jnp.ones((2, 4, 2, 40), bool), jnp.zeros((2, 4), jnp.int32))


SPARSE = NSA(kernel_size=4, kernel_stride=2, block_size=4, num_blocks=5, window=3, kv="shared")
CONFIG = tiny_config(7, attention=SPARSE)
TOKENS, BEGIN = 200, 160
MERGED = SparseVerification("merged", QUERIES)


@functools.cache
def text() -> calibrate_reuse.Texts:
    tokens = np.random.default_rng(0).integers(0, 7, (1, BEGIN + QUERIES + 1))
    return calibrate_reuse.read(CONFIG, noisy_params(CONFIG), tokens, np.array([BEGIN]))


def verification(sparse: SparseVerification | None = MERGED) -> Any:
    """A forward of nine queries behind 160 tokens, and its arguments."""
    texts = text()

    def forward(params: Any, cache: Any, view: BatchView) -> jax.Array:
        return paged_hidden_states(CONFIG, params, cache, view)[0]

    return forward, (noisy_params(CONFIG), texts.cache, dataclasses.replace(texts.view, sparse=sparse))


def own_sets(overlap: float, layers: int = 2) -> Replay:
    sizes = {"requests": 1, "queries": QUERIES, "sets": 1}
    return Replay.of(SPARSE, layers=layers, first=BEGIN, overlap=overlap, **sizes)


class Ignoring(Replay):
    """A replay that has no use for what was routed."""

    def __call__(self, layer: int, routed: Any, positions: Any) -> Any:
        return super().__call__(layer, jnp.zeros(routed.shape, bool), positions)


RANKS = "topk"


@pytest.mark.slow
def test_a_forward_reads_the_stored_sets_and_still_routes() -> None:
    """The forward reads the sets that are stored, its hidden states follow them, and it still ranks blocks.

    Controls: the layers' own selections are others; XLA drops the ranking where nothing takes what it selects.
    """
    forward, arguments = verification()
    replay = own_sets(0.8)
    with watching():
        plain, selected, ignoring = (
            jax.jit(watched(forward, one, gives_sets=True)).lower(*arguments).compile()
            for one in (None, replay, Ignoring(replay.kind, replay.words))
        )
    hidden, of_weights = plain(*arguments)
    replayed, of_store = selected(*arguments)
    counted = Counted(SPARSE, *map(np.asarray, of_store))
    pairs, edges = QUERIES - 1, QUERIES // SPARSE.block_size  # behind an edge another block is the last
    assert counted.tally.whole[0] == pytest.approx(0.8 - edges / (5 * pairs))
    np.testing.assert_array_equal(counted.positions[0], BEGIN + np.arange(QUERIES))
    routed = jnp.ones(of_store.selected.shape[1:], bool)
    want = [replay(layer, routed, of_store.positions) for layer in range(2)]
    np.testing.assert_array_equal(counted.selected, want)
    assert not np.array_equal(of_weights.selected, of_store.selected)
    assert not np.allclose(hidden, replayed)
    np.testing.assert_array_equal(hidden, jax.jit(forward)(*arguments))
    assert RANKS in selected.as_text().lower()
    assert RANKS not in ignoring.as_text().lower()


def test_programs_are_watched_within_watching_alone() -> None:
    forward, arguments = verification()
    with pytest.raises(RuntimeError, match="no layer has selected"):
        jax.eval_shape(watched(forward, own_sets(0.8)), *arguments)
    with watching():
        untouched = jax.eval_shape(forward, *arguments)
    assert untouched.shape == (1, QUERIES, CONFIG.hidden_size)


def test_bytes_follow_from_counted_sets() -> None:
    """Bytes are counted in slots of one set, for nine queries whose sets are drawn 75% alike.

    Control: sets that are all alike.
    """
    config = dataclasses.replace(
        bench.Models("llama-3.1-8b", "llama-3.2-1b", attention="nsa-shared").target_config, num_layers=1
    )
    slot = 2 * config.num_kv_heads * config.head_dim * config.itemsize
    found = {overlap: at(stored(overlap), 65_536) for overlap in (0.75, 1.0)}
    decoding = Rejection(QUERIES - 1, sparse=MERGED)
    for counted in found.values():
        unique = unique_bytes(config, counted) / slot
        blocks = counted.union(QUERIES)
        end = counted.positions.max(axis=1) + 1
        complete = ((end - 32) // 16 + 1).mean()
        window = 512 + QUERIES - 1
        assert complete + 64 * (blocks - 3) + window <= unique <= complete + 64 * blocks + window
        issued = issued_bytes(config, decoding, 65_536, 0.0, sets=counted) / slot
        assert issued == pytest.approx(4095 + 64 * blocks + 512 + QUERIES)
    assert unique_bytes(config, found[1.0]) < unique_bytes(config, found[0.75])
    one = issued_bytes(config, Rejection(QUERIES - 1, sparse=ONE_BY_ONE), 65_536, 0.0, sets=found[0.75])
    assert one == issued_bytes(config, Rejection(QUERIES - 1), 65_536, 0.5)


def test_unique_slots_by_a_plain_count() -> None:
    """Positions that some query sees, one by one. Control: without the window."""
    counted = at(stored(0.75, 2048 + 70), 2048 + 70)
    at_all = np.arange(counted.selected.shape[-1] * KIND.block_size)
    slots, without = [], []
    for request, positions in enumerate(counted.positions):
        last = positions[:, None, None]
        seen = counted.selected[:, request].repeat(KIND.block_size, axis=-1) & (at_all <= last)
        window = (at_all <= last) & (at_all > last - KIND.window)
        complete = (positions.max() + 1 - KIND.kernel_size) // KIND.kernel_stride + 1
        slots.append((seen | window).any(axis=1).sum(-1).mean() + complete)
        without.append(seen.any(axis=1).sum(-1).mean() + complete)
    assert counted.unique_slots() == pytest.approx(np.mean(slots))
    assert counted.unique_slots() > np.mean(without) + 100


def test_a_tally_of_sets_that_are_known() -> None:
    """Two sets of two queries, four blocks of which the first and the last are always selected."""
    kind = NSA(kernel_size=4, kernel_stride=4, block_size=4, num_blocks=4, window=1, init_blocks=1, local_blocks=1)
    positions = np.array([39, 39])
    sets = np.zeros((2, 1, 10), bool)
    sets[0, 0, [0, 3, 4, 9]] = sets[1, 0, [0, 4, 7, 9]] = True
    assert chosen_by_rank(kind, sets, positions).sum() == 4
    one = Tally(2)
    one.add(kind, sets, positions)
    assert (one.whole, one.by_rank) == ([0.75], [0.5])
    assert one.by_chance == [2 / 8]
    assert one.union_over_one == 5 / 4
    assert one.union_by_chance == pytest.approx((2 + 8 * (1 - (6 / 8) ** 2)) / 4)
    assert one.as_overlap == pytest.approx(0.75)
    twice = added([one, one])
    assert (twice.whole, twice.union) == (one.whole, 10)


def test_measured_selections_are_those_of_verification() -> None:
    """The sets that the measurement tallies are those that a verification of these tokens selects."""
    texts = text()
    found = np.asarray(measure.selections(CONFIG, noisy_params(CONFIG), texts.cache, texts.view))
    forward, arguments = verification()
    with watching():
        _, sets = jax.jit(watched(forward, None, gives_sets=True))(*arguments)
    np.testing.assert_array_equal(found, sets.selected)
    assert found.sum(-1).max() == SPARSE.num_blocks


TREE = DraftTree.of((2, 2))  # 0 → 1, 2; 1 → 3, 4; 2 → 5, 6


@pytest.mark.slow
def test_nodes_select_as_their_paths_would() -> None:
    """Each of a tree's nodes has the sets of the same position in a text that goes along its path.

    Control: the sets of another leaf's path, behind the node they have in common.
    """
    texts, params = text(), noisy_params(CONFIG)
    cache = jax.jit(measure.paged_hidden_states, static_argnums=0)(CONFIG, params, texts.cache, texts.view)[1]
    column = 3
    with watching():
        sets, tokens = measure.tree_selections(CONFIG, TREE, params, cache, texts.view, jnp.asarray(column))
    found = []
    for leaf in (3, 4, 5, 6):
        path = [*TREE.paths[leaf]]
        along = texts.view.tokens.at[0, column : column + 3].set(tokens[jnp.asarray(path)])
        view = dataclasses.replace(texts.view, tokens=along)
        found.append(np.asarray(measure.selections(CONFIG, params, texts.cache, view))[:, 0, column : column + 3])
        np.testing.assert_array_equal(np.asarray(sets)[:, path], found[-1])
    assert len({*np.asarray(tokens[1:3]).tolist()}) == 2, "siblings are different tokens"
    assert any((one[:, -1] != found[0][:, -1]).any() for one in found[1:])


def test_what_groups_of_nodes_load() -> None:
    """Sets of one branch are alike here, so "dfs", which puts branches together, loads least.

    Control: one by one, and all nodes together, no order matters.
    """
    sets = np.zeros((1, TREE.size, 1, 8), bool)
    sets[0, [0, 1, 3, 4], 0, :4] = sets[0, [2, 5, 6], 0, 4:] = True
    sums = measure.Sums([], [], {})
    sums.add_tree(TREE, sets)
    assert [sums.over_one_by_one(TREE, 4, order) for order in ("bfs", "dfs", "position")] == [4 / 7, 2 / 7, 4 / 7]
    assert {sums.over_one_by_one(TREE, 1, order) for order in ORDERS} == {1.0}
    assert {sums.over_one_by_one(TREE, 16, order) for order in ORDERS} == {2 / 7}
    assert "| 7 nodes, 2 deep | 4 | 0.57 | 0.29 | 0.57 |" in measure.trees_table(sums, [TREE])
