"""Which form of a product a step is traced with: forms compute the same, and the fastest algorithm is found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smcjax.bench.shapes import SHAPES
from smcjax.engine import product_choice
from smcjax.engine.product_choice import FORMS, Choice, choose, chosen_forms, products_of
from smcjax.engine.programs import CUBLAS_PRODUCTS, Job, Programs
from smcjax.model.params import init_params
from smcjax.model.quantize import quantize_params
from smcjax.numerics import Form, Product, product, product_forms

ROWS = 6
PRODUCT = Product(ROWS, 32, 16, "bfloat16", "bfloat16")


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
    """What compiles the forms, in their order, to these algorithms; and all that it made."""
    made: list[Fake] = []

    def compiled(form: Form) -> Fake:
        name = algorithms[FORMS.index(form)] if FORMS.index(form) < len(algorithms) else algorithms[-1]
        made.append(Fake(name, microseconds[name]))
        return made[-1]

    return compiled, made


def test_every_form_gives_the_same_bits(operands: tuple[jax.Array, jax.Array]) -> None:
    plain = product(*operands)
    assert plain.shape == (2, 3, 32)
    assert plain.dtype == jnp.bfloat16
    for form in FORMS:
        with product_forms({PRODUCT: form}):
            np.testing.assert_array_equal(product(*operands), plain)


def test_a_form_is_for_its_product_only(operands: tuple[jax.Array, jax.Array]) -> None:
    x, weight = operands

    def precisions(x: jax.Array, result: Any = None) -> Any:
        jaxpr = jax.make_jaxpr(lambda x: product(x, weight, result))(x)
        return jaxpr.eqns[-1].params["precision"]

    form = FORMS[5]
    with product_forms({PRODUCT: form}):
        assert precisions(x) == form
        assert precisions(x[:1]) is None
        assert precisions(x, jnp.float32) is None
    assert precisions(x) is None


def test_float32_products_are_full_float32() -> None:
    x = jnp.ones((2, 16))
    jaxpr = jax.make_jaxpr(lambda x: product(x, jnp.ones((32, 16))))(x)
    assert jaxpr.eqns[-1].params["precision"] == (jax.lax.Precision.HIGHEST,) * 2


def test_a_program_is_traced_with_the_forms_of_its_job(operands: tuple[jax.Array, jax.Array]) -> None:
    """Also if the same function was traced before."""
    asked = []

    def function(x: jax.Array, weight: jax.Array) -> jax.Array:
        jaxpr = jax.make_jaxpr(lambda x, weight: product(x, weight))(x, weight)
        asked.append(jaxpr.eqns[-1].params["precision"])
        return product(x, weight)

    jax.eval_shape(function, *operands)
    programs = Programs()
    for number, form in enumerate((FORMS[3], FORMS[7])):
        programs.compile("a product", {number: Job(function, (), operands, forms={PRODUCT: form})})
        np.testing.assert_array_equal(programs[number](*operands), product(*operands))
    assert asked == [None, FORMS[3], FORMS[7]]


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
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of choices, of a process that has made none yet."""
    monkeypatch.setattr(product_choice, "_file", lambda: tmp_path / "cache" / "forms.json")
    monkeypatch.setattr(product_choice, "_chosen", {})
    return tmp_path / "cache" / "forms.json"


def test_another_process_makes_the_same_choice(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = product_choice._choice(PRODUCT, fakes("0", "1", **{"0": 60.0, "1": 50.0})[0])
    assert first.form == 1
    compiled, made = fakes("9", **{"9": 1.0})
    assert product_choice._choice(PRODUCT, compiled) == first
    assert not made  # this process knows

    monkeypatch.setattr(product_choice, "_chosen", {})
    compiled, made = fakes("1", "1", **{"1": 70.0})
    assert product_choice._choice(PRODUCT, compiled)[:2] == (1, "1")
    assert len(made) == 1
    assert not made[0].timed


def test_a_choice_whose_algorithm_is_another_now_is_made_again(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    product_choice._choice(PRODUCT, fakes("0", "1", **{"0": 60.0, "1": 50.0})[0])
    monkeypatch.setattr(product_choice, "_chosen", {})
    again = product_choice._choice(PRODUCT, fakes("1", "2", **{"1": 60.0, "2": 70.0})[0])
    assert again[:2] == (0, "1")
    assert list(json.loads(kept.read_text()).values()) == [[0, "1"]]


@pytest.mark.parametrize("content", ["", "{", "[1, 2]", '{"a": 1}', '{"a": [99, "0"]}', '{"a": ["x", "0"]}'])
def test_a_file_that_is_not_ours_is_none(kept: Path, content: str) -> None:
    kept.parent.mkdir()
    kept.write_text(content)
    assert product_choice._choice(PRODUCT, fakes("0", **{"0": 1.0})[0])[:2] == (0, "0")
    assert list(json.loads(kept.read_text()).values()) == [[0, "0"]]


def test_the_products_of_a_forward() -> None:
    config = SHAPES["tiny-target"]
    params = init_params(config, jax.random.key(0), jnp.bfloat16)
    found = products_of(params, ROWS)
    assert sum(len(matrices) for matrices in found.values()) == 4 * config.num_layers + 1
    assert {what.rows for what in found} == {ROWS}
    assert {what.result for what in found} == {"bfloat16", "float32"}
    assert all(matrix.shape == (what.outputs, what.inputs) for what, some in found.items() for matrix in some)
    assert not products_of(quantize_params(params), ROWS)
    assert chosen_forms(params, product_choice.MOST_ROWS + 1, CUBLAS_PRODUCTS) == {}


@pytest.mark.gpu
def test_a_form_is_chosen_on_a_gpu(kept: Path) -> None:
    what = Product(72, 4096, 2048, "bfloat16", "bfloat16")
    weights = [jax.random.normal(jax.random.key(i), (4096, 2048), jnp.bfloat16) for i in range(16)]

    def compiled(form: Form) -> product_choice._Compiled:
        return product_choice._Compiled(what, weights, form, CUBLAS_PRODUCTS)

    choice = product_choice._choice(what, compiled)
    assert choice.algorithm.isdigit()
    assert compiled(FORMS[choice.form]).algorithm == choice.algorithm
    assert 3e-6 < compiled(FORMS[choice.form]).seconds() < 1e-3
