"""Compiled programs: made once per shape, counted, timed, and kept on disk between processes."""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, MutableMapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

import jax

from smcjax.engine.run.memory import device_memory
from smcjax.engine.run.settings import own_settings
from smcjax.matmul import product_dtypes
from smcjax.pallas import active_implementation, implementations
from smcjax.quantization import FLOAT8

logger = logging.getLogger("smcjax")


# XLA's option to leave bf16 products to cuBLAS: dev/LOG.md says which is faster where.
CUBLAS_PRODUCTS = {"xla_gpu_enable_triton_gemm": False}


MAX_CONCURRENT_COMPILATIONS = 6  # programs that are compiled side by side: XLA takes device memory to time algorithms
Progress = Callable[[int, int], None]

CACHE_BYTES = 16 << 30  # of compiled programs on disk, when a process begins


class Job(NamedTuple):
    """A function to compile."""

    function: Callable[..., Any]
    donate: tuple[int, ...]  # arguments' numbers
    arguments: tuple[Any, ...]
    cublas: bool = False  # for its products in bfloat16
    # With the arguments' shapes, all that the function computes by: of jobs that are equal in this, the process
    # compiles one. None: no other job is like it.
    identity: Hashable = None


_tracing = threading.Lock()

# The process's executables, while any `Programs` has them: a second engine of the same shapes compiles nothing.
_shared: MutableMapping[Hashable, Any] = weakref.WeakValueDictionary()


def enable_compilation_cache() -> None:
    """Keeps compiled programs under ~/.cache/smcjax, unless the process has chosen another place already.

    Programs not used for longest go first, until `CACHE_BYTES` remain. Without a place that can be written to, every
    start compiles, and a remark says so.
    """
    if jax.config.jax_compilation_cache_dir is not None:
        return
    directory = _cache_directory(os.environ.get("XDG_CACHE_HOME"))
    if directory is None:
        return
    _prune(directory, CACHE_BYTES)
    # JAX's own limit stays off: with it every program that is written, the smallest too, waits while all files are
    # looked at, under a lock of all processes: half a second where there are 7,000.
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


@functools.cache  # one remark a process
def _cache_directory(base: str | None) -> Path | None:
    """The directory of compiled programs below `base`, or the user's; None where none can be written to."""
    try:
        directory = Path(base or Path.home() / ".cache") / "smcjax" / "xla"
        directory.mkdir(parents=True, exist_ok=True)
        if not os.access(directory, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "it cannot be written to", str(directory))
    except RuntimeError:  # of Path.home: neither HOME nor an entry in the system's list of users
        reason = "there is no home directory"
    except OSError as error:
        reason = f"{error.filename}: {error.strerror}"
    else:
        return directory
    logger.warning("Compiled programs are not kept for the next start (%s); XDG_CACHE_HOME names a place.", reason)
    return None


def _prune(directory: Path, limit: int) -> None:
    """Removes files, those first that were used longest ago, until at most `limit` bytes remain."""
    files = []
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):  # gone meanwhile
                stat = entry.stat()
                if entry.is_file():
                    files.append((max(stat.st_atime, stat.st_mtime), stat.st_size, entry.path))
    excess = sum(size for _, size, _ in files) - limit
    for _, size, path in sorted(files):
        if excess <= 0:
            break
        with contextlib.suppress(OSError):
            os.unlink(path)
        excess -= size


class Programs(dict[Hashable, Any]):
    """Executables by key. Calling one never compiles; `compile` does, and says so.

    Executables are shared with other `Programs` of the process where jobs have the same identity. `workspace_bytes` are
    those of the device that programs use beside their arguments, results and temporaries; `sizes` names the arguments
    to lower where a program needs more memory than there is.
    """

    def __init__(self, workspace_bytes: int = 0, sizes: str = "max_num_seqs or max_model_len") -> None:
        super().__init__()
        self.workspace_bytes, self.sizes = workspace_bytes, sizes
        self.seconds = 0.0
        self.scratch_bytes = 0  # temporaries of the program that needs most; one runs at a time

    def compile(self, what: str, jobs: Mapping[Any, Job], progress: Progress | None = None) -> None:
        """Compiles what is missing of `jobs`, and calls `progress(done, of)` before all and after each of them.

        XLA works outside the interpreter lock, so the jobs compile side by side. Raises ValueError, and keeps none,
        where one of them would need more memory than the device has.
        """
        compile_together([Wanted(self, what, jobs)], progress)

    def _keep(self, what: str, made: Mapping[Any, Any], scratch: int, seconds: float) -> None:
        self.update(made)
        self.scratch_bytes = max(self.scratch_bytes, scratch)
        self.seconds += seconds
        logger.info("Compiled %s: %d programs in %.1f s, scratch %.2f GiB.", what, len(made), seconds, scratch / 2**30)


