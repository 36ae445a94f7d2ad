"""Find out which sparse layers of a model can take the blocks of earlier ones: a schedule for `SparseVerification`.

    python scripts/benchmarks/calibrate_reuse.py tests/data/recall/target --context 1024 --documents 8
    python scripts/benchmarks/calibrate_reuse.py recall --context 2048 8192 --modes shared shared_forced --groups 2 4 8
    python scripts/benchmarks/calibrate_reuse.py DIR --limit 0.02 --save FILE

All layers select at first. Then that layer stops which raises least the KL divergence of next-token laws from those
of the model whose layers all select, and so on, until the next would raise it above the limit: 0.01 nats a token. Texts
are the answers to long documents (`smcjax.tasks.recall`, keys of the training split). Of each the document is read with
all layers selecting, as decoders read prompts, and the laws behind the answer's tokens are compared.

One forward is compiled, whatever the number of layers: which of them select is an argument of it.

`--modes` takes the divergence of ways to read blocks in groups too, each by one forward of the answers in groups of C,
as verification by cycles of C tokens reads them where all drafts are accepted. Approximate modes leave keys and values
behind that are approximate, and the laws of later tokens follow from those, so errors that add up are counted.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from smcjax.bench.record import save, this_machine
from smcjax.cli.bench_options import add_save_option, check_files
from smcjax.decoding.prefill import prefill_chunk
from smcjax.decoding.sequences import Sequences
from smcjax.kv import KVCache, pages_for
from smcjax.model import ModelConfig, Params, load_checkpoint
from smcjax.model.attention import Projection
from smcjax.model.decoder import hidden_states, unembed
from smcjax.model.files.hub import BUNDLED, bundled_model
from smcjax.model.paged import create_cache, paged_hidden_states
from smcjax.model.view import BatchView
from smcjax.sparse.groups import Chosen
from smcjax.sparse.verification import MODES, SparseVerification
from smcjax.tasks import recall

PAGE, CHUNK = 16, 256
LIMIT = 0.01  # nats a token


@dataclasses.dataclass(frozen=True)
class Texts:
    """Answers, of which each row has the document in pages: the tokens whose next-token laws are compared."""

    cache: KVCache
    view: BatchView
    counts: Bool[Array, "R T"]  # columns that the row's answer has


def read(config: ModelConfig, params: Params, tokens: Int[np.ndarray, "R L"], begin: Int[np.ndarray, " R"]) -> Texts:
    """Reads the first `begin` tokens of each row, all layers selecting; the others are the texts.

    A row's last token is left out, as nothing is known of what follows it.
    """
    rows, length = tokens.shape
    pages, columns = pages_for(length, PAGE), length - 1 - int(begin.min())
    table = 1 + jnp.arange(rows * pages, dtype=jnp.int32).reshape(rows, pages)
    sequences = Sequences.create(rows, max_tokens=length, max_pages=pages)
    sequences = dataclasses.replace(
        sequences,
        tokens=jnp.asarray(tokens, jnp.int32),
        length=jnp.asarray(begin, jnp.int32),
        finished=jnp.zeros(rows, bool),
        block_table=table,
    )
    cache = create_cache(config, params, num_pages=rows * pages + 1, page_size=PAGE)
    hidden = jnp.zeros((rows, config.hidden_size), params.embed.dtype)
    chunk = jax.jit(prefill_chunk, static_argnums=(0, 5), donate_argnums=2)
    for start in range(0, int(begin.max()), CHUNK):
        cache, hidden, _ = chunk(config, params, cache, sequences, jnp.asarray(start, jnp.int32), CHUNK, hidden)
    positions = jnp.asarray(begin[:, None] + np.arange(columns), jnp.int32)
    counts = positions < length - 1
    ends = jnp.full(rows, length - 1)
    view = BatchView(
        tokens=jnp.take_along_axis(sequences.tokens, jnp.minimum(positions, length - 1), axis=1),
        positions=positions,
        block_table=table,
        write_pages=sequences.write_pages(positions, counts, PAGE),
        lengths=ends,
        num_immutable=positions[:, 0],
        page_size=PAGE,
    )
    return Texts(cache, view, counts)


@functools.partial(jax.jit, static_argnums=0)
def log_laws(
    config: ModelConfig, params: Params, cache: KVCache, view: BatchView, selects: Bool[Array, " sparse"]
) -> Float[Array, "R T V"]:
    """Log-probabilities behind each token, where the sparse layers that `selects` names select, the first among them.

    What `paged_hidden_states` computes of a view with that schedule, which is static there.
    """
    view = dataclasses.replace(view, lengths=view.written())
    number = {layer: index for index, layer in enumerate(config.selecting)}
    taken: list[Chosen] = []

    def attend(index: int, projection: Projection) -> jax.Array:
        kind, layer = config.layer(index).attention, cache.layers[index]
        attended, _, chosen = kind(projection, layer, None, view)
        if not kind.selects:
            return attended
        blocks = chosen.blocks
        taken.append(Chosen(jnp.where(selects[number[index]], blocks, taken[-1].blocks) if taken else blocks))
        return kind(projection, layer, None, view, taken[-1])[0]

    hidden = hidden_states(config, params, view.tokens, view.positions, attend)
    return jax.nn.log_softmax(unembed(params, hidden))


@jax.jit
def divergence(of: Float[Array, "R T V"], to: Float[Array, "R T V"], counts: Bool[Array, "R T"]) -> Float[Array, ""]:
    """KL of log-probabilities `of` from `to`, nats, the mean over the tokens that count."""
    each = jnp.sum(jnp.exp(of) * (of - to), axis=-1)
    return jnp.sum(jnp.where(counts, each, 0)) / jnp.sum(counts, dtype=each.dtype)


@functools.partial(jax.jit, static_argnums=0)
def verified_laws(config: ModelConfig, params: Params, cache: KVCache, view: BatchView) -> Float[Array, "R T V"]:
    """Log-probabilities behind each token, as a forward that verifies with the view's `sparse` has them."""
    hidden, _ = paged_hidden_states(config, params, cache, view)
    return jax.nn.log_softmax(unembed(params, hidden))


