"""Which shapes the persistent decode step takes, and how its products divide."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import pytest

from smcjax.pallas.decode_step import shape as decode_shape

PAGE = 16
LLAMA_1B: dict[str, Any] = {
    "hidden": 2048,
    "ffn": 8192,
    "heads": 32,
    "kv_heads": 8,
    "dim": 64,
    "vocab": 128256,
    "eps": 1e-5,
    "groups": 1,
    "rows": 8,
    "columns": 1,
    "page_size": PAGE,
    "prefetches": False,
}


@pytest.mark.parametrize("ffn", [8192, 11008, 14336])
def test_products_through_the_same_code(ffn: int) -> None:
    """A site's units cover the rows of both of its products once, also where one of them could be divided finer."""
    terms: dict[str, Any] = {"hidden": 4096, "heads": 32, "kv_heads": 8, "dim": 128, "vocab": 32000, "eps": 1e-5}
    shape = decode_shape.make_shape(**terms, ffn=ffn, groups=1, rows=8, columns=1, page_size=PAGE, prefetches=True)
    assert decode_shape.supports(shape, jnp.bfloat16)
    rows = {"qkv": 48 * 128, "o": 4096, "gate_up": 2 * ffn, "down": 4096, "head": 32000}
    depths = {"qkv": 4096, "o": 4096, "gate_up": 4096, "down": ffn, "head": 4096}
    for site in shape.sites().values():
        for which, name in enumerate(site.names):
            units = site.pick(which, lambda product: product.units)
            starts = sorted(int(row) for unit in range(units) for row in site.rows(which, unit))
            assert starts == list(range(0, rows[name], decode_shape.TILE))
            steps, split = site.pick(which, lambda product: product.steps), site.split
            assert steps * split * 128 == depths[name]


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize(
    "taken",
    [{}, {"groups": 4}, {"columns": 2}, {"rows": 16}, {"page_size": 64}, {"prefetches": True}, {"vocab": 32000}],
    ids=str,
)
def test_what_is_taken(taken: dict[str, Any], int8: bool) -> None:
    assert decode_shape.supports(decode_shape.make_shape(**LLAMA_1B | taken, int8=int8), jnp.bfloat16)


@pytest.mark.parametrize(
    "refused",
    [
        {"dim": 32},
        {"hidden": 2048 + 128},  # not whole tiles for both halves of a product's inner dimension
        {"ffn": 8192 + 128},
        {"vocab": 128256 + 16},
        {"hidden": 1024, "ffn": 1024, "heads": 8, "groups": 5},  # 40 tokens
        {"rows": 32},  # 128 queries a key-value head
        {"heads": 16, "kv_heads": 16, "rows": 1},  # a query of 64 elements a head
        {"rows": 3},  # 12 queries a head
        {"groups": 17, "rows": 1},  # 136 pairs of a group and a head, for 132 blocks
        {"page_size": 4},
        {"page_size": 24},
        {"page_size": 128},
        {"hidden": 256},  # down's activations neither have the room of x nor stream past a single unit
    ],
    ids=str,
)
def test_what_is_refused(refused: dict[str, Any]) -> None:
    assert not decode_shape.supports(decode_shape.make_shape(**LLAMA_1B | refused), jnp.bfloat16)


def test_refused_otherwise() -> None:
    shape = decode_shape.make_shape(**LLAMA_1B)
    assert not decode_shape.supports(shape, jnp.float32)
    assert not decode_shape.supports(dataclasses.replace(shape, ring=3, in_flight=2), jnp.bfloat16)
    assert not decode_shape.supports(dataclasses.replace(shape, ring=5, in_flight=6), jnp.bfloat16)
