"""Make the recall pair: a target with Native Sparse Attention for 16,384 tokens, its controls, and a dense draft.

    python scripts/training/train_recall.py target                  # 450 s of training on a GPU; writes recall/target
    python scripts/training/train_recall.py dense window draft      # the dense twin, the window-only control, the draft
    python scripts/training/train_recall.py target draft --smoke --output /tmp/pair    # the whole path, tiny, on a CPU

Documents made up on the spot (`smcjax.tasks.recall`) → training in stages of growing length → accuracy on documents of
held-out keys → Hugging Face directories. A sparse model learns the task with dense attention first, whose heads then
teach its compressed tokens which blocks to choose (`sparse_training.routing_loss`). Needs flax and optax
(`uv run --extra train`).
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import recall_data as data
from flax.training.train_state import TrainState
from recall_measure import LENGTHS, documents_of, in_answers, in_words, logits_of, measure
from sparse_training import attend_by, routing_loss
from train_pair import clipped_adamw, initial_params, surprise

from smcjax.model import LayerSpec, ModelConfig, Params, Rope, load_checkpoint, save_checkpoint
from smcjax.model.attention import FULL, AttentionKind, Projection, SlidingWindow
from smcjax.sparse.nsa import NSA
from smcjax.tasks.recall import BOS, EOS, vocabulary

MAX_LENGTH = 16_384
SPARSE = NSA(num_blocks=8, window=256, kv="shared")
FALLING = 0.35  # of the time, in which the learning rate falls to 0
GATE_BIAS = (-3.0, 4.0, -3.0)  # of compressed tokens, selection, window


@dataclasses.dataclass(frozen=True)
class Stage:
    """Training on documents of one length, at a fraction of the model's learning rate.

    dense: a sparse model attends to all; routes: it learns what to select; until: nats an answer's token, below which
    the stage ends early.
    """

    length: int
    seconds: float
    rate: float = 1.0
    dense: bool = False
    routes: bool = True
    until: float = 0.0


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The shape of a model and how it is trained."""

    kind: AttentionKind
    stages: tuple[Stage, ...]
    peak: float = 1.5e-3  # learning rate
    size: str = "384x8"  # hidden size x layers


# Learning to route from the first step on keeps a model from the task, which it finds after 600 to 1,500 steps; at the
# whole rate a sparse one forgets it.
_DENSE = (
    Stage(512, 180, dense=True, routes=False, until=0.01),
    Stage(2048, 40, dense=True),
    Stage(8192, 30, 0.7, dense=True),
)
_SPARSE = (Stage(2048, 50, 0.4), Stage(8192, 120, 0.4), Stage(16384, 80, 0.4))
_TWIN = (*_DENSE, Stage(8192, 40), Stage(16384, 40))
RECIPES = {
    "target": Recipe(SPARSE, (*_DENSE, *_SPARSE)),
    "dense": Recipe(FULL, _TWIN),
    "window": Recipe(SlidingWindow(SPARSE.window), (Stage(512, 20), Stage(2048, 25), Stage(8192, 30))),
    "draft": Recipe(FULL, (Stage(512, 20), Stage(2048, 20), Stage(8192, 30), Stage(16384, 30)), 4e-3, "128x2"),
    "small": Recipe(SPARSE, (*_DENSE, *_SPARSE), 4e-3, "128x2"),
}


def model_config(recipe: Recipe, *, smoke: bool) -> ModelConfig:
    """The decoder of a recipe; `smoke`: a tiny one of its kind."""
    kind, (hidden, layers) = recipe.kind, map(int, recipe.size.split("x"))
    if smoke:
        hidden, layers = 64, 2
        if isinstance(kind, NSA):
            kind = dataclasses.replace(kind, kernel_size=8, kernel_stride=4, block_size=16, window=32)
    heads = 8 if hidden >= 256 else 4
    return ModelConfig(
        vocab_size=len(vocabulary()),
        hidden_size=hidden,
        intermediate_size=3 * hidden if hidden >= 256 else hidden * 11 // 4,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=2,
        head_dim=64 if hidden >= 256 else hidden // heads,
        max_position_embeddings=MAX_LENGTH,
        layers=(LayerSpec(kind, Rope(500_000.0)),),
        tie_embeddings=True,
        bos_token_id=BOS,
        eos_token_ids=(EOS,),
    )


