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

    def copy_pages(self, source: Int[Array, " n"], destination: Int[Array, " n"]) -> KVCache:
        """Page `source[i]` into page `destination[i]` in every layer, as if all were read before any is written.

        Entries that need no copy name the trash page on both sides.
        """

        def copy(pages: jax.Array) -> jax.Array:
            return pages.at[destination].set(pages[source])

        return KVCache(keys=tuple(map(copy, self.keys)), values=tuple(map(copy, self.values)))

    def write(
        self,
        layer: int,
        k: Float[Array, "R T Hkv D"],
        v: Float[Array, "R T Hkv D"],
        pages: Int[Array, "R T"],
        offsets: Int[Array, "R T"],
    ) -> KVCache:
        """Stores one layer's keys and values of token (r, t) at slot `offsets[r, t]` of page `pages[r, t]`."""

        def put(array: jax.Array, new: jax.Array) -> jax.Array:
            return array.at[pages, offsets].set(new.astype(array.dtype))

        return KVCache(
            keys=_replace(self.keys, layer, put(self.keys[layer], k)),
            values=_replace(self.values, layer, put(self.values[layer], v)),
        )


def _replace(arrays: tuple[jax.Array, ...], index: int, array: jax.Array) -> tuple[jax.Array, ...]:
    return (*arrays[:index], array, *arrays[index + 1 :])
