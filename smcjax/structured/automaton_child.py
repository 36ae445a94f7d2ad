"""Compiles a form of answers over a vocabulary, in a process that `smcjax.structured.automaton` starts.

    bytes        the minimal automaton over bytes, of the rules that expressions, grammars and schemas are read as
    tokens       each token's bytes walked from every state at once; tokens that lead alike are one class
    reach        the fewest tokens from each state to an accepting one; where there is no way, a token is impossible

An expression of thirty characters may ask for 2³⁰ states: what is far too large is refused before it is begun, and the
system ends the process where the rest takes more time or memory than it was given.
"""

from __future__ import annotations

import io
import json
import resource
import signal
import sys
from typing import Any

import numpy as np

from smcjax.structured.byte_automata import Refusal, TooLarge, kinds_of_bytes
from smcjax.structured.grammar import expression_automaton, grammar_automaton, part_automaton, rules_automaton
from smcjax.structured.json_schema import rules_of_schema
from smcjax.structured.parts import Choice, Text

MAX_CLASSES = 2**15 - 1  # which tables on the device name in 16 bits
MAX_CALLS = 20_000  # within each other: rules of a grammar refer to rules
REFUSED = 8  # exit code of a process that has written a refusal
OUT_OF_MEMORY = 9  # exit code of a process that has told by itself that its memory does not suffice
UNREACHED = 1 << 30  # in `reach`: no way to an accepting state


def token_columns(table: Any, tokens: list[bytes], most_cells: int) -> tuple[Any, Any]:
    """The state behind each token: classes [V], and columns [S + 1, classes] of the states that a class leads to.

    An empty token leads nowhere.
    """
    leads, kinds = kinds_of_bytes(table)
    kind_of = kinds.astype(np.uint8).tobytes()
    steps = list(np.ascontiguousarray(leads.T))
    dead = table.shape[0] - 1
    nowhere = np.full(dead + 1, dead, np.int32)
    spelled = [token.translate(kind_of) for token in tokens]
    of_spelling: dict[bytes, int] = {b"": 0}
    columns, of_column = [nowhere], {nowhere.tobytes(): 0}
    path: list[Any] = [np.arange(dead + 1, dtype=np.int32)]  # behind each prefix of the last spelling
    last = b""
    for spelling in sorted(set(spelled) - {b""}):
        shared = next((i for i, (a, b) in enumerate(zip(last, spelling, strict=False)) if a != b), len(last))
        del path[min(shared, len(spelling)) + 1 :]
        for kind in spelling[len(path) - 1 :]:
            before = path[-1]
            path.append(nowhere if before is nowhere else steps[kind][before])
            if path[-1] is not nowhere and (path[-1] == dead).all():
                path[-1] = nowhere
        last, column = spelling, path[-1]
        if column is nowhere:
            of_spelling[spelling] = 0
            continue
        key = column.tobytes()
        if key not in of_column:
            of_column[key] = len(columns)
            columns.append(column)
            if len(columns) * (dead + 1) > 8 * most_cells:
                raise TooLarge("has an automaton too large to be compared with the vocabulary")
        of_spelling[spelling] = of_column[key]
    return np.array([of_spelling[one] for one in spelled], np.int32), np.stack(columns, axis=1)


def token_automaton(table: Any, accepts: Any, tokens: list[bytes], most_cells: int) -> dict[str, Any]:
    """The automaton over tokens, without states and classes that nothing can lead to: the arrays of `Automaton`."""
    classes, columns = token_columns(table, tokens, most_cells)
    dead = table.shape[0] - 1
    before, kinds = np.nonzero(columns != dead)  # of each transition: its state, and the one that it leads to
    behind = columns[before, kinds]
    reach = _distances(behind, before, np.flatnonzero(accepts), dead + 1)
    if reach[0] == UNREACHED:
        raise Refusal("matches no text that this model's tokens can spell; change it")
    columns = np.where(reach[columns] == UNREACHED, dead, columns)
    hopeful = reach[behind] != UNREACHED
    kept = np.flatnonzero(_distances(before[hopeful], behind[hopeful], np.zeros(1, int), dead + 1) != UNREACHED)
    number = np.full(dead + 1, -1, np.int32)
    number[kept] = np.arange(len(kept))
    table, again = np.unique(number[columns[kept]], axis=1, return_inverse=True)
    classes = again.reshape(-1)[classes]
    if table.size > most_cells or table.shape[1] > MAX_CLASSES:
        raise TooLarge(
            f"has an automaton of {table.shape[0]} states and {table.shape[1]} classes of tokens, {table.size} cells, "
            f"and {most_cells} are the most, of {MAX_CLASSES} classes"
        )
    return {
        "following": table.astype(np.int16),
        "classes": classes.astype(np.int32),
        "reach": reach[kept].astype(np.int32),
    }