def starting_params(config: ModelConfig, key: jax.Array) -> Params:
    """Random weights; of sparse layers what compresses is the mean, so that blocks are ranked by what they hold at
    once, and gates leave it to the selection, which is as dense attention where it chooses well."""
    params = initial_params(config, key)
    kind = config.layer(0).attention
    if not isinstance(kind, NSA):
        return params
    mean = jnp.tile(jnp.eye(config.head_dim) / kind.kernel_size, (1, kind.kernel_size))

    def with_means(own: dict[str, jax.Array]) -> dict[str, jax.Array]:
        means = {name: jnp.broadcast_to(mean, own[name].shape) for name in ("phi_k", "phi_v")}
        nothing = {name: jnp.zeros_like(own[name]) for name in ("gate", "position_k", "position_v")}
        return {**own, **means, **nothing, "gate_bias": jnp.broadcast_to(jnp.array(GATE_BIAS), own["gate_bias"].shape)}

    layers = tuple(dataclasses.replace(layer, attention=with_means(layer.attention)) for layer in params.layers)
    return dataclasses.replace(params, layers=layers)


class Losses(NamedTuple):
    """Nats a token: of answers, of all tokens with their weights, and how far routing is from dense attention."""

    answers: jax.Array
    all: jax.Array
    routing: jax.Array


def losses(config: ModelConfig, params: Params, tokens: jax.Array, stage: Stage, args: Any) -> Losses:
    """The losses of `tokens` [R, T], with attention as in a stage."""
    routing, answer = [], in_answers(tokens) & (jnp.arange(tokens.shape[1]) < tokens.shape[1] - 1)[None]
    # Of each row, places in answers first, at random: there is something to look for.
    order = jax.random.uniform(jax.random.key(0), tokens.shape) + answer.astype(jnp.float32)
    queries = jax.lax.top_k(order, min(args.routing_queries, tokens.shape[1]))[1]
    attend = attend_by(args.implementation, config, dense=stage.dense)

    def learning(index: int, projection: Projection) -> jax.Array:
        kind = config.layer(index).attention
        if isinstance(kind, NSA) and stage.routes:
            routing.append(routing_loss(kind, projection, queries))
        return attend(index, projection)

    logits = logits_of(config, params, tokens, learning)
    nll = surprise(logits, jnp.pad(tokens[:, 1:], ((0, 0), (0, 1))))
    weights = jnp.where(answer, 1.0, args.other_weight).at[:, -1].set(0.0)
    weighted, routed = (weights * nll).sum() / weights.sum(), sum(routing, jnp.float32(0))
    counted = answer.astype(nll.dtype)
    return Losses((counted * nll).sum() / counted.sum(), weighted, routed)


def compressing(params: Any) -> Any:
    """True for the weights that make compressed tokens: each adds up 32 tokens, so it must move so much more slowly."""
    names = jax.tree_util.tree_map_with_path(lambda path, _: jax.tree_util.keystr(path), params)
    return jax.tree.map(lambda name: "phi_" in name or "position_" in name, names)


