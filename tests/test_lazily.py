"""Programs that wait for their first call are those that would have been compiled when an engine asked for them."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import jaxprs_in_params

from smcjax import LLM, SMC, Autoregressive, Rejection
from smcjax.engine.run import programs as engine_programs
from smcjax.engine.run.programs import Job, Programs
from tests import test_lazily as module
from tests.checkpoints import write_pair
from tests.lazily import lazily, program_patches

# Rooms and modules of which lines run while programs are traced, and modules in these of which none does.
OF_PROGRAMS = ("autoregressive", "decoding", "engine.run.jobs", "engine.run.slots", "kv", "matmul")
OF_PROGRAMS += ("model", "noise", "pallas", "rejection", "smc", "sparse")
BESIDE = ("smcjax.model.files.checkpoint", "smcjax.model.files.hub", "smcjax.model.params", "smcjax.smc.history")

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


def test_a_program_has_the_patches_of_the_time_it_was_asked_for(asked: Programs) -> None:
    """Before a patch, within it, and after it: neither a patch nor its end is lost, whenever the program is called."""
    with program_patches(module, "amount", lambda: 2.0) as patch:
        within = programs()
        assert value(asked) == 1.0
        patch(module, "amount", lambda: 3.0)
        twice = programs()
    after = programs()
    with program_patches(module, "amount", lambda: 4.0):
        assert [value(within), value(twice), value(after), value(asked)] == [2.0, 3.0, 1.0, 1.0]
        assert value(programs()) == 4.0
    assert module.amount() == 1.0


def test_a_patch_compiles_nothing(asked: Programs) -> None:
    with program_patches(module, "amount", lambda: 2.0):
        pass
    assert module.traced == []


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


def modules_traced(files: set[str]) -> set[str]:
    """Returns the names of the package's modules among these files."""
    paths = [Path(file).with_suffix("").parts for file in files if "/smcjax/" in file]
    return {".".join(path[path.index("smcjax") :]) for path in paths}


def traced_in_programs(name: str) -> bool:
    """Tells whether programs are said to be made of what has this dotted name."""
    return any(f"{name}.".startswith(f"smcjax.{one}.") for one in OF_PROGRAMS) and not name.startswith(BESIDE)


@pytest.mark.slow
def test_programs_are_made_of_the_modules_whose_patches_must_be_told(tmp_path: Path) -> None:
    pair = write_pair(tmp_path)
    for decoding in (SMC(2, 2, control=0.3), Rejection(gamma=2), Autoregressive()):
        draft = None if isinstance(decoding, Autoregressive) else pair.draft
        with LLM(pair.target, draft_model=draft, decoding=decoding, max_num_seqs=1, max_model_len=32) as llm:
            runner = llm.engine.runner
            jobs = runner.jobs(1, runner.program)
            assert len(jobs) >= 6
            for job in jobs.values():
                modules = modules_traced(files_traced(job.function, *job.arguments))
                assert modules
                assert {name for name in modules if not traced_in_programs(name)} == set()


def forgotten(source: str) -> list[str]:
    """Returns the patches in a test's source of what programs are made of that `program_patches` is not told of."""
    names, found = {}, []
    nodes = list(ast.walk(ast.parse(source)))
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            prefix = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            names |= {one.asname or one.name: prefix + one.name for one in node.names}
    for node in nodes:
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith((".setattr", "patch.object", "mock.patch")):
            target = ast.unparse(node.args[0]).strip("'\"")
            known = max((name for name in names if f"{target}.".startswith(f"{name}.")), key=len, default="")
            if traced_in_programs(names.get(known, known) + target.removeprefix(known)):
                found.append(ast.unparse(node))
    return found


def test_no_patch_of_a_program_is_forgotten() -> None:
    found = {path.name: forgotten(path.read_text()) for path in Path(__file__).parent.rglob("*.py")}
    assert {name: patches for name, patches in found.items() if patches} == {}


@pytest.mark.parametrize(
    ("source", "seen"),
    [
        ("from smcjax.smc import cycle as c\nmonkeypatch.setattr(c, 'steer', None)", 1),
        ("import smcjax.matmul\nwith mock.patch.object(smcjax.matmul, '_sum_over', None): pass", 1),
        ("from smcjax.sparse.nsa import NSA\npatch.setattr(NSA, 'home', None)", 1),
        ("monkeypatch.setattr('smcjax.pallas.head.sampled_head.HOPPER', None)", 1),
        ("from smcjax.smc import cycle\npatch_programs(cycle, 'steer', None)", 0),
        ("from smcjax.model.files import hub\nmonkeypatch.setattr(hub, 'bundled_model', None)", 0),
        ("from smcjax.engine.engine import Engine\nmonkeypatch.setattr(Engine, 'step', None)", 0),
    ],
)
def test_control_a_forgotten_patch_is_seen(source: str, seen: int) -> None:
    assert len(forgotten(source)) == seen


def test_an_error_of_the_compiler_reaches_the_caller() -> None:
    def broken(x: jax.Array) -> jax.Array:
        raise ValueError("no such program")

    made = Programs()
    with lazily():
        made.compile("a test", {"one": Job(broken, (), (jax.ShapeDtypeStruct((), jnp.float32),))})
    for _ in range(2):
        with pytest.raises(ValueError, match="no such program"):
            made["one"](jnp.float32(0))
