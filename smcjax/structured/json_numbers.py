"""Numbers of JSON as parts: between bounds, digit by digit, and multiples of others, by remainders."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import suppress
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from fractions import Fraction
from typing import Any

import numpy as np

from smcjax.structured.byte_automata import Empty, product
from smcjax.structured.grammar import part_automaton
from smcjax.structured.parts import NEVER, NOTHING, Character, Choice, Made, Part, Repeat, Sequence, Text

MAX_DIGITS = 30  # of a number between bounds, before its point
# Significant digits of a number with exclusive bounds: a reader cannot distinguish more.
MAX_FRACTION_DIGITS = 15


@dataclasses.dataclass(frozen=True)
class Numbers:
    """Numbers between bounds, which themselves are among them or not; whole ones, and multiples of others."""

    whole: bool = False
    low: Decimal | None = None
    above: bool = False  # the lower bound is not among them
    high: Decimal | None = None
    below: bool = False
    multiples: frozenset[Fraction] = frozenset()  # of a power of two

    def part(self) -> Part:
        """The texts of these numbers, without exponents where there are bounds but 0."""
        if self.multiples:
            return Made(self._of_multiples)
        if self.low is None and self.high is None:
            sign = Repeat(Text(b"-"), 0, 1)
            return Sequence((sign, _WHOLE) if self.whole else (sign, _WHOLE, _ANY_FRACTION, _EXPONENT))
        if (self.low, self.above, self.high, self.whole) == (0, False, None, False):
            return Sequence((_WHOLE, _ANY_FRACTION, _EXPONENT))
        return self._between()

    def holds(self, value: float) -> bool:
        """True for a number that is one of these."""
        exact = decimal_of(value)
        return not (
            (self.whole and exact != exact.to_integral_value())
            or (self.low is not None and (exact < self.low or (self.above and exact == self.low)))
            or (self.high is not None and (exact > self.high or (self.below and exact == self.high)))
            or any(Fraction(exact) % one for one in self.multiples)
        )

    @property
    def is_empty(self) -> bool:
        """True where bounds leave no number."""
        low, high = self._bounds()
        if low is None or high is None:
            return False
        return low > high or (low == high and (self.above or self.below) and not self.whole)

    def _bounds(self) -> tuple[Decimal | None, Decimal | None]:
        """The bounds; whole numbers' are whole, and among them. Others have `MAX_FRACTION_DIGITS` decimals."""
        low, high = self.low, self.high
        if low is not None:
            low = _rounded(low, self.above, ROUND_CEILING) if self.whole else _cut(low, ROUND_CEILING)
        if high is not None:
            high = _rounded(high, self.below, ROUND_FLOOR) if self.whole else _cut(high, ROUND_FLOOR)
        return low, high

    def _between(self) -> Part:
        low, high = self._bounds()
        above, below = self.above and not self.whole, self.below and not self.whole
        parts: list[Part] = []
        if high is None or high > 0 or (high == 0 and not below):
            least = Decimal(0) if low is None else max(low, Decimal(0))
            parts.append(_magnitudes(least, above and low == least, high, below, self.whole))
        if low is None or low < 0:
            negative = high is not None and high <= 0
            least = -high if negative and high is not None else Decimal(0)
            strict = below if negative else False
            if self.whole and least == 0:
                least = Decimal(1)  # no -0
            size = None if low is None else -low
            parts.append(Sequence((Text(b"-"), _magnitudes(least, strict, size, above, self.whole))))
        return Choice(tuple(parts))

    def _of_multiples(self, most_states: int) -> tuple[Any, Any]:
        """Makes the automaton of multiples with the divisors' decimals at most, and digits that doubles tell apart."""
        most = Decimal(10**MAX_FRACTION_DIGITS)
        low, above = max((-most, False), (-most if self.low is None else self.low, self.above))
        high, within = min((most, True), (most if self.high is None else self.high, not self.below))
        bounded = Numbers(self.whole, low, above, high, not within)
        if bounded.is_empty:
            raise Empty("matches no text at all; mend it")
        between, found = part_automaton(bounded.part(), most_states), []
        behind = 0 if self.whole else max(one.denominator.bit_length() - 1 for one in self.multiples)
        for digits in range(behind + 1):
            shape = (_WHOLE, Text(b"."), Repeat(_DIGIT, digits, digits)) if digits else (_WHOLE,)
            here = part_automaton(Sequence((Repeat(Text(b"-"), 0, 1), *shape)), most_states)
            with suppress(Empty):
                for one in sorted(self.multiples):
                    here = product(here, _multiples((one * 10**digits).numerator), most_states)
                found.append(Made(_both(here, between)))
        return part_automaton(Choice(tuple(found)), most_states)


def decimal_of(number: float) -> Decimal:
    """The number as it is written; a whole double exactly, since readers compare integers with it."""
    return Decimal(number if number == int(number) else repr(number))


def _rounded(bound: Decimal, is_strict: bool, direction: str) -> Decimal:
    """The first whole number within a bound."""
    whole = bound.to_integral_value(direction)
    return whole if whole != bound or not is_strict else whole + (1 if direction == ROUND_CEILING else -1)


def _cut(bound: Decimal, direction: str) -> Decimal:
    """The bound, or the next number within it, with `MAX_FRACTION_DIGITS` digits behind the point."""
    exponent = bound.as_tuple().exponent
    assert isinstance(exponent, int)
    if exponent >= -MAX_FRACTION_DIGITS:
        return bound
    return bound.quantize(Decimal(1).scaleb(-MAX_FRACTION_DIGITS), direction, Context(prec=1000))


