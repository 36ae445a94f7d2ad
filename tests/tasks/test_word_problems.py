"""The word problems: right by an independent reading of every line, deterministic, and the two splits apart."""

from __future__ import annotations

import collections
import hashlib
import itertools
import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smcjax.tasks import vocabulary as words
from smcjax.tasks.templates import LINES, Split, family, in_tense, is_set_aside, templates
from smcjax.tasks.word_problems import (
    MAX_VALUE,
    Problem,
    completion,
    draw,
    extract_answer,
    generate,
    is_correct,
    is_held_out,
)

SPLITS: tuple[Split, ...] = ("train", "eval")
LINE = re.compile(
    r"(?:\w+ has|That makes|Together they have|Each \w+ (?:gets|holds)) (\d+) ([-+*/]) (\d+) = (\d+) [a-z ]+"
)
WORD_VALUES = {word: value for value, word in words.NUMBER_WORDS.items()}
# What says a number without a digit, beside the number words themselves.
IMPLICIT = {"double": 2, "doubles": 2, "doubled": 2, "twice": 2, "half": 2, "third": 3, "triples": 3, "tripled": 3}
EVERY_TEMPLATE = [template for name in LINES for line in family(name) for template in line]


@pytest.fixture(scope="module", params=SPLITS)
def split(request: pytest.FixtureRequest) -> Split:
    return request.param


@pytest.fixture(scope="module")
def problems(split: Split) -> list[Problem]:
    return generate(7, 2_000, split)


def calculations(problem: Problem) -> list[tuple[int, str, int, int]]:
    """(a, op, b, result) of each line, read by this test's own pattern."""
    *lines, _ = problem.solution.split("\n")
    matches = [LINE.fullmatch(line) for line in lines]
    assert all(matches), problem.solution
    return [(int(m[1]), m[2], int(m[3]), int(m[4])) for m in matches if m]


def numbers(question: str) -> set[int]:
    tokens = re.findall(r"\d+|[a-z]+", question.lower())
    return {int(t) if t.isdigit() else WORD_VALUES.get(t) or IMPLICIT.get(t) or 0 for t in tokens} - {0}


# -- right ------------------------------------------------------------------------------------------------------------


def test_every_line_calculates(problems: list[Problem]) -> None:
    for problem in problems:
        for a, op, b, result in calculations(problem):
            if op == "/":
                assert result * b == a, problem.solution
            else:
                assert {"+": a + b, "-": a - b, "*": a * b}[op] == result, problem.solution


def test_lines_chain_and_end_in_the_answer(problems: list[Problem]) -> None:
    for problem in problems:
        steps = calculations(problem)
        lines = problem.solution.split("\n")
        for index in range(1, len(steps)):
            (a, _, b, _), before = steps[index], steps[index - 1]
            if lines[index].startswith("Together"):
                assert (a, b) == (before[0], before[3]), problem.solution
            elif lines[index].startswith("That makes"):
                assert not lines[index + 1].startswith(("That", "####")), problem.solution
            elif lines[index - 1].startswith("That makes"):
                assert b == before[3], problem.solution
                assert index == 1 or a == steps[index - 2][3], problem.solution
            else:
                assert a == before[3], problem.solution
        assert steps[-1][3] == problem.answer
        assert problem.solution.endswith(f"\n#### {problem.answer}")
        assert extract_answer(completion(problem)) == problem.answer
        assert is_correct(problem, completion(problem))


def test_steps_and_quantities_are_bounded(problems: list[Problem]) -> None:
    for problem in problems:
        assert problem.steps == len(calculations(problem))
        assert all(1 <= value <= MAX_VALUE for a, _, b, result in calculations(problem) for value in (a, b, result))
    share = collections.Counter(problem.steps for problem in problems)
    assert set(share) == {2, 3, 4, 5, 6}
    assert min(share.values()) > 0.17 * len(problems)  # one fifth each


def test_the_question_tells_every_number_that_the_solution_needs(problems: list[Problem]) -> None:
    for problem in problems:
        told, steps = numbers(problem.question), calculations(problem)
        results = {result for *_, result in steps}
        assert {number for a, _, b, _ in steps for number in (a, b)} - results <= told, problem


def test_questions_are_well_formed(problems: list[Problem]) -> None:
    for problem in problems:
        text = problem.question
        assert re.fullmatch(r"[A-Z0-9][^{}\[\]|\n]*[.?]", text), text
        assert "  " not in text
        assert not re.search(r"[.?] [a-z]", text), text
        assert not re.search(r"\b(a [aeiou]\w+|an [^aeiou]\w+)", text.replace("an hour", "")), text
        assert not re.search(r"\b(\w+) \1\b|[<>/_]| [.,:?]|,\.|,,|[,:](?! )", text.replace("had had", "")), text
        assert text.count("?") <= 1, text


# -- deterministic ----------------------------------------------------------------------------------------------------


def test_a_seed_names_one_sequence(split: Split, problems: list[Problem]) -> None:
    assert generate(7, 50, split) == problems[:50]
    assert generate(8, 50, split) != problems[:50]


def test_problems_are_the_same_on_every_machine() -> None:
    """A change here changes what every reported accuracy was measured on: say so where they are reported."""
    text = repr([generate(123, 100, split) for split in SPLITS])
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "96f2428b4b4872e2"


