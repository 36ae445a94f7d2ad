"""Log evidence per token of the bundled pair on word problems, which it knows, and on prompts of other kinds.

The threshold of the command line's warning (`smcjax.cli.answers.FOREIGN`) comes from its output:

    uv run python scripts/measure_evidence.py -n 200
"""

from __future__ import annotations

import argparse

import numpy as np

from smcjax import LLM, SMC, SamplingParams
from smcjax.cli.answers import evidence_per_token
from smcjax.markdown import head, row
from smcjax.tasks.questions import questions

OTHER_KINDS = (
    "hi",
    "Hello, how are you?",
    "What is the capital of France?",
    "Write a poem about the sea.",
    "def fibonacci(n):",
    "Once upon a time",
    "Translate to German: good morning",
    "Explain how a transistor works.",
    "1 + 1 =",
    "The quick brown fox jumps over the lazy dog.",
    "What is the meaning of life?",
    "How many legs does a spider have?",
    "bonjour",
    "Is 17 prime?",
)
SETTINGS = ((8, 8, 0.7), (8, 8, 1.0), (8, 4, 0.7))  # N, K, temperature
THRESHOLDS = (-0.25, -0.5, -0.75, -1.0, -1.5)


def main() -> None:
    """Prints one row a setting and kind of prompt: how many are below each threshold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-n", "--num-problems", type=int, default=20)
    args = parser.parse_args()
    own = [question.prompt for question in questions("words", 123, args.num_problems)]
    names = ["N", "K", "T", "prompts", "lowest", "median", *(f"< {threshold:g}" for threshold in THRESHOLDS)]
    print(head(names))
    for n_particles, gamma, temperature in SETTINGS:
        with LLM(decoding=SMC(n_particles, gamma), max_num_seqs=8) as llm:
            for kind, prompts in (("word problems", own), ("others", OTHER_KINDS)):
                params = [
                    SamplingParams(max_tokens=128, temperature=temperature, seed=seed) for seed in range(len(prompts))
                ]
                outputs = llm.generate(list(prompts), params)
                values = np.array([evidence_per_token(output) for output in outputs], np.float64)
                counts = [f"{(values < threshold).sum()} of {len(values)}" for threshold in THRESHOLDS]
                cells = [
                    n_particles,
                    gamma,
                    temperature,
                    kind,
                    f"{values.min():.2f}",
                    f"{np.median(values):.2f}",
                    *counts,
                ]
                print(row(cells), flush=True)


if __name__ == "__main__":
    main()
