"""Make the recall pair: a target with Native Sparse Attention for 16,384 tokens, its controls, and a dense draft.

    python scripts/train_recall.py target                  # 11 minutes on one H100; writes recall/target
    python scripts/train_recall.py dense window draft      # the dense twin, the window-only control, the draft
    python scripts/train_recall.py target draft --smoke --output /tmp/pair    # the whole path, tiny, on a CPU

Documents made up on the spot (`smcjax.tasks.recall`) → training in stages of growing length → accuracy on documents of
held-out keys → Hugging Face directories. Needs flax and optax (`uv run --extra train`).
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import recall_data as data
from flax.training.train_state import TrainState
from sparse_training import attend_by
from train_pair import LookUp, initial_params

from smcjax.model import LayerSpec, ModelConfig, Params, Rope, save_checkpoint
from smcjax.model.attention import FULL, AttentionKind, SlidingWindow
from smcjax.model.decoder import hidden_states, unembed
from smcjax.model.nsa import NSA
from smcjax.tasks.intervals import wilson_interval
from smcjax.tasks.recall import BOS, EOS, vocabulary

MAX_LENGTH = 16_384
SPARSE = NSA(num_blocks=8, window=256, kv="shared", phi="linear")
KINDS: dict[str, AttentionKind] = {
    "target": SPARSE,
    "dense": FULL,
    "window": SlidingWindow(SPARSE.window),
    "draft": FULL,
}
# Seconds of training at each length; the learning rate falls to 0 over the last part of their sum.
STAGES = {
    "target": {512: 60, 2048: 110, 8192: 200, 16384: 75},
    "dense": {512: 50, 2048: 60, 8192: 90, 16384: 40},
    "window": {512: 20, 2048: 25, 8192: 30},
    "draft": {512: 20, 2048: 20, 8192: 30},
}
PEAKS = {"target": 1.5e-3, "dense": 1.5e-3, "window": 1.5e-3, "draft": 4e-3}
FALLING = 0.35  # of the time
EVAL_SEED = 2_024
ANSWERS, NEWLINE = (vocabulary().index(piece) for piece in ("answers", "\n"))


def model_config(name: str, smoke: bool) -> ModelConfig:
    """The decoder of that name; `smoke`: a tiny one of its kind."""
    kind = KINDS[name]
    if smoke and isinstance(kind, NSA):
        kind = dataclasses.replace(kind, kernel_size=8, kernel_stride=4, block_size=16, window=32)
    small = smoke or name == "draft"
    return ModelConfig(
        vocab_size=len(vocabulary()),
        hidden_size=128 if small else 384,
        intermediate_size=352 if small else 1152,
        num_layers=2 if small else 8,
        num_heads=4 if small else 8,
        num_kv_heads=2,
        head_dim=32 if small else 64,
        max_position_embeddings=MAX_LENGTH,
        layers=(LayerSpec(kind, Rope(500_000.0)),),
        tie_embeddings=True,
        bos_token_id=BOS,
        eos_token_ids=(EOS,),
    )


def starting_params(config: ModelConfig, key: jax.Array) -> Params:
    """Random weights; what compresses is the mean at first, so that blocks are ranked by what they hold at once, and
    gates are even but for the window's, which is more open."""
    params = initial_params(config, key)

    def with_means(own: dict[str, jax.Array] | None) -> Any:
        if own is None:
            return None
        kind = config.layer(0).attention
        assert isinstance(kind, NSA)
        mean = jnp.tile(jnp.eye(config.head_dim) / kind.kernel_size, (1, kind.kernel_size))
        means = {name: jnp.broadcast_to(mean, own[name].shape) for name in ("phi_k", "phi_v")}
        nothing = {name: jnp.zeros_like(own[name]) for name in ("gate", "position_k", "position_v")}
        return {**own, **means, **nothing, "gate_bias": own["gate_bias"].at[:, 2].set(1.0)}

    layers = tuple(dataclasses.replace(layer, attention=with_means(layer.attention)) for layer in params.layers)
    return dataclasses.replace(params, layers=layers)


