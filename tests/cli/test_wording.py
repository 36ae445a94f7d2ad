"""Refusals name options where the library names arguments, and leave words that are only words."""

from __future__ import annotations

import pytest

from smcjax.cli.main import make_parser
from smcjax.cli.wording import in_options

OPTIONS = vars(make_parser().parse_args(["generate", "hello"])).keys()

SAID = [
    ("top_p must be above 0, got 2.", "--top-p must be above 0, got 2."),
    ("power / temperature is 9e9; lower power, or raise temperature.",
     "--power / --temperature is 9e9; lower --power, or raise --temperature."),
    ("raise it, or use temperature=0 with decoding=Rejection() or Autoregressive().",
     "raise it, or use --temperature 0 with --decoding rejection or autoregressive."),
    ("use Rejection(gamma=4), or a draft model.", "use --decoding rejection with --gamma 4, or a draft model."),
    ("use decoding=Rejection() or SMC(control=1), which are exact.",
     "use --decoding rejection or smc with --control 1, which are exact."),
    ("use select='best' or n_candidates=1.", "use select='best' or --n-particles 1."),
    ("control is 0.5 and power 2, at which evidence falls by itself; use power=1, or leave control out.",
     "--control is 0.5 and --power 2, at which evidence falls by itself; use --power 1, or leave --control out."),
    ("max_tokens must be a whole number of at least 1, or None, got 0.",
     "--max-tokens must be a whole number of at least 1, got 0."),
    ("the prompt has 60 tokens and max_model_len is 48; shorten it.",
     "the prompt has 60 tokens and --max-model-len is 48; shorten it."),
]  # fmt: skip


@pytest.mark.parametrize(("theirs", "ours"), SAID, ids=[ours[:30] for _, ours in SAID])
def test_arguments_become_options(theirs: str, ours: str) -> None:
    assert in_options(theirs, OPTIONS) == ours
    assert in_options(ours, OPTIONS) == ours  # an option is not named twice


@pytest.mark.parametrize(
    "sentence",
    [
        "/models/draft_model/config.json does not exist; pass another.",
        "the weights are random, at a temperature above 0, in the order of prompts.",
        "max_waiting must be 1.",  # no option of this command
    ],
)
def test_other_words_stay(sentence: str) -> None:
    assert in_options(sentence, OPTIONS) == sentence
