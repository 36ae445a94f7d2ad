"""Traces how likely each token of an answer is to be an accepted draft, on the bundled pair: what a replay draws from.

    python scripts/trace_acceptance.py -o traces.json      # half a minute of a CPU

Prompts are of `scripts/bench_planner.py`'s two kinds: word problems, whose drafts are accepted often, and words of
random letters, where few are. The target answers each by itself, at `--temperature`; then both models read the answers.

By token rejection a draft x that q drew is accepted with probability min(1, p(x)/q(x)), and the token that comes of it
has the law p, accepted or not. So a position's token is x, as an accepted draft, with probability min(p(x), q(x)), and
given that the token is x, it is one with probability

    α = min(1, q(x)/p(x))

independently of all other positions, as every position has a uniform of its own. That is what is kept, for each token
but the first, which no cycle makes. It says nothing of K: a cycle from position t on accepts the drafts from t on up to
the first that is not, or K of them. So coins drawn once for all positions are the cycles of every K at once, and the
smaller K's are those of the larger, cut; the token behind K accepted drafts is the target's own, whose coin counts for
nothing. Answers drawn by the target alone are as good as any, since rejection has its law.

Of each kind the first half of the answers is for a profile's acceptance, the second for a replay's requests.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from bench_planner import random_words, word_problems

from smcjax import LLM, Autoregressive, SamplingParams
from smcjax.bench.profile import commit
from smcjax.model import load_checkpoint
from smcjax.model.decoder import logits
from smcjax.model.hub import bundled_model

KINDS = {"words": word_problems, "letters": random_words}
DIGITS = 3  # of α


class Pair:
    """The bundled pair's laws along texts, at a temperature."""

    def __init__(self, temperature: float) -> None:
        self.target, self.target_params = load_checkpoint(bundled_model("target"))
        self.draft, self.draft_params = load_checkpoint(bundled_model("draft"))
        self.temperature = temperature
        self._alphas = jax.jit(self._along)

    def _along(self, tokens: jax.Array) -> jax.Array:
        """α of each token but the first."""

        def log_law(config: Any, params: Any) -> jax.Array:
            law = jax.nn.log_softmax(logits(config, params, tokens[:, :-1]) / self.temperature)
            return jnp.take_along_axis(law, tokens[:, 1:, None], axis=2)[..., 0]

        ratio = log_law(self.draft, self.draft_params) - log_law(self.target, self.target_params)
        return jnp.exp(jnp.minimum(ratio, 0.0))

    def alphas(self, texts: Sequence[tuple[list[int], list[int]]]) -> list[list[float]]:
        """α of the tokens of each answer, behind its prompt and its first token."""
        longest = max(len(prompt) + len(answer) for prompt, answer in texts)
        tokens = np.zeros((len(texts), longest), np.int32)
        for row, (prompt, answer) in zip(tokens, texts, strict=True):
            row[: len(prompt) + len(answer)] = prompt + answer
        found = np.asarray(self._alphas(tokens))
        return [
            [round(float(one), DIGITS) for one in row[len(prompt) : len(prompt) + len(answer) - 1]]
            for row, (prompt, answer) in zip(found, texts, strict=True)
        ]


def traced(count: int, max_tokens: int, temperature: float, seed: int) -> dict[str, list[list[float]]]:
    """α along `count` answers of each kind."""
    pair, found = Pair(temperature), {}
    with LLM(decoding=Autoregressive(), max_model_len=512, max_num_seqs=16, compile_at_start=False) as llm:
        for kind, prompts in KINDS.items():
            asked = prompts(seed, count)
            params = [
                SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed + number)
                for number in range(count)
            ]
            outputs = llm.generate(asked, params, use_tqdm=False)
            texts = [(list(one.prompt_token_ids), list(one.outputs[0].token_ids)) for one in outputs]
            found[kind] = pair.alphas([(prompt, answer) for prompt, answer in texts if len(answer) > 1])
    return found


def main() -> int:
    """Traces both kinds and writes the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE")
    parser.add_argument("-n", "--count", type=int, default=64, help="answers of each kind (64)")
    parser.add_argument("--max-tokens", type=int, default=96, help="of an answer (96)")
    parser.add_argument("--temperature", type=float, default=0.7, help="(0.7)")
    parser.add_argument("--seed", type=int, default=5001, help="of prompts and answers (5001)")
    args = parser.parse_args()
    kinds = traced(args.count, args.max_tokens, args.temperature, args.seed)
    settings = {name: value for name, value in vars(args).items() if name != "output"}
    lines = [f" {json.dumps(kind)}: [\n  " + ",\n  ".join(map(_line, rows)) + "\n ]" for kind, rows in kinds.items()]
    facts = {"pair": "bundled", "commit": commit(), "settings": settings}
    head = ",\n".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in facts.items())
    args.output.write_text("{" + head + ',\n"kinds": {\n' + ",\n".join(lines) + "\n}}\n")
    for kind, rows in kinds.items():
        mean = np.mean([alpha for row in rows for alpha in row])
        print(f"{kind}: {len(rows)} answers of {np.mean([len(row) + 1 for row in rows]):.1f} tokens, mean α {mean:.3f}")
    return 0


def _line(row: Sequence[float]) -> str:
    return json.dumps(row, separators=(",", ":"))


if __name__ == "__main__":
    sys.exit(main())
