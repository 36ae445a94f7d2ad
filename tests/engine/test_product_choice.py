"""Which hint of a product a step is traced with: hints compute the same, and the fastest algorithm is found."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smcjax import smc
from smcjax.bench.shapes import SHAPES
from smcjax.engine import product_choice
from smcjax.engine import programs as programs_module
from smcjax.engine.product_choice import HINTS, Choice, choose, chosen_hints, matmuls_asked, weights_of
from smcjax.engine.programs import CUBLAS_PRODUCTS, Job, Programs, step_job
from smcjax.matmul import AlgorithmHint, Dense, Matmul, algorithm_hints
from smcjax.model.decoder import logits
from smcjax.model.params import Params, init_params
from smcjax.model.quantize import quantize_params
from tests.helpers import Ask, batch

ROWS = 6
PRODUCT = Matmul(ROWS, 32, 16, "bfloat16", "bfloat16")


@pytest.fixture
def operands() -> tuple[jax.Array, jax.Array]:
    keys = jax.random.split(jax.random.key(0))
    return jax.random.normal(keys[0], (2, 3, 16), jnp.bfloat16), jax.random.normal(keys[1], (32, 16), jnp.bfloat16)


class Fake:
    """A candidate that takes this long."""

    def __init__(self, algorithm: str, microseconds: float) -> None:
        self.algorithm = algorithm
        self._microseconds = microseconds
        self.timed = 0

    def seconds(self) -> float:
        self.timed += 1
        return self._microseconds * 1e-6


def fakes(*algorithms: str, **microseconds: float) -> tuple[Any, list[Fake]]:
    """Returns a fake compiler that turns the hints, in order, into `algorithms`, and the list of all it has made."""
    made: list[Fake] = []

    def compiled(hint: AlgorithmHint) -> Fake:
        name = algorithms[HINTS.index(hint)] if HINTS.index(hint) < len(algorithms) else algorithms[-1]
        made.append(Fake(name, microseconds[name]))
        return made[-1]

    return compiled, made


def test_a_program_is_traced_with_the_forms_of_its_job(operands: tuple[jax.Array, jax.Array]) -> None:
    """Also if the same function was traced before."""
    asked = []

    def function(x: jax.Array, weight: jax.Array) -> jax.Array:
        jaxpr = jax.make_jaxpr(lambda x, weight: Dense(weight)(x))(x, weight)
        asked.append(jaxpr.eqns[-1].params["precision"])
        return Dense(weight)(x)

    jax.eval_shape(function, *operands)
    programs = Programs()
    for number, hint in enumerate((HINTS[3], HINTS[7])):
        programs.compile("a product", {number: Job(function, (), operands, hints=lambda hint=hint: {PRODUCT: hint})})
        np.testing.assert_array_equal(programs[number](*operands), Dense(operands[1])(operands[0]))
    assert asked == [None, HINTS[3], HINTS[7]]


def test_the_fastest_algorithm_is_chosen() -> None:
    compiled, _ = fakes("0", "0", "4", "1", "4", **{"0": 62.0, "1": 59.0, "4": 61.0})
    assert choose(compiled) == Choice(
        3, "1", {"0": pytest.approx(62.0), "1": pytest.approx(59.0), "4": pytest.approx(61.0)}
    )


def test_what_is_hardly_faster_is_not_taken() -> None:
    compiled, _ = fakes("0", "1", **{"0": 60.0, "1": 59.5})
    assert choose(compiled)[:2] == (0, "0")


def test_one_algorithm_is_not_timed() -> None:
    compiled, made = fakes("2", **{"2": 60.0})
    assert choose(compiled) == Choice(0, "2", {})
    assert not any(candidate.timed for candidate in made)


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where choices are kept, of a process that has made none yet."""
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "cache"))
    monkeypatch.setattr(product_choice, "_chosen", {})
    yield tmp_path / "cache" / product_choice.DIRECTORY
    jax.config.update("jax_compilation_cache_dir", before)


def chosen(compiled: Any, what: Matmul = PRODUCT, **options: Any) -> Choice:
    return product_choice._choice(what, options, compiled)


