"""Make the bundled pair: a target and a draft of the same kind, trained alike on word problems made up on the spot.

    python scripts/training/train_pair.py                    # minutes on one H200; writes smcjax/bundled/{target,draft}
    python scripts/training/train_pair.py --smoke --output /tmp/pair     # the whole path, tiny, on a CPU

Problems → tokenizer → target → draft → accuracy of both on held-out templates and numbers → Hugging Face directories.
A model is named ExL: hidden size x layers; heads are 32 wide. Needs flax and optax (`uv run --extra train`).
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pair_data as data
from flax.training.train_state import TrainState
from tokenizers import Tokenizer

from smcjax import LLM, Autoregressive, SamplingParams
from smcjax.model import ModelConfig, Params, init_params, save_checkpoint
from smcjax.model.decoder import hidden_states, unembed
from smcjax.pallas import implementations
from smcjax.tasks.intervals import wilson_interval
from smcjax.tasks.word_problems import generate, is_correct

BUNDLED = Path(__file__).resolve().parents[2] / "smcjax" / "bundled"
EVAL_SEED = 2_024
MAX_NEW_TOKENS = 160
MAX_LENGTH = 512


def model_config(name: str, vocab_size: int) -> ModelConfig:
    """The Llama-style decoder that "256x8" names."""
    hidden, layers = (int(number) for number in name.split("x"))
    heads = hidden // 32
    return ModelConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=heads // 2 if heads % 2 == 0 else 1,
        head_dim=32,
        max_position_embeddings=MAX_LENGTH,
        tie_embeddings=True,
        bos_token_id=data.BOS,
        eos_token_ids=(data.EOS,),
    )


def initial_params(config: ModelConfig, key: jax.Array) -> Params:
    """Random weights, with what writes to the residual stream scaled down by √(2L), so that its size does not grow."""
    params = init_params(config, key)
    scale = 1 / math.sqrt(2 * config.num_layers)
    layers = tuple(dataclasses.replace(layer, o=layer.o * scale, down=layer.down * scale) for layer in params.layers)
    return dataclasses.replace(params, layers=layers)


# -- training ---------------------------------------------------------------------------------------------------------


@jax.custom_vjp
def look_up(table: jax.Array, tokens: jax.Array) -> jax.Array:
    """table[tokens], whose gradient is a product with a one-hot matrix: a scatter-add would have thousands of rows
    collide on the few tokens of this vocabulary."""
    return table[tokens]


def _look_up_forward(table: jax.Array, tokens: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return table[tokens], (table, tokens)


def _look_up_backward(saved: tuple[jax.Array, jax.Array], gradient: jax.Array) -> tuple[jax.Array, None]:
    table, tokens = saved
    one_hot = jax.nn.one_hot(tokens, table.shape[0], dtype=gradient.dtype)
    return jnp.einsum("rtv,rte->ve", one_hot, gradient, preferred_element_type=jnp.float32).astype(table.dtype), None


look_up.defvjp(_look_up_forward, _look_up_backward)


@dataclasses.dataclass(frozen=True)
class LookUp:
    """Stands for an embedding matrix where the decoder indexes it."""

    table: jax.Array

    def __getitem__(self, tokens: jax.Array) -> jax.Array:
        return look_up(self.table, tokens)


def row_losses(
    config: ModelConfig, params: Params, tokens: jax.Array, newline: int, question_weight: float
) -> tuple[jax.Array, jax.Array]:
    """(weights, -log p) of every next token of `tokens` [B, T]: 1 in the solution, from the newline that begins it to
    <eos>; `question_weight` in the question; 0 in the padding."""
    targets = jnp.pad(tokens[:, 1:], ((0, 0), (0, 1)), constant_values=data.PAD)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    fastest = "cudnn" if jax.default_backend() == "gpu" else "xla"
    attend = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation=fastest)
    embedded = dataclasses.replace(params, embed=LookUp(params.embed))
    hidden = hidden_states(config, embedded, tokens, positions, lambda _, new: attend(*new.heads()))
    nll = surprise(unembed(params, hidden), targets)
    solution = jnp.cumsum(targets == newline, axis=1) > 0
    weights = jnp.where(targets == data.PAD, 0.0, jnp.where(solution, 1.0, question_weight))
    return weights, nll


def surprise(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """-log p of `targets` [B, T] under `logits` [B, T, V]."""
    # logits[targets], written so that it fuses in both directions.
    chosen = jnp.where(targets[..., None] == jnp.arange(logits.shape[-1])[None, None], logits, 0.0).sum(-1)
    return jax.nn.logsumexp(logits, axis=-1) - chosen


def clipped_adamw(weight_decay: float, decayed: Callable[[Any], Any]) -> optax.GradientTransformation:
    """AdamW on gradients clipped at norm 1, whose learning rate is set step by step; `decayed` masks parameters."""
    adamw = optax.inject_hyperparams(optax.adamw, static_args=("mask",))
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        adamw(learning_rate=0.0, b1=0.9, b2=0.95, eps=1e-9, weight_decay=weight_decay, mask=decayed),
    )


def learning_rate(step: jax.Array | int, total: jax.Array, peak: float, warmup: int) -> jax.Array:
    """Linear warm-up, then a cosine to zero at `total`, which is known only once the speed is."""
    cosine = 0.5 * (1 + jnp.cos(math.pi * jnp.minimum(step / total, 1.0)))
    return peak * jnp.minimum((step + 1) / warmup, 1.0) * cosine


def train(
    name: str, config: ModelConfig, buckets: list[jax.Array], newline: int, peak: float, limit: float, args: Any
) -> Params:
    """Train one model for at most `limit` seconds after compilation and `args.max_steps` steps; bf16 weights.

    A step takes rows of every bucket in proportion to its size, so that each is a fair sample. The number of steps is
    set from the speed of the first ones, so that the learning rate always gets to zero.
    """
    on_gpu = jax.default_backend() == "gpu"
    compute = jnp.bfloat16 if on_gpu else jnp.float32
    sizes = [len(bucket) for bucket in buckets]
    batch = [max(1, round(args.batch_rows * size / sum(sizes))) for size in sizes]
    tokens_per_step = sum(rows * bucket.shape[1] for rows, bucket in zip(batch, buckets, strict=True))

    def loss(params: dict[str, Params], rows: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
        cast = jax.tree.map(lambda leaf: leaf.astype(compute), params["decoder"])
        parts = [row_losses(config, cast, tokens, newline, args.question_weight) for tokens in rows]
        zero = jnp.float32(0)
        weight = sum((w.sum() for w, _ in parts), zero)
        answers = sum(((w == 1).sum() for w, _ in parts), zero)
        solution = sum((((w == 1) * nll).sum() for w, nll in parts), zero) / answers
        return sum(((w * nll).sum() for w, nll in parts), zero) / weight, solution

    decayed = lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params)  # noqa: E731
    optimizer = clipped_adamw(args.weight_decay, decayed)

    def one_step(state: TrainState, total: jax.Array, key: jax.Array, buckets: Any) -> tuple[TrainState, jax.Array]:
        keys = jax.random.split(jax.random.fold_in(key, state.step), len(buckets))
        rows = [
            bucket[jax.random.randint(k, (n,), 0, len(bucket))].astype(jnp.int32)
            for k, n, bucket in zip(keys, batch, buckets, strict=True)
        ]
        (_, solution), gradients = jax.value_and_grad(loss, has_aux=True)(state.params, rows)
        rate = learning_rate(state.step, total, peak, args.warmup)
        state = state.replace(opt_state=optax.tree.set(state.opt_state, learning_rate=rate))
        return state.apply_gradients(grads=gradients), solution

    @functools.partial(jax.jit, donate_argnums=0)
    def some_steps(state: TrainState, total: jax.Array, key: jax.Array, buckets: Any) -> tuple[TrainState, jax.Array]:
        def body(state: TrainState, _: None) -> tuple[TrainState, jax.Array]:
            return one_step(state, total, key, buckets)

        state, losses = jax.lax.scan(body, state, None, length=args.chunk)
        return state, losses.mean()

    params = initial_params(config, jax.random.key(args.seed))
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    print(f"{name}: {count:,} parameters, {tokens_per_step:,} tokens a step in rows {batch}")
    state = TrainState.create(apply_fn=hidden_states, params={"decoder": params}, tx=optimizer)
    key = jax.random.key(args.seed + 1)

    total, begin = args.max_steps, time.perf_counter()
    history = []
    step, calibrated = 0, False
    while step < total:
        state, mean = some_steps(state, jnp.asarray(total, jnp.float32), key, buckets)
        step += args.chunk
        if step == args.chunk:
            jax.block_until_ready(mean)
            print(f"{name}: compiled in {time.perf_counter() - begin:.0f} s", flush=True)
            begin, after = time.perf_counter(), step
            continue
        if not calibrated and step >= 5 * args.chunk:
            jax.block_until_ready(mean)
            speed = (step - after) / (time.perf_counter() - begin)
            total = min(total, after + int(speed * limit))
            calibrated = True
            print(f"{name}: {speed * tokens_per_step / 1e6:.2f} M tokens/s, {total} steps", flush=True)
        history.append((step, mean))
        if len(history) >= max(2, total // args.chunk // 25):
            values = [float(value) for _, value in history]
            print(
                f"{name}: step {step:6d}  solution loss {np.mean(values):.4f}  {time.perf_counter() - begin:5.0f} s",
                flush=True,
            )
            history.clear()
            if time.perf_counter() - begin > 1.1 * limit:
                print(f"{name}: out of time at step {step} of {total}")
                break
    return jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), state.params["decoder"])


# -- measuring --------------------------------------------------------------------------------------------------------


def measure(directory: Path, args: Any) -> dict[str, Any]:
    """Accuracy of a saved model, as it was saved, on held-out problems and on fresh ones of the training kind."""
    result: dict[str, Any] = {"model": directory.name}
    each = [
        SamplingParams(max_tokens=MAX_NEW_TOKENS, temperature=args.temperature, seed=index)
        for index in range(args.eval_problems)
    ]
    rows = min(512, args.eval_problems)
    with LLM(str(directory), decoding=Autoregressive(), max_model_len=MAX_LENGTH, max_num_seqs=rows) as llm:
        for split in ("eval", "train"):
            problems = generate(EVAL_SEED, args.eval_problems, split)
            outputs = llm.generate([problem.question for problem in problems], each, use_tqdm=False)
            texts = [output.outputs[0].text for output in outputs]
            right = np.array([is_correct(problem, text) for problem, text in zip(problems, texts, strict=True)])
            low, high = wilson_interval(int(right.sum()), len(right))
            result[split] = {"accuracy": float(right.mean()), "ci_low": low, "ci_high": high, "n": len(right)}
            steps = np.array([problem.steps for problem in problems])
            by_steps = {int(s): round(float(right[steps == s].mean()), 3) for s in np.unique(steps)}
            interval = f"{right.mean():.3f} [{low:.3f}, {high:.3f}] of {len(right)}"
            print(f"{directory.name} {split}: {interval}; by steps {by_steps}", flush=True)
    return result


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=BUNDLED, help="where the directories target and draft go")
    parser.add_argument("--target", default="256x8", help="hidden size x layers, or '' to leave the target as it is")
    parser.add_argument("--draft", nargs="*", default=["64x3"], help="as --target; further ones go to draft-ExL")
    parser.add_argument("--time-limit-target", type=float, default=300, help="seconds of training")
    parser.add_argument("--time-limit-draft", type=float, default=60, help="seconds of training")
    parser.add_argument("--max-steps", type=int, default=1_000_000)
    parser.add_argument("--problems", type=int, default=2_500_000, help="training problems to generate")
    parser.add_argument("--vocab-size", type=int, default=1024)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--batch-rows", type=int, default=384)
    parser.add_argument("--target-lr", type=float, default=2e-3)
    parser.add_argument("--draft-lr", type=float, default=4e-3)
    parser.add_argument("--warmup", type=int, default=300, help="steps")
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--question-weight", type=float, default=0.1, help="weight of the loss on question tokens")
    parser.add_argument("--chunk", type=int, default=20, help="steps in one program")
    parser.add_argument("--eval-problems", type=int, default=2048)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true", help="everything tiny: does the whole path work?")
    args = parser.parse_args(arguments)
    if args.smoke:
        args.target, args.draft, args.problems, args.workers, args.vocab_size = "64x2", ["32x1"], 400, 1, 512
        args.max_steps, args.chunk, args.batch_rows, args.warmup, args.eval_problems = 12, 3, 6, 3, 4
    return args


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    begin = time.perf_counter()
    tokenizer_file = args.output / "target" / "tokenizer.json"
    if args.target:
        tokenizer = data.train_tokenizer(args.vocab_size, min(20_000, args.problems))
    else:
        tokenizer = Tokenizer.from_file(str(tokenizer_file))
    widths = data.bucket_widths(tokenizer, (0.4, 0.8, 0.998))
    rows = data.make_rows(tokenizer, args.seed, args.problems, widths, args.workers)
    shapes, seconds = [bucket.shape for bucket in rows], time.perf_counter() - begin
    filled = sum(int((bucket != data.PAD).sum()) for bucket in rows) / sum(bucket.size for bucket in rows)
    print(f"{sum(len(b) for b in rows):,} problems in rows {shapes}, {filled:.0%} full, {seconds:.0f} s", flush=True)

    buckets = [jnp.asarray(bucket) for bucket in rows]
    newline = tokenizer.encode("\n", add_special_tokens=False).ids
    assert len(newline) == 1, "a newline must be one token"
    jobs = [("target", args.target, args.target_lr, args.time_limit_target)] if args.target else []
    for index, name in enumerate(args.draft):
        jobs.append((f"draft-{name}" if index else "draft", name, args.draft_lr, args.time_limit_draft))
    results = []
    for directory, name, peak, limit in jobs:
        config = model_config(name, tokenizer.get_vocab_size())
        params = train(directory, config, buckets, newline[0], peak, limit, args)
        save_checkpoint(config, params, args.output / directory, dtype="bfloat16")
        data.save_tokenizer(tokenizer, args.output / directory, MAX_LENGTH)
        print(f"{directory}: saved in {args.output / directory} at {time.perf_counter() - begin:.0f} s", flush=True)
        results.append(measure(args.output / directory, args))
    for result in results:
        print(json.dumps(result))
    print(f"done in {time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    with implementations("xla"):  # kernels have no gradients
        main()
