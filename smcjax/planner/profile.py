"""The profile file: what `smcjax profile` has measured of one pair of models on one device.

    {"format": 1, "device", "jax", "smcjax", "commit", "date", "model", "draft", "settings": {…},
     "strategies": [{"decoding": {"decoder", …options}, "law",
                     "counted": [{"context", "tokens_per_cycle", "prompts": [n]}, …],
                     "cells": [{"requests", "context", "ms", "windows": [w]}, …]}, …],
     "left_out": [{"strategy", "why"}, …]}

`requests` are running ones, and so the slots of the batch; `context` is tokens of prompt and answer of each; `ms` is
the median of windows, in milliseconds a cycle, through the engine (with `--clock cpu` of all cores, summed). `counted`
has an entry for each context that prompts are nearest to in length: `prompts` are the mean tokens a cycle on each.
`model` and `draft` are fingerprints of the models as they were kept on the device. Every strategy has been measured at
every load and context of the file, so that no two are compared by what only one of them was seen to do; what could not
be is in `left_out`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from typing import Any

from smcjax.checks import Rule, is_number, or_none, require, short, whole
from smcjax.decoders import Decoding
from smcjax.files import MIB, Unreadable, read_json, write_atomically
from smcjax.planner.laws import as_json, from_json, law_of

FORMAT = 1
LARGEST = 16 * MIB


@dataclasses.dataclass(frozen=True)
class Cell:
    """Milliseconds a cycle with `requests` running ones, each of `context` tokens; `windows` are those of each."""

    requests: int
    context: int
    ms: float
    windows: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for name in ("requests", "context"):
            value = getattr(self, name)
            require({f"a cell's {name}": value}, {f"a cell's {name}": whole(1)})
        if not _is_positive(self.ms) or not all(map(_is_positive, self.windows)):
            raise ValueError(f"a cell's times must be numbers above 0, got {short((self.ms, *self.windows))}.")


@dataclasses.dataclass(frozen=True)
class Counted:
    """Tokens a cycle on the prompts of one length."""

    context: int  # the measured one that these prompts are nearest to in tokens
    tokens_per_cycle: float  # of one request in the mean
    prompts: tuple[float, ...] = ()  # tokens a cycle on each

    def __post_init__(self) -> None:
        require({"counted context": self.context}, {"counted context": whole(1)})
        for value in (self.tokens_per_cycle, *self.prompts):
            if not _is_positive(value):
                raise ValueError(f"tokens a cycle must be numbers above 0, got {short(value)}.")


@dataclasses.dataclass(frozen=True)
class Measured:
    """A strategy: a decoder with all its options, and what was measured of it."""

    decoding: Decoding
    counted: tuple[Counted, ...]  # tokens a cycle, by ascending context; one entry at least
    cells: tuple[Cell, ...] = ()  # times

    def __post_init__(self) -> None:
        contexts = [one.context for one in self.counted]
        if not contexts or contexts != sorted({*contexts}):
            raise ValueError(f"{self.decoding} must have tokens counted at ascending contexts, got {short(contexts)}.")

    @property
    def law(self) -> str:
        """The law class."""
        return law_of(self.decoding)

    @property
    def grid(self) -> set[tuple[int, int]]:
        """The loads and contexts that were measured."""
        return {(cell.requests, cell.context) for cell in self.cells}


@dataclasses.dataclass(frozen=True)
class Profile:
    """All of a file. `device`, `model` and `draft` say whose it is, `settings` how the models were run."""

    device: str
    model: str
    draft: str | None
    strategies: tuple[Measured, ...]
    jax: str = ""
    smcjax: str = ""
    commit: str | None = None
    date: str = ""
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    left_out: tuple[dict[str, str], ...] = ()

    def __post_init__(self) -> None:
        if not self.strategies:
            raise ValueError("a profile must have at least one strategy.")
        if len({one.decoding for one in self.strategies}) < len(self.strategies):
            raise ValueError("a profile has one strategy twice.")
        first = self.strategies[0]
        for one in self.strategies:
            if len(one.grid) != len(one.cells) or not one.cells:
                raise ValueError(f"{one.decoding} must have one cell for each load and context, and at least one.")
            if one.grid != first.grid:
                raise ValueError(f"{one.decoding} was measured at other loads or contexts than {first.decoding}.")
        loads, contexts = self.loads, self.contexts
        if len(first.grid) != len(loads) * len(contexts):
            raise ValueError("a profile must have every load at every context.")

    @property
    def loads(self) -> list[int]:
        """Numbers of running requests, ascending."""
        return sorted({cell.requests for cell in self.strategies[0].cells})

    @property
    def contexts(self) -> list[int]:
        """Contexts, ascending."""
        return sorted({cell.context for cell in self.strategies[0].cells})

    def as_json(self) -> dict[str, Any]:
        """The file's content."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        strategies = [
            {**dataclasses.asdict(one), "decoding": as_json(one.decoding), "law": one.law} for one in self.strategies
        ]
        return {"format": FORMAT, **fields, "strategies": strategies}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the file, whole or not at all."""
        write_atomically(path, (json.dumps(self.as_json(), indent=1) + "\n").encode())

    @classmethod
    def from_json(cls, value: Any) -> Profile:
        """The profile of a file's content; raises ValueError for anything that is none."""
        if not isinstance(value, dict) or value.get("format") != FORMAT:
            found = value.get("format") if isinstance(value, dict) else value
            raise ValueError(f"format must be {FORMAT}, got {short(found)}.")
        texts, maybe = ("device", "model", "jax", "smcjax", "date"), ("draft", "commit")
        given: dict[str, Any] = {name: value.get(name) for name in (*texts, *maybe)}
        text = Rule(lambda value: isinstance(value, str), "text")
        require(given, dict.fromkeys(texts, text) | dict.fromkeys(maybe, or_none(text, " or null")))
        strategies, settings = value.get("strategies"), value.get("settings")
        if not isinstance(strategies, list) or not isinstance(settings, dict):
            raise ValueError("it must have a list of strategies, and settings.")
        left_out = value.get("left_out", [])
        if not isinstance(left_out, list) or not all(isinstance(one, dict) for one in left_out):
            raise ValueError("left_out must be a list of objects.")
        return cls(
            strategies=tuple(map(_measured, strategies)),
            settings=settings,
            left_out=tuple(left_out),
            **given,
        )

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Profile:
        """Reads a file. Raises ValueError, in one sentence, for one that cannot be read or is no profile."""
        try:
            return cls.from_json(read_json(path, LARGEST))
        except Unreadable as error:
            raise ValueError(f"profile {str(path)!r} {error}; {error.mend}.") from None
        except (ValueError, TypeError, KeyError) as error:
            reason = str(error).rstrip(".")
            raise ValueError(
                f"profile {str(path)!r} is no profile of this version ({reason}); make one by smcjax profile."
            ) from None

    def check(self, *, device: str, model: str, draft: str | None) -> None:
        """Raises ValueError unless it was measured on this device, with these models."""
        mend = "make one by smcjax profile, or leave profile out"
        if self.device != device:
            raise ValueError(f"profile is of {self.device} and this device is {device}; {mend}.")
        for what, mine, given in (("model", self.model, model), ("draft_model", self.draft, draft)):
            if given is not None and mine != given:
                raise ValueError(
                    f"profile is of another {what}, or of this one in another dtype or quantization; {mend}."
                )


def _measured(value: Any) -> Measured:
    if not isinstance(value, dict) or not isinstance(value.get("cells"), list):
        raise ValueError(f"a strategy must be an object with cells, got {short(value)}.")
    cells = []
    for cell in value["cells"]:
        if not isinstance(cell, dict) or not {"requests", "context", "ms"} <= cell.keys() <= set(_CELL):
            raise ValueError(f"a cell must have {', '.join(_CELL)}, got {short(cell)}.")
        cells.append(Cell(**{**cell, "windows": tuple(cell.get("windows", ()))}))
    counted = value.get("counted")
    if not isinstance(counted, list) or not all(isinstance(one, dict) for one in counted):
        raise ValueError("counted must be a list of objects.")
    return Measured(from_json(value.get("decoding")), tuple(map(_counted, counted)), tuple(cells))


def _counted(value: dict[str, Any]) -> Counted:
    prompts = value.get("prompts", [])
    if not isinstance(prompts, list):
        raise ValueError("prompts must be a list of numbers.")
    return Counted(value["context"], value["tokens_per_cycle"], tuple(prompts))


_CELL = tuple(field.name for field in dataclasses.fields(Cell))


def _is_positive(value: object) -> bool:
    return is_number(value, 0) and value not in (0, math.inf)
