"""Questions whose answers can be checked, and the statistics that results are reported with."""

from smcjax.tasks.intervals import paired_difference_interval, wilson_interval
from smcjax.tasks.word_problems import Problem, completion, extract_answer, generate, is_correct, prompt

__all__ = [
    "Problem",
    "completion",
    "extract_answer",
    "generate",
    "is_correct",
    "paired_difference_interval",
    "prompt",
    "wilson_interval",
]
