"""KV without a prompt's forward: random numbers where there were zeros, in no more memory than those took."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from smcjax.bench import models


def test_random_memory_gives_up_each_array_before_it_makes_the_next() -> None:
    """An array that is no KV stays as it is, and two arrays of a shape have different numbers."""
    pages, table = [jnp.zeros((50, 16, 2, 8), jnp.bfloat16) for _ in range(2)], jnp.arange(7)
    made = models.random_memory({"keys": pages[0], "values": pages[1], "table": table})
    assert made["table"] is table
    assert all(page.is_deleted() for page in pages)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), made["keys"]) == ((50, 16, 2, 8), jnp.bfloat16)
    keys, values = (np.asarray(made[name], np.float32) for name in ("keys", "values"))
    assert abs(keys.std() - 1) < 0.05
    assert np.abs(keys - values).max() > 1