def test_another_process_makes_the_same_choice(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = chosen(fakes("0", "1", **{"0": 60.0, "1": 50.0})[0])
    assert first.hint == 1
    compiled, made = fakes("9", **{"9": 1.0})
    assert chosen(compiled) == first
    assert not made  # this process knows

    monkeypatch.setattr(product_choice, "_chosen", {})
    compiled, made = fakes("1", "1", **{"1": 70.0})
    assert chosen(compiled) == Choice(1, "1", {})
    assert len(made) == 1
    assert not made[0].timed


def test_a_choice_whose_algorithm_is_another_now_is_made_again(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen(fakes("0", "1", **{"0": 60.0, "1": 50.0})[0])
    monkeypatch.setattr(product_choice, "_chosen", {})
    assert chosen(fakes("1", "2", **{"1": 60.0, "2": 70.0})[0])[:2] == (0, "1")
    (path,) = kept.iterdir()
    assert json.loads(path.read_text()) == [0, "1"]


def test_each_product_and_option_has_a_choice_of_its_own(kept: Path) -> None:
    for what, options in ((PRODUCT, {}), (PRODUCT, {"a": 1}), (PRODUCT._replace(rows=7), {})):
        compiled, made = fakes("0", **{"0": 60.0})
        chosen(compiled, what, **options)
        assert made
    assert len(list(kept.iterdir())) == 3


def test_the_product_as_it_is_needs_no_look(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen(fakes("0", **{"0": 60.0})[0])
    monkeypatch.setattr(product_choice, "_chosen", {})
    compiled, made = fakes("1", **{"1": 60.0})
    assert chosen(compiled).hint == 0
    assert not made


@pytest.mark.parametrize(
    "content", ["", "{", "[1]", '{"a": 1}', '[99, "0"]', '[-1, "0"]', '[1e999, "0"]', '["x", "0"]', "[" * 100_000]
)
def test_a_file_that_is_not_ours_is_none(kept: Path, monkeypatch: pytest.MonkeyPatch, content: str) -> None:
    chosen(fakes("0", **{"0": 1.0})[0])
    (path,) = kept.iterdir()
    path.write_text(content)
    monkeypatch.setattr(product_choice, "_chosen", {})
    assert chosen(fakes("0", "1", **{"0": 60.0, "1": 50.0})[0]).hint == 1
    assert json.loads(path.read_text()) == [1, "1"]


@pytest.mark.parametrize("directory", [None, "gs://bucket/cache", "/proc/nowhere"])
def test_choices_need_no_disk(kept: Path, directory: str | None) -> None:
    jax.config.update("jax_compilation_cache_dir", directory)
    assert chosen(fakes("0", "1", **{"0": 60.0, "1": 50.0})[0]).hint == 1
    assert not kept.exists()


def test_forms_of_what_a_program_asks_for(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not of products that it does not make, of other weights, of many rows, or where trying fails."""
    config = SHAPES["tiny-target"]
    params = init_params(config, jax.random.key(0), jnp.bfloat16)
    tokens = jax.ShapeDtypeStruct((2, 3), jnp.int32)

    def forward(params: Params, tokens: jax.Array) -> jax.Array:
        return logits(config, params, tokens)

    asked = matmuls_asked(forward, params, tokens)
    assert len(asked) == len(set(asked)) >= 4
    assert {what.rows for what in asked} == {6}
    assert sum(len(weights_of(params, what)) for what in asked) == 4 * config.num_layers + 1

    tried: list[Matmul] = []

    def compiled(what: Matmul, weights: Any, hint: AlgorithmHint, options: Any) -> Fake:
        assert options == CUBLAS_PRODUCTS
        assert all(matrix.shape == (what.outputs, what.inputs) for matrix in weights)
        tried.append(what)
        if what.result == "float32":
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory\nand much more")
        return Fake(*(("1", 50.0) if hint == HINTS[2] else ("0", 60.0)))

    monkeypatch.setattr(product_choice, "_Compiled", compiled)
    others = [what._replace(rows=product_choice.MOST_ROWS + 1) for what in asked]
    others += [what._replace(outputs=what.outputs + 1) for what in asked]
    hints = chosen_hints(params, [*asked, *others], CUBLAS_PRODUCTS)
    assert hints == {what: HINTS[2] for what in asked if what.result != "float32"}
    assert set(tried) == set(asked)
    assert matmuls_asked(forward, params, tokens) == asked  # whatever was traced before

    layers = tuple(dataclasses.replace(layer, qkv_bias=layer.qkv[:, 0]) for layer in params.layers)
    biased = dataclasses.replace(params, layers=layers)
    assert sum(len(weights_of(biased, what)) for what in asked) == 3 * config.num_layers + 1
    assert not any(weights_of(quantize_params(params), what) for what in asked)


def test_a_step_is_compiled_with_cublas_and_chosen_hints(monkeypatch: pytest.MonkeyPatch) -> None:
    config = SHAPES["tiny-target"]
    program = smc.Program(smc.SMC(n_particles=8, gamma=2), config, config, max_model_len=32)
    one = init_params(config, jax.random.key(0), jnp.bfloat16)
    params = smc.PairParams(one, one)
    prompts, requests = batch([Ask((1, 2, 3), 4)], config.vocab_size, 32)
    state = jax.eval_shape(lambda params: smc.init(program, params, prompts, requests), params)

    def step(params: Any, state: Any) -> Any:
        return smc.step(program, params, state)

    plain = step_job(step, program, params, state)
    assert (plain.options, plain.hints()) == (None, {})  # on a CPU
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(programs_module, "uses_kernels", lambda: True)
    monkeypatch.setattr(programs_module, "chosen_hints", lambda params, asked, options: dict.fromkeys(asked, options))
    job = step_job(step, program, params, state)
    assert job.options == CUBLAS_PRODUCTS
    assert {what.rows for what in job.hints()} >= {8 * 3}
    assert step_job(step, program, smc.PairParams(quantize_params(one), one), state).options is None
    # Int8 that kernels multiply is none of XLA's business.
    of_target = step_job(lambda params, _: logits(config, params.target, prompts), program, params, state)
    half = smc.PairParams(one, quantize_params(one))
    assert step_job(of_target.function, program, half, state).options == CUBLAS_PRODUCTS
    assert step_job(step, program, half, state).options is None


@pytest.mark.parametrize("added", [False, True])
def test_candidates_are_compiled_and_timed(added: bool) -> None:
    what = Matmul(ROWS, 32, 16, "bfloat16", "bfloat16", added)
    weights = [jax.random.normal(jax.random.key(i), (32, 16), jnp.bfloat16) for i in range(3)]
    candidate = product_choice._Compiled(what, weights, HINTS[1], {})
    assert 0 < candidate.seconds() < 1


@pytest.mark.gpu
@pytest.mark.parametrize("added", [False, True])
def test_a_hint_is_chosen_on_a_gpu(kept: Path, added: bool) -> None:
    what = Matmul(72, 4096, 2048, "bfloat16", "bfloat16", added)
    weights = [jax.random.normal(jax.random.key(i), (4096, 2048), jnp.bfloat16) for i in range(16)]

    def compiled(hint: AlgorithmHint) -> product_choice._Compiled:
        return product_choice._Compiled(what, weights, hint, CUBLAS_PRODUCTS)

    choice = chosen(compiled, what)
    assert choice.algorithm.isdigit()
    assert compiled(HINTS[choice.hint]).algorithm == choice.algorithm
    assert 3e-6 < compiled(HINTS[choice.hint]).seconds() < 1e-3
    x = jax.random.normal(jax.random.key(99), (72, 2048), jnp.bfloat16)
    exact = np.asarray(x, np.float64) @ np.asarray(weights[0], np.float64).T
    for hint in HINTS[: product_choice.TRIES]:
        with algorithm_hints({what: hint}):
            got = jax.jit(lambda x, w: Dense(w)(x)).lower(x, weights[0]).compile(CUBLAS_PRODUCTS)(x, weights[0])
        # f32 sums of 2,048 terms, then one rounding to bf16
        np.testing.assert_allclose(np.asarray(got, np.float64), exact, rtol=2.0**-8, atol=2048 * 2.0**-24 * 64)
