"""The words that word problems are dressed in. Both splits share them: what is held out is templates and numbers."""

from __future__ import annotations

import itertools


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def _pairs(text: str) -> tuple[tuple[str, str], ...]:
    """(one, several) of each "one/several"."""
    return tuple((one, several) for one, _, several in (word.partition("/") for word in text.split()))


FEMALE_NAMES = _words(
    "Ada Alice Amina Anna Clara Dana Ella Emma Eva Fatima Grace Hana Ines Iris Julia Kate Lena Lily Lucy Maria "
    "Maya Mia Nina Nora Olga Priya Rosa Ruth Sara Sofia Tara Vera Wendy Yuki Zoe"
)
MALE_NAMES = _words(
    "Adam Ahmed Alex Ben Carlos Daniel David Diego Erik Felix George Hugo Ivan Jack James Jonas Kai Leo Liam Luca "
    "Marco Max Noah Omar Oscar Paul Pedro Peter Raj Sam Simon Theo Tom Victor Will"
)
NAMES = {"she": FEMALE_NAMES, "he": MALE_NAMES}
# Subject, object and possessive form of each pronoun.
PRONOUNS = {"she": ("she", "her", "her"), "he": ("he", "him", "his")}

OBJECTS = (
    *_words(
        "apples oranges pears plums lemons cookies muffins eggs nuts carrots potatoes marbles stickers stamps coins "
        "cards books notebooks pencils crayons erasers buttons beads shells stones feathers flowers seeds candles "
        "ribbons balloons kites dolls puzzles badges magnets photos bottles cups bricks rings keys"
    ),
    "toy cars",
    "paper planes",
    "glass balls",
)
FOODS = frozenset(_words("apples oranges pears plums lemons cookies muffins eggs nuts carrots potatoes"))
# What somebody (eats, ate) or otherwise (uses up, used up).
USES = (("uses up", "used up"), ("eats", "ate"))

# What holds things, and who things are shared among.
CONTAINERS = _pairs("box/boxes bag/bags basket/baskets jar/jars drawer/drawers bucket/buckets crate/crates tray/trays")
GROUPS = _pairs("friend/friends child/children cousin/cousins neighbor/neighbors classmate/classmates student/students")

RELATIVES = _words("aunt uncle brother sister father mother grandmother grandfather teacher")
PLACES = (
    "in the garden", "in the park", "at the beach", "near the river", "behind the house", "at school",
    "on the way home", "at the market", "under the bed", "in the kitchen",
)  # fmt: skip
ADJECTIVE_PAIRS = tuple(
    itertools.chain.from_iterable(
        itertools.permutations(group, 2)
        for group in (("red", "blue", "green", "yellow"), ("big", "small"), ("old", "new"), ("plain", "fancy"))
    )
)
JOBS = ("washing cars", "walking dogs", "cleaning windows", "watering plants", "painting a fence", "carrying boxes")
ITEMS = ("a hat", "a lamp", "a book", "a ticket", "a game", "a shirt", "a clock", "a bike ride", "a cake", "a bag")
# Optional openings of a sentence after the first.
TIMES = (
    "later, ", "then ", "after that, ", "the next day, ", "on Monday, ", "on Friday, ", "in the afternoon, ",
    "after lunch, ", "a week later, ", "next, ", "soon ", "in the evening, ", "the same day, ", "after school, ",
)  # fmt: skip

NUMBER_WORDS = {
    2: "two", 3: "three", 4: "four", 5: "five", 6: "six", 7: "seven", 8: "eight", 9: "nine", 10: "ten",
    11: "eleven", 12: "twelve",
}  # fmt: skip
