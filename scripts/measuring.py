"""Parts of the scripts that measure decoders on prompts (`measure_*`) and of those that join their figures."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from smcjax import LLM, RequestOutput, SamplingParams

Interval = tuple[float, float, float]  # mean, low, high


def asked(llm: LLM, prompts: Sequence[Any], params: SamplingParams, seed: int = 1000) -> list[RequestOutput]:
    """Answers to texts, or to conversations, whose seeds are `seed` and those that follow it."""
    each = [dataclasses.replace(params, seed=seed + number) for number in range(len(prompts))]
    answer = llm.generate if isinstance(prompts[0], str) else llm.chat
    return answer(prompts, each, use_tqdm=False)


def conversation(question: str) -> list[dict[str, str]]:
    """A conversation that begins with a question."""
    return [{"role": "user", "content": question}]


def by_prompt(values: Sequence[float], prompts: int) -> np.ndarray:
    """Mean over the repetitions of each prompt, which come one whole set of prompts after the other."""
    return np.asarray(values, float).reshape(-1, prompts).mean(axis=0)


def shown(value: Interval | None, form: str) -> str:
    """An interval as a cell of a table; a dash where there is none."""
    return "–" if value is None else "{} ({} to {})".format(*(format(one + 0.0, form) for one in value))


def write_rows(args: argparse.Namespace, rows: Sequence[Any]) -> None:
    """Writes rows, which are dataclasses, and the settings that made them to the file of --json, if it is given."""
    if args.json is not None:
        settings = {name: value for name, value in vars(args).items() if name != "json"}
        found = {**settings, "rows": [dataclasses.asdict(row) for row in rows]}
        args.json.write_text(json.dumps(found, indent=1) + "\n")
