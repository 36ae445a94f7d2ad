"""Grade-school word problems in varied English, made up on the spot, with worked solutions and checkable answers.

    >>> problem = generate(seed=0, n=1, split="eval")[0]

A story opens with a quantity and changes it in two to six steps of + - * /; somebody may have more or fewer than
somebody else, things may come and go in equal groups, be sold, shared, put together; some sentences do not matter. The
solution has one line a step and ends in `#### answer`. Every quantity is an integer in [1, 999] and every division is
exact.

Training and evaluation are apart by construction, so that memory does not answer:

- sentences: every sentence of an evaluation problem comes from templates that training never uses. They are whole
  surface forms made of phrases that training sentences have too (`templates.py`);
- numbers: a hash sets a tenth of all calculations `a op b` aside (commuted ones together). None of them occurs in a
  training solution; every evaluation solution needs at least one.
"""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Callable

from smcjax.tasks import vocabulary as words
from smcjax.tasks.templates import Split, templates

MAX_VALUE = 999
MIN_STEPS, MAX_STEPS = 2, 6
ANSWER_MARK = "####"

_CALCULATE: dict[str, Callable[[int, int], int]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a // b,
}


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
    """`question`, which is the prompt as it is, is one line; `solution` one a step and last `#### answer`, without a
    final newline."""

    question: str
    solution: str
    answer: int
    steps: int


def generate(seed: int, n: int, split: Split) -> list[Problem]:
    """The first `n` problems of the endless sequence that `seed` and `split` name, the same on every machine."""
    if split not in ("train", "eval"):
        raise ValueError(f"split={split!r}: choose 'train' or 'eval'")
    rng = random.Random(f"smcjax word problems {split} {seed}")
    return [draw(rng, split)[0] for _ in range(n)]


def draw(rng: random.Random, split: Split) -> tuple[Problem, list[str]]:
    """One problem and the templates (in the tense they were used in) that it was written with."""
    steps = MIN_STEPS + int(rng.random() * (MAX_STEPS - MIN_STEPS + 1))
    while True:  # again with the same number of steps, so that what is rejected does not bias it
        story = _Story(rng, split)
        if story.tell(steps) and (split == "train" or story.needs_held_out):
            return story.problem(), story.templates


def completion(problem: Problem) -> str:
    """The text that a model is trained to continue the question with, its first newline included."""
    return "\n" + problem.solution


def extract_answer(text: str) -> int | None:
    """The integer after the first `####`, or None if there is none."""
    _, mark, rest = text.partition(ANSWER_MARK)
    match = re.match(r"\s*(-?(?:\d{1,3}(?:,\d{3})+|\d{1,18}))(?![\d,]*\d|\.\d)", rest, re.ASCII)
    return int(match.group(1).replace(",", "")) if mark and match else None


def is_correct(problem: Problem, completion: str) -> bool:
    """True where a model's text gives the answer."""
    return extract_answer(completion) == problem.answer


def is_held_out(a: int, op: str, b: int) -> bool:
    """True for calculations `a op b` set aside for evaluation: a tenth of all, by hash."""
    if op in "+*" and a > b:
        a, b = b, a
    h = (a * 0x9E3779B1 + b * 0x85EBCA77 + ord(op) * 0xC2B2AE3D) & 0xFFFFFFFF
    h = ((h ^ (h >> 15)) * 0x2C1B3C6D) & 0xFFFFFFFF
    h = ((h ^ (h >> 12)) * 0x297A2D39) & 0xFFFFFFFF
    return (h ^ (h >> 15)) % 10 == 0


