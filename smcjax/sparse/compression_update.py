"""The compression update of Native Sparse Attention: computes compressed tokens as they become complete.

    token i = φ(stored_{i·d} … stored_{i·d + l − 1})        complete once a forward has written position i·d + l − 1

φ reads keys and values from pages, new ones included, and un-rotates keys that are stored rotated. A compressed key is
rotated by its first position. A forward over pages completes few tokens, by default one of sixteen positions;
`smcjax.pallas.sparse.compress` computes and writes them.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from smcjax.kv import TRASH, LayerCache, page_of
from smcjax.model.attention import Projection
from smcjax.model.view import BatchView
from smcjax.pallas.sparse.compress import CompressionUpdate, compressed, update_compressed

COMPRESSED = ("compressed_keys", "compressed_values")


class Compressor:
    """Compresses keys and values by the options that `smcjax.sparse.nsa.NSA` documents and checks."""

    kernel_size: int
    kernel_stride: int
    kv: str

    @property
    def phi(self) -> str:
        """The compression of l stored keys or values to one: one of `COMPRESSIONS`."""
        return "linear" if self.kv == "shared" else "mlp"

    def source(self, name: str) -> str:
        """The array of keys or values that is compressed."""
        return name if self.kv == "shared" else f"raw_{name}"

    def home(self, starts: Any) -> Any:
        """The last position of a compressed token that begins at `starts`. The token lies in that position's page."""
        return starts + self.kernel_size - 1

    def new_compressed_tokens(self, view: BatchView) -> tuple[Int[Array, "R N"], Bool[Array, "R N"]]:
        """First positions of the compressed tokens that the new tokens may complete, and which are complete."""
        size, stride, columns = self.kernel_size, self.kernel_stride, view.positions.shape[1]
        first = view.positions[:, :1]
        column = (size - 1 - first) % stride + stride * jnp.arange((columns - 1) // stride + 1)[None]
        ends = first + column
        pages = jnp.take_along_axis(view.write_pages, jnp.minimum(column, columns - 1), axis=1)
        return ends - (size - 1), (column < columns) & (ends >= size - 1) & (pages != TRASH)

    def update_compressed(self, projection: Projection, cache: LayerCache, view: BatchView) -> LayerCache:
        """Writes the newly complete compressed tokens to the layer's pages, which hold the new tokens already."""
        assert projection.weights is not None
        size, table = view.page_size, view.block_table
        starts, is_complete = self.new_compressed_tokens(view)
        covered, home = starts[..., None] + jnp.arange(self.kernel_size)[None, None], self.home(starts)

        def pages_of(positions: jax.Array) -> jax.Array:
            return page_of(table, positions.reshape(table.shape[0], -1), size).reshape(positions.shape)

        of_covered, pages, slots = pages_of(covered), pages_of(home), home % size // self.kernel_stride
        stored = cache[self.source("keys")], cache[self.source("values")]
        pools = cache[COMPRESSED[0]], cache[COMPRESSED[1]]
        weights = {name: of for name, of in projection.weights.items() if name.startswith(("position_", "phi_"))}
        update = CompressionUpdate(
            covered=(of_covered * size + covered % size).reshape(-1, self.kernel_size),
            home=(pages * pools[0].shape[1] + slots).reshape(-1),
            is_complete=is_complete.reshape(-1),
            turned=_flat(projection.angles(self._positions(starts))) if self._unrotates else None,
            begins=_flat(projection.angles(starts)),
        )
        made = update_compressed(self.phi, weights, stored, pools, update)
        return {**cache, **dict(zip(COMPRESSED, made, strict=True))}

    def compressed(
        self, projection: Projection, raw: dict[str, Float[Array, "R N l Hkv D"]], starts: Int[Array, "_ N"]
    ) -> tuple[Float[Array, "R N Hkv D"], Float[Array, "R N Hkv D"]]:
        """Compressed keys and values, f32, of stored ones that begin at positions `starts`."""
        assert projection.weights is not None
        turned = projection.angles(self._positions(starts)) if self._unrotates else None
        stored = raw["keys"], raw["values"]
        return compressed(self.phi, projection.weights, *stored, turned, projection.angles(starts))

    @property
    def _unrotates(self) -> bool:
        """True where stored keys are rotated: φ reads them unrotated."""
        return self.kv == "shared"

    def _positions(self, starts: Int[Array, "_ N"]) -> Int[Array, "_ N·l"]:
        """The positions that compressed tokens stand for, one token after the other."""
        return (starts[..., None] + jnp.arange(self.kernel_size)[None, None]).reshape(starts.shape[0], -1)


def _flat(angles: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines of all rows, one after the other."""
    cos, sin = (x.reshape(-1, x.shape[-1]) for x in angles)
    return cos, sin
