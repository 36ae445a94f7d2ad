"""Measure how alike the blocks are that neighbouring queries of a verification select in a trained sparse model.

    python scripts/benchmarks/measure_block_overlap.py tests/data/recall/target --context 2048 16384
    python scripts/benchmarks/measure_block_overlap.py recall --context 8192 16384 --documents 2 --save recall.json
    python scripts/benchmarks/measure_block_overlap.py recall --documents 2 --texts true --trees 3,3,3 4,2,1,1

Texts are long documents with their answers (`smcjax.tasks.recall`, keys of the evaluation split), once with the true
answers and once with those that the model itself says, greedy. A verification of K drafts has the queries of K + 1
consecutive positions of an answer: those where all drafts are accepted. All such runs count, in every layer that
selects.

For each layer the table has the share of the blocks chosen by rank that the query 1 … K positions earlier has chosen
too, the share of all blocks of a set at distance 1 (first and last blocks are always in it, so it is the higher one),
and the blocks of the union of K + 1 sets over those of one. Beside both stands what independent sets of that size would
have. ρ of the union is the fraction of neighbours' sets for which n · (1 + K(1 − ρ)), the formula of bytes that are
issued, gives that union. On a CPU it computes in float32.

A second table has the share of a query's blocks that the same query and set have in the next layer too. For each of
`--trees`, children per depth, a third one has the blocks that groups of C nodes load over those that nodes load one by
one, in each order. Such a tree stands at ROOTS positions of each document's answers; a node's children are the target's
likeliest tokens.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from block_overlap import Tally, added
from calibrate_reuse import PAGE, Texts, read
from jaxtyping import Array, Bool, Int
from replayed_sets import watched, watching

from smcjax import LLM, Autoregressive, SamplingParams
from smcjax.bench.record import save, this_machine
from smcjax.cli.bench_options import add_save_option, check_files
from smcjax.kv import KVCache
from smcjax.markdown import table
from smcjax.model import ModelConfig, Params, load_checkpoint
from smcjax.model.attention import Projection
from smcjax.model.decoder import hidden_states, unembed
from smcjax.model.files.hub import BUNDLED, bundled_model
from smcjax.model.paged import create_scratch, paged_hidden_states, tree_hidden_states
from smcjax.model.view import BatchView, TreeView
from smcjax.pallas.sparse.query_groups import QueryGroups
from smcjax.sparse.nsa import NSA
from smcjax.sparse.verification import SparseVerification
from smcjax.tasks import recall
from smcjax.trees import ORDERS, DraftTree

TEXTS = ("true", "own")  # answers: the document's, or the model's
ROOTS = 8  # of trees in a document
GROUPS = (4, 8, 16)  # nodes


@dataclasses.dataclass(frozen=True)
class Document:
    """Tokens of a text, and where its answers begin."""

    tokens: Int[np.ndarray, " L"]
    begin: int


def documents(seed: int, count: int, length: int) -> list[Document]:
    """Documents of `length` tokens with true answers."""
    heading, found = recall.vocabulary().index("answers"), []
    for index in range(count):
        tokens = recall.tokens(np.random.default_rng([seed, index]), length, "eval").astype(np.int32)
        found.append(Document(tokens, int(np.argmax(tokens == heading)) + 2))  # behind the heading's line
    return found


def answered(model: str, found: Sequence[Document]) -> list[Document]:
    """Puts the model's own greedy answers, of at most as many tokens, in place of the documents' true ones."""
    length = max(len(one.tokens) for one in found)
    llm = LLM(model, decoding=Autoregressive(), dtype="float32", max_model_len=length, max_num_seqs=1)
    made = []
    for one in found:
        params = SamplingParams(max_tokens=len(one.tokens) - one.begin, temperature=0)
        (output,) = llm.generate({"prompt_token_ids": one.tokens[: one.begin].tolist()}, params, use_tqdm=False)
        answer = np.asarray(output.outputs[0].token_ids, np.int32)
        made.append(Document(np.concatenate([one.tokens[: one.begin], answer]), one.begin))
    llm.close()
    return made


@functools.partial(jax.jit, static_argnums=0)
def selections(
    config: ModelConfig, params: Params, cache: KVCache, view: BatchView
) -> Bool[Array, "selecting R T S blocks"]:
    """The blocks that the view's queries select in each layer that selects."""
    view = dataclasses.replace(view, lengths=view.written())
    found: list[jax.Array] = []

    def attend(index: int, projection: Projection) -> jax.Array:
        kind = config.layer(index).attention
        attended, _, chosen = kind(projection, cache.layers[index], None, view)
        if kind.selects:
            found.append(chosen.blocks)
        return attended

    hidden_states(config, params, view.tokens, view.positions, attend)
    return jnp.stack(found)


def kinds_of(config: ModelConfig) -> list[NSA]:
    """The kinds of the layers that select, in order."""
    return [kind for kind in config.selecting.values() if isinstance(kind, NSA)]


