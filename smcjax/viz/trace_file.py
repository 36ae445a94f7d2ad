"""A trace as one JSON file: what `--trace` writes and `smcjax viz` draws.

    {"format": "smcjax-trace", "version": 2, "prompt": …, "n_particles": N, "ess": [C], "ancestors": [C][N], …}

JSON knows no infinities, so −inf, which is common among log weights, is null; +inf and NaN, which only a failed
request holds, are strings.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np

from smcjax.engine.results.outputs import RequestOutput
from smcjax.files import MIB, Unreadable, read_json, shortened, write_atomically

FORMAT, VERSION = "smcjax-trace", 2
TRACE_BYTES = 256 * MIB  # at most; 1,024 particles of 2,048 tokens take some 20
_NOT_FINITE = {None: -math.inf, "NaN": math.nan, "Infinity": math.inf}
_MAX_FLOAT32 = float(np.finfo(np.float32).max)


@dataclasses.dataclass(frozen=True, eq=False)
class TraceFile:
    """One request's population over its C cycles of N particles. Cycle t's ancestors are rows of cycle t−1."""

    prompt: str | None  # None: the request was token ids
    n_particles: int
    gamma: int | None  # drafted tokens a cycle; None where no cycle ran
    ess: np.ndarray  # [C] float32
    resampled: np.ndarray  # [C] bool
    ancestors: np.ndarray  # [C, N] int32, the row itself where nothing was resampled
    log_weights: np.ndarray  # [C, N] float32, before resampling; may hold −inf
    lengths: np.ndarray  # [C, N] int32, generated tokens after the cycle
    finished: np.ndarray  # [C, N] bool, after the cycle
    final_log_weights: np.ndarray  # [N] float32, after the last resampling
    texts: list[str] | None  # [N]
    selected: int  # the row that answered
    log_evidence: float

    @property
    def cycles(self) -> int:
        """C."""
        return len(self.ess)


def save_trace(path: str | os.PathLike[str], output: RequestOutput) -> None:
    """Writes the trace of a request that ran under `SMC(trace=True)`. Raises ValueError without one or a place."""
    # One field a line: compact, and still readable in a diff.
    fields = trace_fields(output).items()
    lines = [f"{json.dumps(name)}: {json.dumps(value, allow_nan=False)}" for name, value in fields]
    write_atomically(path, ("{\n" + ",\n".join(lines) + "\n}\n").encode())


def trace_fields(output: RequestOutput) -> dict[str, Any]:
    """The fields of a trace's file, of a request that has one. Raises ValueError without one."""
    smc = output.smc
    if smc is None or smc.trace is None:
        raise ValueError(f"request {output.request_id} has no trace to save; decode with SMC(trace=True).")
    trace, n = smc.trace, len(smc.particles)
    proposals = len(trace.ess) * n
    return {
        "format": FORMAT,
        "version": VERSION,
        "prompt": output.prompt,
        "n_particles": n,
        "gamma": output.metrics.drafted // proposals if proposals else None,
        "ess": _numbers(trace.ess),
        "resampled": trace.resampled.tolist(),
        "ancestors": trace.ancestors.tolist(),
        "log_weights": [_numbers(row) for row in trace.log_weights],
        "lengths": trace.lengths.tolist(),
        "finished": trace.finished.tolist(),
        "final_log_weights": _numbers(smc.log_weights),
        "texts": trace.texts,
        "selected": smc.selected,
        "log_evidence": _number(smc.log_evidence),
    }


def load_trace(path: str | os.PathLike[str]) -> TraceFile:
    """Reads and checks a trace. Raises ValueError, one sentence, for anything that `save_trace` would not write."""
    fields = _read(path)
    reader = _Reader(path, fields)
    n = reader.whole("n_particles", 1, 1024)
    raw = reader.take("ess")
    cycles = len(raw) if isinstance(raw, list) else reader.wrong("ess", "must be a list")
    trace = TraceFile(
        prompt=reader.text("prompt"),
        n_particles=n,
        gamma=None if reader.take("gamma") is None else reader.whole("gamma", 1, 1 << 20),
        ess=reader.array("ess", (cycles,), _to_float, np.float32),
        resampled=reader.array("resampled", (cycles,), _to_bool, np.bool_),
        ancestors=reader.array("ancestors", (cycles, n), _whole_in(0, n - 1), np.int32),
        log_weights=reader.array("log_weights", (cycles, n), _to_float, np.float32),
        lengths=reader.array("lengths", (cycles, n), _whole_in(0, 2**31 - 1), np.int32),
        finished=reader.array("finished", (cycles, n), _to_bool, np.bool_),
        final_log_weights=reader.array("final_log_weights", (n,), _to_float, np.float32),
        texts=reader.texts("texts", n),
        selected=reader.whole("selected", 0, n - 1),
        log_evidence=float(reader.array("log_evidence", (), _to_float, np.float64)),
    )
    if ((trace.ess < 0) | (trace.ess > n * 1.001)).any():  # NaN passes: a failed request's last entry
        reader.wrong("ess", f"has a value outside 0..{n}")
    moved = (trace.ancestors != np.arange(n)).any(axis=1)
    if (moved & ~trace.resampled).any():
        reader.wrong(
            "ancestors", f"moves particles in cycle {int(np.argmax(moved & ~trace.resampled))} without resampling"
        )
    return trace


