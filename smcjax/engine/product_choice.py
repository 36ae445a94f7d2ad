"""Choice of cuBLAS's algorithm for products with a verify's rows: the fastest of those that XLA comes upon.

XLA times every algorithm of a product once, and prefers the one with least scratch memory among those that are little
slower than the fastest. For products of 10 to 60 µs that is nearly a draw: on an H200 Llama-3.1-8B's gate_up took 62.6
or 59.2 µs for 72 rows, by process, 32 times a cycle. A precision that is asked of bfloat16 operands changes nothing
but that XLA chooses anew for it. So a product is compiled here with several such *hints*, those that got different
algorithms are timed on the model's own weights, and the step is traced with the fastest.

Choices are kept beside the compiled programs, a file each, so another process makes the same and finds them.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import logging
import re
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from smcjax.matmul import AlgorithmHint, Dense, Matmul, algorithm_hints, is_packed
from smcjax.model.params import Params
from smcjax.numerics import key_of

logger = logging.getLogger("smcjax")

MOST_ROWS = 144  # more rows take longer to multiply than to stream the weights past them
HINTS: tuple[AlgorithmHint, ...] = tuple(itertools.product(tuple(jax.lax.Precision), tuple(jax.lax.Precision)))
TRIES = 5  # of these hints; the first is the product as it is
GAIN = 0.98  # of the time without a hint: what is not faster than that is not taken
REPEATS = 5  # timings of each algorithm, whose median counts
CALLS = 8  # of the timed program each
TOGETHER = 24  # products of a timed program, or as many as have results of
RESULT_BYTES = 1 << 28
DIRECTORY = "products"  # in that of compiled programs


class Candidate(Protocol):
    """A product with one hint, compiled."""

    @property
    def algorithm(self) -> str:
        """Name of the algorithm that XLA chose."""
        ...

    def seconds(self) -> float:
        """Seconds that one product takes."""
        ...


class Choice(NamedTuple):
    """The hint that is taken for one product, and why."""

    hint: int  # of HINTS
    algorithm: str
    microseconds: Mapping[str, float]  # by algorithm; empty if there was only one


_chosen: dict[str, Choice] = {}  # by this process


def chosen_hints(params: Params, asked: Iterable[Matmul], options: Mapping[str, Any]) -> dict[Matmul, AlgorithmHint]:
    """Hints for those of the products `asked` that are made with these weights and have at most `MOST_ROWS` rows.

    For a program that XLA compiles with `options`. The first time it compiles and runs some small programs, which
    takes about a second for each product; calls side by side would disturb each other's timings.
    """
    hints: dict[Matmul, AlgorithmHint] = {}
    for what in asked:
        weights = weights_of(params, what)
        if what.rows > MOST_ROWS or not weights:
            continue

        def compiled(hint: AlgorithmHint, what: Matmul = what, weights: list[jax.Array] = weights) -> Candidate:
            return _Compiled(what, weights, hint, options)

        try:
            hint = _choice(what, options, compiled).hint
        except Exception as error:  # no memory left, say: whatever it is, the program works without
            logger.info("%s stays as it is: %s", what, str(error).partition("\n")[0])
            continue
        if hint:
            hints[what] = HINTS[hint]
    return hints


def matmuls_asked(function: Callable[..., Any], *arguments: Any) -> list[Matmul]:
    """The products that tracing the function comes by, each once."""
    asked = _Asked()
    with algorithm_hints(asked):
        jax.eval_shape(lambda *arguments: function(*arguments), *arguments)  # not an earlier trace of the same function
    return list(asked.products)


class _Asked(dict[Matmul, AlgorithmHint]):
    """A mapping without hints that remembers the products that hints were asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.products: dict[Matmul, None] = {}

    def get(self, what: Matmul, default: Any = None) -> Any:
        self.products[what] = None
        return default


def weights_of(params: Params, what: Matmul) -> list[jax.Array]:
    """The matrices that a forward makes this product with.

    Not those with a bias, which XLA adds within the product: that is another one.
    """
    biased = [
        pair
        for layer in params.layers
        for pair in (
            (layer.qkv, layer.qkv_bias),
            (layer.o, layer.o_bias),
            (layer.gate_up, layer.gate_up_bias),
            (layer.down, layer.down_bias),
        )
    ]
    matrices = [matrix for matrix, bias in biased if bias is None]
    if what.result != what.dtype:
        matrices = [params.unembed]
    return [
        matrix
        for matrix in matrices
        if not is_packed(matrix)
        and matrix.shape == (what.outputs, what.inputs)
        and jnp.dtype(matrix.dtype).name == what.dtype
    ]


