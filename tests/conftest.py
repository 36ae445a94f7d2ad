"""Shared by all tests: shapes and types checked at run time, and which tests need which machine."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxtyping import install_import_hook

# Interpreted kernels wait for each other in threads of XLA's pool, which has one a core unless this says otherwise.
os.environ.setdefault("NPROC", "16")

# No test asks the hub; those of downloads ask a server of their own, in a process of their own.
os.environ["HF_HUB_OFFLINE"] = "1"

# This process and those that tests start, pytest's workers among them, read modules as users' do: compiled once. Where
# Python is told to write none (many containers tell it), each would compile JAX's anew: two thirds of its start.
if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):
    os.environ.setdefault("PYTHONPYCACHEPREFIX", str(Path(__file__).parents[1] / ".pytest_cache" / "modules"))
    sys.dont_write_bytecode, sys.pycache_prefix = False, os.environ["PYTHONPYCACHEPREFIX"]

# Most of the time of all tests is XLA's compiler, for hundreds of small programs that run few times. On a CPU its older
# emitters of fusions compile a cycle of a tiny pair in a third of the time that those take which are MLIR pipelines.
QUICK = ("--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters", "--xla_cpu_parallel_codegen_split_count=1")
os.environ["XLA_FLAGS"] = " ".join((os.environ.get("XLA_FLAGS", ""), *QUICK))

# Each of pytest's workers has a core of its own where there is one for each: its threads, sixteen of XLA's among them,
# wake each other all the time, and from core to core that takes interrupts.
worker, workers = (os.environ.get(f"PYTEST_XDIST_WORKER{what}", "") for what in ("", "_COUNT"))
if worker and hasattr(os, "sched_setaffinity"):
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) == int(workers):
        os.sched_setaffinity(0, {cores[int(worker.removeprefix("gw"))]})

# Tracing and lowering make millions of objects, few of them garbage: collected as often as Python would, a tenth of
# all time.
gc.set_threshold(100_000, 50, 100)

# Before the first import of smcjax: the jaxtyping annotations of these modules become run-time checks. Modules that
# define pytrees stay out, because JAX fills those with placeholders (`lower`, `eval_shape`, `in_axes`), and those whose
# annotations name protocols, which nothing can check.
CHECKED = ["pallas.attention.reference", "model.decoder", "model.paged", "decoding.prefill", "decoding.sampling"]
CHECKED += ["rejection.rules", "smc.control", "smc.cycle", "smc.ending", "smc.lifecycle"]
CHECKED += ["smc.pipelined", "smc.potential", "smc.resampling", "smc.weights"]
install_import_hook([f"smcjax.{module}" for module in CHECKED], "beartype.beartype")

import jax  # noqa: E402
import pytest  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

from smcjax.engine.run import programs  # noqa: E402
from smcjax.engine.run.settings import PROMOTION  # noqa: E402
from tests.first_cases import first_cases  # noqa: E402
from tests.interpreted import hand_arrays_over  # noqa: E402
from tests.lazily import Patch, lazily, program_patches  # noqa: E402
from tests.memory import give_back, keep_free_memory  # noqa: E402
from tests.passes import leave_llvm_passes_out  # noqa: E402
from tests.sizes import one_size  # noqa: E402
from tests.weights import draw_on_the_host  # noqa: E402

# JAX promotes neither dtypes nor ranks, nor do engines: each cast and each broadcast is said, as one that JAX adds may
# be a mistake, which costs bits or memory. Other people's code may: `with jax.numpy_dtype_promotion("standard")`.
PROMOTION.update(dtype="strict", rank="raise")
jax.config.update("jax_numpy_dtype_promotion", PROMOTION["dtype"])
jax.config.update("jax_numpy_rank_promotion", PROMOTION["rank"])

keep_free_memory()
draw_on_the_host()
hand_arrays_over()

# JAX compiles within an example, so an example's time says nothing; examples are the same in every run.
settings.register_profile("laws", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("laws")


@pytest.fixture(autouse=True, scope="session")
def _programs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> None:
    """All compiled programs stay in pytest's cache, none in the user's."""
    leave_llvm_passes_out(True)  # of fixtures of the session as well, which are made before a file's
    gc.freeze()  # all files are imported by now
    has_cache = request.config.pluginmanager.has_plugin("cacheprovider")
    place = request.config.cache.mkdir("smcjax") if has_cache else tmp_path_factory.mktemp("smcjax")
    os.environ["XDG_CACHE_HOME"] = str(place)
    programs.enable_compilation_cache()


# Compiled programs of engines that live as long as the session: a file's own engine like one of them compiles nothing.
lasting: weakref.WeakValueDictionary[Any, Any] = weakref.WeakValueDictionary()


@pytest.fixture(autouse=True, scope="module")
def _programs_of_a_file(request: pytest.FixtureRequest) -> Iterator[None]:
    """A file's compiled programs go with it: each takes memory maps, and without them Linux stops a process.

    Engines that live as long as the session say their sizes themselves: one that a file makes may serve another file.
    """
    marked = {mark.name for mark in request.node.iter_markers()}
    leave_llvm_passes_out("llvm_passes" not in marked)
    at_once = "compiled_at_once" in marked
    # Closed engines' too: the next one like them compiles nothing.
    shared, programs._shared = programs._shared, {} if at_once else dict(lasting)
    with (
        contextlib.nullcontext() if "all_sizes" in marked else one_size(),
        contextlib.nullcontext() if at_once else lazily(),
    ):
        yield
    leave_llvm_passes_out(True)
    lasting.update(programs._shared)
    programs._shared = shared
    jax.clear_caches()
    give_back()
    gc.freeze()  # what is left lives as long as the process, modules above all: no later collection looks at it


@pytest.fixture
def patch_programs() -> Iterator[Patch]:
    """Patches what programs are made of, until the test ends; `test_lazily.py` says which modules that are."""
    with program_patches() as patch:
        yield patch


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the option for all cases; without it the first case of each test runs, unless tests are named."""
    parser.addoption("--all", action="store_true", help="run all cases of all tests")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """All cases run of tests that are named by path, marker or keyword. A worker takes what the first process found."""
    if hasattr(config, "workerinput"):
        config.option.all = config.workerinput["all_cases"]
    else:
        named = config.args_source is not pytest.Config.ArgsSource.TESTPATHS
        config.option.all |= bool(named or config.option.markexpr or config.option.keyword)


@pytest.hookimpl(optionalhook=True)  # of xdist
def pytest_configure_node(node: Any) -> None:
    """Tells a worker which cases run: it sees the command line, and not what `pytest_configure` made of it."""
    node.workerinput["all_cases"] = node.config.option.all


def pytest_report_header(config: pytest.Config) -> str:
    """Says which tests run."""
    return f"smcjax: {'all cases' if config.option.all else 'the first case of each test, but slow ones; --all: all'}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what was not chosen. Tests marked `gpu` are skipped where there is no GPU. Slow files come first.

    A worker takes a file at a time; were a long one left for the end, the other worker would have nothing beside it.
    """
    if not config.option.all:
        first = first_cases(items)
        config.hook.pytest_deselected(items=list(set(items) - set(first)))
        items[:] = first
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)
    if any(device.platform == "gpu" for device in jax.devices()):
        return
    for item in items:
        if item.get_closest_marker("gpu"):  # not by keyword: a directory may have that name
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