def train(name: str, recipe: Recipe, config: ModelConfig, args: Any) -> Params:
    """Trains one model stage by stage, each for its seconds behind compilation and at most `args.max_steps` steps."""
    compute = jnp.bfloat16 if args.implementation == "cudnn" else jnp.float32

    def decayed(params: Any) -> Any:
        return jax.tree.map(lambda leaf, own: leaf.ndim > 1 and not own, params, compressing(params))

    optimizer = optax.apply_if_finite(
        optax.chain(
            clipped_adamw(args.weight_decay, decayed),
            optax.masked(optax.scale(args.compressing_rate), compressing),
        ),
        max_consecutive_errors=1_000,
    )
    params = starting_params(config, jax.random.key(args.seed))
    if args.start is not None:
        params = started(config, params, args.start)
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    state = TrainState.create(apply_fn=logits_of, params={"decoder": params}, tx=optimizer)

    def one_step(stage: Stage, state: TrainState, rows: jax.Array, rate: jax.Array) -> tuple[TrainState, jax.Array]:
        def loss(params: dict[str, Params]) -> tuple[jax.Array, Losses]:
            cast = jax.tree.map(lambda leaf: leaf.astype(compute), params["decoder"])
            parts = losses(config, cast, rows.astype(jnp.int32), stage, args)
            return parts.all + args.routing_weight * parts.routing, parts

        (_, parts), gradients = jax.value_and_grad(loss, has_aux=True)(state.params)
        warm = jnp.minimum((state.step + 1) / args.warmup, 1.0)
        state = state.replace(opt_state=optax.tree.set(state.opt_state, learning_rate=rate * warm))
        return state.apply_gradients(grads=gradients), jnp.stack([parts.answers, parts.routing])

    @functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
    def some_steps(stage: Stage, state: TrainState, rows: jax.Array, rate: jax.Array) -> tuple[TrainState, jax.Array]:
        return jax.lax.scan(lambda state, rows: one_step(stage, state, rows, rate), state, rows)

    stages = [stage for stage in recipe.stages if args.shortest <= stage.length <= args.longest]
    stages = [stage for stage in stages if not (stage.dense and args.start is not None)]
    total, spent, tokens = sum(stage.seconds for stage in stages) * args.time, 0.0, 0
    for number, stage in enumerate(stages):
        length, seconds, rows = stage.length, stage.seconds * args.time, max(1, args.tokens // stage.length)
        # Speeds are guesses on the generous side; documents that run out are read again.
        guess = max(args.chunk * rows, min(int(seconds * args.tokens_per_second / length), args.max_steps * rows))
        documents = data.make_rows(args.seed + 1 + number, guess, length, "train", args.workers)
        on_device, where = jax.device_put(documents), f"{name}: {length} {'dense' if stage.dense else 'as it is'}:"
        begin, steps, cursor = time.perf_counter(), 0, 0
        history: list[np.ndarray] = []
        while steps < args.max_steps:
            elapsed = time.perf_counter() - begin if steps else 0.0
            learnt = len(history) >= 100 and np.mean(history[-100:], axis=0)[0] < stage.until
            if steps > args.chunk and (elapsed >= seconds or learnt):
                break
            rate = args.rate * stage.rate * recipe.peak * min(1.0, (1 - (spent + elapsed) / total) / FALLING)
            if cursor + args.chunk * rows > len(documents):
                cursor = 0
            batch = on_device[cursor : cursor + args.chunk * rows].reshape(args.chunk, rows, length)
            cursor += args.chunk * rows
            state, parts = some_steps(stage, state, batch, jnp.float32(max(rate, 0.0)))
            history.extend(np.asarray(parts))
            if int(state.opt_state.notfinite_count) > args.chunk:
                raise SystemExit(f"{where} gradients are not finite at step {steps}")
            steps += args.chunk
            if steps == args.chunk:
                print(f"{where} compiled in {time.perf_counter() - begin:.0f} s", flush=True)
                begin = time.perf_counter()
            if steps % args.report == 0:
                answers, routing = np.mean(history[-args.report :], axis=0)
                line = f"{where} step {steps:6d}  answers {answers:.4f}  routing {routing:.4f}  {elapsed:5.0f} s"
                print(line, flush=True)
        spent += seconds
        tokens += steps * rows * length
        speed = (steps - args.chunk) * rows * length / (time.perf_counter() - begin) / 1e6
        print(f"{where} {steps} steps of {rows} rows, {speed:.2f} M tokens/s, loss {history[-1][0]:.4f}", flush=True)
        params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), state.params["decoder"])
        save(name, config, params, args.output)
    print(f"{name}: {count:,} parameters, {tokens / 1e6:.0f} M tokens, {spent:.0f} s of training", flush=True)
    return params


