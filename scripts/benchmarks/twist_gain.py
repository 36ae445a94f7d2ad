r"""Compares log Ẑ of steered requests without and with a twist, at equal N.

    PYTHONPATH=scripts/benchmarks smcjax tune-twist --potential twist_gain:CHECKED --prompts words --temperature 1.8 \
        --max-tokens 96 -o twist.safetensors
    python scripts/benchmarks/twist_gain.py CHECKED --twist twist.safetensors --temperature 1.8 --max-tokens 96

The potential is BRIEF, e^-0.2 a token, or CHECKED, e^-4 a false calculation, heard of at the end. The bundled pair
answers word problems of the evaluation split. Each problem is answered with several seeds, of whose log Ẑ the variance
is taken; its mean over problems has a bootstrapped interval. E[Ẑ] is Σ p·Φ with any twist, which samples of the target
estimate too.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
from typing import Any

import numpy as np

from smcjax import LLM, SMC, Rejection, RequestOutput, SamplingParams, TextPotential
from smcjax.bench.record import save, this_machine
from smcjax.cli.bench_options import add_save_option, check_files
from smcjax.markdown import table
from smcjax.smc import Answers, Twist
from smcjax.tasks.questions import LONGEST_ANSWER, questions

BOOTSTRAPS = 2000


def interval(values: np.ndarray) -> tuple[float, float, float]:
    """The mean over problems and the ends of its 95% interval."""
    rng = np.random.default_rng(0)
    means = values[rng.integers(0, len(values), (BOOTSTRAPS, len(values)))].mean(axis=1)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(values.mean()), float(low), float(high)


def log_mean(values: np.ndarray) -> np.ndarray:
    """The log of the mean of exp over the last axis."""
    return np.logaddexp.reduce(values, axis=-1) - np.log(values.shape[-1])


@dataclasses.dataclass(frozen=True)
class Brief:
    """A factor of each token of an answer."""

    log_factor: float = -0.2

    def log_value(self, answers: Answers) -> Any:
        """The factor to the power of the answer's length."""
        return self.log_factor * (answers.end - answers.begin).astype(float)


RESULTS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__, "/": lambda a, b: a // b if b else -1}


def false_calculations(prompt: str, texts: list[str]) -> list[float]:
    """The log potential: −4 for each."""
    found = [re.findall(r"(\d+) ([-+*/]) (\d+) = (\d+)", text) for text in texts]
    return [-4.0 * sum(RESULTS[sign](int(a), int(b)) != int(c) for a, sign, b, c in each) for each in found]


BRIEF, CHECKED = Brief(), TextPotential(false_calculations)


def main() -> None:
    """Measures what the command line says and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("potential", choices=["BRIEF", "CHECKED"])
    parser.add_argument("--twist", required=True, metavar="FILE", help="trained by the first command")
    parser.add_argument("--problems", type=int, default=24, help="word problems (24)")
    parser.add_argument("--seeds", type=int, default=16, help="answers to each in a case (16)")
    parser.add_argument("--samples", type=int, default=64, help="of the target, for each problem (64)")
    parser.add_argument("-N", "--particles", type=int, default=8, help="particles (8)")
    parser.add_argument("-K", "--gamma", type=int, default=4, help="drafts a cycle (4)")
    parser.add_argument("--temperature", type=float, default=0.7, help="of answers, and of the twist's (0.7)")
    parser.add_argument("--max-tokens", type=int, default=LONGEST_ANSWER["words"], help="of an answer (160)")
    add_save_option(parser)
    args = parser.parse_args()
    check_files(args)
    potential = CHECKED if args.potential == "CHECKED" else BRIEF
    cases: dict[str, tuple[Any, ...]] = {"without": (potential,), "with": (potential, Twist.load(args.twist))}
    asked = [one.prompt for one in questions("words", 1234, args.problems)]

    def answers(llm: LLM, times: int, *potentials: Any) -> list[list[RequestOutput]]:
        """Outputs by problem, of seeds 0, 1, …"""
        common = {"max_tokens": args.max_tokens, "temperature": args.temperature, "potentials": potentials}
        params = [SamplingParams(seed=seed, **common) for _ in asked for seed in range(times)]
        outputs = llm.generate([prompt for prompt in asked for _ in range(times)], params, use_tqdm=False)
        return [outputs[begin : begin + times] for begin in range(0, len(outputs), times)]

    with LLM(decoding=Rejection(gamma=args.gamma), max_num_seqs=32, compile_at_start=False) as llm:
        samples = [[one.outputs[0] for one in own] for own in answers(llm, args.samples)]
    values = [
        CHECKED.values(prompt, [one.text for one in own], whole=True)
        if potential is CHECKED
        else [BRIEF.log_factor * len(one.token_ids) for one in own]
        for prompt, own in zip(asked, samples, strict=True)
    ]
    truth = log_mean(np.array(values))
    rows: list[dict[str, Any]] = []
    decoding = SMC(args.particles, args.gamma)
    with LLM(decoding=decoding, max_num_seqs=8, compile_at_start=False) as llm:
        for name, potentials in cases.items():
            outputs = answers(llm, args.seeds, *potentials)
            evidence = np.array([[one.smc.log_evidence for one in own if one.smc is not None] for own in outputs])
            metrics = [one.metrics for own in outputs for one in own]
            rows.append(
                {
                    "twist": name,
                    "variance": interval(evidence.var(axis=1, ddof=1)),
                    "mean_ess": float(np.mean([one.mean_ess or 0.0 for one in metrics])),
                    "resamplings": float(np.mean([one.resamples for one in metrics])),
                    "log_mean_less_samples": interval(log_mean(evidence) - truth),
                }
            )
    shown = [
        (
            row["twist"],
            "{:.3f} ({:.3f} to {:.3f})".format(*row["variance"]),
            f"{row['mean_ess']:.2f}",
            f"{row['resamplings']:.1f}",
            "{:+.3f} ({:+.3f} to {:+.3f})".format(*row["log_mean_less_samples"]),
        )
        for row in rows
    ]
    print(f"{decoding}, {args.problems} problems, {args.seeds} seeds")
    print(table(["twist", "variance of log Ẑ", "mean ESS", "resamplings", "log E Ẑ less samples'"], shown))
    if args.save is not None:
        save(args.save, rows, this_machine())


if __name__ == "__main__":
    main()
