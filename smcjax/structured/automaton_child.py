"""Compiles an expression or a grammar over a vocabulary, in a process that `smcjax.structured.automaton` starts.

    bytes        the minimal automaton over bytes, of an expression (`byte_automata`) or of a grammar (`grammar`)
    tokens       each token's bytes walked from every state at once; tokens that lead alike are one class
    reach        the fewest tokens from each state to an accepting one; where there is no way, a token is impossible

An expression of thirty characters may ask for 2³⁰ states: the system ends the process where that takes more time or
memory than it was given.
"""

from __future__ import annotations

import io
import json
import sys
from typing import Any

from smcjax.structured.byte_automata import Refusal, TooLarge, byte_automaton, minimal
from smcjax.structured.grammar import grammar_automaton

MOST_CLASSES = 2**15 - 1  # which tables on the device name in 16 bits
MOST_CALLS = 20_000  # within each other: rules of a grammar refer to rules
OUT_OF_MEMORY = 9  # exit code of a process that has told by itself that its memory does not suffice
UNREACHED = 1 << 30  # in `reach`: no way to an accepting state


# JSON of any shape, to a depth. As expressions these take outlines-core minutes; spliced level by level they take none.
OBJECT, VALUE = 1, 2  # bytes that stand for any object and any value in expressions of JSON, which have no such bytes
SPACE = "[ ]?"
STRING = r'"([^"\\\x00-\x1f\x7f-\x9f]|\\["\\/bfnrt])*"'
NUMBER = r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-][0-9]+)?"


def json_automata(depth: int, most_states: int) -> dict[int, tuple[Any, Any]]:
    """The automata of `OBJECT` and `VALUE`, of at most `depth` objects and arrays within each other."""
    scalar = f"{STRING}|{NUMBER}|true|false|null"
    pair = rf"{STRING}{SPACE}:{SPACE}\x02"
    objects = rf"\{{{SPACE}({pair}({SPACE},{SPACE}{pair})*{SPACE})?\}}"
    arrays = rf"\[{SPACE}(\x02({SPACE},{SPACE}\x02)*{SPACE})?\]"
    of_object, of_value = (byte_automaton(regex, most_states) for regex in (objects, f"{scalar}|{arrays}|{objects}"))
    value = byte_automaton(scalar, most_states)
    for _ in range(depth - 1):
        value = spliced(*of_value, {VALUE: value}, most_states)
    of_all = {OBJECT: spliced(*of_object, {VALUE: value}, most_states)}
    of_all[VALUE] = spliced(*of_value, {VALUE: value}, most_states)
    return of_all


def spliced(table: Any, accepts: Any, inner: dict[int, tuple[Any, Any]], most_states: int) -> tuple[Any, Any]:
    """The automaton with each of these bytes replaced by the texts of another automaton.

    Raises Refusal where it could not be told from its first byte whether such a text begins or something else goes on.
    """
    import numpy as np

    dead = table.shape[0] - 1
    parts, accepting, size = [table[:-1].copy()], [accepts[:-1]], dead
    entries: list[tuple[int, int, Any]] = []  # states, and what their transitions are to be joined with
    for byte, (of_inner, ends) in inner.items():
        for target in sorted(set(table[:-1, byte].tolist()) - {dead}):
            copy = np.where(of_inner == of_inner.shape[0] - 1, -1, of_inner + size)[:-1]
            entries += [(int(state), -1, copy[0]) for state in np.flatnonzero(table[:-1, byte] == target)]
            entries += [(size + int(state), target, None) for state in np.flatnonzero(ends[:-1])]
            parts.append(copy)
            accepting.append(ends[:-1] & accepts[target])
            size += len(copy)
            if size > 8 * most_states:
                raise TooLarge(f"has an automaton of over {size} states, and {most_states} are the most")
        parts[0][:, byte] = dead
    parts[0] = np.where(parts[0] == dead, -1, parts[0])
    joined = np.concatenate([*parts, np.full((1, 256), -1)])
    outer = joined[:dead].copy()
    for state, target, first in [entry for entry in entries if entry[1] < 0] + [e for e in entries if e[1] >= 0]:
        following = first if target < 0 else joined[target]
        both = (joined[state] >= 0) & (following >= 0) & (joined[state] != following)
        if both.any() or (target < 0 and ((outer[state] >= 0) & (first >= 0)).any()):
            raise Refusal("offers any JSON beside other JSON that begins alike; say which of them it is to be")
        joined[state] = np.where(following >= 0, following, joined[state])
    joined = np.where(joined < 0, size, joined).astype(np.int32)
    return minimal(joined, np.append(np.concatenate(accepting), False), most_states)