@functools.partial(jax.jit, static_argnums=(0, 1))
def tree_selections(
    config: ModelConfig, tree: DraftTree, params: Params, cache: KVCache, view: BatchView, column: Int[Array, ""]
) -> tuple[Bool[Array, "selecting M S blocks"], Int[Array, " M"]]:
    """The blocks that each node of a tree selects, and their tokens, behind the first `column` columns of a row.

    Node 0 is the row's token there; the children of a node are its likeliest next tokens.
    """
    root, tokens = view.positions[:, column], jnp.broadcast_to(view.tokens[:, column], (1, tree.size))
    scratch = create_scratch(config, params, rows=1, nodes=tree.size)
    found = []
    levels = [[node for node in range(tree.size) if tree.depths[node] == depth] for depth in range(tree.depth + 1)]
    for level in levels:
        nodes = TreeView(
            tokens=tokens[:, jnp.asarray(level)],
            root=root,
            committed=root,
            block_table=view.block_table,
            tree=tree,
            nodes=tuple(level),
            page_size=view.page_size,
        )
        forward: Callable[..., Any] = watched(tree_hidden_states, None, gives_sets=True)
        (hidden, scratch), sets = forward(config, params, cache, scratch, nodes)
        found.append(sets.selected[:, 0])
        for number, node in enumerate(level):
            if tree.children[node]:
                likeliest = jax.lax.top_k(unembed(params, hidden[:, number]), len(tree.children[node]))[1]
                tokens = tokens.at[:, jnp.asarray(tree.children[node])].set(likeliest.astype(tokens.dtype))
    by_number = np.argsort([node for level in levels for node in level])
    return jnp.concatenate(found, axis=1)[:, by_number], tokens[0]


@dataclasses.dataclass
class Sums:
    """Counts over documents.

    Attributes:
        layers: for each layer that selects, all runs of consecutive positions.
        next_layers: for each of these layers but the last, sets of a query there and in the next one.
        loaded: blocks that trees' nodes load, by tree, nodes of a group, and order; one by one in groups of 1.
    """

    layers: list[Tally]
    next_layers: list[Tally]
    loaded: dict[tuple[DraftTree, int, str], float]

    def add_tree(self, tree: DraftTree, sets: Bool[np.ndarray, "selecting M S blocks"]) -> None:
        """Adds the blocks that one tree's nodes load."""
        for size in (1, *GROUPS):
            for order in ORDERS:
                groups = QueryGroups.of_tree(tree, range(tree.size), order, size)
                ordered = sets[:, groups.order]
                loaded = sum(
                    ordered[:, first : first + groups.size].any(axis=1).sum()
                    for first in range(0, tree.size, groups.size)
                )
                key = (tree, size, order)
                self.loaded[key] = self.loaded.get(key, 0) + int(loaded)

    def over_one_by_one(self, tree: DraftTree, size: int, order: str) -> float:
        """Blocks that groups of so many nodes load over those that the nodes load one by one."""
        return self.loaded[tree, size, order] / self.loaded[tree, 1, order]


def counted(
    config: ModelConfig, params: Params, found: Sequence[Document], queries: int, trees: Sequence[DraftTree] = ()
) -> Sums:
    """Counts over all runs of `queries` positions of the answers, and over trees at `ROOTS` of them."""
    kinds = kinds_of(config)
    sums = Sums([Tally(queries) for _ in kinds], [Tally(2) for _ in kinds[1:]], {})
    for one in found:
        texts = read(config, params, one.tokens[None], np.array([one.begin]))
        counts = np.asarray(texts.counts[0])
        chosen = np.asarray(selections(config, params, texts.cache, texts.view))[:, 0, counts]
        positions = np.asarray(texts.view.positions[0])[counts]
        for tally, kind, sets in zip(sums.layers, kinds, chosen, strict=True):
            tally.add(kind, sets, positions)
        for layer, tally in enumerate(sums.next_layers):
            for query, position in enumerate(positions):
                tally.add(kinds[layer], chosen[layer : layer + 2, query], np.array([position, position]))
        for tree, sets in of_trees(config, params, texts, trees):
            sums.add_tree(tree, sets)
    return sums


def of_trees(
    config: ModelConfig, params: Params, texts: Texts, trees: Sequence[DraftTree]
) -> Iterator[tuple[DraftTree, Bool[np.ndarray, "selecting M S blocks"]]]:
    """Yields each tree with the sets of its nodes at each of `ROOTS` positions of one text, evenly apart."""
    if not trees:
        return
    cache = jax.jit(paged_hidden_states, static_argnums=0)(config, params, texts.cache, texts.view)[1]
    columns = int(texts.counts[0].sum())
    with watching():
        for tree in trees:
            for column in np.linspace(0, columns - 1, ROOTS).astype(np.int32):
                yield tree, np.asarray(tree_selections(config, tree, params, cache, texts.view, column)[0])


