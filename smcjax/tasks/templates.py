"""The sentences of the word problems: for every move of a story, templates to train on and templates held out.

`[finds|found]` is one verb in the two tenses; a story keeps to one. Slots:

    {A} who owns the quantity, by name     {S} {O} {P} the same, as subject, object, possessive: name or pronoun
    {he} {his} always the pronoun          {B} somebody else, always of the other pronoun, so none is ambiguous
    {n} {m} numbers                        {o} what is counted ("apples", "dollars"), {x} something else
    {c} {cs} container, one and several    {g} {gs} a receiver, one and several
    {rel} {place} {job} {item} {adj} {adk} dressing

Held-out sentences are put together differently, out of words that the training sentences use (tests/tasks checks
this): what they ask of a reader is to understand, not to know a word never met.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Literal

from smcjax.tasks.sentences_events import CHANGES, OPENINGS
from smcjax.tasks.sentences_relations import ASIDES, COMPARISONS, ENDINGS

Split = Literal["train", "eval"]


@dataclasses.dataclass(frozen=True)
class Family:
    """Templates that say the same thing. A story of a split uses that split's templates only."""

    train: tuple[str, ...]
    eval: tuple[str, ...]

    def of(self, split: Split) -> tuple[str, ...]:
        return self.train if split == "train" else self.eval


def _family(train: str, held_out: str) -> Family:
    """One template a line."""
    return Family(*(tuple(line.strip() for line in text.strip().splitlines()) for text in (train, held_out)))


def in_tense(template: str, past: bool) -> str:
    """Choose the tense of `[present|past]`."""
    return re.sub(r"\[([^|\]]*)\|([^\]]*)\]", r"\2" if past else r"\1", template)


FAMILIES: dict[str, Family] = {
    name: _family(*texts) for part in (OPENINGS, CHANGES, COMPARISONS, ENDINGS, ASIDES) for name, texts in part.items()
}
