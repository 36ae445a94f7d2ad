"""Tests' random weights are those of `smcjax.model.init_params`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smcjax.model import init_params, params
from tests import weights
from tests.helpers import tiny_config

CONFIG = tiny_config(300, qkv_bias=True)  # its embedding is longer than the shortest program draws


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_they_are_the_same_to_the_last_bit(dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert params.init_leaf is weights.init_leaf
    ours, other = (init_params(CONFIG, jax.random.key(seed), dtype) for seed in (3, 4))
    monkeypatch.setattr(params, "init_leaf", weights._init_leaf)
    theirs = init_params(CONFIG, jax.random.key(3), dtype)
    different = 0
    for a, b, c in zip(*map(jax.tree.leaves, (ours, theirs, other)), strict=True):
        assert (a.dtype, a.shape, a.weak_type, a.sharding) == (b.dtype, b.shape, b.weak_type, b.sharding)
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))
        different += bool((np.asarray(a, np.float32) != np.asarray(c, np.float32)).any())
    assert different == 10, "control: another key changes all that is drawn"


def test_a_trace_holds_the_package_s_own_draws() -> None:
    jaxpr = str(jax.make_jaxpr(lambda key: init_params(CONFIG, key))(jax.random.key(0)))
    assert f"f32[{CONFIG.vocab_size},{CONFIG.hidden_size}]" in jaxpr
    assert "erf_inv" in jaxpr