def divergence_of_modes(config: ModelConfig, params: Params, texts: Texts) -> Callable[[SparseVerification], float]:
    """Returns the function from ways to verify to their KL, nats a token, from each query by itself."""
    whole = verified_laws(config, params, texts.cache, texts.view)

    def kl(sparse: SparseVerification) -> float:
        view = dataclasses.replace(texts.view, sparse=sparse)
        return float(divergence(whole, verified_laws(config, params, texts.cache, view), texts.counts))

    return kl


def divergences(kl: Callable[[SparseVerification], float], modes: Sequence[SparseVerification]) -> list[float]:
    """Several at once: each compiles a forward of its own, which several cores do side by side."""
    with concurrent.futures.ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        return list(pool.map(kl, modes))


def divergence_of(config: ModelConfig, params: Params, texts: Texts) -> Callable[[Sequence[bool]], float]:
    """Returns the function from schedules to their KL, nats a token, from the model whose layers all select."""

    def laws(schedule: Sequence[bool]) -> jax.Array:
        return log_laws(config, params, texts.cache, texts.view, jnp.asarray(schedule))

    whole = laws((True,) * len(config.selecting))
    return lambda schedule: float(divergence(whole, laws(schedule), texts.counts))


@dataclasses.dataclass(frozen=True)
class Step:
    """One more layer that selects no longer, and the KL then."""

    layer: int
    kl: float
    schedule: tuple[bool, ...]


def search(layers: int, kl: Callable[[Sequence[bool]], float], limit: float) -> tuple[list[Step], Step | None]:
    """The layers that stop selecting, in order, with `kl` at most `limit`; and the next one, which would exceed it.

    The first layer always selects. Of layers with equal KL the lowest stops.
    """
    schedule, steps = (True,) * layers, list[Step]()
    while True:
        found = []
        for layer in range(1, layers):
            if schedule[layer]:
                tried = (*schedule[:layer], False, *schedule[layer + 1 :])
                found.append(Step(layer, kl(tried), tried))
        if not found:
            return steps, None
        best = min(found, key=lambda step: step.kl)
        if not best.kl <= limit:  # NaN is not
            return steps, best
        steps.append(best)
        schedule = best.schedule


def spacings(schedule: Sequence[bool]) -> list[int]:
    """Layers from each one that selects to the next, or to the end."""
    places = [layer for layer, selects in enumerate(schedule) if selects]
    return np.diff([*places, len(schedule)]).tolist()


