"""Train an EAGLE-3 head for a target, on the target's laws, with a training-time test of several steps.

    python scripts/training/train_eagle.py --output head  # for the bundled target, on word problems
    python scripts/training/train_eagle.py --task recall --output head --seconds 120  # for the sparse target, documents
    python scripts/training/train_eagle.py --model DIR --task recall --lengths 2048 8192 --output head
    python scripts/training/train_eagle.py --smoke --output /tmp/head  # the whole path, tiny, on a CPU

Word problems are answered by the target, sampled; documents of recall come with their right answers, which a target
that is worth a head gives nearly always. Then a head of one layer, with the target's embedding and unembedding, is
trained so that its logits behind the tokens of answers are the target's → a directory that `LLM(model,
draft_model=head)` takes. `smcjax bench decoders` says what it gains. In the training-time test (arXiv
2503.01840, section 3.2) step k reads the head's own outputs of step k − 1 in place of features, and attends to the
target's entries up to k positions before and to its own behind them: as it will when it drafts.

The target attends as in `sparse_training`, dense or sparse, without pages. The head computes keys and values of all of
a document and outputs behind the beginning of its answers alone, so that memory grows with the document, not with its
square. Needs flax and optax (`uv run --extra train`).
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
import recall_data
from recall_measure import in_answers
from sparse_training import attend_by
from train_pair import clipped_adamw

from smcjax import LLM, Autoregressive, SamplingParams
from smcjax.model import ModelConfig, Params, load_checkpoint
from smcjax.model.config import LayerSpec
from smcjax.model.decoder import AuxHiddenStates, hidden_states, unembed
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
from smcjax.model.files.eagle_files import save_eagle
from smcjax.model.files.hub import BUNDLED, bundled_model
from smcjax.pallas import implementations
from smcjax.tasks import word_problems
from smcjax.tasks.questions import LONGEST_ANSWER, TASKS

DECAY = 0.8  # of the loss's weight from step to step
FALLING = 0.5  # of the training, in which the learning rate falls to 0
ROWS_OF = 2048  # tokens of a document that --batch and --prompts count; of shorter ones there are more


def head_config(
    target: ModelConfig,
    heads: int | None = None,
    kv_heads: int | None = None,
    intermediate: int | None = None,
    aux_layers: tuple[int, ...] | None = None,
) -> EagleConfig:
    """A head of the target's width and vocabulary; with default heads and `aux_layers` if none are given."""
    layer = dataclasses.replace(
        target,
        num_layers=1,
        layers=(LayerSpec(ATTENTION, target.layer(0).rope),),
        tie_embeddings=False,
        num_heads=heads or target.num_heads,
        num_kv_heads=kv_heads or target.num_kv_heads,
        intermediate_size=intermediate or target.intermediate_size,
    )
    count = target.num_layers
    return EagleConfig(layer, target.vocab_size, target.hidden_size, aux_layers or (2, count // 2, count - 3))


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
    config: EagleConfig, params: EagleParams, tokens: jax.Array, features: jax.Array, steps: int, first: int = 0
) -> list[jax.Array]:
    """The head's outputs [B, T − first, E] for entries `first` … of tokens [B, T], at each of `steps` steps.

    Entry i of step k stands at the end of k drafted tokens: up to i − k features are the target's, and behind that the
    outputs of steps 0 … k − 1. The first k entries of step k mean nothing.
    """
    positions = jnp.broadcast_to(1 + jnp.arange(tokens.shape[1]), tokens.shape)
    q, all_keys, all_values = project(config, params, tokens, features, positions).heads()
    q, features, tokens = q[:, first:], features[:, first:], tokens[:, first:]
    positions, index = positions[:, first:], jnp.arange(first, all_keys.shape[1])
    keys: list[jax.Array] = [all_keys]
    values: list[jax.Array] = [all_values]
    outputs: list[jax.Array] = []
    for step in range(steps):
        if step:
            features = jnp.pad(outputs[-1][:, :-1], ((0, 0), (1, 0), (0, 0)))
            q, k, v = project(config, params, tokens, features, positions).heads()
            keys.append(k)
            values.append(v)
        q = q.reshape(*q.shape[:2], all_keys.shape[2], -1, q.shape[-1]) / np.sqrt(q.shape[-1]).astype(np.float32)
        q = q.astype(features.dtype)
        scores = jnp.einsum("bihgd,bmhd->bihgm", q, all_keys, preferred_element_type=jnp.float32)
        visible = jnp.arange(all_keys.shape[1])[None] <= index[:, None] - step
        parts = [jnp.where(visible[None, :, None, None], scores, -jnp.inf)]
        # Entry i sees of step s the one that its own chain made: the entry step − s before.
        own = range(1, step + 1)
        rolled = [(jnp.roll(keys[s], step - s, axis=1), jnp.roll(values[s], step - s, axis=1)) for s in own]
        parts += [jnp.einsum("bihgd,bihd->bihg", q, key)[..., None].astype(jnp.float32) for key, _ in rolled]
        scores = jnp.concatenate(parts, axis=-1)
        # An entry that sees nothing means nothing, and must not make NaN of gradients.
        scores = jnp.where(scores.max(axis=-1, keepdims=True) > -jnp.inf, scores, 0.0)
        weights = jax.nn.softmax(scores, axis=-1).astype(features.dtype)
        attended = jnp.einsum("bihgm,bmhd->bihgd", weights[..., : all_keys.shape[1]], all_values)
        for place, (_, value) in enumerate(rolled, all_keys.shape[1]):
            attended += weights[..., place, None] * value[:, :, :, None]
        outputs.append(conclude(config, params, features, attended.reshape(*tokens.shape, -1, q.shape[-1])))
    return outputs


def read_target(
    config: ModelConfig, params: Params, aux_layers: tuple[int, ...], tokens: jax.Array, first: int, implementation: str
) -> tuple[jax.Array, jax.Array]:
    """The target's auxiliary hidden states, and its logits [B, T − first, V] from token `first` on; without pages."""
    positions, watch = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape), AuxHiddenStates(aux_layers)
    hidden = hidden_states(config, params, tokens, positions, attend_by(implementation, config), watch)
    return watch.streams, unembed(params, hidden[:, first:])