def choose(compiled: Callable[[AlgorithmHint], Candidate]) -> Choice:
    """Returns the fastest of some hints; of several with one algorithm the first."""
    candidates: dict[str, tuple[int, Candidate]] = {}
    for number, hint in enumerate(HINTS[:TRIES]):
        candidate = compiled(hint)
        candidates.setdefault(candidate.algorithm, (number, candidate))
    usual = next(iter(candidates))
    if len(candidates) == 1:
        return Choice(0, usual, {})
    times: dict[str, list[float]] = {algorithm: [] for algorithm in candidates}
    for _ in range(REPEATS):  # in turns, so that what else changes meanwhile falls on all
        for algorithm, (_, candidate) in candidates.items():
            times[algorithm].append(candidate.seconds())
    medians = {algorithm: 1e6 * statistics.median(seconds) for algorithm, seconds in times.items()}
    best = min(medians, key=lambda algorithm: medians[algorithm])
    if medians[best] > GAIN * medians[usual]:
        best = usual
    return Choice(candidates[best][0], best, medians)


def _choice(what: Matmul, options: Mapping[str, Any], compiled: Callable[[AlgorithmHint], Candidate]) -> Choice:
    """Returns the process's own choice, or an earlier one's if XLA still has that algorithm for it, or a new one."""
    device = jax.devices()[0]
    version = getattr(device.client, "platform_version", "")
    key = str((device.device_kind, version, jax.__version__, sorted(options.items()), *what))
    if key in _chosen:
        return _chosen[key]
    kept = _kept(key)
    if kept is None or (kept.hint and compiled(HINTS[kept.hint]).algorithm != kept.algorithm):
        choice = choose(compiled)
        took = ", ".join(f"{name}: {us:.1f} µs" for name, us in choice.microseconds.items())
        logger.debug("%s: algorithm %s. %s", what, choice.algorithm, took)
        _keep(key, choice)
    else:
        choice = kept
    _chosen[key] = choice
    return choice


def _file(key: str) -> Path | None:
    directory = jax.config.jax_compilation_cache_dir
    if directory is None or "://" in directory:
        return None
    return Path(directory) / DIRECTORY / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"


def _kept(key: str) -> Choice | None:
    """The choice on disk; None if there is none, or nothing that we would have written."""
    path = _file(key)
    try:
        hint, algorithm = json.loads(path.read_text()) if path else (-1, "")
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    whole = isinstance(hint, int) and isinstance(algorithm, str) and 0 <= hint < len(HINTS)
    return Choice(hint, algorithm, {}) if whole else None


def _keep(key: str, choice: Choice) -> None:
    path = _file(key)
    if path is None:
        return
    temporary = path.with_suffix(f".{time.time_ns()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps([choice.hint, choice.algorithm]))
        temporary.replace(path)
    except OSError as error:
        logger.info("The choice of a product is not kept: %s", error)
        with contextlib.suppress(OSError):
            temporary.unlink()


class _Compiled:
    """A program of several such products, each with another matrix as long as there are any."""

    def __init__(self, what: Matmul, weights: list[jax.Array], hint: AlgorithmHint, options: Mapping[str, Any]) -> None:
        size = what.rows * what.outputs * jnp.dtype(what.result).itemsize
        self._what, self._count = what, max(2, min(TOGETHER, RESULT_BYTES // size))
        self._weights = [weights[i % len(weights)] for i in range(self._count)]

        def products(operands: list[tuple[jax.Array, ...]], weights: list[jax.Array]) -> list[jax.Array]:
            return [
                Dense(w)(x, out=what.result, add_to=added[0] if added else None)
                for (x, *added), w in zip(operands, weights, strict=True)
            ]

        # Each has rows of its own, or XLA would make one product of them.
        shapes = tuple(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in self._operands())
        with algorithm_hints({what: hint}):
            self._executable = jax.jit(products).lower([shapes] * self._count, self._weights).compile(dict(options))
        named = re.findall(r'"selected_algorithm":"(-?\d+)"', self._executable.as_text() or "")
        self.algorithm = "/".join(sorted(set(named)))

    def _operands(self) -> list[tuple[tuple[int, int], str]]:
        """Shapes and dtypes beside the matrix."""
        what = self._what
        rows = [((what.rows, what.inputs), what.dtype)]
        return [*rows, ((what.rows, what.outputs), what.result)] if what.added else rows

    def seconds(self) -> float:
        """Seconds that one product takes, among others."""
        keys = [jax.random.fold_in(key_of(0), i) for i in range(self._count)]
        operands = [tuple(jax.random.normal(key, *described) for described in self._operands()) for key in keys]
        jax.block_until_ready(self._executable(operands, self._weights))
        began = time.perf_counter()
        for _ in range(CALLS):
            done = self._executable(operands, self._weights)
        jax.block_until_ready(done)
        return (time.perf_counter() - began) / (CALLS * self._count)
