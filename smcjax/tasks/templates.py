"""The sentences of the word problems: for every move of a story, templates to train on and templates set aside.

The written lines (`sentences.txt`) hold choices, and every combination of them is a *template*: `<a/b/>` is "a", "b"
or nothing, `<more>` one of a set of PHRASES that can stand for each other. In a template `[finds|found]` is one verb
in the two tenses; a story keeps to one. Slots:

    {A} who owns the quantity, by name     {S} {O} {P} the same, as subject, object, possessive: name or pronoun
    {he} {his} always the pronoun          {B} somebody else, always of the other pronoun, so none is ambiguous
    {n} {m} numbers                        {o} what is counted ("apples", "dollars"), {x} something else
    {c} {cs} container, one and several    {g} {gs} a receiver, one and several
    {uses} eats or uses up                 {coll} collection, or account where dollars are counted
    {rel} {place} {job} {item} {adj} {adk} dressing

A hash of the words between the slots sets an eighth of all templates aside for evaluation. These are whole surface
forms that no training sentence has, but they are made of the same phrases as training sentences: they show that a
model puts together what it knows, not that it reads English in general.
"""

from __future__ import annotations

import functools
import hashlib
import re
from pathlib import Path
from typing import Literal

Split = Literal["train", "eval"]
# Line by line, the templates that it has; a story chooses a line, then a template.
Lines = tuple[tuple[str, ...], ...]
SET_ASIDE = 8  # one template in so many

PHRASES = {
    "first": "In the beginning,/At first,/To begin with,/At the start,",
    "has": "[has|had]/[owns|owned]",
    "gets": "[gets|got]/[receives|received]",
    "gives": "[gives|gave]/[hands|handed]",
    "more": "{n} more {o}/another {n} {o}/{n} additional {o}/{n} extra {o}",
    "new": "{n} {o}/{n} new {o}/<more>",
    "another": "{n} more/another {n}",
    "ofthe": "{n} of the {o}/{n} of {his} {o}",
    "of": "{n} {o}/<ofthe>",
    "the": "the {o}/{his} {o}",
    "all": "all the {o}/all of the {o}/all {his} {o}/all of {his} {o}",
    "them": "all of them/them all",
    "evenly": "equally/evenly/fairly",
    "someone": "{B}/{his} {rel}/a friend",
    "groups": "{n} {cs} <with {m} {o} <each/in each/in each one/in every {c}>/of {m} {o} each>",
    "groups_that": "<groups>/{n} {cs} that <each [hold|held] {m} {o}/[contain|contained] {m} {o} each>",
    "one_of": "each/each one/every one",
    "moredollars": "{n} dollars/{n} more dollars/another {n} dollars/{n} extra dollars",
    "money": "the money/{his} money",
    "end": "in the end/at the end/after all this/after all of that",
}


def _written() -> dict[str, list[str]]:
    """The written lines of each family."""
    found: dict[str, list[str]] = {}
    for line in Path(__file__).with_name("sentences.txt").read_text("utf-8").splitlines():
        if line.startswith("== "):
            own = found[line.removeprefix("== ")] = []
        elif line and not line.startswith("#"):
            own.append(line)
    return found


LINES = _written()


def in_tense(template: str, past: bool) -> str:
    """Choose the tense of `[present|past]`."""
    return re.sub(r"\[([^|\]]*)\|([^\]]*)\]", r"\2" if past else r"\1", template)


def masked(template: str) -> str:
    """The words of a template in the present tense, with "_" for every name, thing and number."""
    return re.sub(r"\{\w+\}", "_", in_tense(template, False)).lower()


def is_set_aside(template: str) -> bool:
    """True for a template that is for evaluation: an eighth, by hash; those that differ in slots go together."""
    return hashlib.sha256(masked(template).encode()).digest()[0] % SET_ASIDE == 0


def expand(line: str) -> tuple[str, ...]:
    """All templates of a written line."""
    while (named := re.sub(r"<(\w+)>", lambda name: f"<{PHRASES[name[1]]}>", line)) != line:
        line = named
    done: dict[str, None] = {}
    todo = [line]
    while todo:
        text = todo.pop()
        choice = re.search(r"<([^<>]*)>", text)  # an innermost one
        if choice is None:
            done[re.sub(r" +(?=[ .,:?]|$)", "", text).strip()] = None
        else:
            todo += [text[: choice.start()] + option + text[choice.end() :] for option in choice[1].split("/")]
    return tuple(done)


@functools.cache
def family(name: str) -> Lines:
    """Every template of a family, both those to train on and those set aside."""
    return tuple(map(expand, LINES[name]))


@functools.cache
def templates(name: str, split: Split, past: bool) -> Lines:
    """A family's templates of one split in one tense; lines that have none in this split are left out."""
    lines = (
        tuple(in_tense(template, past) for template in line if is_set_aside(template) == (split == "eval"))
        for line in family(name)
    )
    return tuple(line for line in lines if line)
