"""Measure how alike the blocks are that neighbouring queries of a verification select in a trained sparse model.

    python scripts/benchmarks/measure_block_overlap.py tests/data/recall/target --context 2048 16384
    python scripts/benchmarks/measure_block_overlap.py recall --context 8192 16384 --documents 2 --save recall.json

Texts are long documents with their answers (`smcjax.tasks.recall`, keys of the evaluation split), once with the true
answers and once with those that the model itself says, greedy. A verification of K drafts has the queries of K + 1
consecutive positions of an answer: those where all drafts are accepted. All such runs count, in every layer that
selects.

For each layer the table has the share of the blocks chosen by rank that the query 1 … K positions earlier has chosen
too, the share of all blocks of a set at distance 1 (first and last blocks are always in it, so it is the higher one),
and the blocks of the union of K + 1 sets over those of one. Beside both stands what independent sets of that size would
have. ρ of the union is the fraction of neighbours' sets for which n · (1 + K(1 − ρ)), the formula of bytes that are
issued, gives that union. On a CPU it computes in float32.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from block_overlap import Tally, added
from calibrate_reuse import PAGE, read
from jaxtyping import Array, Bool, Int

from smcjax import LLM, Autoregressive, SamplingParams
from smcjax.bench.record import save, this_machine
from smcjax.cli.bench_options import add_save_option, check_files
from smcjax.kv import KVCache
from smcjax.markdown import table
from smcjax.model import ModelConfig, Params, load_checkpoint
from smcjax.model.attention import Projection
from smcjax.model.decoder import hidden_states
from smcjax.model.hub import BUNDLED, bundled_model
from smcjax.model.view import BatchView
from smcjax.sparse.nsa import NSA
from smcjax.sparse.verification import SparseVerification
from smcjax.tasks import recall

TEXTS = ("true", "own")  # answers: the document's, or the model's


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


def tallies(config: ModelConfig, params: Params, found: Sequence[Document], queries: int) -> list[Tally]:
    """The sums of each layer that selects, over all runs of `queries` positions of the answers."""
    sums = [Tally(queries) for _ in config.selecting]
    for one in found:
        texts = read(config, params, one.tokens[None], np.array([one.begin]))
        counts = np.asarray(texts.counts[0])
        chosen = np.asarray(selections(config, params, texts.cache, texts.view))[:, 0, counts]
        positions = np.asarray(texts.view.positions[0])[counts]
        for tally, kind, sets in zip(sums, kinds_of(config), chosen, strict=True):
            tally.add(kind, sets, positions)
    return sums


def rows_of(sums: Sequence[Tally]) -> Iterator[list[str]]:
    """The table's rows, one a layer and one of all."""
    named = [*((str(number), one) for number, one in enumerate(sums)), ("all", added(sums))]
    for name, one in named:
        yield [
            name,
            *(f".{100 * share:02.0f}" if share < 0.995 else "1" for share in one.by_rank),
            f".{100 * one.by_chance[0]:02.0f}",
            f"{one.whole[0]:.2f}",
            f"{one.union_over_one:.2f}",
            f"{one.union_by_chance:.2f}",
            f"{one.as_overlap:.2f}",
        ]


def as_json(one: Tally) -> dict[str, Any]:
    """A layer's figures."""
    names = ("whole", "by_rank", "by_chance", "union_over_one", "union_by_chance", "as_overlap")
    return {name: getattr(one, name) for name in names}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, and prints a table for each context and kind of answers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a directory with sparse layers, of the task's vocabulary, or a bundled name")
    parser.add_argument("--context", type=int, nargs="+", default=[2048], help="tokens of a document with its answers")
    parser.add_argument("--documents", type=int, default=4, help="of each context (4)")
    parser.add_argument("--gamma", type=int, default=8, help="K, drafts of a verification (8)")
    parser.add_argument("--texts", nargs="+", choices=TEXTS, default=TEXTS, help="whose answers (true own)")
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
            sums = tallies(config, params, found, args.gamma + 1)
            tokens = sum(len(one.tokens) - one.begin - 1 for one in found)
            print(f"\n{context:,} tokens, {whose} answers: {tokens:,} positions of {len(found)} documents\n")
            near = [f"{distance} apart" if distance == 1 else str(distance) for distance in range(1, args.gamma + 1)]
            heads = ["layer", *near, "by chance", "whole sets, 1 apart", "union / one", "by chance", "ρ of the union"]
            print(table(heads, rows_of(sums)), flush=True)
            about = {"model": args.model, "device": jax.devices()[0].device_kind, "context": context, "texts": whose}
            layers = [as_json(one) for one in sums]
            lines.append({**about, "positions": tokens, "layers": layers, "all": as_json(added(sums))})
            if args.save is not None:
                save(args.save, lines, this_machine())


if __name__ == "__main__":
    main()
