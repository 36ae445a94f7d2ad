"""Keys and values of one model, in pages.

One array per layer for keys and one for values, never one stacked array: XLA updates separate donated buffers in
place, and copies a stacked one that a loop indexes. The layout is token-major, so that writing a token is one
contiguous store and a page is one contiguous block.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from smcjax.pallas import Copies, HeadNorms, PendingNorm, copy_all_pages, rotate_and_write


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Per layer: keys and values [P, B, Hkv, D]. Which sequence owns which page: `smcjax.kv.pages`."""

    keys: tuple[Float[Array, "P B Hkv D"], ...]
    values: tuple[Float[Array, "P B Hkv D"], ...]

    @classmethod
    def create(
        cls, *, num_layers: int, num_pages: int, page_size: int, num_kv_heads: int, head_dim: int, dtype: Any
    ) -> KVCache:
        """Zeros. Every page must hold finite numbers from the start, since masked slots are read and discarded."""
        shape = (num_pages, page_size, num_kv_heads, head_dim)
        return cls(
            keys=tuple(jnp.zeros(shape, dtype) for _ in range(num_layers)),
            values=tuple(jnp.zeros(shape, dtype) for _ in range(num_layers)),
        )

    @property
    def page_size(self) -> int:
        """B, tokens a page."""
        return self.keys[0].shape[1]

    def copy_pages(self, copies: Copies) -> KVCache:
        """The copies made in every layer; rows that need none name one page twice. No target is a source."""
        pools = copy_all_pages(self.keys + self.values, copies)
        return KVCache(keys=pools[: len(self.keys)], values=pools[len(self.keys) :])

    def write(
        self,
        layer: int,
        qkv: Float[Array, "R T HHH D"],
        cos: Float[Array, "R T half"],
        sin: Float[Array, "R T half"],
        pages: Int[Array, "R T"],
        slots: Int[Array, "R T"],
        copies: Copies | None = None,
        norms: HeadNorms | None = None,
        pending: PendingNorm | None = None,
    ) -> tuple[Float[Array, "R T H D"], KVCache]:
        """Rotated queries of one layer's fused product, and the cache with its keys and values stored.

        Those of token (r, t) go to slot `slots[r, t]` of page `pages[r, t]`, after the layer's pages are copied:
        `smcjax.pallas.rotate_and_write`.
        """
        q, keys, values = rotate_and_write(
            qkv,
            cos,
            sin,
            self.keys[layer],
            self.values[layer],
            pages,
            slots,
            copies,
            norms,
            pending,
        )
        return q, KVCache(keys=_replace(self.keys, layer, keys), values=_replace(self.values, layer, values))


def _replace(arrays: tuple[jax.Array, ...], index: int, array: jax.Array) -> tuple[jax.Array, ...]:
    return (*arrays[:index], array, *arrays[index + 1 :])
