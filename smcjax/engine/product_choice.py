"""Which of cuBLAS's algorithms multiplies a verify's rows: the fastest of those that XLA comes upon.

XLA times every algorithm of a product once, and prefers the one with least scratch memory among those that are little
slower than the fastest. For products of 10 to 60 µs that is nearly a draw: on an H200 Llama-3.1-8B's gate_up took 62.6
or 59.2 µs for 72 rows, by process, 32 times a cycle. A precision that is asked of bfloat16 operands changes nothing of
what is computed, but XLA chooses anew for each. So several such *forms* of a product are compiled here, those that got
different algorithms are timed on the model's own weights, and the step is traced with the fastest.

The choice is kept beside the compiled programs, so another process makes the same and finds them.
"""

from __future__ import annotations

import itertools
import json
import logging
import re
import statistics
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from smcjax.model.params import Params
from smcjax.model.quantize import QuantizedMatrix
from smcjax.numerics import Form, Product, product, product_forms

logger = logging.getLogger("smcjax")

MOST_ROWS = 144  # more rows take longer to multiply than to stream the weights past them
FORMS: tuple[Form, ...] = tuple(itertools.product(tuple(jax.lax.Precision), tuple(jax.lax.Precision)))
TRIES = 5  # of these forms; the first is the product as it is
GAIN = 0.98  # of the time without a form: what is not faster than that is not taken
REPEATS = 5  # timings of each algorithm, whose median counts
CALLS = 8  # of the timed program each
TOGETHER = 24  # products of a timed program, or as many as have results of
RESULT_BYTES = 1 << 28
FILE = "product_forms.json"  # in the directory of compiled programs


class Candidate(Protocol):
    """One form of a product, compiled."""

    @property
    def algorithm(self) -> str:
        """What XLA chose for it."""
        ...

    def seconds(self) -> float:
        """How long one product takes."""
        ...


class Choice(NamedTuple):
    """What was found for one product."""

    form: int  # of FORMS
    algorithm: str
    microseconds: Mapping[str, float]  # by algorithm; empty if there was only one


_chosen: dict[str, Choice] = {}  # by this process
_one_at_a_time = threading.Lock()  # timings side by side would disturb each other


def chosen_forms(params: Params, rows: int, options: dict[str, Any]) -> dict[Product, Form]:
    """Forms of the products of `rows` tokens with these weights, in a program that is compiled with `options`.

    Empty where there are more rows than `MOST_ROWS`. The first time it compiles and runs some small programs.
    """
    if rows > MOST_ROWS:
        return {}
    forms: dict[Product, Form] = {}
    with _one_at_a_time:
        for what, weights in products_of(params, rows).items():

            def compiled(form: Form, what: Product = what, weights: list[jax.Array] = weights) -> Candidate:
                return _Compiled(what, weights, form, options)

            try:
                form = _choice(what, compiled).form
                forms |= {what: FORMS[form]} if form else {}
            except jax.errors.JaxRuntimeError as error:  # no memory left, say
                logger.info("Product %s stays as it is: %s", what, str(error).splitlines()[0])
    return forms


def products_of(params: Params, rows: int) -> dict[Product, list[jax.Array]]:
    """The products of a forward of `rows` tokens, each with the matrices that it is made with."""
    found: dict[Product, list[jax.Array]] = {}
    matrices = [(matrix, None) for layer in params.layers for matrix in (layer.qkv, layer.o, layer.gate_up, layer.down)]
    for matrix, result in [*matrices, (params.unembed, "float32")]:
        if not isinstance(matrix, QuantizedMatrix):
            name = jnp.dtype(matrix.dtype).name
            outputs, inputs = matrix.shape
            found.setdefault(Product(rows, outputs, inputs, name, result or name), []).append(matrix)
    return found


def choose(compiled: Callable[[Form], Candidate]) -> Choice:
    """The fastest of some forms; of those with one algorithm the first."""
    candidates: dict[str, tuple[int, Candidate]] = {}
    for number, form in enumerate(FORMS[:TRIES]):
        candidate = compiled(form)
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


def _choice(what: Product, compiled: Callable[[Form], Candidate]) -> Choice:
    """This process's choice, or an earlier one's if XLA still has that algorithm for it, or a new one."""
    key = f"{jax.devices()[0].device_kind}, jax {jax.__version__}: {' '.join(map(str, what))}"
    if key in _chosen:
        return _chosen[key]
    kept = _kept().get(key)
    if kept is None or compiled(FORMS[kept[0]]).algorithm != kept[1]:
        choice = choose(compiled)
        if choice.microseconds:
            took = ", ".join(f"{name}: {us:.1f} µs" for name, us in choice.microseconds.items())
            logger.info("Product %s: of algorithms %s takes %s.", key, took, choice.algorithm)
        _keep(key, choice)
    else:
        choice = Choice(*kept, {})
    _chosen[key] = choice
    return choice


def _file() -> Path | None:
    directory = jax.config.jax_compilation_cache_dir
    return None if directory is None or "://" in directory else Path(directory) / FILE


def _kept() -> dict[str, tuple[int, str]]:
    """Choices on disk; none if there is no file or it is not one of ours."""
    path = _file()
    try:
        read = json.loads(path.read_text()) if path else {}
        return {key: (int(form), str(algorithm)) for key, (form, algorithm) in read.items() if int(form) < len(FORMS)}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _keep(key: str, choice: Choice) -> None:
    path = _file()
    if path is None:
        return
    together = _kept() | {key: (choice.form, choice.algorithm)}
    temporary = path.with_suffix(f".{time.time_ns()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(together, indent=1))
        temporary.replace(path)
    except OSError as error:
        logger.info("The choice of products is not kept: %s", error)


class _Compiled:
    """A program of several such products, each with another matrix as long as there are any."""

    def __init__(self, what: Product, weights: list[jax.Array], form: Form, options: dict[str, Any]) -> None:
        size = what.rows * what.outputs * jnp.dtype(what.result).itemsize
        self.count = max(2, min(TOGETHER, RESULT_BYTES // size))
        self.weights = [weights[i % len(weights)] for i in range(self.count)]
        key, shape = jax.random.key(0), (what.rows, what.inputs)
        # Each has rows of its own, or XLA would make one product of them.
        self.rows = [jax.random.normal(jax.random.fold_in(key, i), shape, what.dtype) for i in range(self.count)]

        def products(rows: list[jax.Array], weights: list[jax.Array]) -> list[jax.Array]:
            return [product(x, w, what.result) for x, w in zip(rows, weights, strict=True)]

        with product_forms({what: form}):
            self.executable = jax.jit(products).lower(self.rows, self.weights).compile(options)
        named = re.findall(r'"selected_algorithm":"(-?\d+)"', self.executable.as_text() or "")
        self.algorithm = "/".join(sorted(set(named)))

    def seconds(self) -> float:
        """How long one product takes, among others."""
        jax.block_until_ready(self.executable(self.rows, self.weights))
        began = time.perf_counter()
        for _ in range(CALLS):
            done = self.executable(self.rows, self.weights)
        jax.block_until_ready(done)
        return (time.perf_counter() - began) / (CALLS * self.count)
