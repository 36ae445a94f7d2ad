"""Documents of facts: their answers can be read from them, their lengths and splits are kept, and text is tokens."""

from __future__ import annotations

import re

import numpy as np
import pytest
import recall_data as data
from hypothesis import given, settings
from hypothesis import strategies as st

from smcjax.tasks import recall

FACT = re.compile(r"^([A-Z]\d[A-Z]\d)=(\d\d|[A-Z]\d[A-Z]\d)$")


def solved(prompt: str) -> list[str]:
    """The answer lines, read from the prompt alone by other means than it was made with."""
    context, questions = prompt.split("questions\n")
    lines = context.split("\n")
    facts = {match[1]: match[2] for match in map(FACT.match, lines) if match}
    places = {line[:4]: index for index, line in enumerate(lines) if FACT.match(line)}
    found = []
    for question in questions.splitlines()[:-1]:
        kind, number, *keys = question.split(" ")
        if kind == "hop":
            keys.append(facts[keys[0]])
        if kind == "copy":
            keys = [line[:4] for line in lines[places[keys[0]] :][:3]]
        parts = [f"{key}={facts[key]}" for key in keys]
        if kind == "sum":
            parts.append(f"sum={sum(int(facts[key]) for key in keys)}")
        found.append(" ".join([number, *parts]))
    return found


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 10**6), length=st.sampled_from([256, 300, 512, 1024, 2048, 5000]))
def test_answers_can_be_read_from_the_prompt(seed: int, length: int) -> None:
    problem = recall.generate(seed, 1, "eval", length)[0]
    assert list(problem.answers) == solved(problem.prompt)
    text = "".join(f"{line}\n" for line in problem.answers)
    assert all(recall.right_lines(problem, text))
    wrong = text.replace(problem.answers[0], problem.answers[0][:-1] + "x", 1)
    assert recall.right_lines(problem, wrong) == [False] + [True] * (len(problem.answers) - 1)
    assert not any(recall.right_lines(problem, ""))


def test_facts_lie_anywhere() -> None:
    """The share of the context before a fact that is asked for is uniform: quarters of it hold a quarter each."""
    places = []
    for problem in recall.generate(5, 60, "eval", 2048):
        context = problem.prompt.split("questions\n")[0]
        keys = [answer.split(" ")[1][:4] for answer in problem.answers]
        places += [context.index(f"{key}=") / len(context) for key in keys]
    counts, _ = np.histogram(places, bins=4, range=(0, 1))
    assert counts.min() > 0.18 * len(places), counts


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 10**6), length=st.sampled_from([512, 777, 2048]), rounds=st.integers(1, 3))
def test_documents_have_their_length(seed: int, length: int, rounds: int) -> None:
    rng = np.random.default_rng(seed)
    if length < recall.SHORTEST * rounds:
        with pytest.raises(ValueError, match=f"length must be at least 256 tokens for each of {rounds} rounds"):
            recall.tokens(rng, length, "train", rounds)
        return
    ids = recall.tokens(rng, length, "train", rounds)
    assert len(ids) == length
    assert (ids[0], ids[-1]) == (recall.BOS, recall.EOS)
    assert (ids == recall.EOS).sum() == rounds
    assert (ids == recall.vocabulary().index("answers")).sum() == rounds


def test_splits_share_no_key() -> None:
    train, evaluation = recall.keys_of("train"), recall.keys_of("eval")
    assert len(np.intersect1d(train, evaluation)) == 0
    assert len(train) + len(evaluation) == 260**2
    assert len(evaluation) == pytest.approx(260**2 / 8, rel=0.02)
    names = {
        split: {key for p in recall.generate(1, 30, split, 1024) for key in re.findall(r"[A-Z]\d[A-Z]\d", p.prompt)}
        for split in ("train", "eval")
    }
    assert not names["train"] & names["eval"]
    halves = {split: {half for key in keys for half in (key[:2], key[2:])} for split, keys in names.items()}
    assert len(halves["eval"] & halves["train"]) > 250, "halves of keys are known, pairs of them are not"


def test_a_seed_gives_the_same_documents() -> None:
    assert recall.generate(7, 2, "eval", 512) == recall.generate(7, 2, "eval", 512)
    assert recall.generate(7, 2, "eval", 512)[:1] == recall.generate(7, 1, "eval", 512)
    assert recall.generate(8, 1, "eval", 512) != recall.generate(7, 1, "eval", 512)
    with pytest.raises(ValueError, match="split='test': choose 'train' or 'eval'"):
        recall.generate(7, 1, "test", 512)


# -- tokens -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [512, 2048])
def test_tokens_of_the_text_are_the_documents(length: int) -> None:
    """Encoding prompt and answers as text gives the training document's own ids, and decoding gives the text."""
    tokenizer = data.tokenizer()
    for seed in range(5):
        rng = np.random.default_rng([seed, 0, length, True])
        ids = recall.tokens(rng, length, "eval").tolist()
        problem = recall.generate(seed, 1, "eval", length)[0]
        text = problem.prompt + "".join(f"{line}\n" for line in problem.answers)
        assert tokenizer.encode(text).ids == ids[:-1]
        assert tokenizer.decode(ids[1:-1], skip_special_tokens=False) == text
        assert tokenizer.encode(problem.prompt).ids == ids[: len(tokenizer.encode(problem.prompt).ids)]
    assert recall.UNKNOWN not in ids
    assert tokenizer.encode("Hello").ids.count(recall.UNKNOWN) > 0, "control"


def test_rows_do_not_depend_on_the_number_of_workers() -> None:
    rows = data.make_rows(3, 130, 512, "train", 1)
    assert rows.shape[1] == 512
    assert len(rows) >= 130
    np.testing.assert_array_equal(rows[:64], data.make_rows(3, 64, 512, "train", 1))
    np.testing.assert_array_equal(rows, data.make_rows(3, 130, 512, "train", 2))