class Wanted(NamedTuple):
    """Programs to compile: whose they are, what they are for, and by which keys."""

    programs: Programs
    what: str
    jobs: Mapping[Any, Job]


def compile_together(wanted: Sequence[Wanted], progress: Progress | None = None) -> None:
    """Calls `Programs.compile` for each, all side by side; `seconds` of each are those of all.

    Raises ValueError, and keeps none of any, where a program would need more memory than the device has.
    """
    missing = {
        (number, key): job
        for number, one in enumerate(wanted)
        for key, job in one.jobs.items()
        if key not in one.programs
    }
    if not missing:
        return
    began = time.perf_counter()
    lacking = [number for number in range(len(wanted)) if any(whose == number for whose, _ in missing)]
    for number in lacking:
        logger.info("Compiling %s …", wanted[number].what)
    if progress is not None:
        progress(0, len(missing))

    def build(key: Any) -> Any:
        job = missing[key]
        shared = _identity(job)
        if shared is not None and (executable := _shared.get(shared)) is not None:
            return executable
        executable = _compiled(job)
        if shared is not None:
            _shared[shared] = executable
        return executable

    made: dict[int, dict[Any, Any]] = {number: {} for number in lacking}
    todo, building = list(missing), dict[Future[Any], tuple[int, Any]]()
    workers = min(len(missing), os.cpu_count() or 1, MAX_CONCURRENT_COMPILATIONS)
    pool = ThreadPoolExecutor(workers)
    try:
        while todo or building:
            # No job waits in the pool: after an interruption, or at the interpreter's end, no other one is begun.
            while todo and len(building) < workers:
                key = todo.pop(0)
                building[pool.submit(build, key)] = key
            for built in wait(building, return_when=FIRST_COMPLETED).done:
                number, name = building.pop(built)
                made[number][name] = built.result()
                if progress is not None:
                    progress(len(missing) - len(todo) - len(building), len(missing))
    finally:  # after an interruption: does not wait for what XLA is at
        pool.shutdown(wait=False, cancel_futures=True)
    scratch = {
        number: _require_memory(wanted[number].what, made[number].values(), wanted[number].programs)
        for number in lacking
    }
    seconds = time.perf_counter() - began
    for number in lacking:
        wanted[number].programs._keep(wanted[number].what, made[number], scratch[number], seconds)


@own_settings()  # which are a thread's own
def _compiled(job: Job) -> Any:
    """The executable of a job."""
    # A function of its own: JAX would reuse an earlier trace of the same one, in which no product would be seen.
    function = functools.wraps(job.function)(lambda *args: job.function(*args))
    # One thread traces at a time. More would not be done sooner, as all of it is Python, and would leave less of the
    # interpreter to an engine that runs beside them.
    with _tracing, product_dtypes() as dtypes:
        lowered = jax.jit(function, donate_argnums=job.donate).lower(*job.arguments)
    cublas = leaves_to_cublas(job.cublas, dtypes, jax.default_backend())
    return lowered.compile(CUBLAS_PRODUCTS if cublas else None)


def leaves_to_cublas(asked: bool, dtypes: set[str], backend: str) -> bool:
    """True where cuBLAS multiplies matrices of these dtypes best: some in float8, or bfloat16 alone where `asked`.

    XLA times dozens of Triton products for each one in float8, half a minute, and finds none that is faster. Int8
    weights alone need Triton to be converted on the way.
    """
    in_float8 = FLOAT8.dtype in dtypes and backend == "gpu"
    return in_float8 or (asked and dtypes <= {"bfloat16"})


