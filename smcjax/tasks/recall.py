"""Long documents with facts among filler, questions about them, and answers that can be checked exactly.

    >>> problem = generate(seed=0, n=1, split="eval", length=2048)[0]

A fact is a line `K7Q3=48` or, where its value names another key, `T4A1=M2P9`; between facts is filler, words without
meaning. Numbered questions follow, of four kinds, and a line of answer for each:

    recall 1 K7Q3         1 K7Q3=48
    sum 2 K7Q3 M2P9       2 K7Q3=48 M2P9=15 sum=63
    hop 3 T4A1            3 T4A1=M2P9 M2P9=15
    copy 4 K7Q3           4 K7Q3=48 B0C5=31 D1D1=20        (the fact and the two lines below it)

Documents are made of the pieces that are the tokens of `vocabulary`, so `length` counts tokens, answers included.
Training and evaluation are apart by construction: a hash sets an eighth of all keys aside, and a document has keys of
its split only. Values are drawn anew in each, so that memory does not answer.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator
from typing import Literal

import numpy as np

Split = Literal["train", "eval"]
Tokens = list[int]

KINDS = ("recall", "sum", "hop", "copy")
RUN = 3  # lines that a copy is of
VALUES = (10, 49)  # so that sums have two digits
SHORTEST, MAX_QUESTIONS = 256, 16
DENSITIES = (1 / 320, 1 / 80)  # of groups of facts, a token
SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
PAD, BOS, EOS, UNKNOWN = range(len(SPECIAL))
# A piece is half of a key, a number of two digits or one, a word of filler with the space before it, a word of
# questions, or any other character.
PIECES = r"[A-Z]\d|\d\d?| (?:[bdfgklmnprstvz][aeiou]){2}(?![a-z])|[a-z]+|[\s\S]"
HALVES = tuple(f"{letter}{digit}" for letter in "ABCDEFGHIJKLMNOPQRSTUVWXYZ" for digit in range(10))


@functools.cache
def vocabulary() -> tuple[str, ...]:
    """The pieces by token id: special ones, marks, words of questions, numbers, halves of keys, words of filler."""
    numbers = tuple(str(number) for number in range(100))
    syllables = [f"{consonant}{vowel}" for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]
    filler = tuple(f" {first}{second}" for first in syllables[:20] for second in syllables[::3])
    return (*SPECIAL, "\n", " ", "=", "questions", "answers", *KINDS, *numbers, *HALVES, *filler)


class _Pieces:
    """Token ids of the pieces that documents are made of."""

    def __init__(self) -> None:
        self.of = {piece: index for index, piece in enumerate(vocabulary())}
        self.newline, self.space, self.equals = (self.of[mark] for mark in "\n =")
        self.questions, self.answers = self.of["questions"], self.of["answers"]
        self.half, self.filler = self.of[HALVES[0]], self.of[HALVES[-1]] + 1

    def number(self, value: int) -> int:
        return self.of["0"] + value

    def key(self, key: int) -> Tokens:
        return [self.half + key // len(HALVES), self.half + key % len(HALVES)]


_pieces = functools.cache(_Pieces)


@functools.cache
def keys_of(split: Split) -> np.ndarray:
    """The keys of a split, ascending: the number of the first half times 260 plus that of the second."""
    keys = np.arange(len(HALVES) ** 2, dtype=np.uint64)
    aside = (keys * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(61) == 0
    return keys[aside if split == "eval" else ~aside].astype(np.int64)


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
    """A document with its questions, up to the word `answers`, and the answer lines, without newlines."""

    prompt: str
    answers: tuple[str, ...]
    kinds: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Round:
    """Questions and their answer lines as token ids, with newlines, and the kind of each."""

    kinds: list[str]
    questions: list[Tokens]
    answers: list[Tokens]


@dataclasses.dataclass
class _Facts:
    """The facts that a document has stated so far."""

    values: dict[int, int] = dataclasses.field(default_factory=dict)  # of keys that have numbers
    hops: dict[int, int] = dataclasses.field(default_factory=dict)  # the key that a key names
    runs: list[list[int]] = dataclasses.field(default_factory=list)  # keys of consecutive lines


def document(
    rng: np.random.Generator, length: int, split: Split, rounds: int = 1
) -> tuple[list[np.ndarray], list[Round]]:
    """A document of exactly `length` tokens, in stretches of token ids, with the questions behind each stretch.

    A round is a stretch of facts among filler, up to and with the word `answers`, and the answers to questions about
    all facts until there, which end with an end of text. Raises ValueError below 256 tokens a round.
    """
    if length < SHORTEST * rounds:
        raise ValueError(f"length must be at least {SHORTEST} tokens for each of {rounds} rounds, got {length}.")
    pieces, each = _pieces(), length // rounds
    asked = MAX_QUESTIONS if each >= 1024 else MAX_QUESTIONS // 2 if each >= 512 else MAX_QUESTIONS // 4
    density = np.exp(rng.uniform(*np.log(DENSITIES)))
    groups = max(asked // 2, int(each * density))
    sizes = rng.choice([1, 1, RUN], size=(rounds, groups), p=[0.4, 0.3, 0.3])
    fresh = iter(_distinct(rng, keys_of(split), int(sizes.sum()) + sizes.size))
    facts, stretches, told, written = _Facts(), [], [], 0
    for turn in range(rounds):
        lines = [
            line for size in sizes[turn] for line in _told(rng, facts, [int(next(fresh)) for _ in range(size)], fresh)
        ]
        order = rng.permutation(len(lines))
        told.append(_asked(rng, facts, asked))
        head = [] if turn else [BOS]
        tail = [pieces.questions, pieces.newline, *_joined(told[-1].questions), pieces.answers, pieces.newline]
        after = sum(map(len, told[-1].answers)) + 1
        until = length if turn == rounds - 1 else (turn + 1) * each
        room = until - written - len(head) - len(tail) - after
        body = _among_filler(rng, [lines[index] for index in order], room)
        stretches.append(np.array([*head, *body, *tail], np.uint16))
        written = until
    return stretches, told


def tokens(rng: np.random.Generator, length: int, split: Split, rounds: int = 1) -> np.ndarray:
    """Token ids [length], uint16, of a document with its answers, for training."""
    stretches, told = document(rng, length, split, rounds)
    parts = [
        part for stretch, one in zip(stretches, told, strict=True) for part in (stretch, [*_joined(one.answers), EOS])
    ]
    return np.concatenate(parts).astype(np.uint16)


def generate(seed: int, n: int, split: Split, length: int) -> list[Problem]:
    """The first `n` problems of the endless sequence that `seed`, `split` and `length` name, the same everywhere.

    `length` counts the tokens of a document with the beginning of text, its answers and the end of text.
    """
    if split not in ("train", "eval"):
        raise ValueError(f"split={split!r}: choose 'train' or 'eval'")
    words = vocabulary()

    def text(ids: Iterable[int]) -> str:
        return "".join(words[index] for index in ids)

    def one(rng: np.random.Generator) -> Problem:
        (stretch,), (told,) = document(rng, length, split)
        return Problem(text(stretch[1:]), tuple(text(line[:-1]) for line in told.answers), tuple(told.kinds))

    return [one(np.random.default_rng([seed, index, length, split == "eval"])) for index in range(n)]


def right_lines(problem: Problem, text: str) -> list[bool]:
    """True for each answer line of `problem` that `text`, a completion of its prompt, has in its place exactly."""
    lines = text.split("\n")
    return [index < len(lines) and lines[index] == answer for index, answer in enumerate(problem.answers)]


def _told(rng: np.random.Generator, facts: _Facts, keys: list[int], fresh: Iterator[int]) -> list[Tokens]:
    """Lines of one group of facts, a run as one: of `keys` with new values, and perhaps of a new key that names one."""
    pieces = _pieces()
    values = rng.integers(VALUES[0], VALUES[1] + 1, size=len(keys)).tolist()
    facts.values.update(zip(keys, values, strict=True))
    said = zip(keys, values, strict=True)
    run = [t for k, v in said for t in (*pieces.key(k), pieces.equals, pieces.number(v), pieces.newline)]
    if len(keys) == RUN:
        facts.runs.append(keys)
        return [run]
    if rng.random() < 0.5:
        return [run]
    pointer = int(next(fresh))
    facts.hops[pointer] = keys[0]
    return [run, [*pieces.key(pointer), pieces.equals, *pieces.key(keys[0]), pieces.newline]]


def _asked(rng: np.random.Generator, facts: _Facts, count: int) -> Round:
    """`count` questions about `facts`, of kinds drawn alike among those that they allow, and the answers."""
    pieces = _pieces()
    known, hops = list(facts.values), list(facts.hops)
    kinds = [k for k in KINDS if (k != "hop" or hops) and (k != "copy" or facts.runs) and (k != "sum" or known[1:])]
    told = Round([], [], [])

    def equal(key: int, value: Tokens) -> Tokens:
        return [*pieces.key(key), pieces.equals, *value]

    def fact(key: int) -> Tokens:
        return equal(key, pieces.key(facts.hops[key]) if key in facts.hops else [pieces.number(facts.values[key])])

    for number in range(1, count + 1):
        kind = kinds[rng.integers(len(kinds))]
        if kind == "hop":
            about = [hops[rng.integers(len(hops))]]
            keys = [about[0], facts.hops[about[0]]]
        elif kind == "copy":
            keys = facts.runs[rng.integers(len(facts.runs))]
            about = keys[:1]
        else:
            about = keys = [known[i] for i in rng.choice(len(known), 2 if kind == "sum" else 1, replace=False)]
        parts = [fact(key) for key in keys]
        if kind == "sum":
            total = sum(facts.values[key] for key in keys)
            parts.append([pieces.of["sum"], pieces.equals, pieces.number(total)])
        named = [t for key in about for t in (pieces.space, *pieces.key(key))]
        answer = [t for part in parts for t in (pieces.space, *part)]
        told.kinds.append(kind)
        told.questions.append([pieces.of[kind], pieces.space, pieces.number(number), *named, pieces.newline])
        told.answers.append([pieces.number(number), *answer, pieces.newline])
    return told


def _among_filler(rng: np.random.Generator, lines: list[Tokens], room: int) -> Tokens:
    """The lines in this order between lines of filler, `room` tokens in all."""
    pieces = _pieces()
    cuts = np.sort(rng.integers(0, room - sum(map(len, lines)) + 1, size=len(lines)))
    words = rng.integers(pieces.filler, len(vocabulary()), size=room)
    lengths = np.diff([0, *cuts, room - sum(map(len, lines))])
    out: Tokens = []
    for length, line in zip(lengths, [*lines, []], strict=True):
        if length:
            out += [*words[len(out) : len(out) + length - 1].tolist(), pieces.newline]
        out += line
    return out


def _distinct(rng: np.random.Generator, keys: np.ndarray, count: int) -> np.ndarray:
    """`count` different ones of `keys`, in any order alike likely."""
    found = np.empty(0, keys.dtype)
    while len(found) < count:
        more = np.concatenate([found, rng.choice(keys, size=count)])
        found = more[np.sort(np.unique(more, return_index=True)[1])]
    return found[:count]


def _joined(lines: list[Tokens]) -> Tokens:
    return [token for line in lines for token in line]