def logits_of(config: ModelConfig, params: Params, tokens: jax.Array, implementation: str) -> jax.Array:
    """Logits [R, T, V] behind every token of `tokens` [R, T], without pages."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    embedded = dataclasses.replace(params, embed=LookUp(params.embed))
    return unembed(params, hidden_states(config, embedded, tokens, positions, attend_by(implementation, config)))


def in_answers(tokens: np.ndarray | jax.Array) -> Any:
    """True where the next token belongs to answers: from behind the word `answers` to the end of text. [R, T]"""
    xp = jnp if isinstance(tokens, jax.Array) else np
    return xp.cumsum(tokens == ANSWERS, axis=1) > xp.cumsum(tokens == EOS, axis=1)


def losses(
    config: ModelConfig, params: Params, tokens: jax.Array, other_weight: float, implementation: str
) -> tuple[jax.Array, jax.Array]:
    """The loss of `tokens` [R, T], whose answers weigh 1 and the rest `other_weight`, and that of answers alone."""
    targets = jnp.pad(tokens[:, 1:], ((0, 0), (0, 1)))
    logits = logits_of(config, params, tokens, implementation)
    # logits[targets], written so that it fuses in both directions.
    chosen = jnp.where(targets[..., None] == jnp.arange(config.vocab_size), logits, 0.0).sum(-1)
    nll = jax.nn.logsumexp(logits, axis=-1) - chosen
    there = jnp.arange(tokens.shape[1]) < tokens.shape[1] - 1
    answer = in_answers(tokens) & there
    weights = jnp.where(answer, 1.0, other_weight) * there
    return (weights * nll).sum() / weights.sum(), (answer * nll).sum() / answer.sum()


def compressing(params: Any) -> Any:
    """True for the weights that make compressed tokens: each adds up 32 tokens, so it must move so much more slowly."""
    names = jax.tree_util.tree_map_with_path(lambda path, _: jax.tree_util.keystr(path), params)
    return jax.tree.map(lambda name: "phi_" in name or "position_" in name, names)


def train(name: str, config: ModelConfig, args: Any) -> Params:
    """Trains one model stage by stage, each for its seconds behind compilation and at most `args.max_steps` steps."""
    on_gpu = jax.default_backend() == "gpu"
    compute, implementation = (jnp.bfloat16, "cudnn") if on_gpu else (jnp.float32, "xla")
    adamw = optax.inject_hyperparams(optax.adamw, static_args=("mask",))
    decayed = lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params)  # noqa: E731
    optimizer = optax.apply_if_finite(
        optax.chain(
            optax.clip_by_global_norm(1.0),
            adamw(learning_rate=0.0, b1=0.9, b2=0.95, eps=1e-9, weight_decay=args.weight_decay, mask=decayed),
            optax.masked(optax.scale(1 / 32), compressing),
        ),
        max_consecutive_errors=1_000,
    )
    params = starting_params(config, jax.random.key(args.seed))
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    state = TrainState.create(apply_fn=logits_of, params={"decoder": params}, tx=optimizer)

    def loss(params: dict[str, Params], rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        cast = jax.tree.map(lambda leaf: leaf.astype(compute), params["decoder"])
        return losses(config, cast, rows, args.other_weight, implementation)

    def one_step(state: TrainState, rows: jax.Array, rate: jax.Array) -> tuple[TrainState, jax.Array]:
        (_, answers), gradients = jax.value_and_grad(loss, has_aux=True)(state.params, rows.astype(jnp.int32))
        warm = jnp.minimum((state.step + 1) / args.warmup, 1.0)
        state = state.replace(opt_state=optax.tree.set(state.opt_state, learning_rate=rate * warm))
        return state.apply_gradients(grads=gradients), answers

    @functools.partial(jax.jit, donate_argnums=0)
    def some_steps(state: TrainState, rows: jax.Array, rate: jax.Array) -> tuple[TrainState, jax.Array]:
        state, answers = jax.lax.scan(lambda state, rows: one_step(state, rows, rate), state, rows)
        return state, answers.mean()

    stages = {length: seconds * args.time for length, seconds in STAGES[name].items() if length <= args.longest}
    total, spent, tokens = sum(stages.values()), 0.0, 0
    for length, seconds in stages.items():
        rows = max(1, args.tokens // length)
        # Speeds are guesses on the generous side; documents that run out are read again.
        guess = int(seconds * args.tokens_per_second / length) if on_gpu else args.max_steps * rows
        made = time.perf_counter()
        documents = data.make_rows(args.seed + 1, max(guess, args.chunk * rows), length, "train", args.workers)
        print(f"{name}: {len(documents):,} documents of {length}, {time.perf_counter() - made:.0f} s", flush=True)
        on_device = jax.device_put(documents)
        begin, steps, history, cursor = time.perf_counter(), 0, [], 0
        while steps < args.max_steps:
            elapsed = time.perf_counter() - begin if steps > args.chunk else 0.0
            if elapsed >= seconds:
                break
            share = (spent + elapsed) / total
            rate = jnp.float32(PEAKS[name] * min(1.0, (1 - share) / FALLING))
            if cursor + args.chunk * rows > len(documents):
                cursor = 0
            batch = on_device[cursor : cursor + args.chunk * rows].reshape(args.chunk, rows, length)
            cursor += args.chunk * rows
            state, mean = some_steps(state, batch, rate)
            history.append(float(mean))
            if int(state.opt_state.notfinite_count) > args.chunk:
                raise SystemExit(f"{name}: gradients are not finite at step {steps} of length {length}")
            steps += args.chunk
            if steps == args.chunk:
                print(f"{name}: {length}: compiled in {time.perf_counter() - begin:.0f} s", flush=True)
                begin = time.perf_counter()
            if len(history) * args.chunk % args.report == 0:
                line = f"{name}: {length}: step {steps:6d}  answers {np.mean(history[-10:]):.4f}  {elapsed:5.0f} s"
                print(line, flush=True)
        seconds_taken = time.perf_counter() - begin
        spent += seconds
        tokens += steps * rows * length
        speed = (steps - args.chunk) * rows * length / seconds_taken / 1e6
        print(
            f"{name}: {length}: {steps} steps of {rows} rows, {speed:.2f} M tokens/s, loss {history[-1]:.4f}",
            flush=True,
        )
        params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), state.params["decoder"])
        save(name, config, params, args.output)
    print(f"{name}: {count:,} parameters, {tokens / 1e6:.0f} M tokens, {spent:.0f} s of training", flush=True)
    return params


def save(name: str, config: ModelConfig, params: Params, output: Path) -> None:
    """A Hugging Face directory of weights in bf16 and the tokenizer."""
    save_checkpoint(config, params, output / name, dtype="bfloat16")
    data.save_tokenizer(output / name, MAX_LENGTH)


@functools.partial(jax.jit, static_argnames=("config", "implementation"))
def _guesses(config: ModelConfig, params: Params, tokens: jax.Array, implementation: str) -> jax.Array:
    return jnp.argmax(logits_of(config, params, tokens, implementation), axis=-1)


def lines_right(tokens: np.ndarray, guesses: np.ndarray) -> list[bool]:
    """For each answer line of documents [R, T]: true if every token is the likeliest behind what precedes it."""
    found = []
    for row, guess in zip(tokens, guesses, strict=True):
        places = np.flatnonzero(in_answers(row[None])[0, :-1])[1:]  # behind the newline of the word `answers`
        right = guess[places] == row[places + 1]
        ends = np.flatnonzero(row[places + 1] == NEWLINE)
        found += [bool(part.all()) for part in np.split(right, ends + 1)[: len(ends)]]
    return found


def measure(name: str, config: ModelConfig, params: Params, args: Any, lengths: list[int]) -> dict[int, Any]:
    """Shares of answer lines that are right token by token, on documents of held-out keys, with 95% intervals."""
    implementation, result = ("cudnn" if jax.default_backend() == "gpu" else "xla"), {}
    if jax.default_backend() != "gpu":
        params = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)
    for length in lengths:
        rows = max(1, args.tokens // length // 4)
        count = max(rows, min(args.eval_documents, args.eval_documents * 2048 // length))
        documents = data.make_rows(EVAL_SEED, count, length, "eval", 1, several=False)
        right = []
        for begin in range(0, count - rows + 1, rows):
            part = documents[begin : begin + rows]
            right += lines_right(
                part, np.asarray(_guesses(config, params, jnp.asarray(part, jnp.int32), implementation))
            )
        low, high = wilson_interval(sum(right), len(right))
        result[length] = {"lines": sum(right) / len(right), "ci_low": low, "ci_high": high, "n": len(right)}
        print(f"{name}: lines right at {length}: {sum(right) / len(right):.4f} [{low:.4f}, {high:.4f}]", flush=True)
    return result


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", choices=list(KINDS))
    parser.add_argument("--output", type=Path, default=Path("recall"), help="where directories of the models' names go")
    parser.add_argument("--time", type=float, default=1.0, help="factor of the seconds of all stages")
    parser.add_argument("--longest", type=int, default=MAX_LENGTH, help="tokens of the last stage")
    parser.add_argument("--max-steps", type=int, default=1_000_000, help="of a stage")
    parser.add_argument("--tokens", type=int, default=65_536, help="of a step")
    parser.add_argument("--tokens-per-second", type=float, default=1.2e6, help="guess, for the number of documents")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--warmup", type=int, default=200, help="steps")
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--other-weight", type=float, default=0.05, help="weight of the loss outside of answers")
    parser.add_argument("--chunk", type=int, default=10, help="steps in one program")
    parser.add_argument("--report", type=int, default=100, help="steps between lines of progress")
    parser.add_argument("--eval-documents", type=int, default=128, help="of 2,048 tokens; in proportion fewer of more")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true", help="everything tiny: does the whole path work?")
    args = parser.parse_args(arguments)
    if args.smoke:
        args.longest, args.max_steps, args.chunk, args.tokens, args.workers = 512, 4, 2, 1024, 1
        args.eval_documents, args.report = 2, 2
    return args


def main() -> None:
    args = parse()
    begin = time.perf_counter()
    results: list[dict[str, Any]] = []
    for name in args.models:
        config = model_config(name, args.smoke)
        params = train(name, config, args)
        lengths = [length for length in (2048, 8192, 16384) if length <= args.longest] or [args.longest]
        results.append({"model": name, "lines": measure(name, config, params, args, lengths)})
    for result in results:
        print(json.dumps(result))
    print(f"done in {time.perf_counter() - begin:.0f} s on {jax.devices()[0].device_kind}")


if __name__ == "__main__":
    main()
