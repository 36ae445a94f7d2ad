"""Measure what recall models get right, and where a sparse one looks.

    python scripts/training/recall_measure.py recall/target recall/dense recall/window  # 2,048 to 16,384 tokens
    python scripts/training/recall_measure.py tests/data/recall/target --lengths 1024 --documents 16

For every directory: the share of answer lines of which each token is the likeliest behind what precedes it, on fresh
documents of held-out keys. For sparse models also that share with blocks drawn at random in place of those that they
select, and how often they select the block of the fact that an answer states. A table comes last.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import recall_data as data
from jaxtyping import Array, Bool, Float, Int
from sparse_training import Choose, attend_by, nsa, selection
from train_pair import LookUp

from smcjax.markdown import table
from smcjax.model import ModelConfig, Params, load_checkpoint
from smcjax.model.attention import Projection
from smcjax.model.decoder import Attend, hidden_states, unembed
from smcjax.sparse.nsa import NSA
from smcjax.tasks.intervals import clustered_interval
from smcjax.tasks.recall import EOS, vocabulary

EVAL_SEED = 2_024
LENGTHS = (2048, 8192, 16384)
ANSWERS, NEWLINE, EQUALS = (vocabulary().index(piece) for piece in ("answers", "\n", "="))
MAX_STATED_FACTS = 64  # facts in the answers of a document: 16 lines of at most 3
MEASURES = {"lines": "lines right", "random": "with random blocks", "selected": "fact's block selected"}


def logits_of(config: ModelConfig, params: Params, tokens: jax.Array, attend: Attend) -> jax.Array:
    """Logits [R, T, V] behind every token of `tokens` [R, T], without pages."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    embedded = dataclasses.replace(params, embed=LookUp(params.embed))
    return unembed(params, hidden_states(config, embedded, tokens, positions, attend))


def in_answers(tokens: np.ndarray | jax.Array) -> Any:
    """True where the next token belongs to answers: from behind the word `answers` to the end of text. [R, T]"""
    xp = jnp if isinstance(tokens, jax.Array) else np
    return xp.cumsum(tokens == ANSWERS, axis=1) > xp.cumsum(tokens == EOS, axis=1)


def lines_right(tokens: np.ndarray, guesses: np.ndarray) -> list[list[bool]]:
    """For each answer line of R documents [R, T]: true if every token is the likeliest behind what precedes it."""
    found = []
    for row, guess in zip(tokens, guesses, strict=True):
        places = np.flatnonzero(in_answers(row[None])[0, :-1])[1:]  # behind the newline of the word `answers`
        right = guess[places] == row[places + 1]
        ends = np.flatnonzero(row[places + 1] == NEWLINE)
        found.append([bool(part.all()) for part in np.split(right, ends + 1)[: len(ends)]])
    return found


def facts_stated(tokens: np.ndarray) -> list[tuple[int, int]]:
    """The facts that one document's answers state [T]: where each `=` in an answer stands, and the value that the
    document has told behind the key's own `=`. Sums, which no line tells, are left out."""

    ids = tokens.tolist()

    def key(place: int) -> tuple[int, int]:
        return ids[place - 2], ids[place - 1]

    begin, equals = ids.index(ANSWERS), [place for place, token in enumerate(ids) if token == EQUALS]
    told = {key(place): place + 1 for place in equals if place < begin}
    return [(place, told[key(place)]) for place in equals if place > begin and key(place) in told]


def random_scores(
    kind: NSA, q: Float[Array, "T Hkv G D"], keys: Float[Array, "N Hkv D"], positions: Int[Array, " T"], blocks: int
) -> Float[Array, "T Hkv blocks"]:
    """Stands for `block_scores` with a ranking that no query has a part in, another one in each row and layer."""
    seed = jax.lax.bitcast_convert_type(q.astype(jnp.float32).sum(), jnp.uint32)
    return jax.random.uniform(jax.random.key(seed), (*q.shape[:2], blocks))


def choosing(config: ModelConfig, implementation: str, choose: Choose) -> Attend:
    """The attention of every layer of `config`, sparse ones with the blocks of `choose`."""
    usual = attend_by(implementation, config)

    def attend(index: int, projection: Projection) -> jax.Array:
        kind = config.layer(index).attention
        if isinstance(kind, NSA):
            return nsa(implementation, kind, projection, choose)
        return usual(index, projection)

    return attend


at_random: Choose = functools.partial(selection, scores=random_scores)


@functools.partial(jax.jit, static_argnames=("config", "implementation", "choose"))
def _guesses(
    config: ModelConfig, params: Params, tokens: jax.Array, implementation: str, choose: Choose
) -> Int[Array, "R T"]:
    return jnp.argmax(logits_of(config, params, tokens, choosing(config, implementation, choose)), axis=-1)


