"""How Native Sparse Attention bears compressed tokens: of which stored positions, by which rotations, in which pages.

    token i = φ(stored_{i·d} … stored_{i·d + l − 1})        born by a forward that writes position i·d + l − 1

φ reads keys and values as pages hold them, new ones among them, and un-rotates keys that are stored rotated. A
compressed key is rotated by its first position. A forward over pages bears few tokens, one of sixteen positions by
default, which `smcjax.pallas.sparse.compress` makes and writes.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from smcjax.kv import TRASH, LayerCache, page_of
from smcjax.model.attention import Projection
from smcjax.model.view import BatchView
from smcjax.pallas.sparse.compress import Births, bear, compressed

COMPRESSED = ("compressed_keys", "compressed_values")


class Bearing:
    """Births by the options that `smcjax.sparse.nsa.NSA` explains and checks."""

    kernel_size: int
    kernel_stride: int
    kv: str

    @property
    def phi(self) -> str:
        """How l stored keys or values become a compressed one, one of `COMPRESSIONS`."""
        return "linear" if self.kv == "shared" else "mlp"

    def source(self, name: str) -> str:
        """The array of keys or values that is compressed."""
        return name if self.kv == "shared" else f"raw_{name}"

    def home(self, starts: Any) -> Any:
        """The position in whose page a compressed token lies that begins at `starts`: its last."""
        return starts + self.kernel_size - 1

    def births(self, view: BatchView) -> tuple[Int[Array, "R N"], Bool[Array, "R N"]]:
        """First positions of the compressed tokens that the new tokens can bear, and which of them they do."""
        size, stride, columns = self.kernel_size, self.kernel_stride, view.positions.shape[1]
        first = view.positions[:, :1]
        column = (size - 1 - first) % stride + stride * jnp.arange((columns - 1) // stride + 1)
        ends = first + column
        pages = jnp.take_along_axis(view.write_pages, jnp.minimum(column, columns - 1), axis=1)
        return ends - (size - 1), (column < columns) & (ends >= size - 1) & (pages != TRASH)

    def bear(self, projection: Projection, cache: LayerCache, view: BatchView) -> LayerCache:
        """The layer's pages, whose new tokens are written, with the compressed ones that these bear."""
        assert projection.weights is not None
        size, table = view.page_size, view.block_table
        starts, born = self.births(view)
        covered, home = starts[..., None] + jnp.arange(self.kernel_size), self.home(starts)

        def pages_of(positions: jax.Array) -> jax.Array:
            return page_of(table, positions.reshape(table.shape[0], -1), size).reshape(positions.shape)

        of_covered, pages, slots = pages_of(covered), pages_of(home), home % size // self.kernel_stride
        stored = cache[self.source("keys")], cache[self.source("values")]
        pools = cache[COMPRESSED[0]], cache[COMPRESSED[1]]
        weights = {name: of for name, of in projection.weights.items() if name.startswith(("position_", "phi_"))}
        births = Births(
            covered=(of_covered * size + covered % size).reshape(-1, self.kernel_size),
            home=(pages * pools[0].shape[1] + slots).reshape(-1),
            is_born=born.reshape(-1),
            turned=_flat(projection.angles(self._positions(starts))) if self._unrotates else None,
            begins=_flat(projection.angles(starts)),
        )
        made = bear(self.phi, weights, stored, pools, births)
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
        return (starts[..., None] + jnp.arange(self.kernel_size)).reshape(starts.shape[0], -1)


def _flat(angles: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines of all rows, one after the other."""
    cos, sin = (x.reshape(-1, x.shape[-1]) for x in angles)
    return cos, sin