def loss_of(
    config: EagleConfig,
    params: EagleParams,
    streams: jax.Array,
    wanted: jax.Array,
    tokens: jax.Array,
    weights: jax.Array,
    steps: int,
    first: int = 0,
) -> tuple[jax.Array, jax.Array]:
    """The cross-entropy of the target's logits and the head's, and how often both agree by step.

    `tokens` [B, T]; `weights` [B, T] say which positions' next tokens count; `wanted` [B, T − 1 − first, V] are the
    target's logits behind tokens 1 + first …, whose entries alone count.
    """
    with implementations("xla"):
        outputs = unrolled(config, params, tokens[:, 1:], fuse(params, streams)[:, :-1], steps, first)
        law, losses, agreed = jax.nn.softmax(wanted), [], []
        for step, x in enumerate(outputs):
            logits = eagle_logits(config, params, x)
            counted = jnp.where((jnp.arange(x.shape[1]) >= step)[None], weights[:, 1 + first :], 0)
            nll = -(law * jax.nn.log_softmax(logits)).sum(axis=-1)
            losses.append(DECAY**step * (nll * counted).sum() / counted.sum())
            right = logits.argmax(axis=-1) == wanted.argmax(axis=-1)
            agreed.append(jnp.where(right, counted, 0).sum() / counted.sum())
    return jnp.stack(losses).sum(), jnp.stack(agreed)


class Texts(NamedTuple):
    """Rows of one length [rows, T] int32, padded with 0, and which positions' next tokens count, of 0 and 1."""

    rows: np.ndarray
    counted: np.ndarray

    def first(self, steps: int) -> int:
        """The entry from which on outputs are needed: so many steps before the first one that counts."""
        return max(0, int(np.flatnonzero(self.counted.any(axis=0))[0]) - 1 - steps)