def test_an_unknown_split_is_refused() -> None:
    # TypeError where the tests check annotations at run time.
    with pytest.raises((ValueError, TypeError), match=r"'train'.*'eval'"):
        generate(0, 1, "test")


# -- apart ------------------------------------------------------------------------------------------------------------


def test_no_calculation_set_aside_is_in_training_and_every_evaluation_problem_has_one() -> None:
    seen = {(a, op, b) for p in generate(1, 6_000, "train") for a, op, b, _ in calculations(p)}
    assert not any(is_held_out(*step) for step in seen)
    for problem in generate(1, 1_000, "eval"):
        steps = [(a, op, b) for a, op, b, _ in calculations(problem)]
        new = [step for step in steps if is_held_out(*step)]
        assert new
        assert not any(step in seen or (step[1] in "+*" and step[::-1] in seen) for step in new)


def test_a_tenth_of_the_calculations_is_set_aside_and_commuted_ones_together() -> None:
    for op in "+-*/":
        held_out = [is_held_out(a, op, b) for a in range(1, 400) for b in range(2, 50)]
        assert 0.09 < sum(held_out) / len(held_out) < 0.11
    for a, b in itertools.product(range(60), repeat=2):
        assert is_held_out(a, "+", b) == is_held_out(b, "+", a)
        assert is_held_out(a, "*", b) == is_held_out(b, "*", a)


def test_no_template_is_in_both_splits() -> None:
    def shapes(split: Split) -> set[str]:
        """Templates in both tenses, with every slot alike: a sentence is not new by another name or number in it."""
        every = (t for name in LINES for past in (False, True) for line in templates(name, split, past) for t in line)
        return {re.sub(r"\{\w+\}", "_", template).lower() for template in every}

    assert shapes("train")
    assert not shapes("train") & shapes("eval")


def test_a_problem_is_written_in_the_templates_of_its_split(split: Split) -> None:
    rng = random.Random(5)
    drawn = [draw(rng, split) for _ in range(4_000)]
    used = {template for _, used in drawn for template in used}
    own = {
        template
        for name in LINES
        for past in (False, True)
        for line in templates(name, split, past)
        for template in line
    }
    assert used <= own
    assert len(used) > 0.5 * len(own)
    for problem, used_here in drawn[:500]:
        # Every sentence of the text comes from a template, alone or joined to the one before.
        text = problem.question.lower()
        for template in used_here:
            pieces = re.split(r"\{\w+\}", re.sub(r"^\{[SA]\} ", "", template)[:-1].lower())
            assert re.search(".+?".join(map(re.escape, pieces)), text), (template, text)


def test_about_an_eighth_of_the_templates_is_set_aside_and_some_of_every_family() -> None:
    share = sum(map(is_set_aside, EVERY_TEMPLATE)) / len(EVERY_TEMPLATE)
    assert 0.11 < share < 0.14
    for name in LINES:
        trained, held_out = (
            sum(map(len, templates(name, "train", False))),
            sum(map(len, templates(name, "eval", False))),
        )
        assert trained >= 30, name
        assert held_out >= 3, name


def test_held_out_sentences_use_words_of_training_sentences_only() -> None:
    def vocabulary(split: Split) -> set[str]:
        text = " ".join(t for t in EVERY_TEMPLATE if is_set_aside(t) == (split == "eval"))
        return set(re.findall(r"[a-z]+", re.sub(r"\{\w+\}", " ", text.lower())))

    assert vocabulary("eval") <= vocabulary("train")


def test_the_english_is_varied(problems: list[Problem]) -> None:
    assert len(set(EVERY_TEMPLATE)) == len(EVERY_TEMPLATE) >= 4_000
    assert len({problem.question for problem in problems}) == len(problems)
    assert len(words.FEMALE_NAMES) + len(words.MALE_NAMES) >= 70
    assert not set(words.FEMALE_NAMES) & set(words.MALE_NAMES)


def test_templates_are_well_formed() -> None:
    names = "A B S O P he his n m o x c cs g gs uses coll rel place job item adj adk"
    for template in EVERY_TEMPLATE:
        assert set(re.findall(r"\{(\w*)\}", template)) <= set(names.split()), template
        assert re.fullmatch(r"(?:[A-Za-z ,:'?.]|\{\w+\}|\[[a-z ]+\|[a-z ]+\])*[.?]", template), template
        for past in (False, True):
            assert not re.search(r"[\[\]<>|/]|  | [.,:?]", in_tense(template, past)), template


# -- answers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("#### 17", 17),
        ("1 + 1 = 2\n####17\n", 17),
        ("####   17 apples", 17),
        ("####\n17", 17),
        ("#### -3", -3),
        ("#### 1,234", 1234),
        ("#### 17.", 17),
        ("#### 5\n#### 6", 5),
        ("17", None),
        ("", None),
        ("####", None),
        ("#### apples 17", None),
        ("#### 17.5", None),
        ("#### 1,23", None),
        ("### 17", None),
    ],
)
def test_extract_answer(text: str, answer: int | None) -> None:
    assert extract_answer(text) == answer


@given(
    st.text().filter(lambda text: "#" not in text),
    st.integers(-(10**9), 10**9),
    st.from_regex(r"([^\d.,].*)?", fullmatch=True),
)
def test_extract_answer_finds_the_number_after_the_first_mark(before: str, number: int, after: str) -> None:
    assert extract_answer(f"{before}#### {number}{after}") == number
