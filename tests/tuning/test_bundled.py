"""The tuned draft of the bundled pair is nearer to the target than the shipped one, on problems new to both."""

from __future__ import annotations

import numpy as np
import pytest

from smcjax.model import load_checkpoint
from smcjax.model.files.checkpoint import resolve_model_path
from smcjax.tasks.word_problems import generate
from smcjax.tokenizer.tokenizer import Tokenizer
from smcjax.tuning.answers import Answers, Batches
from smcjax.tuning.laws import Laws, TargetStates
from smcjax.tuning.measure import measure


def solutions(seed: int, n: int) -> Answers:
    """Right answers, as the target gives to 97 of 100 problems."""
    tokenizer = Tokenizer.load(resolve_model_path("words"))
    texts = [(one.question, f"\n{one.solution}\n") for one in generate(seed, n, "eval")]
    ids = [(tokenizer.encode(asked), [*tokenizer.encode(asked + answer)]) for asked, answer in texts]
    tokens = np.zeros((n, max(len(whole) for _, whole in ids)), np.int32)
    for row, (_, whole) in zip(tokens, ids, strict=True):
        row[: len(whole)] = whole
    begins = np.array([len(asked) for asked, _ in ids], np.int32)
    return Answers(tokens, begins, np.array([len(whole) for _, whole in ids], np.int32) - begins)


@pytest.mark.slow
def test_it_is_nearer_to_the_target() -> None:
    target, target_params = load_checkpoint(resolve_model_path("words"))
    batches = Batches(solutions(31, 48), 4096)
    found = {}
    for name in ("words-draft", "words-smc-draft"):
        draft, params = load_checkpoint(resolve_model_path(name))
        laws = Laws(target, draft, target.vocab_size, temperature=0.7)
        states = TargetStates(laws, target_params, batches)
        found[name] = measure(laws, target_params, params, batches, states, gamma=4)
    shipped, tuned = found["words-draft"], found["words-smc-draft"]
    assert tuned.kl[0] < 0.5 * shipped.kl[0]
    assert tuned.token_divergence[0] < 0.5 * shipped.token_divergence[0]
    assert 1 - tuned.acceptance[0] < 0.8 * (1 - shipped.acceptance[0])