_DIGIT = Character(((48, 57),))
_DIGITS = Repeat(_DIGIT, 1, None)
_WHOLE = Choice((Text(b"0"), Sequence((Character(((49, 57),)), Repeat(_DIGIT, 0, None)))))
_ANY_FRACTION = Repeat(Sequence((Text(b"."), _DIGITS)), 0, 1)
# Of two digits, so that a number is finite where it is read.
_EXPONENT = Repeat(
    Sequence((Character(((69, 69), (101, 101))), Character(((43, 43), (45, 45))), Repeat(_DIGIT, 1, 2))), 0, 1
)


def _multiples(divisor: int) -> tuple[Any, Any]:
    """The automaton of digits, a sign and a point aside, that make a multiple of a number: states are remainders."""
    table = np.full((divisor + 1, 256), divisor, np.int32)
    table[:-1, 48:58] = (np.arange(divisor)[:, None] * 10 + np.arange(10)) % divisor
    table[:-1, [ord("-"), ord(".")]] = np.arange(divisor)[:, None]
    return table, np.arange(divisor + 1) == 0


def _magnitudes(low: Decimal, above: bool, high: Decimal | None, below: bool, whole: bool) -> Part:
    """Numbers without a sign from `low` on, to `high` where there is one."""
    first, fraction = _split(low)
    strict = [
        len(one)
        for one, is_strict in ((first, above), (_split(high)[0] if high is not None else "", below))
        if is_strict
    ]
    most = MAX_FRACTION_DIGITS - max(strict) if strict else None
    if high is not None and int(first) == int(high):
        if whole:
            return Text(first.encode())
        both = (_fractions(fraction, above, False, most), _fractions(_split(high)[1], below, True, most))
        return Sequence((Text(first.encode()), Made(_both(*(part_automaton(one, 1 << 15) for one in both)))))
    if len(first) > MAX_DIGITS:
        return NEVER
    free = NOTHING if whole else _free(most)
    last, of_last = _split(high) if high is not None else ("", "")
    if len(last) > MAX_DIGITS:
        last, of_last = "9" * MAX_DIGITS, ""
    parts = [Sequence((_naturals(int(first) + 1, int(last) - 1 if last else None), free))]
    parts.append(Sequence((Text(first.encode()), NOTHING if whole else _fractions(fraction, above, False, most))))
    if last:
        parts.append(Sequence((Text(last.encode()), NOTHING if whole else _fractions(of_last, below, True, most))))
    return Choice(tuple(parts))


def _both(one: tuple[Any, Any], two: tuple[Any, Any]) -> Callable[[int], tuple[Any, Any]]:
    return lambda most_states: product(one, two, most_states)


def _split(number: Decimal) -> tuple[str, str]:
    """The digits before the point and behind it, of these as few as can be."""
    before, _, behind = f"{number:f}".partition(".")
    return before, behind.rstrip("0")


def _free(most: int | None) -> Part:
    """Any fraction, or none."""
    return _ANY_FRACTION if most is None else Repeat(Sequence((Text(b"."), Repeat(_DIGIT, 1, max(most, 1)))), 0, 1)


def _fractions(bound: str, strict: bool, is_below: bool, most: int | None) -> Part:
    """Fractions of at least the digits of `bound`, or of at most them; the empty one is 0."""
    rest = Repeat(_DIGIT, 0, None if most is None else max(most - len(bound), 0))
    parts: list[Part] = []
    for place, digit in enumerate(bound):
        inner = (48, ord(digit) - 1) if is_below else (ord(digit) + 1, 57)
        if inner[0] <= inner[1]:
            parts.append(Sequence((Text(f".{bound[:place]}".encode()), Character((inner,)),
                                   Repeat(_DIGIT, 0, None if most is None else max(most - place - 1, 0)))))  # fmt: skip
        if is_below:
            parts.append(Text(f".{bound[:place]}".encode() if place else b""))
    zeros = Repeat(Text(b"0"), 0, None if most is None else max(most - len(bound), 0))
    if not strict:
        parts.append(Sequence((Text(f".{bound}".encode()), zeros if is_below else rest)) if bound else NOTHING)
        if not bound:
            parts.append(Sequence((Text(b".0"), zeros)) if is_below else _free(most))
    elif not is_below:
        more = Sequence((zeros, Character(((49, 57),)), rest))
        parts.append(Sequence((Text(f".{bound}".encode()), more)))
    return Choice(tuple(parts))


def _naturals(low: int, high: int | None) -> Part:
    """Whole numbers from `low` on, to `high` where there is one."""
    first = str(low)
    if high is None:
        longer = Sequence((Character(((49, 57),)), Repeat(_DIGIT, len(first), None)))
        return Choice((_same_length(first, "9" * len(first)), longer))
    if low > high:
        return NEVER
    parts, last = [], str(high)
    for length in range(len(first), len(last) + 1):
        begin = first if length == len(first) else "1" + "0" * (length - 1)
        parts.append(_same_length(begin, last if length == len(last) else "9" * length))
    return Choice(tuple(parts))


def _same_length(first: str, last: str) -> Part:
    """Whole numbers from the first to the last, which have as many digits."""
    if first == "0" * len(first) and last == "9" * len(last):
        return Repeat(_DIGIT, len(first), len(first))
    low, high = ord(first[0]), ord(last[0])
    if low == high:
        return Sequence((Text(first[:1].encode()), _same_length(first[1:], last[1:])))
    more = len(first) - 1
    parts: list[Part] = [
        Sequence((Text(first[:1].encode()), _same_length(first[1:], "9" * more))),
        Sequence((Text(last[:1].encode()), _same_length("0" * more, last[1:]))),
    ]
    if high - low > 1:
        parts.append(Sequence((Character(((low + 1, high - 1),)), Repeat(_DIGIT, more, more))))
    return Choice(tuple(parts))