def _distances(sources: Any, targets: Any, first: Any, states: int) -> Any:
    """The fewest transitions to each state from the first ones; `UNREACHED` where there is no way.

    Each transition is looked at once, so a chain of states takes no more than a bush of them.
    """
    order = np.argsort(sources, kind="stable")
    targets, begin = targets[order], np.searchsorted(sources[order], np.arange(states + 1)).tolist()
    distances = np.full(states, UNREACHED)
    distance = 0
    while len(first):
        distances[first] = distance
        distance += 1
        after = np.unique(np.concatenate([targets[begin[state] : begin[state + 1]] for state in first.tolist()]))
        first = after[distances[after] == UNREACHED]
    return distances


def byte_automaton(kind: str, text: str, depth: int, most_states: int) -> tuple[Any, Any]:
    """The minimal automaton over bytes of a form's texts (`smcjax.structured.response_format`). Raises Refusal."""
    most_calls = sys.getrecursionlimit()
    sys.setrecursionlimit(max(most_calls, MAX_CALLS))
    try:
        if kind == "regex":
            return expression_automaton(text, most_states)
        if kind == "choice":
            return part_automaton(Choice(tuple(Text(one.encode()) for one in json.loads(text))), most_states)
        if kind == "grammar":
            return grammar_automaton(text, depth, most_states)
        try:
            return rules_automaton(rules_of_schema(json.loads(text), most_states), depth, most_states)
        except Refusal as refusal:
            raise type(refusal)(f"has a JSON schema that {refusal}") from None
    except RecursionError:
        raise Refusal("is nested too deeply to be read; flatten it") from None
    except UnicodeEncodeError:
        raise Refusal("has half of a surrogate pair, which no text has; mend it") from None
    finally:
        sys.setrecursionlimit(most_calls)


def worded(refusal: Refusal, mend: str) -> str:
    """The words of a refusal, with `mend` where it lacks one."""
    return f"{refusal}; {mend}" if isinstance(refusal, TooLarge) else str(refusal)


def main() -> None:
    """Reads a request from standard input, and writes the arrays of `Automaton` as an npz to standard output.

    Exits with `REFUSED` where it has written why there are none, and with `OUT_OF_MEMORY` where Python's own memory
    does not suffice; what else does not ends by a signal.
    """
    setup = json.loads(sys.stdin.buffer.read(int(sys.stdin.buffer.readline())))
    resource.setrlimit(resource.RLIMIT_AS, (setup["bytes"], setup["bytes"]))
    signal.setitimer(signal.ITIMER_PROF, setup["seconds"])  # what ends by it is the process
    try:
        table, accepts = byte_automaton(setup["kind"], setup["text"], setup["depth"], setup["most_states"])
        arrays = token_automaton(table, accepts, _tokens(sys.stdin.buffer.read()), setup["most_cells"])
    except MemoryError:
        sys.exit(OUT_OF_MEMORY)
    except Refusal as refusal:
        sys.stdout.buffer.write(worded(refusal, setup["mend"]).encode())
        sys.exit(REFUSED)
    written = io.BytesIO()
    np.savez(written, **arrays)
    sys.stdout.buffer.write(written.getvalue())
    sys.stdout.buffer.flush()


def _tokens(written: bytes) -> list[bytes]:
    """The vocabulary, from an npz of its bytes and of where each token ends."""
    given = np.load(io.BytesIO(written), allow_pickle=False)
    data, ends = given["data"].tobytes(), given["ends"].tolist()
    return [data[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
