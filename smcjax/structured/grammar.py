"""A context-free grammar as an automaton: of the texts that it derives with at most so many levels of nesting.

Let rules that need each other be a *cycle*. Where a rule of a cycle names one of the same cycle, that reference is

    left     at the beginning of an alternative    sum: sum "+" item | item
    right    at its end                            list: item "," list | item
    within   with something on both sides          item: "(" sum ")" | NUMBER

or in a repetition, which counts as within. Cycles of left references alone, or of right ones alone, are loops of an
automaton, without a bound and exactly: a grammar of such cycles is regular (Chomsky 1959).

References within are *nested*: each leads one level down, of which there are `depth` below the first, and then there is
no way on. Where left and right references make a cycle that no nested one is part of, as in sum: sum "+" sum |
"(" sum ")" | NUMBER, left ones loop, and right ones lead down a ladder of their own, of `depth` levels too, which
begins anew at each nested one. Last, in the order in which rules are named from the start on, a nested reference is
spared that would be on no cycle, since others are nested: so each turn of a cycle costs one level as a rule.

So the language is that of derivations on whose every path, within each cycle, at most `depth` references are nested,
and at most `depth` of those on the ladder come between two that are. A text of several derivations needs but one of
them to be so.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from smcjax.structured.byte_automata import MAX_MEMBERS, Empty, Joined, Refusal, TooLarge
from smcjax.structured.expressions import read_expression
from smcjax.structured.grammar_text import read_grammar
from smcjax.structured.parts import (
    START,
    Anchor,
    Character,
    Choice,
    Listed,
    Made,
    Part,
    Reference,
    Repeat,
    Sequence,
    Text,
    parts_of,
)


def grammar_automaton(text: str, depth: int, most_states: int) -> tuple[Any, Any]:
    """The minimal automaton over bytes (`byte_automata`) of a grammar, to `depth` levels of nesting.

    Raises Refusal for what is no grammar, derives no text, or takes more states (TooLarge).
    """
    rules = read_grammar(text)
    if START not in _productive(rules):
        raise Refusal("has a grammar that derives no text, for its derivations never end; give them an end")
    try:
        return rules_automaton(rules, depth, most_states)
    except Empty:
        raise Refusal(f"has a grammar that derives no text within max_depth={depth}; raise it") from None


def rules_automaton(rules: Mapping[str, Part], depth: int, most_states: int) -> tuple[Any, Any]:
    """The minimal automaton over bytes of rules, to `depth` levels of nesting. Raises Empty, TooLarge."""
    productive = _productive(rules)
    if START not in productive:
        raise Empty("matches no text at all; mend it")
    rules = {name: _pruned(rules[name], productive) for name in productive}
    if _Weights(rules).of(rules[START]) > most_states:
        raise TooLarge(f"has an automaton of over {most_states} states")
    return _Compiler(rules, depth, most_states).automaton(START, (depth, depth))


def part_automaton(part: Part, most_states: int) -> tuple[Any, Any]:
    """The minimal automaton over bytes of a part without references. Raises Empty, TooLarge."""
    return rules_automaton({START: part}, 0, most_states)


def expression_automaton(text: str, most_states: int) -> tuple[Any, Any]:
    """The minimal automaton over bytes of a regular expression in Python's syntax.

    Raises Refusal for what is none, or cannot be kept; Empty, TooLarge.
    """
    return part_automaton(read_expression(text), most_states)


def _productive(rules: Mapping[str, Part]) -> set[str]:
    """The names of rules that derive a text."""
    found: set[str] = set()
    while True:
        fresh = {name for name, part in rules.items() if name not in found and _ends(part, found)}
        if not fresh:
            return found
        found |= fresh


def _ends(part: Part, productive: set[str]) -> bool:
    """True where a text can be derived from a part by productive rules."""
    if isinstance(part, Reference):
        return part.name in productive
    if isinstance(part, Choice):
        return any(_ends(one, productive) for one in part.parts)
    if isinstance(part, Listed):
        return all(_ends(one, productive) for one, must in zip(part.items, part.required, strict=True) if must)
    if isinstance(part, Repeat):
        return part.least == 0 or _ends(part.part, productive)
    return all(_ends(one, productive) for one in parts_of(part))


def _pruned(part: Part, productive: set[str]) -> Part:
    """A productive part without alternatives from which no text can be derived."""
    if isinstance(part, Sequence):
        return Sequence(tuple(_pruned(one, productive) for one in part.parts))
    if isinstance(part, Choice):
        return Choice(tuple(_pruned(one, productive) for one in part.parts if _ends(one, productive)))
    if isinstance(part, Repeat):
        if not _ends(part.part, productive):
            return Sequence(())
        return Repeat(_pruned(part.part, productive), part.least, part.most)
    if isinstance(part, Listed):
        kept = [(_pruned(one, productive), must) for one, must in zip(part.items, part.required, strict=True)
                if _ends(one, productive)]  # fmt: skip
        others = part.others
        others = _pruned(others, productive) if others is not None and _ends(others, productive) else None
        items, required = tuple(one for one, _ in kept), tuple(must for _, must in kept)
        return Listed(part.separator, items, required, others, part.least, part.most)
    return part


def weight_of_list(items: int, required: tuple[bool, ...]) -> int:
    """The weight (`_Weights`) of a list, of its items' weight together and of which of them are required.

    Behind each item, those are looked for that may come next: the optional ones up to a required one.
    """
    steps = following = 0
    for is_required in reversed(required):
        following = 1 if is_required else following + 1
        steps += following
    return max(items, 2 * steps // MAX_MEMBERS)


class _Weights:
    """Numbers of states that automata of parts have at least, as a rule: what is far too large is not begun."""

    def __init__(self, rules: Mapping[str, Part]) -> None:
        self._rules = rules
        self._of_rule: dict[str, int] = {}

    def of(self, part: Part) -> int:
        """The weight of a part; references of a cycle have none."""
        if isinstance(part, Text):
            return len(part.data)
        if isinstance(part, Choice):
            return max((self.of(one) for one in part.parts), default=0)
        if isinstance(part, Repeat):
            return self.of(part.part) * max(part.least, part.most or 1)
        if isinstance(part, Listed):
            others = 0 if part.others is None else self.of(part.others) * max(part.least, part.most or 1)
            return weight_of_list(sum(map(self.of, part.items)) + others, part.required)
        if isinstance(part, Reference):
            if part.name not in self._of_rule:
                self._of_rule[part.name] = 0
                self._of_rule[part.name] = self.of(self._rules[part.name])
            return self._of_rule[part.name]
        return sum(map(self.of, parts_of(part))) if isinstance(part, Sequence) else int(not isinstance(part, Anchor))


def _behind(name: str, needs: Mapping[str, Collection[str]]) -> dict[str, None]:
    """The name and those that it needs, directly or not, in the order in which they are met, nearest first."""
    seen = {name: None}
    waiting = [name]
    for one in waiting:  # which grows
        fresh = [other for other in needs[one] if other in needs and other not in seen]
        seen |= dict.fromkeys(fresh)
        waiting += dict.fromkeys(fresh)
    return seen


def _cycles(needs: Mapping[str, Collection[str]]) -> list[frozenset[str]]:
    """The sets of names that need each other, directly or not; a name by itself is one too."""
    behind = {name: _behind(name, needs) for name in needs}
    return list(dict.fromkeys(frozenset(one for one in behind[name] if name in behind[one]) for name in needs))


def _places(part: Part, left: bool = True, right: bool = True) -> Iterator[tuple[Reference, bool, bool]]:
    """The references within a part, and whether each is at its left and at its right end."""
    if isinstance(part, Reference):
        yield part, left, right
    elif isinstance(part, Choice):
        for one in part.parts:
            yield from _places(one, left, right)
    elif isinstance(part, Repeat):
        once = part.most == 1
        yield from _places(part.part, left and once, right and once)
    elif isinstance(part, Listed):
        for one in parts_of(part):
            yield from _places(one, False, False)
    elif isinstance(part, Sequence):
        parts = [one for one in part.parts if not _is_nothing(one)]
        for place, one in enumerate(parts):
            yield from _places(one, left and place == 0, right and place == len(parts) - 1)


def _is_nothing(part: Part) -> bool:
    return (isinstance(part, Text) and not part.data) or (
        isinstance(part, Sequence) and all(map(_is_nothing, part.parts))
    )


Level = tuple[int, int]  # nested references, and right ones before the next nested one, that are left


class _Loop(NamedTuple):
    """Rules of one loop whose parts are being joined."""

    state_of: dict[str, int]  # where each begins, in a loop to the right, or ends, in one to the left
    is_left: bool
    level: Level


class _Compiler:
    """Makes automata of productive rules, each for a number of levels that are left."""

    def __init__(self, rules: Mapping[str, Part], depth: int, most_states: int) -> None:
        self._rules, self._depth, self._most = rules, depth, most_states
        self._made: dict[tuple[str, Level], tuple[Any, Any] | None] = {}
        self._leaves: dict[Callable[[int], tuple[Any, Any]], tuple[Any, Any]] = {}
        self._cycle_of: dict[str, frozenset[str]] = {}
        self._nested: set[Reference] = set()
        self._right: set[Reference] = set()  # of loops that have left ones too
        self._loop_of: dict[str, frozenset[str]] = {}  # what is left of a cycle without nested references
        self._is_left: dict[frozenset[str], bool] = {}  # of each loop
        self._sort_references()

    def _sort_references(self) -> None:
        """Fills what says which references lead down, and which ones loop."""
        places = {name: list(_places(part)) for name, part in self._rules.items()}
        order = _behind(START, {name: [one.name for one, _, _ in some] for name, some in places.items()})
        for cycle in _cycles({name: [one.name for one, _, _ in places[name]] for name in order}):
            self._cycle_of |= dict.fromkeys(cycle, cycle)
            inside = [
                (name, *place) for name in order if name in cycle for place in places[name] if place[0].name in cycle
            ]
            self._nested |= {one for _, one, left, right in inside if not left and not right}
            for loop in _cycles(self._needs(cycle, inside)):
                some = [place for place in inside if place[0] in loop and place[1].name in loop]
                if any(left and not right for _, _, left, right in some):
                    self._right |= {one for _, one, left, right in some if right and not left}
            for name, one, _, _ in inside:
                if one in self._nested and name not in _behind(one.name, self._needs(cycle, inside)):
                    self._nested.remove(one)
            for loop in _cycles(self._needs(cycle, inside)):
                self._loop_of |= dict.fromkeys(loop, loop)
                self._is_left[loop] = any(
                    left and not right for name, one, left, right in inside if name in loop and one.name in loop
                )

    def _needs(self, cycle: frozenset[str], places: list[tuple[str, Reference, bool, bool]]) -> dict[str, list[str]]:
        """The rules that each rule of a cycle names by references that do not lead down."""
        needs: dict[str, list[str]] = {name: [] for name in cycle}
        for name, one, _, _ in places:
            if one not in self._nested and one not in self._right:
                needs[name].append(one.name)
        return needs

    def automaton(self, name: str, level: Level) -> tuple[Any, Any]:
        """The automaton of a rule at a level. Raises Empty where it derives nothing there."""
        if (name, level) not in self._made:
            self._join(self._loop_of[name], level)
        made = self._made[name, level]
        if made is None:
            raise Empty("matches no text at all; mend it")
        return made

    def _join(self, loop: frozenset[str], level: Level) -> None:
        """Makes the automata of the rules of a loop, at one level.

        In a loop to the right, a rule's end is the end of all, and a reference goes on at the beginning of its rule; in
        one to the left, the other way round.
        """
        joined = Joined(self._most)
        shared = joined.state()
        here = _Loop({name: joined.state() for name in loop}, self._is_left[loop], level)
        ends = {name: (shared, own) if here.is_left else (own, shared) for name, own in here.state_of.items()}
        for name, (begin, end) in ends.items():
            self._lay(joined, self._rules[name], begin, end, here)
        for name, (begin, end) in ends.items():
            try:
                self._made[name, level] = joined.minimal(begin, end, self._most)
            except Empty:
                self._made[name, level] = None

    def _lay(self, joined: Joined, part: Part, begin: int, end: int, here: _Loop) -> None:
        """Lets the texts of a part lead from `begin` to `end`."""
        if isinstance(part, Text):
            joined.text(part.data, begin, end)
        elif isinstance(part, Character):
            joined.characters(part.ranges, begin, end)
        elif isinstance(part, Anchor):
            joined.anchor(part.at_end, begin, end)
        elif isinstance(part, Made):
            with suppress(Empty):
                joined.automaton(self._leaf(part), begin, end)
        elif isinstance(part, Listed):
            self._lay_listed(joined, part, begin, end, here)
        elif isinstance(part, Choice):
            for one in part.parts:
                self._lay(joined, one, begin, end, here)
        elif isinstance(part, Sequence):
            for one in part.parts:
                begin = self._lay_behind(joined, one, begin, here)
            joined.skip(begin, end)
        elif isinstance(part, Repeat):
            for _ in range(part.least):
                begin = self._lay_behind(joined, part.part, begin, here)
            if part.most is None:
                again = joined.state()
                joined.skip(begin, again)
                self._lay(joined, part.part, again, again, here)
                begin = again
            else:
                for _ in range(part.most - part.least):
                    joined.skip(begin, end)
                    begin = self._lay_behind(joined, part.part, begin, here)
            joined.skip(begin, end)
        elif isinstance(part, Reference):
            self._refer(joined, part, begin, end, here)

    def _lay_behind(self, joined: Joined, part: Part, begin: int, here: _Loop) -> int:
        """The state that the texts of a part lead to from `begin`."""
        end = joined.state()
        self._lay(joined, part, begin, end, here)
        return end

    def _refer(self, joined: Joined, part: Reference, begin: int, end: int, here: _Loop) -> None:
        leads_down = part in self._nested or part in self._right
        if part.name in here.state_of and not leads_down:
            own = here.state_of[part.name]
            joined.skip(*((own, end) if here.is_left else (begin, own)))
            return
        nested, right = here.level
        if part in self._nested:
            nested, right = nested - 1, self._depth
        elif part in self._right:
            right -= 1
        elif part.name not in self._cycle_of[next(iter(here.state_of))]:
            nested, right = self._depth, self._depth
        if min(nested, right) >= 0:
            with suppress(Empty):
                joined.automaton(self.automaton(part.name, (nested, right)), begin, end)

    def _lay_listed(self, joined: Joined, part: Listed, begin: int, end: int, here: _Loop) -> None:
        """Lets the texts of a list lead from `begin` to `end`.

        A state says which item may come next at the earliest, and how many texts there are then; `counted` stands for
        as many and more.
        """
        last, counts = len(part.items), range(1, part.counted + 1)
        needed = max((place + 1 for place in range(last) if part.required[place]), default=0)  # may end from there on
        before = {(place, count): joined.state() for place in range(last + 1) for count in counts}
        behind = {(place, count): joined.state() for place in range(last + 1) for count in counts}
        if counts:
            joined.skip(begin, before[0, 1])
        if not needed and not part.least:
            joined.skip(begin, end)
        for (place, count), state in behind.items():
            if place >= needed and count >= part.least:
                joined.skip(state, end)
            more = count + 1 if part.most is not None else min(count + 1, part.counted)
            if more in counts and (place < last or part.others is not None):
                self._lay(joined, part.separator, state, before[place, more], here)
        for (place, count), state in before.items():
            item = part.items[place] if place < last else part.others
            if item is not None:
                self._lay(joined, item, state, behind[min(place + 1, last), count], here)
            if place < last and not part.required[place]:
                joined.skip(state, before[place + 1, count])

    def _leaf(self, part: Made) -> tuple[Any, Any]:
        if part.make not in self._leaves:
            self._leaves[part.make] = part.make(self._most)
        return self._leaves[part.make]
