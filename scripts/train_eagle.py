"""Train an EAGLE-3 head for a target, on the target's own answers, with a training-time test of several steps.

    python scripts/train_eagle.py --output head                            # for the bundled target, on word problems
    python scripts/train_eagle.py --model DIR --task recall --output head  # for a target that knows long documents
    python scripts/train_eagle.py --smoke --output /tmp/head               # the whole path, tiny, on a CPU

Prompts of the task → the target's answers, sampled → a head of one layer, the target's embedding and head, trained so
that its logits are the target's → a directory that `LLM(model, draft_model=head)` takes → acceptance of its drafts on
held-out prompts. In the training-time test (arXiv 2503.01840, section 3.2) step k reads the head's own outputs of step
k − 1 in place of features, and attends to the target's entries up to k positions before and to its own behind them: as
it will when it drafts. Needs flax and optax (`uv run --extra train`).
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from train_pair import clipped_adamw, learning_rate

from smcjax import LLM, Autoregressive, Rejection, SamplingParams
from smcjax.model import ModelConfig, Params, load_checkpoint
from smcjax.model.config import LayerSpec
from smcjax.model.decoder import Taps, hidden_states, unembed
from smcjax.model.eagle import (
    ATTENTION,
    EagleConfig,
    EagleParams,
    conclude,
    eagle_logits,
    eagle_shapes,
    fuse,
    project,
)
from smcjax.model.eagle_files import save_eagle
from smcjax.model.hub import bundled_model
from smcjax.pallas import implementations
from smcjax.tasks import recall, word_problems
from smcjax.tasks.questions import LONGEST_ANSWER, TASKS, questions

DECAY = 0.8  # of the loss's weight from step to step


def head_config(target: ModelConfig) -> EagleConfig:
    """A head of the target's width, heads and vocabulary."""
    layer = dataclasses.replace(
        target, num_layers=1, layers=(LayerSpec(ATTENTION, target.layer(0).rope),), tie_embeddings=False
    )
    count = target.num_layers
    return EagleConfig(layer, target.vocab_size, target.hidden_size, (2, count // 2, count - 3))


def starting_params(config: EagleConfig, key: jax.Array) -> EagleParams:
    """Norms 1, matrices Gaussian with standard deviation 1/√(fan-in), less where they write to the residual."""
    shapes = eagle_shapes(config, jnp.float32, lm_head=False)
    leaves, tree = jax.tree.flatten(shapes)
    keys = jax.random.split(key, len(leaves))
    made = [
        jnp.ones(leaf.shape) if len(leaf.shape) == 1 else jax.random.normal(one, leaf.shape) / np.sqrt(leaf.shape[-1])
        for leaf, one in zip(leaves, keys, strict=True)
    ]
    params: EagleParams = jax.tree.unflatten(tree, made)
    return dataclasses.replace(params, o=params.o / 2, down=params.down / 2)


def unrolled(
    config: EagleConfig, params: EagleParams, tokens: jax.Array, features: jax.Array, steps: int
) -> list[jax.Array]:
    """The head's outputs [B, T, E] for entries of tokens [B, T], at each of `steps` steps.

    Entry i of step k stands at the end of k drafted tokens: up to i − k features are the target's, and behind that the
    outputs of steps 0 … k − 1. The first k entries of step k mean nothing.
    """
    positions = jnp.broadcast_to(1 + jnp.arange(tokens.shape[1]), tokens.shape)
    index = jnp.arange(tokens.shape[1])
    keys: list[jax.Array] = []
    values: list[jax.Array] = []
    outputs: list[jax.Array] = []
    for step in range(steps):
        if step:
            features = jnp.pad(outputs[-1][:, :-1], ((0, 0), (1, 0), (0, 0)))
        q, k, v = project(config, params, tokens, features, positions).heads()
        keys.append(k)
        values.append(v)
        q = q.reshape(*k.shape[:3], -1, q.shape[-1]) / jnp.sqrt(q.shape[-1])
        scores = jnp.einsum("bihgd,bmhd->bihgm", q, keys[0])
        visible = index[None, :] <= index[:, None] - step
        parts = [jnp.where(visible[None, :, None, None], scores, -jnp.inf)]
        # Entry i sees of step s the one that its own chain made: the entry step − s before.
        own = range(1, step + 1)
        rolled = [(jnp.roll(keys[s], step - s, axis=1), jnp.roll(values[s], step - s, axis=1)) for s in own]
        parts += [jnp.einsum("bihgd,bihd->bihg", q, key)[..., None] for key, _ in rolled]
        weights = jax.nn.softmax(jnp.concatenate(parts, axis=-1), axis=-1)
        attended = jnp.einsum("bihgm,bmhd->bihgd", weights[..., : len(index)], values[0])
        for place, (_, value) in enumerate(rolled, len(index)):
            attended += weights[..., place, None] * value[:, :, :, None]
        outputs.append(conclude(config, params, features, attended.reshape(*tokens.shape, -1, q.shape[-1])))
    return outputs


def read_target(
    config: ModelConfig, params: Params, taps: tuple[int, ...], tokens: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The target's streams [B, T, taps, E] and logits [B, T, V], dense."""
    positions, watch = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape), Taps(taps)

    def attend(index: int, projection: Any) -> jax.Array:
        return config.layer(index).attention.dense(projection, positions)

    hidden = hidden_states(config, params, tokens, positions, attend, watch)
    return watch.streams, unembed(params, hidden)


def loss_of(
    config: EagleConfig,
    params: EagleParams,
    streams: jax.Array,
    wanted: jax.Array,
    tokens: jax.Array,
    weights: jax.Array,
    steps: int,
) -> tuple[jax.Array, jax.Array]:
    """The cross-entropy of the target's logits `wanted` [B, T, V] and the head's, and how often both agree by step.

    `tokens` [B, T]; `weights` [B, T] say which positions' next tokens count.
    """
    with implementations("xla"):
        outputs = unrolled(config, params, tokens[:, 1:], fuse(params, streams)[:, :-1], steps)
        law, losses, agreed = jax.nn.softmax(wanted[:, 1:]), [], []
        for step, x in enumerate(outputs):
            logits = eagle_logits(config, params, x)
            counted = weights[:, 1:] * (jnp.arange(x.shape[1]) >= step)
            nll = -(law * jax.nn.log_softmax(logits)).sum(axis=-1)
            losses.append(DECAY**step * (nll * counted).sum() / counted.sum())
            right = logits.argmax(axis=-1) == wanted[:, 1:].argmax(axis=-1)
            agreed.append((right * counted).sum() / counted.sum())
    return jnp.stack(losses).sum(), jnp.stack(agreed)


def answered_rows(args: argparse.Namespace) -> tuple[np.ndarray, np.ndarray]:
    """Prompts with the target's sampled answers [rows, T] int32, padded with 0, and which positions predict answers."""
    if args.task == "recall":
        prompts = [one.prompt for one in recall.generate(args.seed, args.prompts, "train", args.context)]
    else:
        prompts = [word_problems.prompt(one) for one in word_problems.generate(args.seed, args.prompts, "train")]
    with LLM(args.model, decoding=Autoregressive(), max_num_seqs=args.batch) as llm:
        params = [
            SamplingParams(max_tokens=LONGEST_ANSWER[args.task], temperature=1.0, seed=seed)
            for seed in range(len(prompts))
        ]
        outputs = llm.generate(prompts, params)
    texts = [(output.prompt_token_ids, output.outputs[0].token_ids) for output in outputs]
    rows = np.zeros((len(texts), max(len(a) + len(b) for a, b in texts)), np.int32)
    counted = np.zeros(rows.shape, np.float32)
    for row, weights, (prompt, answer) in zip(rows, counted, texts, strict=True):
        row[: len(prompt) + len(answer)] = [*prompt, *answer]
        weights[len(prompt) - 1 : len(prompt) + len(answer) - 1] = 1
    return rows, counted


def train(
    target: ModelConfig, target_params: Params, rows: np.ndarray, counted: np.ndarray, args: argparse.Namespace
) -> tuple[EagleConfig, EagleParams]:
    """The trained head, without what is the target's. `rows` and `counted` are those of `answered_rows`."""
    config = head_config(target)
    params = starting_params(config, jax.random.key(args.seed))
    optimizer = clipped_adamw(0.01, lambda tree: jax.tree.map(lambda leaf: leaf.ndim > 1, tree))
    state = optimizer.init(params)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def update(params: EagleParams, state: Any, tokens: jax.Array, weights: jax.Array, rate: jax.Array) -> Any:
        with implementations("xla"):
            streams, wanted = read_target(target, target_params, config.taps, tokens)

        def loss(own: EagleParams) -> Any:
            whole = own.joined(target_params.embed, target_params.unembed)
            return loss_of(config, whole, streams, wanted, tokens, weights, args.steps)

        (value, agreed), gradient = jax.value_and_grad(loss, has_aux=True)(params)
        state[1].hyperparams["learning_rate"] = rate
        change, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, change), state, value, agreed

    rng, began = np.random.default_rng(args.seed), time.perf_counter()
    for step in range(args.updates):
        chosen = rng.integers(len(rows), size=args.batch)
        rate = learning_rate(step, jnp.asarray(args.updates), args.peak, max(1, args.updates // 20))
        params, state, value, agreed = update(params, state, rows[chosen], counted[chosen], rate)
        if step % max(1, args.updates // 20) == 0 or step == args.updates - 1:
            by_step = " ".join(f"{share:.2f}" for share in np.asarray(agreed))
            print(f"{time.perf_counter() - began:6.1f} s  update {step}  loss {value:.3f}  agree by step {by_step}")
    return config, params


def acceptance(args: argparse.Namespace) -> list[float]:
    """The share of cycles whose accepted drafts reach each position, greedy, on held-out prompts."""
    prompts = [one.prompt for one in questions(args.task, 1, args.held_out, context=args.context)]
    with LLM(args.model, draft_model=args.output, decoding=Rejection(gamma=4), max_num_seqs=8) as llm:
        params = SamplingParams(max_tokens=LONGEST_ANSWER[args.task], temperature=0)
        metrics = [output.metrics for output in llm.generate(prompts, params)]
    cycles = sum(one.cycles for one in metrics)
    return [sum(reached) / cycles for reached in zip(*(one.accepted_at or () for one in metrics), strict=True)]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command's arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(bundled_model("target")), help="the target (the bundled one)")
    parser.add_argument("--output", type=Path, required=True, help="directory of the head")
    parser.add_argument("--task", choices=TASKS, default="words")
    parser.add_argument("--context", type=int, default=2048, help="tokens of a document of recall")
    parser.add_argument("--prompts", type=int, default=4096, help="that the target answers")
    parser.add_argument("--steps", type=int, default=5, help="of the training-time test")
    parser.add_argument("--updates", type=int, default=3000)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--peak", type=float, default=1e-3, help="learning rate")
    parser.add_argument("--held-out", type=int, default=64, help="prompts to count acceptance on")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true", help="few prompts and updates")
    args = parser.parse_args(arguments)
    if args.smoke:
        args.prompts, args.updates, args.batch, args.held_out = 8, 4, 4, 2
    return args


def main() -> None:
    args = parse()
    rows, counted = answered_rows(args)
    config, params = train(*load_checkpoint(args.model, dtype="float32"), rows, counted, args)
    save_eagle(args.output, config, params)
    shares = acceptance(args)
    print("cycles whose accepted drafts reach position 1 …:", " ".join(f"{share:.2f}" for share in shares))


if __name__ == "__main__":
    main()
