"""Measures what weights in eight bits change: laws of next tokens, the likeliest token, and accuracy.

    python scripts/benchmarks/bench_eight_bits.py --save FILE  # all models; an hour on two cores
    python scripts/benchmarks/bench_eight_bits.py --models words --texts 4 --problems 50

A model in float32 answers word problems at temperature 1, and along its answers the laws of next tokens are compared:
KL, nats a token, of the model in bfloat16, with matrices in bfloat16, int8 or float8, from that in float32; and how
often both have the same likeliest token. Weights, activations and float8's rounding of activations are those of a GPU.

The bundled pair answers fresh problems at temperature 0.7, the target alone and by SMC, both models in float32, int8 or
float8: accuracy, and its difference from float32's on the same problems. On a CPU engines multiply matrices out, so
that accuracy is that of rounded weights alone. Intervals are at 95% and take texts, not tokens, for independent.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from smcjax import LLM, SMC, Autoregressive, SamplingParams
from smcjax.bench.accuracy import Evaluation, evaluate
from smcjax.bench.record import save, this_machine
from smcjax.cli.bench_options import add_save_option, check_files
from smcjax.markdown import table
from smcjax.model import ModelConfig, Params, load_checkpoint, logits
from smcjax.quantization import QUANTIZATIONS
from smcjax.tasks.intervals import clustered_difference_interval, clustered_interval, clustered_mean_interval
from smcjax.tasks.questions import LONGEST_ANSWER, questions

MODELS = ("smollm2", "gemma3-270m", "words", "words-draft")
PAIR = ("words", "words-draft")
Text = tuple[list[int], int]  # token ids, and how many of them are the prompt


def texts(model: str, count: int, tokens: int, seed: int) -> list[Text]:
    """Answers of the model in float32 to word problems, sampled at temperature 1: what its laws are compared along."""
    prompts = [question.prompt for question in questions("words", seed, count)]
    params = [SamplingParams(temperature=1.0, max_tokens=tokens, seed=seed + index) for index in range(count)]
    with LLM(model, decoding=Autoregressive(), dtype="float32", max_num_seqs=min(16, count), max_model_len=512) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    found = [
        ([*output.prompt_token_ids, *output.outputs[0].token_ids], len(output.prompt_token_ids)) for output in outputs
    ]
    return [(ids, prompt) for ids, prompt in found if len(ids) > prompt]


@functools.partial(jax.jit, static_argnums=0)
def laws(config: ModelConfig, params: Params, tokens: Int[Array, " T"]) -> Float[Array, "T V"]:
    """Log-probabilities of what follows each token."""
    return jax.nn.log_softmax(logits(config, params, tokens[None])[0])


@jax.jit
def compared(of: Float[Array, "T V"], to: Float[Array, "T V"]) -> tuple[Float[Array, " T"], Bool[Array, " T"]]:
    """KL of the laws `to` from the laws `of`, nats, and whether both have the same likeliest token."""
    return jnp.sum(jnp.exp(of) * (of - to), axis=-1), jnp.argmax(of, axis=-1) == jnp.argmax(to, axis=-1)


def measured(model: str, kinds: Sequence[str], along: Sequence[Text]) -> list[dict[str, Any]]:
    """A row for each kind of weights."""
    config, exact = load_checkpoint(model, "float32")
    loaded = {kind: load_checkpoint(model, "bfloat16", None if kind == "bfloat16" else kind) for kind in kinds}
    longest = max(len(ids) for ids, _ in along)
    divergences = {kind: list[list[float]]() for kind in kinds}
    agrees = {kind: list[list[bool]]() for kind in kinds}
    for ids, prompt in along:
        padded = jnp.asarray(np.pad(ids, (0, longest - len(ids))), jnp.int32)  # behind the text: no token sees it
        of, answer = laws(config, exact, padded), slice(prompt - 1, len(ids) - 1)
        for kind in kinds:
            kl, same = compared(of, laws(*loaded[kind], padded))
            divergences[kind].append(np.asarray(kl)[answer].tolist())
            agrees[kind].append(np.asarray(same)[answer].tolist())
    rows = []
    for kind in kinds:
        same = agrees[kind]
        mean, low, high = clustered_mean_interval(divergences[kind])
        agreement = sum(map(sum, same)) / sum(map(len, same))
        of_agreement = clustered_interval(same)
        rows.append(
            {
                **{"model": model, "weights": kind, "texts": len(along), "tokens": sum(map(len, same))},
                **{"kl": mean, "kl_low": low, "kl_high": high, "agreement": agreement},
                **{"agreement_low": of_agreement[0], "agreement_high": of_agreement[1]},
            }
        )
    return rows


def accuracies(pair: tuple[str, str], problems: int, seed: int, on_row: Callable[[dict[str, Any]], None]) -> None:
    """Gives a row for each decoder and kind of weights, each decoder's first one in float32."""
    asked = questions("words", seed, problems)
    params = SamplingParams(temperature=0.7, max_tokens=LONGEST_ANSWER["words"])
    for decoding in (Autoregressive(), SMC()):
        exact: Evaluation | None = None
        for kind in (None, *QUANTIZATIONS):
            models: dict[str, Any] = {"model": pair[0], "quantization": kind}
            if decoding.drafts:
                models |= {"draft_model": pair[1], "draft_quantization": kind}
            with LLM(**models, decoding=decoding, dtype="float32", max_num_seqs=16, max_model_len=512) as llm:
                evaluation = evaluate(llm, asked, params, seed=seed, use_tqdm=False)
            exact = exact or evaluation
            report = evaluation.report()
            difference, low, high = clustered_difference_interval(evaluation.parts, exact.parts)
            on_row(
                {
                    **{"model": pair[0], "decoder": str(decoding), "weights": kind or "float32"},
                    **{name: report[name] for name in ("accuracy", "ci_low", "ci_high", "n")},
                    **{"difference": difference, "difference_low": low, "difference_high": high},
                }
            )


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """Two tables: of laws and of accuracies."""
    laws = [row for row in rows if "kl" in row]
    right = [row for row in rows if "accuracy" in row]
    of_laws = [
        (
            *(row["model"], row["weights"], f"{row['kl']:.5f} ({row['kl_low']:.5f} to {row['kl_high']:.5f})"),
            "{:.2f}% ({:.2f} to {:.2f})".format(
                *(100 * row[name] for name in ("agreement", "agreement_low", "agreement_high"))
            ),
            f"{row['tokens']:,}",
        )
        for row in laws
    ]
    of_right = [
        (
            *(row["decoder"], row["weights"]),
            "{:.1f}% ({:.1f} to {:.1f})".format(*(100 * row[name] for name in ("accuracy", "ci_low", "ci_high"))),
            "{:+.1f} ({:+.1f} to {:+.1f})".format(
                *(100 * row[name] for name in ("difference", "difference_low", "difference_high"))
            ),
        )
        for row in right
    ]
    return "\n\n".join(
        [
            table(["model", "weights", "KL, nats a token", "same likeliest token", "tokens"], of_laws),
            table(["decoder", "weights", "accuracy", "minus float32, points"], of_right),
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints tables, and writes what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=list(MODELS), help=f"({' '.join(MODELS)})")
    parser.add_argument("--pair", nargs=2, default=PAIR, metavar=("TARGET", "DRAFT"), help=f"({' '.join(PAIR)})")
    parser.add_argument("--texts", type=int, default=32, help="of each model (32)")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer at most (64)")
    parser.add_argument("--problems", type=int, default=1000, help="of the accuracies; 0: none (1000)")
    parser.add_argument("--seed", type=int, default=17, help="of problems and answers (17)")
    add_save_option(parser)
    args = parser.parse_args(argv)
    check_files(args)
    rows: list[dict[str, Any]] = []

    def add(row: dict[str, Any]) -> None:
        rows.append(row)
        print(row, file=sys.stderr, flush=True)
        if args.save is not None:
            save(args.save, rows, this_machine())

    for model in args.models:
        for row in measured(model, ("bfloat16", *QUANTIZATIONS), texts(model, args.texts, args.tokens, args.seed)):
            add(row)
    if args.problems:
        accuracies(tuple(args.pair), args.problems, args.seed, add)
    print(markdown(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
