"""The tasks as questions that any model can be asked: a prompt each, and what is right in a completion of it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

from smcjax.tasks import word_problems

TASKS = ("words", "recall")
JUDGED = {"words": "problems", "recall": "lines of answer"}  # each part that is judged by itself
LONGEST_ANSWER = {"words": 160, "recall": 384}  # tokens


class Question(NamedTuple):
    """A prompt, and the function from a completion of it to a verdict on each part that is judged by itself.

    `kind` says in a few words how hard it is, in the order of difficulty; "" where a task has one kind.
    """

    prompt: str
    right: Callable[[str], list[bool]]
    kind: str = ""


def questions(task: str, seed: int, n: int, *, context: int = 2048) -> list[Question]:
    """`n` questions of the evaluation split: "words", a verdict for each problem, or "recall", one for each line of
    answer about a document of `context` tokens."""
    if task == "recall":
        from smcjax.tasks import recall  # NumPy, which `smcjax --help` has no need of

        documents = recall.generate(seed, n, "eval", context)
        return [Question(one.prompt, functools.partial(recall.right_lines, one)) for one in documents]
    problems = word_problems.generate(seed, n, "eval")
    return [Question(one.question, functools.partial(_answered, one), f"{one.steps} steps") for one in problems]


def training_prompts(task: str, seed: int, n: int, *, context: int = 2048) -> list[str]:
    """`n` prompts of the training split, whose templates and numbers the questions of a task do without."""
    if task == "recall":
        from smcjax.tasks import recall

        return [one.prompt for one in recall.generate(seed, n, "train", context)]
    return [one.question for one in word_problems.generate(seed, n, "train")]


def _answered(problem: word_problems.Problem, text: str) -> list[bool]:
    return [word_problems.is_correct(problem, text)]