def rows_of(sums: Sequence[Tally]) -> Iterator[list[str]]:
    """The table's rows, one a layer and one of all."""
    named = [*((str(number), one) for number, one in enumerate(sums)), ("all", added(sums))]
    for name, one in named:
        yield [
            name,
            *map(share, one.by_rank),
            share(one.by_chance[0]),
            f"{one.whole[0]:.2f}",
            f"{one.union_over_one:.2f}",
            f"{one.union_by_chance:.2f}",
            f"{one.as_overlap:.2f}",
        ]


def share(number: float) -> str:
    """A share of 1 in two digits."""
    return f".{100 * number:02.0f}" if number < 0.995 else "1"


def layers_table(sums: Sums) -> str:
    """A row of how alike a query's sets of consecutive layers are."""
    names = [f"{layer} and {layer + 1}" for layer in range(len(sums.next_layers))]
    every = added(sums.next_layers)
    row = [*(share(one.by_rank[0]) for one in (*sums.next_layers, every)), share(every.by_chance[0])]
    return table(["layers", *names, "all", "by chance"], [["blocks in common", *row]])


def trees_table(sums: Sums, trees: Sequence[DraftTree]) -> str:
    """A row for each tree and size of groups."""
    rows = [
        [f"{tree.size} nodes, {tree.depth} deep", str(size)]
        + [f"{sums.over_one_by_one(tree, size, order):.2f}" for order in ORDERS]
        for tree in trees
        for size in GROUPS
    ]
    return table(["tree", "group", *ORDERS], rows)


def as_json(one: Tally) -> dict[str, Any]:
    """A layer's figures."""
    names = ("whole", "by_rank", "by_chance", "union_over_one", "union_by_chance", "as_overlap")
    return {name: getattr(one, name) for name in names}


def tree_of(text: str) -> DraftTree:
    """The tree of so many children per depth, as `4,2,1`."""
    return DraftTree.of(tuple(int(number) for number in text.split(",")))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, and prints a table for each context and kind of answers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a directory with sparse layers, of the task's vocabulary, or a bundled name")
    parser.add_argument("--context", type=int, nargs="+", default=[2048], help="tokens of a document with its answers")
    parser.add_argument("--documents", type=int, default=4, help="of each context (4)")
    parser.add_argument("--gamma", type=int, default=8, help="K, drafts of a verification (8)")
    parser.add_argument("--texts", nargs="+", choices=TEXTS, default=TEXTS, help="whose answers (true own)")
    parser.add_argument("--trees", nargs="+", type=tree_of, default=[], metavar="A,B,…", help="children per depth")
    parser.add_argument("--seed", type=int, default=0, help="of the documents (0)")
    add_save_option(parser)
    args = parser.parse_args(arguments)
    check_files(args)
    if min(args.context) < recall.SHORTEST or args.documents < 1 or args.gamma < 1:
        parser.error(f"--context must be at least {recall.SHORTEST}, --documents and --gamma 1")
    directory = str(bundled_model(BUNDLED[args.model]) if args.model in BUNDLED else args.model)
    config, params = load_checkpoint(directory, "float32")
    SparseVerification().check(config.selecting.values())
    if config.vocab_size != len(recall.vocabulary()):
        parser.error(f"the model has {config.vocab_size} token ids and the task {len(recall.vocabulary())}")
    kind, lines = kinds_of(config)[0], []
    print(
        f"{args.model}, {jax.devices()[0].device_kind}, pages of {PAGE}; {kind.num_blocks} blocks of {kind.block_size}"
        f" a query, {kind.init_blocks + kind.local_blocks} of them always"
    )
    for context in args.context:
        true = documents(args.seed, args.documents, context)
        for whose in args.texts:
            found = true if whose == "true" else answered(directory, true)
            sums = counted(config, params, found, args.gamma + 1, args.trees)
            tokens = sum(len(one.tokens) - one.begin - 1 for one in found)
            print(f"\n{context:,} tokens, {whose} answers: {tokens:,} positions of {len(found)} documents\n")
            near = [f"{distance} apart" if distance == 1 else str(distance) for distance in range(1, args.gamma + 1)]
            heads = ["layer", *near, "by chance", "whole sets, 1 apart", "union / one", "by chance", "ρ of the union"]
            print(table(heads, rows_of(sums.layers)))
            print(f"\n{layers_table(sums)}")
            print(f"\n{trees_table(sums, args.trees)}" if args.trees else "", flush=True)
            about = {"model": args.model, "device": jax.devices()[0].device_kind, "context": context, "texts": whose}
            layers = [as_json(one) for one in sums.layers]
            figures = {"layers": layers, "all": as_json(added(sums.layers))}
            figures["next_layers"] = [as_json(one) for one in sums.next_layers]
            figures["trees"] = [
                {"parents": tree.parents, "group": size, "order": order, "loaded": number}
                for (tree, size, order), number in sums.loaded.items()
            ]
            lines.append({**about, "positions": tokens, **figures})
            if args.save is not None:
                save(args.save, lines, this_machine())


if __name__ == "__main__":
    main()