def report(layers: int, kl: Callable[[Sequence[bool]], float], limit: float) -> dict[str, Any]:
    """Searches a schedule, and takes the KL of those whose selecting layers are a power of two apart."""
    steps, following = search(layers, kl, limit)
    schedule = steps[-1].schedule if steps else (True,) * layers
    regular = [1 << power for power in range(1, layers.bit_length()) if 1 << power < 2 * layers]
    return {
        "layers": layers,
        "limit": limit,
        "flips": [{"layer": step.layer, "kl": step.kl} for step in steps],
        "next": None if following is None else {"layer": following.layer, "kl": following.kl},
        "schedule": list(schedule),
        "spacings": spacings(schedule),
        "regular": {spacing: kl(SparseVerification(schedule=spacing).refreshes(layers)) for spacing in regular},
    }


def documents(seed: int, count: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Documents with answers [count, length], and where the answers begin."""
    tokens = np.stack([recall.tokens(np.random.default_rng([seed, index]), length, "train") for index in range(count)])
    heading = recall.vocabulary().index("answers")
    return tokens, np.argmax(tokens == heading, axis=1) + 2  # behind the line of the heading


def main(arguments: Sequence[str] | None = None) -> None:
    """Searches, takes divergences, and prints them for each context."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a directory with sparse layers, of the task's vocabulary, or a bundled name")
    parser.add_argument("--context", type=int, nargs="+", default=[1024], help="tokens of a document with its answers")
    parser.add_argument("--documents", type=int, default=8, help="of each context (8)")
    parser.add_argument("--seed", type=int, default=0, help="of the documents (0)")
    parser.add_argument("--limit", type=float, default=LIMIT, help=f"nats a token ({LIMIT})")
    parser.add_argument("--modes", nargs="+", choices=MODES[1:], default=[], help="ways to read in groups, too (none)")
    parser.add_argument("--groups", type=int, nargs="+", default=[2, 4, 8], help="C of these (2 4 8)")
    add_save_option(parser)
    args = parser.parse_args(arguments)
    check_files(args)
    if min(args.context) < recall.SHORTEST or args.documents < 1:
        parser.error(f"--context must be at least {recall.SHORTEST} and --documents 1")
    directory = bundled_model(BUNDLED[args.model]) if args.model in BUNDLED else args.model
    config, params = load_checkpoint(directory, "float32")
    SparseVerification().check(config.selecting.values())
    if config.vocab_size != len(recall.vocabulary()):
        parser.error(f"the model has {config.vocab_size} token ids and the task {len(recall.vocabulary())}")
    lines = []
    for context in args.context:
        texts = read(config, params, *documents(args.seed, args.documents, context))
        found = report(len(config.selecting), divergence_of(config, params, texts), args.limit)
        tokens = {"tokens": int(texts.counts.sum()), "documents": args.documents, "context": context}
        print(
            f"\n{tokens['tokens']} tokens of {args.documents} answers to {context:,}, {found['layers']} sparse layers"
        )
        for flip in found["flips"]:
            print(f"layer {flip['layer']:2d} takes blocks: KL {flip['kl']:.5f} nats a token")
        if found["next"] is not None:
            print(f"layer {found['next']['layer']:2d} would give   KL {found['next']['kl']:.5f}, above {args.limit:g}")
        print(f"schedule {','.join('01'[flag] for flag in found['schedule'])}, spacings {found['spacings']}")
        for spacing, kl in found["regular"].items():
            print(f"spacing {spacing}: KL {kl:.5f}")
        of_mode = divergence_of_modes(config, params, texts)
        ways = [SparseVerification(mode, group) for mode in args.modes for group in args.groups]
        found["modes"] = [
            {"mode": way.mode, "group": way.group, "kl": value}
            for way, value in zip(ways, divergences(of_mode, ways), strict=True)
        ]
        for one in found["modes"]:
            print(f"{one['mode']} by {one['group']}: KL {one['kl']:.5f}", flush=True)
        lines.append({"model": args.model, "device": jax.devices()[0].device_kind, **tokens, **found})
    if args.save is not None:
        save(args.save, lines, this_machine())


if __name__ == "__main__":
    main()