def _identity(job: Job) -> Hashable:
    """All that an executable depends on: the job, and the process's settings of JAX. None: nothing says."""
    if job.identity is None:
        return None
    shapes, structure = jax.tree.flatten(job.arguments)
    settings = frozenset((name, str(value)) for name, value in jax.config.values.items())
    return job.identity, structure, tuple(shapes), job.donate, job.cublas, settings


def _require_memory(what: str, executables: Iterable[Any], programs: Programs) -> int:
    """Most bytes of temporaries that one of the programs takes.

    Raises ValueError where a program's workspace, arguments, results and temporaries together exceed the device.
    """
    needed, held_then, scratch = 0, 0, 0
    for executable in executables:
        sizes = executable.memory_analysis()
        if sizes is not None:  # a backend need not know
            held = programs.workspace_bytes + sizes.argument_size_in_bytes
            held += sizes.output_size_in_bytes - sizes.alias_size_in_bytes
            scratch = max(scratch, sizes.temp_size_in_bytes)
            needed, held_then = max((needed, held_then), (held + sizes.temp_size_in_bytes, held))
    limit = device_memory()
    if needed > limit:
        raise ValueError(
            f"a program {what} needs {held_then / 2**30:.1f} GiB of weights, KV and state beside a scratch of "
            f"{(needed - held_then) / 2**30:.1f} GiB and the device has {limit / 2**30:.1f} GiB; lower "
            f"{programs.sizes}, or num_pages or gpu_memory_utilization for less KV."
        )
    return scratch


def shown(stack: contextlib.ExitStack, use_tqdm: bool) -> Progress:
    """A listener that shows a line with the programs that are compiled and the seconds, until the stack closes.

    There is none where there is nothing to compile, and none but on a terminal or in a notebook: the line is drawn
    again every second, and a file would keep each.
    """
    bar: Any = None
    wanted = use_tqdm and logger.isEnabledFor(logging.WARNING)  # quiet commands raise the level
    unless_terminal = None if "ipykernel" not in sys.modules else False
    closed = threading.Event()

    def on_report(done: int, total: int) -> None:
        nonlocal bar
        if bar is None:
            from tqdm import tqdm  # a tenth of what the package takes to be imported

            line = "Compiling: {n} of {total} programs, {elapsed}"
            bar = tqdm(total=total, bar_format=line, disable=unless_terminal if wanted else True, mininterval=0)
            stack.enter_context(bar)
            stack.callback(closed.set)
            if not bar.disable:
                threading.Thread(target=redrawn, daemon=True).start()
        bar.update(done - bar.n)

    def redrawn() -> None:
        while not closed.wait(1):
            bar.refresh()

    return on_report


def abstract(tree: Any) -> Any:
    """Shapes, dtypes and, of arrays on several devices, shardings of a pytree of arrays.

    A program for arrays on one device takes them from whichever that is.
    """

    def described(x: Any) -> jax.ShapeDtypeStruct:
        sharding = getattr(x, "sharding", None)
        sharded = sharding is not None and len(sharding.device_set) > 1
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding if sharded else None)

    return jax.tree.map(described, tree)


def step_job(
    function: Callable[..., Any], program: Any, params: Any, state: Any, *others: Any, sharded: Any = None
) -> Job:
    """A decoding step of (params, state, …), which donates its state. All but `params` are abstract.

    `sharded`: the `smcjax.engine.run.sharded_programs.ShardedPrograms` over several devices; None: one.

    On an H200 cuBLAS streams bf16 weights past a verify's rows faster than XLA's Triton products do, which XLA's own
    timing of single products does not see (dev/LOG.md). Products of a few rows are not faster without Triton, and "xla"
    is XLA as it is by itself.
    """
    job = Job(function, (1,), (abstract(params), state, *others))
    if sharded is not None:
        job = sharded.job(job)
    few = state.sequences.length.shape[0] < 8  # sequences
    with implementations(program.implementation):
        by_kernels = active_implementation() != "xla"
    return job._replace(cublas=by_kernels and not few and jax.default_backend() == "gpu")


def delete(arrays: Any) -> None:
    """Frees the arrays' memory, even where other references to them remain."""
    for leaf in jax.tree.leaves(arrays):
        if not leaf.is_deleted():
            leaf.delete()
