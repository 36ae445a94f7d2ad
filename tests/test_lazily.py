"""Programs that wait for their first call are those that would have been compiled when an engine asked for them."""

from __future__ import annotations

import time
import unittest.mock
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import jaxprs_in_params

from smcjax import LLM, SMC, Autoregressive, Rejection
from smcjax.engine import engine as engine_module
from smcjax.engine.run import programs as engine_programs
from smcjax.engine.run.programs import Job, Programs
from smcjax.structured import automaton
from tests import test_lazily as module
from tests.checkpoints import write_pair
from tests.lazily import Later, lazily
from tests.patched import OF_THE_HOST, changes_programs

traced: list[float] = []


def amount() -> float:
    return 1.0


def add(x: jax.Array) -> jax.Array:
    traced.append(module.amount())
    return x + module.amount()


@pytest.fixture
def asked() -> Programs:
    """Programs one of which nobody calls; they could be shared."""
    module.traced.clear()
    engine_programs._shared.clear()
    return programs()


def programs() -> Programs:
    made = Programs()
    with lazily():
        shape = jax.ShapeDtypeStruct((), jnp.float32)
        made.compile("a test", {key: Job(add, (), (shape,), identity=(module.__name__, key)) for key in ("one", "two")})
    return made


def value(made: Programs) -> float:
    return float(made["one"](jnp.float32(0)))


def test_nothing_is_traced_before_its_first_call(asked: Programs) -> None:
    assert "two" in asked
    assert module.traced == []
    assert [value(asked), value(asked)] == [1.0, 1.0]
    assert module.traced == [1.0]


@pytest.mark.parametrize("kind", ["monkeypatch", "mock"])
def test_a_program_has_the_patches_of_the_time_it_was_asked_for(asked: Programs, kind: str) -> None:
    """Before a patch, within it, and after it: neither a patch nor its end is lost, whenever the program is called."""

    def patched() -> Any:
        return unittest.mock.patch.object(module, "amount", return_value=2.0)

    if kind == "mock":
        with patched():
            within = programs()
            assert value(asked) == 1.0
    else:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "amount", lambda: 2.0)
            within = programs()
            assert value(asked) == 1.0
    after = programs()
    assert [value(within), value(after), value(asked)] == [2.0, 1.0, 1.0]


def test_control_a_patch_that_nobody_is_told_of_is_lost(asked: Programs) -> None:
    before, module.amount = module.amount, lambda: 2.0
    try:
        assert value(asked) == 2.0
    finally:
        module.amount = before


def files_traced(function: Any, *arguments: Any) -> set[str]:
    """The files of which a line runs for what is traced of the function."""
    files: set[str] = set()

    def walk(jaxpr: Any) -> None:
        for eqn in jaxpr.eqns:
            files.update(frame.file_name for frame in eqn.source_info.traceback.frames)
            for sub in jaxprs_in_params(eqn.params):
                walk(sub)

    walk(jax.jit(lambda *given: function(*given)).trace(*arguments).jaxpr.jaxpr)
    return files


def of_the_host(files: set[str]) -> set[str]:
    """Returns the names among these of modules whose patches are said to change no program."""
    names = {".".join(Path(file).with_suffix("").parts[-4:]) for file in files}
    return {name for name in names if any(f".{one}." in f".{name}." for one in OF_THE_HOST)}


def test_no_program_is_made_of_what_the_host_does(tmp_path: Path) -> None:
    pair = write_pair(tmp_path)
    for decoding in (SMC(2, 2, control=0.3), Rejection(gamma=2), Autoregressive()):
        draft = None if isinstance(decoding, Autoregressive) else pair.draft
        with LLM(pair.target, draft_model=draft, decoding=decoding, max_num_seqs=1, max_model_len=32) as llm:
            runner = llm.engine.runner
            jobs = runner.jobs(1, runner.program)
            assert len(jobs) >= 6
            for job in jobs.values():
                files = files_traced(job.function, *job.arguments)
                assert any(file.endswith("smcjax/engine/run/jobs.py") or "smcjax/kv/" in file for file in files)
                assert of_the_host(files) == set()


def test_control_a_program_of_a_module_of_the_host_is_seen() -> None:
    there = {"__name__": "x"}
    exec(compile("def twice(x): return x + x", "/a/smcjax/engine/results/streaming.py", "exec"), there)
    assert of_the_host(files_traced(there["twice"], jax.ShapeDtypeStruct((), jnp.float32))) == {
        "smcjax.engine.results.streaming"
    }


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("smcjax.engine.engine.Engine", True),
        (engine_module, True),
        (engine_module.Engine, False),
        (automaton, False),
        ("smcjax.engine.run.programs._compiled", True),
        ("smcjax.engine.run.memory.on_cpu", True),
        (LLM, False),
        (time, False),
        (jax, True),
        (module, True),
        (Programs, True),
        (amount, True),
    ],
)
def test_patches_that_change_programs(target: Any, expected: bool) -> None:
    assert changes_programs(target) == expected


def test_an_error_of_the_compiler_reaches_the_caller() -> None:
    def broken(x: jax.Array) -> jax.Array:
        raise ValueError("no such program")

    made = Programs()
    with lazily():
        made.compile("a test", {"one": Job(broken, (), (jax.ShapeDtypeStruct((), jnp.float32),))})
    for _ in range(2):
        with pytest.raises(ValueError, match="no such program"):
            made["one"](jnp.float32(0))
    Later._pending.clear()  # nobody else shall find it
