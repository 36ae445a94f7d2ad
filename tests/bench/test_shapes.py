"""Shapes have as many parameters as the models that they are named after."""

from __future__ import annotations

import math

import jax
import pytest

from smcjax.bench.shapes import SHAPES
from smcjax.cli import bench_options
from smcjax.model.params import param_shapes

# As the models' cards and config.json files say, in millions; Gemma 3 4B without its vision tower.
PUBLISHED = {
    "llama-3.2-1b": 1_236,
    "llama-3.1-8b": 8_030,
    "llama-3.1-70b": 70_554,
    "llama-3.1-405b": 405_853,
    "gemma-3-270m": 268,
    "gemma-3-4b": 3_880,
    "qwen3-0.6b": 596,
    "qwen3-32b": 32_762,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_as_many_parameters_as_published(name: str) -> None:
    leaves = jax.tree.leaves(param_shapes(SHAPES[name], "bfloat16"))  # a tied head is none
    assert sum(math.prod(leaf.shape) for leaf in leaves) / 1e6 == pytest.approx(PUBLISHED[name], abs=0.6)


def test_the_command_line_offers_all_shapes() -> None:
    """It names them by itself, since its help imports no JAX."""
    assert tuple(SHAPES) == bench_options.SHAPES