def started(config: ModelConfig, params: Params, directory: Path) -> Params:
    """`params` with the weights of a directory; those that compress and gate stay where it has none, a dense twin."""
    _, found = load_checkpoint(directory, dtype="float32")
    pairs = zip(found.layers, params.layers, strict=True)
    layers = (dataclasses.replace(theirs, attention=theirs.attention or own.attention) for theirs, own in pairs)
    return dataclasses.replace(found, layers=tuple(layers))


def save(name: str, config: ModelConfig, params: Params, output: Path) -> None:
    """A Hugging Face directory of weights in bf16 and the tokenizer."""
    save_checkpoint(config, params, output / name, dtype="bfloat16")
    data.save_tokenizer(output / name, MAX_LENGTH)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", choices=list(RECIPES))
    parser.add_argument("--output", type=Path, default=Path("recall"), help="where directories of the models' names go")
    parser.add_argument("--time", type=float, default=1.0, help="factor of the seconds of all stages")
    parser.add_argument("--shortest", type=int, default=0, help="tokens of the first stage")
    parser.add_argument("--rate", type=float, default=1.0, help="factor of the learning rate")
    parser.add_argument("--longest", type=int, default=MAX_LENGTH, help="tokens of the last stage")
    parser.add_argument("--start", type=Path, help="weights to start with, of this model or its dense twin")
    parser.add_argument("--max-steps", type=int, default=1_000_000, help="of a stage")
    parser.add_argument("--tokens", type=int, default=65_536, help="of a step")
    parser.add_argument("--tokens-per-second", type=float, default=1.2e6, help="guess, for the number of documents")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--warmup", type=int, default=200, help="steps")
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--other-weight", type=float, default=0.05, help="weight of the loss outside of answers")
    parser.add_argument("--routing-weight", type=float, default=0.03, help="of the loss of routing, a layer")
    parser.add_argument("--routing-queries", type=int, default=256, help="of a document, that teach routing")
    parser.add_argument(
        "--compressing-rate", type=float, default=0.5, help="learning rate of what compresses, relative"
    )
    parser.add_argument("--chunk", type=int, default=10, help="steps in one program")
    parser.add_argument("--report", type=int, default=100, help="steps between lines of progress")
    parser.add_argument("--eval-documents", type=int, default=128, help="of 2,048 tokens; in proportion fewer of more")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true", help="everything tiny: does the whole path work?")
    args = parser.parse_args(arguments)
    args.implementation = "cudnn" if jax.default_backend() == "gpu" else "xla"
    if args.smoke:
        args.longest, args.max_steps, args.chunk, args.tokens, args.workers = 512, 4, 2, 1024, 1
        args.eval_documents, args.report = 2, 2
    return args


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    begin = time.perf_counter()
    results: list[dict[str, Any]] = []
    for name in args.models:
        config = model_config(RECIPES[name], smoke=args.smoke)
        params = train(name, RECIPES[name], config, args)
        lengths = [length for length in LENGTHS if length <= args.longest] or [args.longest]
        for length in lengths:
            found = measure(
                config,
                params,
                length,
                documents=documents_of(length, args.eval_documents),
                tokens=args.tokens // 4,
                implementation=args.implementation,
                looks=False,
            )
            print(f"{name}: lines right at {length}: {in_words(found['lines'])}", flush=True)
            results.append({"model": name, "length": length, **found})
    for result in results:
        print(json.dumps(result))
    print(f"done in {time.perf_counter() - begin:.0f} s on {jax.devices()[0].device_kind}")


if __name__ == "__main__":
    main()