def token_columns(table: Any, tokens: list[bytes], most_cells: int) -> tuple[Any, Any]:
    """The state behind each token: classes [V], and columns [S + 1, classes] of the states that a class leads to.

    An empty token leads nowhere.
    """
    import numpy as np

    _, kinds = np.unique(table, axis=1, return_inverse=True)  # bytes that lead alike
    kind_of = kinds.reshape(-1).astype(np.uint8).tobytes()
    _, example = np.unique(kinds.reshape(-1), return_index=True)
    steps = [np.ascontiguousarray(table[:, byte]) for byte in example]
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
    import numpy as np

    classes, columns = token_columns(table, tokens, most_cells)
    dead = table.shape[0] - 1
    reach = np.where(accepts, 0, UNREACHED)
    distance = 0
    while True:
        near = (reach == distance)[columns].any(axis=1) & (reach == UNREACHED)
        near[dead] = False
        if not near.any():
            break
        distance += 1
        reach[near] = distance
    if reach[0] == UNREACHED:
        raise Refusal("matches no text that this model's tokens can spell; change it")
    columns = np.where(reach[columns] == UNREACHED, dead, columns)
    reached = np.zeros(dead + 1, bool)
    reached[0] = True
    frontier = reached.copy()
    while frontier.any():
        after = np.zeros(dead + 1, bool)
        after[columns[frontier].reshape(-1)] = True
        after[dead] = False
        frontier = after & ~reached
        reached |= after
    kept = np.flatnonzero(reached)
    number = np.full(dead + 1, -1, np.int32)
    number[kept] = np.arange(len(kept))
    table, again = np.unique(number[columns[kept]], axis=1, return_inverse=True)
    classes = again.reshape(-1)[classes]
    if table.size > most_cells or table.shape[1] > MOST_CLASSES:
        raise TooLarge(
            f"has an automaton of {table.shape[0]} states and {table.shape[1]} classes of tokens, {table.size} cells, "
            f"and {most_cells} are the most, of {MOST_CLASSES} classes"
        )
    return {
        "following": table.astype(np.int16),
        "classes": classes.astype(np.int32),
        "reach": reach[kept].astype(np.int32),
    }


def compiled(request: dict[str, Any], tokens: list[bytes]) -> dict[str, Any]:
    """The arrays of `Automaton` for a request of `smcjax.structured.automaton.compile_expression`."""
    most_states, depth = request["most_states"], request["depth"]
    try:
        if request["grammar"]:
            table, accepts = grammar_automaton(request["grammar"], depth, most_states)
        else:
            for what, regex in request["free_of_quotes"].items():
                check_inner(what, regex)
            table, accepts = byte_automaton(request["regex"], most_states)
            if depth:
                table, accepts = spliced(table, accepts, json_automata(depth, 1 << 15), most_states)
        return token_automaton(table, accepts, tokens, request["most_cells"])
    except TooLarge as refusal:
        raise Refusal(f"{refusal}; {request['mend']}") from None
    except RecursionError:
        raise Refusal("is nested too deeply to be read; flatten it") from None


def check_inner(what: str, regex: str) -> None:
    """Raises Refusal for the pattern of a JSON string that lets bytes through which must be escaped there.

    A pattern that is no expression by itself is refused here too, before it is part of a schema's.
    """
    try:
        table, _ = byte_automaton(regex, 1 << 15)
    except Refusal as refusal:
        raise type(refusal)(f"has {what}, which {refusal}") from None
    must_escape = [*range(0x20), ord('"'), ord("\\")]
    if (table[:-1, must_escape] != table.shape[0] - 1).any():
        raise Refusal(f"has {what}, which lets quotes, backslashes or controls into a JSON string; exclude them")


def main() -> None:
    """Reads a request as an npz from standard input, and writes the arrays, or a refusal, as one to standard output.

    Exits with `OUT_OF_MEMORY` where Python's own memory does not suffice; what else does not ends by a signal.
    """
    import resource
    import signal

    import numpy as np

    length = int(sys.stdin.buffer.readline())
    setup = json.loads(sys.stdin.buffer.read(length))
    given = np.load(io.BytesIO(sys.stdin.buffer.read()), allow_pickle=False)
    data, ends = given["data"].tobytes(), given["ends"].tolist()
    tokens = [data[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
    sys.setrecursionlimit(MOST_CALLS)
    resource.setrlimit(resource.RLIMIT_AS, (setup["bytes"], setup["bytes"]))
    signal.setitimer(signal.ITIMER_PROF, setup["seconds"])  # what ends by it is the process
    try:
        reply = compiled(setup, tokens)
    except Refusal as refusal:
        reply = {"refusal": np.frombuffer(str(refusal).encode(), np.uint8)}
    except MemoryError:
        sys.exit(OUT_OF_MEMORY)
    written = io.BytesIO()
    np.savez(written, **reply)
    sys.stdout.buffer.write(written.getvalue())
    sys.stdout.buffer.flush()
