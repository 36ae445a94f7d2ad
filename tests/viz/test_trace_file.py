"""A trace survives its file bit for bit; whatever else lies in a file is refused in one sentence."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smcjax.engine.results.outputs import RequestOutput
from smcjax.viz.trace_file import TraceFile, load_trace, save_trace
from tests.traces import history

TEXT = st.none() | st.text(st.characters(), max_size=20)  # lone surrogates and control characters too


def assert_same(a: TraceFile, b: TraceFile) -> None:
    for field in dataclasses.fields(TraceFile):
        left, right = getattr(a, field.name), getattr(b, field.name)
        if isinstance(left, np.ndarray):
            assert left.dtype == right.dtype, field.name
            np.testing.assert_array_equal(left, right, field.name, strict=True)
        else:
            assert left == right or (left != left and right != right), field.name


def round_trip(output: RequestOutput) -> TraceFile:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "trace.json")
        save_trace(path, output)
        json.loads(path.read_bytes(), parse_constant=pytest.fail)  # JSON as others read it, too
        assert os.listdir(directory) == ["trace.json"]
        return load_trace(path)


@given(
    st.integers(0, 6),
    st.integers(1, 9),
    st.integers(0, 2**32),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.integers(1, 16),
    TEXT,
    TEXT,
)
@settings(max_examples=60)
def test_what_is_saved_is_loaded(
    cycles: int, n: int, seed: int, impossible: float, gamma: int, prompt: str | None, text: str | None
) -> None:
    made = history(cycles, n, seed=seed, impossible=impossible, gamma=gamma, prompt=prompt, text=text)
    loaded = round_trip(made.output)
    assert_same(loaded, made.trace)
    assert loaded.cycles == cycles
    assert loaded.gamma == (gamma if cycles else None)


@given(st.lists(st.floats(width=32), min_size=1, max_size=8), st.floats(width=32))
@settings(max_examples=60)
def test_every_float32_survives(weights: list[float], log_evidence: float) -> None:
    made = history(1, len(weights))
    smc = made.output.smc
    assert smc is not None
    assert smc.trace is not None
    row = np.array(weights, np.float32)
    trace = dataclasses.replace(smc.trace, log_weights=row[None], ess=np.array([math.nan], np.float32))
    smc = dataclasses.replace(smc, log_weights=row, log_evidence=log_evidence, trace=trace)
    loaded = round_trip(dataclasses.replace(made.output, smc=smc))
    np.testing.assert_array_equal(loaded.log_weights[0], row, strict=True)
    np.testing.assert_array_equal(loaded.final_log_weights, row, strict=True)
    np.testing.assert_array_equal(loaded.log_evidence, log_evidence)
    assert np.isnan(loaded.ess).all()


def test_a_request_without_trace_has_nothing_to_save(tmp_path: Path) -> None:
    output = history(2, 2).output
    assert output.smc is not None
    for smc in (None, dataclasses.replace(output.smc, trace=None)):
        with pytest.raises(ValueError, match=r"^request r0 has no trace to save; .*\.$"):
            save_trace(tmp_path / "trace.json", dataclasses.replace(output, smc=smc))
    assert os.listdir(tmp_path) == []


# ------------------------------------------------------------------------------------------------------ bad files


def saved(directory: Path) -> Path:
    path = directory / "trace.json"
    save_trace(path, history(3, 4, seed=1).output)
    return path


def refusal(path: Path) -> str:
    """The one sentence that names the file."""
    with pytest.raises(ValueError, match="trace") as caught:
        load_trace(path)
    assert type(caught.value) is ValueError
    text = str(caught.value)
    assert text.startswith(str(path))
    rest = text.removeprefix(str(path))
    assert rest.endswith(".")
    assert ". " not in rest
    assert "\n" not in rest
    return rest


def test_a_place_without_a_file(tmp_path: Path) -> None:
    assert "does not exist" in refusal(tmp_path / "nothing.json")
    assert "cannot be read (it is a directory, not a regular file)" in refusal(tmp_path)
    assert "cannot be read (Not a directory)" in refusal(saved(tmp_path) / "inner")
    assert "cannot be read (File name too long)" in refusal(tmp_path / ("x" * 300))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "not valid JSON"),
        (b"\xff\xfe\x00", "not a text file"),
        (b"\x89PNG\r\n\x1a\n", "not a text file"),
        (b"[" * 100_000, "not valid JSON"),
        (b"9" * 10_000, "not valid JSON"),
        (b'{"log_evidence": ' + b"9" * 400 + b"}", "an integer of 400 digits"),
        (b'{"n_particles": 2, "n_particles": 3}', "the key 'n_particles' stands there twice"),
        (b'{"format": NaN}', "not valid JSON"),
        (b"{}", "not a trace"),
        (b'{"model_type": "qwen3"}', "not a trace"),
        (b'{"format": "smcjax-trace"}', "version None"),
        (b'{"format": "smcjax-trace", "version": 1}', "version 1 and this smcjax reads version 2"),
        (b'{"format": "smcjax-trace", "version": 2}', "n_particles is missing"),
    ],
)
def test_other_files(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(content)
    assert reason in refusal(path)


def test_every_truncation_is_noticed(tmp_path: Path) -> None:
    path = saved(tmp_path)
    whole = path.read_bytes()
    for size in range(0, len(whole.rstrip()), 7):
        path.write_bytes(whole[:size])
        assert "perhaps cut short" in refusal(path)


def test_every_field_is_needed(tmp_path: Path) -> None:
    path = saved(tmp_path)
    fields = json.loads(path.read_text())
    for name in fields.keys() - {"format", "version"}:
        path.write_text(json.dumps({key: value for key, value in fields.items() if key != name}))
        assert f"{name} is missing" in refusal(path)
        path.write_text(json.dumps({**fields, name: {}}))
        assert refusal(path).startswith(" is a damaged trace: ")


def put(name: str, *place: int, value: Any) -> Callable[[dict[str, Any]], None]:
    """Replaces a field or, at `place`, an entry of it."""

    def change(fields: dict[str, Any]) -> None:
        path = [name, *place]
        inner: Any = fields
        for step in path[:-1]:
            inner = inner[step]
        inner[path[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (put("ancestors", 1, 2, value=4), "ancestors has an entry that is not a whole number in range"),
        (put("ancestors", 1, 2, value=True), "ancestors has an entry"),
        (put("ancestors", 1, value=[0, 1, 2]), "ancestors must have shape [3, 4]"),
        (put("ess", value=[1.0, 1.0]), "resampled must have shape [2]"),
        (put("ess", value=3), "ess must be a list"),
        (put("ess", 0, value=4.5), "ess has a value outside 0..4"),
        (put("ess", 0, value=[1.0]), "ess has an entry that is not a number"),
        (put("resampled", 0, value=1), "resampled has an entry that is not true or false"),
        (put("resampled", value=[False] * 3), "without resampling"),
        (put("log_weights", 0, 0, value="-inf"), "log_weights has an entry"),
        (put("log_weights", 0, 0, value=1e39), "log_weights has an entry"),
        (put("log_weights", 2, value=None), "log_weights must have shape [3, 4]"),
        (put("final_log_weights", value=[0.0] * 3), "final_log_weights must have shape [4]"),
        (put("lengths", 0, 0, value=2**31), "lengths has an entry"),
        (put("n_particles", value=5), "must have shape"),
        (put("n_particles", value=0), "n_particles must be a whole number from 1 to 1024"),
        (put("gamma", value=0), "gamma must be"),
        (put("selected", value=4), "selected must be a whole number from 0 to 3"),
        (put("texts", 0, value=None), "texts must be 4 texts or null"),
        (put("prompt", value=7), "prompt must be text or null"),
        (put("log_evidence", value="much"), "log_evidence has an entry"),
    ],
)
def test_damage(tmp_path: Path, change: Callable[[dict[str, Any]], None], reason: str) -> None:
    path = saved(tmp_path)
    fields = json.loads(path.read_text())
    change(fields)
    path.write_text(json.dumps(fields))
    text = refusal(path)
    assert "damaged trace" in text
    assert reason in text


@given(st.data())
@settings(max_examples=100)
def test_no_change_of_a_byte_is_a_traceback(data: st.DataObject) -> None:
    """Some changes make another trace, as they should; all others are a ValueError."""
    with tempfile.TemporaryDirectory() as directory:
        path = saved(Path(directory))
        content = bytearray(path.read_bytes())
        for _ in range(data.draw(st.integers(1, 3))):
            content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
        path.write_bytes(content)
        with contextlib.suppress(ValueError):
            trace = load_trace(path)
            assert (trace.n_particles, trace.cycles) == (4, 3)
