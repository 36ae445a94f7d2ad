"""A model's memory of its tokens, in pages: keys and values, and whatever else its kinds of attention read.

One array per layer and name, never a stacked one: XLA updates separate donated buffers in place, and copies a stacked
one that a loop indexes. The layout is token-major, so that writing a token is one contiguous store and a page is one
contiguous block.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from smcjax.pallas import Copies, copy_all_pages
from smcjax.pallas.cache.rotate_and_write import TRASH

LayerCache = dict[str, Float[Array, "P entries heads D"]]


class PageArray(NamedTuple):
    """The shape of one array that pages hold, [P, ⌈B/stride⌉, heads, dim].

    Entry i of a sequence stands for the `size` tokens from i·stride on, and lies in the page of the last of them.
    """

    heads: int
    dim: int
    stride: int = 1  # tokens between entries
    size: int = 1  # tokens that an entry stands for

    def entries(self, page_size: int) -> int:
        """Entries of a page of `page_size` tokens, at least one."""
        return -(-page_size // self.stride)

    def count(self, length: int) -> int:
        """Entries that end within the first `length` positions."""
        return max(0, (length - self.size) // self.stride + 1)

    def ends(self, number: int) -> Int[Array, " number"]:
        """The last position of each of the first `number` entries."""
        return jnp.arange(number) * self.stride + self.size - 1

    def ended_at(self, positions: Int[Array, "*shape"]) -> Int[Array, "*shape"]:
        """The entry whose last token stands at each position; −1 where none does."""
        start = positions + 1 - self.size
        return jnp.where((start >= 0) & (start % self.stride == 0), start // self.stride, -1)


@dataclasses.dataclass(frozen=True)
class CacheSpec:
    """The arrays that pages of one layer hold, by name.

    `block` is how many tokens the layer reads together: pages hold whole blocks, or blocks whole pages.
    """

    arrays: Mapping[str, PageArray]
    block: int = 1

    def check_page_size(self, page_size: int) -> None:
        """Raises ValueError for pages of `page_size` tokens that cut the layer's blocks."""
        if page_size % self.block and self.block % page_size:
            raise ValueError(
                f"page_size must be a multiple or a divisor of {self.block}, the block of a kind of attention, "
                f"got {page_size}."
            )

    def page_bytes(self, page_size: int, itemsize: int) -> int:
        """Bytes of a page of `page_size` tokens where a number takes `itemsize`."""
        return sum(array.entries(page_size) * array.heads * array.dim * itemsize for array in self.arrays.values())

    def bytes_of(self, entries: Mapping[str, int], itemsize: int) -> int:
        """Bytes of so many entries of the arrays that are named, where a number takes `itemsize`."""
        return sum(
            count * self.arrays[name].heads * self.arrays[name].dim * itemsize for name, count in entries.items()
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Each layer's arrays by name, [P, …]. Which sequence owns which page: `smcjax.kv.pages`."""

    layers: tuple[LayerCache, ...]
    page_size: int = dataclasses.field(metadata={"static": True})  # B, tokens a page

    @classmethod
    def create(cls, layers: Sequence[CacheSpec], *, num_pages: int, page_size: int, dtype: Any) -> KVCache:
        """Makes a cache of zeros. Pages must hold finite numbers from the start: masked slots are read and discarded.

        Raises ValueError for pages that cut a layer's blocks.
        """
        for spec in layers:
            spec.check_page_size(page_size)

        def zeros(array: PageArray) -> jax.Array:
            return jnp.zeros((num_pages, array.entries(page_size), array.heads, array.dim), dtype)

        pages = ({name: zeros(array) for name, array in spec.arrays.items()} for spec in layers)
        return cls(tuple(pages), page_size)

    @property
    def keys(self) -> tuple[Float[Array, "P B Hkv D"], ...]:
        """Each layer's keys, where all layers have some."""
        return tuple(layer["keys"] for layer in self.layers)

    @property
    def values(self) -> tuple[Float[Array, "P B Hkv D"], ...]:
        """Each layer's values, where all layers have some."""
        return tuple(layer["values"] for layer in self.layers)

    def replace(self, **arrays: Sequence[jax.Array]) -> KVCache:
        """The cache with other arrays of these names, one a layer."""
        layers = [
            {**layer, **{name: of_layers[index] for name, of_layers in arrays.items()}}
            for index, layer in enumerate(self.layers)
        ]
        return dataclasses.replace(self, layers=tuple(layers))

    def write(
        self,
        specs: Sequence[CacheSpec],
        new: Sequence[LayerCache],
        positions: Int[Array, "R C"],
        pages: Int[Array, "R C"],
    ) -> KVCache:
        """Writes the numbers [R, C, heads, D] of tokens at `positions` to `pages`, those of `TRASH` nowhere.

        Of an array whose entries stand for several tokens those are written that end at one of the positions.
        """
        slots, layers = positions % self.page_size, []
        for spec, layer, numbers in zip(specs, self.layers, new, strict=True):
            written = {}
            for name, array in spec.arrays.items():
                home = jnp.where(array.ended_at(positions) >= 0, pages, TRASH)
                entries = numbers[name].astype(layer[name].dtype)
                written[name] = layer[name].at[home, slots // array.stride].set(entries)
            layers.append({**layer, **written})
        return dataclasses.replace(self, layers=tuple(layers))

    def copy_pages(self, copies: Copies) -> KVCache:
        """Makes the copies in every array; rows that need none name one page twice. No target is a source."""
        arrays, tree = jax.tree.flatten(self.layers)
        for shape in {array.shape: None for array in arrays}:
            alike = [index for index, array in enumerate(arrays) if array.shape == shape]
            copied = copy_all_pages(tuple(arrays[index] for index in alike), copies)
            for index, array in zip(alike, copied, strict=True):
                arrays[index] = array
        return dataclasses.replace(self, layers=jax.tree.unflatten(tree, arrays))