@functools.partial(jax.jit, static_argnames=("config", "implementation"))
def _selected(
    config: ModelConfig,
    params: Params,
    tokens: jax.Array,
    queries: Int[Array, "R Q"],
    facts: Int[Array, "R Q"],
    implementation: str,
) -> tuple[Bool[Array, "R Q"], Bool[Array, "R Q"]]:
    """For queries and facts by position: true if some head of some layer selects the fact's block, and true if all do
    for its place alone."""
    selected, forced = [], []

    def looking(kind: NSA, q: jax.Array, keys: jax.Array) -> jax.Array:
        chosen, block = selection(kind, q, keys), facts // kind.block_size
        of_queries = jnp.take_along_axis(chosen, queries[:, :, None, None], axis=1)
        selected.append(jnp.take_along_axis(of_queries, block[:, :, None, None], axis=3).any(axis=(2, 3)))
        forced.append(kind.forced(block, queries // kind.block_size))
        return chosen

    logits_of(config, params, tokens, choosing(config, implementation, looking))
    return jnp.stack(selected).any(axis=0), jnp.stack(forced).any(axis=0)


def _share(clusters: list[list[bool]]) -> dict[str, float | int]:
    judged = [one for cluster in clusters for one in cluster]
    low, high = clustered_interval(clusters)
    return {"share": sum(judged) / len(judged), "ci_low": low, "ci_high": high, "n": len(judged)}


def measure(
    config: ModelConfig,
    params: Params,
    length: int,
    *,
    documents: int,
    tokens: int,
    implementation: str,
    looks: bool = True,
) -> dict[str, dict[str, float | int]]:
    """Shares with 95% intervals, of `documents` documents of `length` tokens, about `tokens` to a forward.

    "lines": of answer lines that are right; of sparse models where `looks`, "random": the same with blocks at random,
    and "selected": of facts that answers state, those whose block some head selects though not for its place.
    """
    if implementation == "xla":
        params = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)
    kinds = [config.layer(index).attention for index in range(config.num_layers)]
    sparse = looks and any(isinstance(kind, NSA) for kind in kinds)
    rows = min(max(1, tokens // length), documents)
    made = data.make_rows(EVAL_SEED, documents, length, "eval", 1, several=False)
    found: dict[str, list[list[bool]]] = {name: [] for name in MEASURES if sparse or name == "lines"}
    for begin in range(0, documents - rows + 1, rows):
        part = made[begin : begin + rows]
        ids = jnp.asarray(part, jnp.int32)
        found["lines"] += lines_right(part, np.asarray(_guesses(config, params, ids, implementation, selection)))
        if not sparse:
            continue
        found["random"] += lines_right(part, np.asarray(_guesses(config, params, ids, implementation, at_random)))
        stated = [facts_stated(row) for row in part]
        places = np.array([[*one, *[(0, 0)] * (MAX_STATED_FACTS - len(one))] for one in stated], np.int32)
        selected, forced = map(
            np.asarray, _selected(config, params, ids, places[..., 0], places[..., 1], implementation)
        )
        for row, one in enumerate(stated):
            found["selected"].append([bool(selected[row, i]) for i in range(len(one)) if not forced[row, i]])
    return {name: _share([one for one in clusters if one]) for name, clusters in found.items()}


def in_words(share: dict[str, float | int]) -> str:
    """A share in percent with its interval."""
    return f"{share['share']:.1%} ({100 * share['ci_low']:.1f} to {100 * share['ci_high']:.1f})"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path, help="directories that train_recall.py has made")
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS, help="tokens of a document")
    parser.add_argument("--documents", type=int, default=128, help="of 2,048 tokens; in proportion fewer of more")
    parser.add_argument("--tokens", type=int, default=16_384, help="of a forward")
    return parser.parse_args(arguments)


def documents_of(length: int, documents: int) -> int:
    """How many documents of `length` tokens are as much to read as `documents` of 2,048, and not more than those."""
    return max(1, min(documents, documents * 2048 // length))


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    implementation = "cudnn" if jax.default_backend() == "gpu" else "xla"
    results: list[dict[str, Any]] = []
    for directory in args.models:
        config, params = load_checkpoint(directory, dtype="bfloat16" if implementation == "cudnn" else "float32")
        for length in args.lengths:
            found = measure(
                config,
                params,
                length,
                documents=documents_of(length, args.documents),
                tokens=args.tokens,
                implementation=implementation,
            )
            results.append({"model": directory.name, "length": length, **found})
            print(json.dumps(results[-1]), flush=True)
    print(f"\n{jax.devices()[0].device_kind}, seed {EVAL_SEED}\n")
    rows = [
        [one["model"], f"{one['length']:,}", *(in_words(one[name]) if name in one else "–" for name in MEASURES)]
        for one in results
    ]
    print(table(["model", "tokens", *MEASURES.values()], rows))


if __name__ == "__main__":
    main()
