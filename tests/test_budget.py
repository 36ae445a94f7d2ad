"""These counts may fall and not rise; where one would rise, a sentence names the seam to use instead."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import re
from pathlib import Path

import pytest

import smcjax
from smcjax import LLM, SMC, Rejection
from smcjax.cli.main import make_parser
from smcjax.decoding.program import Program
from smcjax.smc import cycle
from smcjax.sparse.nsa import NSA

PACKAGE = Path(smcjax.__file__).parent
FIELDS = {SMC: 16, Rejection: 7, NSA: 8, Program: 8}
ARGUMENTS = {LLM.__init__: 20}
FILES_IN_A_ROOM = 16
OPTIONS_OF_GENERATE = 40
SEAMS = "smcjax.decoders.parts has the seams of a cycle: pass a part to SMC in place of another option."
# Names of variations of the cycle, which are parts and no branch of `cycle.py`.
VARIATIONS = ("control", "early_end", "roulette", "branching", "watchdog", "pipelined", "KeepAll", "RejectionControl")


@pytest.mark.parametrize("kind", FIELDS, ids=lambda kind: kind.__name__)
def test_fields(kind: type) -> None:
    assert len(dataclasses.fields(kind)) <= FIELDS[kind], f"{kind.__name__} has one field more. {SEAMS}"


@pytest.mark.parametrize("function", ARGUMENTS, ids=lambda function: function.__qualname__)
def test_arguments(function: object) -> None:
    count = len(inspect.signature(function).parameters) - 1
    assert count <= ARGUMENTS[function], f"LLM takes {count} arguments; say which one the new one replaces."


def test_options_of_generate() -> None:
    """The prompt and --help counted."""
    commands = next(one for one in make_parser()._actions if isinstance(one, argparse._SubParsersAction)).choices
    count = len(commands["generate"]._actions)
    assert count <= OPTIONS_OF_GENERATE, "a decoder's option needs none: `--decoding 'SMC(option=value)'`."


def test_files_in_a_room() -> None:
    rooms = {path for path in PACKAGE.rglob("*") if path.is_dir() and path.name != "__pycache__"}
    crowded = {str(room.relative_to(PACKAGE)): len(list(room.glob("*.py"))) for room in [PACKAGE, *rooms]}
    crowded = {name: count for name, count in crowded.items() if count > FILES_IN_A_ROOM}
    assert not crowded, f"these folders have more than {FILES_IN_A_ROOM} files; make rooms in them."


# What says how the kernels of all operations are chosen; two files report the choice, the rest asks the operation.
CHOICE = re.compile(r"\b(?:uses_kernels|kernel_device|active_implementation)\b")
REPORTS = {PACKAGE / "cli" / "commands" / "doctor.py", PACKAGE / "engine" / "run" / "programs.py"}


def test_kernels_are_chosen_by_their_operation() -> None:
    sources = {path: path.read_text() for path in PACKAGE.rglob("*.py") if PACKAGE / "pallas" not in path.parents}
    by_hand = {path for path, source in sources.items() if CHOICE.search(source)}
    assert by_hand <= REPORTS, "ask `kernel_for` or `has_kernel` of an `Op` (smcjax/pallas/dispatch.py)."
    assert CHOICE.search("from smcjax.pallas.dispatch import uses_kernels"), "negative control"


# What a room of the engine may import of the others.
BELOW = {
    "requests": set[str](),
    "schedule": {"requests"},
    "run": {"requests", "schedule"},
    "results": {"requests", "schedule"},
    "load": {"run"},
}


def rooms_imported(source: str) -> set[str]:
    """The rooms of the engine, or its files beside them, that a module imports."""
    return set(re.findall(r"^\s*(?:from|import) smcjax\.engine\.(\w+)", source, re.MULTILINE))


@pytest.mark.parametrize("room", BELOW)
def test_rooms_of_the_engine_import_downward(room: str) -> None:
    for path in (PACKAGE / "engine" / room).glob("*.py"):
        assert rooms_imported(path.read_text()) <= BELOW[room] | {room}, path
    assert rooms_imported("from smcjax.engine.engine import Engine") == {"engine"}, "negative control"


def variations(source: str) -> list[str]:
    """The names of variations that a module's code uses; comments and docstrings may speak of them."""
    tree = ast.parse(source)
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    names |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return [one for one in VARIATIONS if one in names]


def test_the_cycle_knows_no_variation() -> None:
    assert variations(inspect.getsource(cycle)) == [], SEAMS
    assert variations("if program.decoding.control > 0: pass") == ["control"], "negative control"


def test_a_cycle_fits_one_screen() -> None:
    assert len(inspect.getsource(cycle.step).splitlines()) <= 24, SEAMS