class _Story:
    """A problem in the making: who holds how many of what, the sentences so far and the lines of the solution."""

    def __init__(self, rng: random.Random, split: Split) -> None:
        self.random = rng.random
        self.split = split
        self.past = rng.random() < 0.5
        self.sentences: list[str] = []
        self.templates: list[str] = []
        self.last = ""  # the family of the last sentence
        self.clauses: list[str] = []  # of the last sentence, while it could go on with "and"
        self.lines: list[str] = []
        self.needs_held_out = False
        self.value = 0
        self.before: int | None = None  # what the other person has, right after a comparison
        self.money = self.random() < 0.2
        container, receiver = self.choose(words.CONTAINERS), self.choose(words.GROUPS)
        adjective, other_adjective = self.choose(words.ADJECTIVE_PAIRS)
        thing = self.choose(words.OBJECTS)
        while (other := self.choose(words.OBJECTS)) == thing:
            pass
        self.slots = {
            "o": "dollars" if self.money else thing, "x": other, "c": container[0], "cs": container[1],
            "g": receiver[0], "gs": receiver[1], "adj": adjective, "adk": other_adjective,
            "uses": words.USES[thing in words.FOODS][self.past], "coll": "account" if self.money else "collection",
        }  # fmt: skip
        self.pronoun = "she" if self.random() < 0.5 else "he"
        self.holder = self.choose(words.NAMES[self.pronoun])
        self.meet()

    def choose[T](self, options: tuple[T, ...] | list[T]) -> T:
        return options[int(self.random() * len(options))]

    def between(self, low: int, high: int) -> int:
        return low + int(self.random() * (high - low + 1))

    def meet(self, but: str = "") -> None:
        """Let `holder` own the quantity and somebody new, of the other pronoun and not `but`, be {B}."""
        he, _, his = words.PRONOUNS[self.pronoun]
        names = words.NAMES["he" if self.pronoun == "she" else "she"]
        while (other := self.choose(names)) == but:
            pass
        self.slots |= {"A": self.holder, "B": other, "he": he, "his": his}

    # -- sentences ----------------------------------------------------------------------------------------------------

    def say(self, family: str, **numbers: int) -> None:
        """Add a sentence of `family`, or a clause to the last sentence."""
        slots = self.slots
        if self.last in _SHORT_AFTER.get(family, ()) and not self.money and self.random() < 0.25:
            family += "_them"
        if self.random() < 0.5 and self.sentences:
            slots["S"], slots["O"], slots["P"] = words.PRONOUNS[self.pronoun]
        else:
            slots["S"] = slots["O"] = self.holder
            slots["P"] = self.holder + "'s"
        for slot, value in numbers.items():
            slots[slot] = words.NUMBER_WORDS[value] if value <= 12 and self.random() < 0.15 else str(value)
        lines = templates(family, self.split, self.past)
        template = self.choose(self.choose(lines))
        if template in self.templates:  # say the same thing another way, mostly
            template = self.choose(self.choose(lines))
        self.templates.append(template)
        for slot, options in _DRESSING:
            if slot in template:
                slots[slot[1:-1]] = self.choose(options)
        sentence = template.format_map(slots)
        begins = "{A} " if family.startswith(("open", "money_open")) else "{S} "
        plain = template.startswith(begins) and not _JOINED.search(template) and (family in _EVENTS or begins == "{A} ")
        if plain and self.clauses and self.random() < 0.45:
            self.clauses.append(sentence[len(slots["S"]) + 1 : -1])
            self.sentences[-1] = self.join()
        else:
            self.clauses = []
            timeless = family in _EVENTS and template.startswith(_PLAIN_STARTS) and " soon " not in template
            if self.sentences and timeless and self.random() < 0.3:
                time = self.choose(words.TIMES)
                sentence = time + (sentence if template[0] == "{" else sentence[0].lower() + sentence[1:])
            sentence = sentence[0].upper() + sentence[1:]
            self.sentences.append(sentence)
            if plain:
                self.clauses = [sentence[:-1]]
        if len(self.clauses) == 3:
            self.clauses = []
        self.last = family.removesuffix("_them")

    def join(self) -> str:
        """The clauses, all of one subject, as a sentence."""
        *first, last = self.clauses
        return f"{', '.join(first)}{self.choose(_LINKS if len(first) == 1 else _LAST_LINKS)}{last}."

    def calculate(self, a: int, op: str, b: int, who: str = "") -> int:
        """Write a line of the solution; its result is the new value."""
        self.value = _CALCULATE[op](a, b)
        self.needs_held_out = self.needs_held_out or is_held_out(a, op, b)
        self.lines.append(f"{who or self.holder + ' has'} {a} {op} {b} = {self.value} {self.slots['o']}")
        return self.value

    def operand(self, a: int, op: str, low: int, high: int) -> int | None:
        """A second number in [low, high] that this split may see with `a`; for `/` one that divides a."""
        if op == "/":
            options = [b for b in range(low, high + 1) if a % b == 0 and self.may(a, op, b)]
            return self.choose(options) if options else None
        for _ in range(4):
            if low <= high and self.may(a, op, b := self.between(low, high)):
                return b
        return None

    def may(self, a: int, op: str, b: int) -> bool:
        return self.split == "eval" or not is_held_out(a, op, b)

    # -- the plot -------------------------------------------------------------------------------------------------

    def tell(self, steps: int) -> bool:
        """Write the whole story; False if it came to a dead end."""
        self.open(steps)
        ending = ""
        attempts = 0
        while len(self.lines) < steps:
            attempts += 1
            if attempts > 40:
                return False
            if len(self.lines) == steps - 1 and self.random() < 0.5:
                ending = self.end()
            else:
                self.move(steps - len(self.lines))
            if len(self.sentences) > 1 and self.random() < 0.07:
                self.say("filler")
            if self.random() < 0.07:
                self.say("distractor", n=self.between(2, 60))
        self.say(ending or ("money_question" if self.money and self.random() < 0.6 else "question"))
        return True

    def open(self, steps: int) -> None:
        kind = self.random()
        prefix = "money_open" if self.money else "open"
        if kind < 0.2 and (b := self.operand(a := self.between(2, 12), "*", 2, 20)):
            self.say(prefix + "_groups", n=a, m=b)
            self.calculate(a, "*", b)
        elif kind < 0.35 and not self.money and (b := self.operand(a := self.between(2, 60), "+", 2, 60)):
            self.say("open_two", n=a, m=b)
            self.calculate(a, "+", b)
        else:
            self.value = self.between(2, 60 if self.random() < 0.8 else 200)
            self.say(prefix, n=self.value)

    def move(self, left: int) -> None:
        """One step or, where two are left, perhaps two; none if no number can be found for it."""
        kind = self.random()
        money = "money_" if self.money else ""
        if left > 1 and self.random() < 0.15:
            self.change_in_groups(*((money + "gain", "+") if kind < 0.6 else (money + "lose", "-")))
        elif kind < 0.27:
            self.change(money + "gain", "+", 2, min(MAX_VALUE - self.value, self.size()))
        elif kind < 0.53:
            self.change(money + "lose", "-", 2, min(self.value - 2, self.size()))
        elif kind < 0.63:
            self.change(money + "times", "*", 2, min(self.most(), 9), {2: money + "double", 3: "triple"})
        elif kind < 0.78:
            self.change(money + "part", "/", 2, min(self.value // 2, 10), {2: money + "half", 3: "third"})
        elif kind < 0.84:
            self.compare("more", "+", 2, min(MAX_VALUE - self.value, self.size()))
        elif kind < 0.89:
            self.compare("fewer", "-", 2, min(self.value - 2, self.size()))
        elif kind < 0.92:
            self.compare("times_other", "*", 2, min(self.most(), 9), {2: "twice_other"})
        elif kind < 0.95:
            self.compare("part_other", "/", 2, min(self.value // 2, 10), {2: "half_other"})
        elif not self.money and (b := self.operand(self.value, "*", 2, min(self.most(), 20))):
            self.say("sell", n=b)
            self.money, self.slots["o"], self.before = True, "dollars", None
            self.calculate(self.value, "*", b)

    def size(self) -> int:
        """How large the number of an addition or a subtraction may be: mostly small."""
        return 30 if self.random() < 0.6 else 150

    def most(self) -> int:
        """The largest factor; none where the value is too large for mental arithmetic."""
        return MAX_VALUE // self.value if self.value <= 150 else 0

    def change(self, family: str, op: str, low: int, high: int, special: dict[int, str] | None = None) -> None:
        """Something happens to the holder's quantity. `special` are families that say a number without a digit."""
        b = self.operand(self.value, op, low, high)
        if b is None:
            return
        name = (special or {}).get(b, family)
        if self.money and name in ("triple", "third"):
            name = family
        self.say(name if self.random() < 0.5 else family, n=b)
        self.before = None
        self.calculate(self.value, op, b)

    def change_in_groups(self, family: str, op: str) -> None:
        """Several equal groups come or go: two steps."""
        value, groups = self.value, self.between(2, 9)
        size = self.operand(groups, "*", 2, min(20, (MAX_VALUE - value if op == "+" else value - 2) // groups))
        if size is None or not self.may(value, op, groups * size):
            return
        self.say(family + "_groups", n=groups, m=size)
        self.before = None
        self.calculate(value, op, self.calculate(groups, "*", size, who="That makes"))

    def compare(self, family: str, op: str, low: int, high: int, special: dict[int, str] | None = None) -> None:
        """{B} has more, fewer, a multiple or a part, and becomes the one whom the story is about."""
        b = self.operand(self.value, op, low, high)
        if b is None:
            return
        self.say((special or {}).get(b, family) if self.random() < 0.5 else family, n=b)
        self.before, first = self.value, self.holder
        self.holder, self.pronoun = self.slots["B"], "he" if self.pronoun == "she" else "she"
        self.calculate(self.value, op, b)
        self.meet(but=first)
        self.first = first

    def end(self) -> str:
        """A last step with a question of its own: the family of that question, or "" if none was possible."""
        if self.before is not None and self.may(self.before, "+", self.value):
            if self.before + self.value > MAX_VALUE:
                return ""
            self.calculate(self.before, "+", self.value, who="Together they have")
            self.slots |= {"A": self.first, "B": self.holder}
            return "question_together"
        b = self.operand(self.value, "/", 2, min(self.value // 2, 12))
        if b is None:
            return ""
        if self.money or self.random() < 0.6:
            self.say("share", n=b)
            self.calculate(self.value, "/", b, who=f"Each {self.slots['g']} gets")
            return "question_share"
        self.say("store", n=b)
        self.calculate(self.value, "/", b, who=f"Each {self.slots['c']} holds")
        return "question_store"

    def problem(self) -> Problem:
        solution = "\n".join([*self.lines, f"{ANSWER_MARK} {self.value}"])
        return Problem(" ".join(self.sentences), solution, self.value, len(self.lines))


_DRESSING = (
    ("{rel}", words.RELATIVES),
    ("{place}", words.PLACES),
    ("{job}", words.JOBS),
    ("{item}", words.ITEMS),
)
# A sentence can begin with a time if it tells an event and does not begin with an adverbial already.
_PLAIN_STARTS = ("{", "The ", "A ", "Each ", "Every ", "Half ", "All ")
_EVENTS = {
    *("gain", "lose", "times", "double", "triple", "part", "half", "third", "sell", "share", "store"),
    *("money_gain", "money_lose", "money_times", "money_double", "money_part", "money_half"),
    *("gain_groups", "lose_groups", "money_gain_groups", "money_lose_groups"),
    *("gain_them", "lose_them", "half_them", "share_them"),
}
# After which families "5 more" or "half of them" can only mean what the story is about.
_SHORT_AFTER = {
    "gain": ("open", "gain", "lose"),
    "lose": ("open", "gain"),
    "half": ("open",),
    "share": ("open",),
    "question": ("open", "gain", "lose"),
}
# Two events of one person can be told in one sentence if each is a single clause.
_JOINED = re.compile(r"[,:]|\. | (?:and|but|that|until|because|when|so|as|among|between) ")
_LINKS = (" and ", " and ", " and then ", ", and then ", " and later ")
_LAST_LINKS = (" and ", ", and ", " and then ", ", and then ")