def _read(path: str | os.PathLike[str]) -> dict[str, Any]:
    mend = "pass a file written by 'smcjax generate --trace'"
    try:
        fields = read_json(path, TRACE_BYTES)
    except Unreadable as error:
        raise ValueError(f"{path} {error}; {mend}.") from None
    if not isinstance(fields, dict) or fields.get("format") != FORMAT:
        raise ValueError(f"{path} is not a trace of smcjax; {mend}.")
    if fields.get("version") != VERSION or isinstance(fields["version"], bool):
        raise ValueError(
            f"{path} is a trace of version {shortened(repr(fields.get('version')))} and this smcjax reads version "
            f"{VERSION}; use the smcjax that wrote it."
        )
    return fields


def _number(value: float | np.floating) -> float | str | None:
    """A float32 in its shortest spelling; what is not finite, by its stand-in."""
    if np.isfinite(value):
        return float(str(value))
    return None if value == -math.inf else "Infinity" if value == math.inf else "NaN"


def _numbers(values: np.ndarray) -> list[float | str | None]:
    return [_number(value) for value in values]


# Parsers of one JSON value: the number, or None where it is none.


def _to_float(value: Any) -> float | None:
    if value is None or isinstance(value, str):
        return _NOT_FINITE.get(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _MAX_FLOAT32:
        return None
    return float(value)


def _to_bool(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None


def _whole_in(least: int, most: int) -> Callable[[Any], int | None]:
    def parse(value: Any) -> int | None:
        return value if isinstance(value, int) and not isinstance(value, bool) and least <= value <= most else None

    return parse


_EXPECTED = {
    np.float32: "a number",
    np.float64: "a number",
    np.bool_: "true or false",
    np.int32: "a whole number in range",
}


@dataclasses.dataclass(frozen=True)
class _Reader:
    """Fields of one file by name, each checked; every complaint names the file."""

    path: str | os.PathLike[str]
    fields: dict[str, Any]

    def wrong(self, name: str, what: str) -> NoReturn:
        raise ValueError(
            f"{self.path} is a damaged trace: {name} {what}; write it anew with 'smcjax generate --trace'."
        )

    def take(self, name: str) -> Any:
        return self.fields[name] if name in self.fields else self.wrong(name, "is missing")

    def whole(self, name: str, least: int, most: int) -> int:
        value = _whole_in(least, most)(self.take(name))
        return self.wrong(name, f"must be a whole number from {least} to {most}") if value is None else value

    def text(self, name: str) -> str | None:
        value = self.take(name)
        return value if value is None or isinstance(value, str) else self.wrong(name, "must be text or null")

    def texts(self, name: str, n: int) -> list[str] | None:
        value = self.take(name)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != n or not all(isinstance(text, str) for text in value):
            self.wrong(name, f"must be {n} texts or null")
        return value

    def array(self, name: str, shape: tuple[int, ...], parse: Callable[[Any], Any], dtype: type) -> np.ndarray:
        """Nested lists of exactly this shape; each value must be one that `parse` knows."""

        def walk(value: Any, shape: tuple[int, ...]) -> Any:
            if not shape:
                parsed = parse(value)
                return self.wrong(name, f"has an entry that is not {_EXPECTED[dtype]}") if parsed is None else parsed
            if not isinstance(value, list) or len(value) != shape[0]:
                self.wrong(name, f"must have shape {list(whole_shape)}")
            return [walk(item, shape[1:]) for item in value]

        whole_shape = shape
        return np.asarray(walk(self.take(name), shape), dtype).reshape(shape)