def answered(args: argparse.Namespace) -> Texts:
    """Word problems with the target's sampled answers."""
    prompts = [one.question for one in word_problems.generate(args.seed, args.prompts, "train")]
    with LLM(args.model, decoding=Autoregressive(), max_num_seqs=args.batch) as llm:
        params = [
            SamplingParams(max_tokens=LONGEST_ANSWER[args.task], temperature=1.0, seed=seed)
            for seed in range(len(prompts))
        ]
        outputs = llm.generate(prompts, params)
    texts = [(output.prompt_token_ids, output.outputs[0].token_ids) for output in outputs]
    rows = np.zeros((len(texts), max(len(a) + len(b) for a, b in texts)), np.int32)
    counted = np.zeros(rows.shape, np.uint8)
    for row, weights, (prompt, answer) in zip(rows, counted, texts, strict=True):
        row[: len(prompt) + len(answer)] = [*prompt, *answer]
        weights[len(prompt) - 1 : len(prompt) + len(answer) - 1] = 1
    return Texts(rows, counted)


def documents(args: argparse.Namespace, length: int) -> Texts:
    """Documents of recall with their answers."""
    count = max(1, args.prompts * ROWS_OF // length)
    made = recall_data.make_rows(args.seed, count, length, "train", args.workers, several=False)
    counted = in_answers(made)
    counted[:, -1] = False
    return Texts(made.astype(np.int32), counted.astype(np.uint8))


def train(target: ModelConfig, target_params: Params, stages: list[Texts], args: argparse.Namespace) -> None:
    """Trains a head on each of the stages for as long, and writes it after each, without what is the target's."""
    config = head_config(target, args.heads, args.kv_heads, args.intermediate, args.taps and tuple(args.taps))
    params = starting_params(config, jax.random.key(args.seed))
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    print(f"a head of {count:,} parameters, layers {', '.join(map(str, config.aux_layers))}", flush=True)
    optimizer = clipped_adamw(0.01, lambda tree: jax.tree.map(lambda leaf: leaf.ndim > 1, tree))
    compute = jnp.bfloat16 if args.implementation == "cudnn" else jnp.float32

    def one_update(first: int, carry: Any, given: Any) -> Any:
        params, state, target_params = carry
        tokens, weights, rate = given
        with implementations("xla"):
            layers = config.aux_layers
            streams, wanted = read_target(target, target_params, layers, tokens, 1 + first, args.implementation)
        streams, wanted = jax.lax.stop_gradient((streams, wanted))

        def loss(own: EagleParams) -> Any:
            own = jax.tree.map(lambda leaf: leaf.astype(compute), own)
            whole = own.joined(target_params.embed, target_params.unembed)
            return loss_of(config, whole, streams, wanted, tokens, weights, args.steps, first)

        (value, agreed), gradient = jax.value_and_grad(loss, has_aux=True)(params)
        state[1].hyperparams["learning_rate"] = rate
        change, state = optimizer.update(gradient, state, params)
        return (optax.apply_updates(params, change), state, target_params), (value, agreed)

    @functools.partial(jax.jit, static_argnums=0, donate_argnums=(1, 2))
    def some(first: int, params: Any, state: Any, target_params: Any, texts: Any, chosen: Any, rates: Any) -> Any:
        def one(carry: Any, given: Any) -> Any:
            rows, rate = given
            tokens, weights = (jnp.take(x, rows, axis=0) for x in texts)
            return one_update(first, carry, (tokens, weights.astype(jnp.float32), rate))

        (params, state, _), told = jax.lax.scan(one, (params, state, target_params), (chosen, rates))
        return params, state, told

    state, rng = optimizer.init(params), np.random.default_rng(args.seed)
    done, spent, budget = 0, 0.0, args.seconds / len(stages)
    for number, texts in enumerate(stages):
        length = texts.rows.shape[1]
        batch = max(1, args.batch * ROWS_OF // length) if args.task == "recall" else args.batch
        on_device, first = jax.device_put(tuple(texts)), texts.first(args.steps)
        began, updates, reported = time.perf_counter(), 0, 0.0
        while updates < args.updates:
            elapsed = time.perf_counter() - began if updates > args.chunk else 0.0
            if elapsed >= budget:
                break
            progress = (number + max(elapsed / budget, updates / args.updates)) / len(stages)
            rate = args.peak * min(1.0, (1 - progress) / FALLING)
            rates = rate * np.minimum((done + updates + np.arange(args.chunk) + 1) / args.warmup, 1.0)
            chosen = rng.integers(len(texts.rows), size=(args.chunk, batch))
            params, state, told = some(
                first, params, state, target_params, on_device, chosen, jnp.asarray(rates, jnp.float32)
            )
            told = jax.block_until_ready(told)
            updates += args.chunk
            if updates == args.chunk:
                print(f"{length} tokens: compiled in {time.perf_counter() - began:.0f} s", flush=True)
                began = time.perf_counter()
            if elapsed >= reported:
                reported += budget / 15
                value, agreed = (np.asarray(x).mean(axis=0) for x in told)
                by_step = " ".join(f"{share:.3f}" for share in agreed)
                print(
                    f"{spent + elapsed:6.1f} s  update {done + updates}  loss {value:.3f}  agree {by_step}", flush=True
                )
        done, spent = done + updates, spent + time.perf_counter() - began
        speed = (updates - args.chunk) * batch * length / (time.perf_counter() - began) / 1e6
        print(f"{length} tokens: {updates} updates of {batch} rows, {speed:.2f} M tokens/s; {by_step}", flush=True)
        save_eagle(args.output, config, jax.tree.map(lambda leaf: leaf.astype(args.dtype), params))
    record = {"parameters": count, "updates": done, "seconds": round(spent, 1), "agree": np.asarray(agreed).tolist()}
    print(json.dumps(record), flush=True)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command's arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="the target, a directory or a bundled name (the task's bundled one)")
    parser.add_argument("--output", type=Path, required=True, help="directory of the head")
    parser.add_argument("--task", choices=TASKS, default="words")
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[2048, 8192], help="tokens of recall's documents, by stages"
    )
    parser.add_argument("--prompts", type=int, default=4096, help="of a stage (4096)")
    parser.add_argument("--steps", type=int, default=5, help="of the training-time test")
    parser.add_argument("--seconds", type=float, default=120, help="of training, behind compilation")
    parser.add_argument("--updates", type=int, default=100_000, help="of a stage, at most")
    parser.add_argument("--batch", type=int, default=32, help="rows of an update (32)")
    parser.add_argument("--peak", type=float, default=2e-3, help="learning rate")
    parser.add_argument("--warmup", type=int, default=100, help="updates")
    parser.add_argument("--heads", type=int, help="of the head (the target's)")
    parser.add_argument("--kv-heads", type=int, help="of the head (the target's)")
    parser.add_argument("--intermediate", type=int, help="width of its MLP (the target's)")
    parser.add_argument("--taps", type=int, nargs=3, help="layers of the target whose inputs it reads (2, L/2, L - 3)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="of the file (bfloat16)")
    parser.add_argument("--chunk", type=int, default=10, help="updates in one program")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes that make documents")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true", help="few prompts and updates")
    args = parser.parse_args(arguments)
    args.implementation = "cudnn" if jax.default_backend() == "gpu" else "xla"
    name = args.model or args.task
    args.model = str(bundled_model(BUNDLED[name])) if name in BUNDLED else name
    if args.smoke:
        args.prompts, args.updates, args.batch, args.chunk, args.workers, args.lengths = 8, 4, 2, 2, 1, [512]
    return args


def main(arguments: list[str] | None = None) -> None:
    """Makes texts, trains, and writes the head."""
    args = parse(arguments)
    began = time.perf_counter()
    if args.task == "recall":
        stages = [documents(args, length) for length in args.lengths]
    else:
        stages = [answered(args)]
    print(f"{sum(len(one.rows) for one in stages):,} texts in {time.perf_counter() - began:.0f} s", flush=True)
    dtype = "bfloat16" if args.implementation == "cudnn" else "float32"
    train(*load_checkpoint(args.model, dtype=dtype), stages, args)
    print(f"{args.output} in {time.perf_counter() - began:.0f} s on {jax.devices()[0].device_kind}", flush=True)


if __name__ == "__main__":
    main()
