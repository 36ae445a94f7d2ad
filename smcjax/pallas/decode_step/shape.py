"""The static side of the persistent decode step: which shapes it takes, and how its products divide among blocks."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

from smcjax.device import HOPPER
from smcjax.pallas.mosaic.compat import pl
from smcjax.pallas.mosaic.tiles import FEATURES
from smcjax.pallas.mosaic.wgmma import QUERIES

BLOCKS = HOPPER.multiprocessors  # one each; all must be resident at once
CHUNK = 64  # KV slots that attention multiplies at once: of one task, or of several single pages
DEPTH = 128  # inner elements of one tile of activations, and of one of 64 rows of bf16 weights
WEIGHT_TILE = 64 * DEPTH * 2  # bytes, of int8 weights twice as many elements
MAX_TOKENS = 32
BESIDE = 4 << 10  # bytes of a block's shared memory for barriers and alignment
TILE = FEATURES


def padded_tokens(count: int) -> int:
    """M for this many tokens, at least eight: a power of two, as each thread has M/8 elements of a tile."""
    return max(8, 1 << (count - 1).bit_length())


@dataclasses.dataclass(frozen=True)
class Shape:
    """The static facts of a step. M `tokens` = G `groups` · `group_tokens`, padded to a power of two."""

    hidden: int  # E
    ffn: int  # F
    heads: int  # H
    kv_heads: int  # Hkv
    dim: int  # D
    vocab: int  # V
    eps: float
    tokens: int
    groups: int
    rows: int  # N, of a group
    group_tokens: int  # N · tokens a row
    page_size: int
    prefetches: bool  # KV chunks that no step of the cycle writes come with the weights, before attention's turn
    int8: bool  # matrices are int8 with a scale a row, otherwise bf16
    ring: int  # weight tiles in shared memory
    in_flight: int = 4  # of them, on their way: a deeper queue would delay the barriers
    in_flight_early: int = 2  # the same for qkv, o, down, and until gate_up and head have filled the ring once
    kv_in_flight: int = 4  # the same for KV chunks that are prefetched
    kv_ring: int = 2  # chunks of pieces
    blocks: int = BLOCKS

    @property
    def tile_columns(self) -> int:
        """Inner elements of a weight tile."""
        return DEPTH * self.x_tiles

    @property
    def x_tiles(self) -> int:
        """Tiles of activations that face one of weights."""
        return 2 if self.int8 else 1

    @property
    def warpgroups(self) -> int:
        """Warpgroups of a block. Converting int8 takes two, a half of each tile's columns each."""
        return 4 if self.int8 else 3

    @property
    def pieces_per_chunk(self) -> int:
        """Pages that are multiplied at once, where tasks are single ones."""
        return CHUNK // self.page_size

    @property
    def tiles_per_chunk(self) -> int:
        """Places of the weights' ring that keys and values of a chunk take."""
        return 2 * CHUNK * self.dim * 2 // WEIGHT_TILE

    @property
    def tile_arrivals(self) -> int:
        """Copies that fill a place of the weights' ring, at most: four of weights."""
        return max(4, 2 * self.pieces_per_chunk // self.tiles_per_chunk) if self.prefetches else 4

    @property
    def paired(self) -> bool:
        """True where two prefetched chunks are multiplied at once, each by its half of the 64 rows."""
        return self.prefetches and self.query_rows <= QUERIES // 2

    @property
    def query_rows(self) -> int:
        """Rows of the query buffer that a group takes."""
        return self.group_tokens * self.q_step

    @property
    def per_kv_head(self) -> int:
        """Query heads that share a KV head."""
        return self.heads // self.kv_heads

    @property
    def splits(self) -> int:
        """Blocks that share the tasks of one (group, KV head)."""
        return max(1, self.blocks // (self.groups * self.kv_heads))

    @property
    def attention_blocks(self) -> int:
        """Blocks that take part in attention."""
        return self.groups * self.kv_heads * self.splits

    @property
    def queries(self) -> int:
        """Real rows of the 64 of a (group, KV head)."""
        return self.group_tokens * self.per_kv_head

    @property
    def q_step(self) -> int:
        """Rows of the query buffer from one token to the next: a group's rows fill whole tiles of 8."""
        if self.queries % 8 == 0 or self.group_tokens > 1:
            return self.per_kv_head
        return -(-self.per_kv_head // 8) * 8

    @property
    def x_rows(self) -> int:
        """Rows of 128 elements that hold M · E activations."""
        return self.hidden * self.tokens // DEPTH

    def products(self) -> dict[str, Product]:
        """The five matrices."""
        inner = self.heads * self.dim
        half = self.dim // 2

        def head_pair(unit: Any) -> tuple[Any, Any]:  # rows that rotate together
            per_head = half // TILE
            first = lax.div(unit, per_head) * self.dim + lax.rem(unit, per_head) * TILE
            return first, first + half

        columns = self.tile_columns
        of_hidden = functools.partial(Product, self.hidden, columns)
        o, down = _plain((inner, self.ffn), columns, self.hidden, self.blocks)
        return {
            "qkv": of_hidden((self.heads + 2 * self.kv_heads) * half // TILE, head_pair),
            "o": o,
            "gate_up": of_hidden(self.ffn // TILE, lambda unit: (unit * TILE, self.ffn + unit * TILE)),
            "down": down,
            "head": of_hidden(self.vocab // 32, lambda unit: (unit * 32, unit * 32 + TILE)),
        }

    def scale_places(self) -> dict[str, int]:
        """The place among a layer's scales where each int8 matrix's begin; `head` is how many a layer has."""
        rows = {"qkv": (self.heads + 2 * self.kv_heads) * self.dim, "o": self.hidden, "gate_up": 2 * self.ffn}
        sizes = [*rows.values(), self.hidden]
        return dict(zip((*rows, "down", "head"), itertools.accumulate(sizes, initial=0), strict=True))

    def sites(self) -> dict[str, StagePair]:
        """The products by what they read: the normed residual, what the stage before leaves, the last residual."""
        products = self.products()
        sites = {"from_residual": ("qkv", "gate_up"), "from_stage": ("o", "down"), "head": ("head",)}
        return {site: StagePair(names, tuple(products[name] for name in names)) for site, names in sites.items()}


@dataclasses.dataclass(frozen=True)
class Product:
    """y = W·x by units of one or two tiles of 16 rows."""

    depth: int  # inner dimension
    columns: int  # of a weight tile
    units: int
    tiles: Callable[[Any], tuple[Any, ...]]  # unit → first rows of its tiles
    pieces: int = 2  # tiles a unit

    @property
    def split(self) -> int:
        """Parts of the inner dimension that are multiplied at once."""
        return 4 // self.pieces

    @property
    def part(self) -> int:
        """Length of one of the `split` parts."""
        return self.depth // self.split

    @property
    def steps(self) -> int:
        """Weight tiles a unit."""
        return self.part // self.columns

    @property
    def x_steps(self) -> int:
        """Tiles of activations that a unit's weight tiles are multiplied with."""
        return self.part // DEPTH


StageIndex = Any  # an int, or a jax.Array of a number that is known when the kernel runs


def when(condition: Any, do: Callable[[], None]) -> None:
    """`do()` where a condition holds, which may be known when this is traced, as of an int `StageIndex`."""
    if isinstance(condition, bool):
        if condition:
            do()
    else:
        pl.when(condition)(do)


@dataclasses.dataclass(frozen=True)
class StagePair:
    """A place in the code: one or two products of a layer that run through it, which divide their units the same way.

    A step's machine code passes through the instruction caches once a layer, which is why there is one for both.
    """

    names: tuple[str, ...]
    products: tuple[Product, ...]

    def __post_init__(self) -> None:
        assert len({product.pieces for product in self.products}) == 1

    @property
    def pieces(self) -> int:
        """Tiles a unit, in all products of the pair."""
        return self.products[0].pieces

    @property
    def split(self) -> int:
        """Parts of the inner dimension that are multiplied at once, in all products of the pair."""
        return self.products[0].split

    def pick(self, which: StageIndex, of: Callable[[Product], Any]) -> Any:
        """`of` the product that is meant."""
        values = [of(product) for product in self.products]
        if isinstance(which, int):
            return values[which]
        if all(isinstance(value, int) and value == values[0] for value in values):
            return values[0]
        return jnp.where(which == 0, *values)

    def rows(self, which: StageIndex, unit: Any) -> list[Any]:
        """First rows of a unit's tiles."""
        return [self.pick(which, lambda product: product.tiles(unit)[i]) for i in range(self.pieces)]  # noqa: B023

    def single(self, blocks: int) -> bool:
        """True where no block has more than one unit of either product."""
        return max(product.units for product in self.products) <= blocks


def _plain(depths: tuple[int, ...], columns: int, out: int, blocks: int) -> list[Product]:
    """Consecutive rows, by 16 or by 32: whichever loads the busiest block less."""

    def busiest(rows: int) -> int:
        return -(-(out // rows) // blocks) * rows

    if busiest(16) < busiest(32) and all(depth % (4 * columns) == 0 for depth in depths):
        return [Product(depth, columns, out // 16, lambda unit: (unit * 16,), pieces=1) for depth in depths]
    return [Product(depth, columns, out // 32, lambda unit: (unit * 32, unit * 32 + TILE)) for depth in depths]


def supports(shape: Shape, dtype: Any) -> bool:
    """True for shapes and dtypes that the kernel computes."""
    products = shape.products().values()
    return (
        jnp.dtype(dtype) == jnp.bfloat16
        and shape.dim in (64, 128)
        and shape.vocab % 32 == 0
        and shape.tokens <= MAX_TOKENS
        and shape.queries <= QUERIES
        and shape.queries * shape.dim % 128 == 0
        and shape.query_rows % 8 == 0
        and shape.groups * shape.kv_heads <= shape.blocks
        and shape.page_size % 8 == 0
        and CHUNK % shape.page_size == 0
        and all(product.depth % (product.split * product.columns) == 0 for product in products)  # E, H·D and F
        and all(_x_fits(shape, site) for site in shape.sites().values())
        and shape.ring >= max(4, shape.in_flight)  # two chunks of wide heads take four places
    )


def _x_fits(shape: Shape, site: StagePair) -> bool:
    """Activations stay in shared memory, or stream through it past a single unit (then by two slots at least).

    With two tiles to one of weights each of them has slots of its own.
    """
    slots, more = divmod(shape.x_rows // (site.split * shape.tokens), shape.x_tiles)
    fits = all(product.steps <= slots for product in site.products)
    return more == 0 and (fits or (slots >= 2 and site.single(shape.blocks)))


def _turns(shape: Shape) -> int:
    """Bytes of a block in which attention and products take turns: all but the weights' ring."""
    products = shape.x_rows * DEPTH * 2 + (64 * shape.x_tiles + TILE) * shape.tokens * 4
    attention = 2 * shape.kv_ring * CHUNK * shape.dim * 2 + QUERIES * shape.dim * 2
    return max(products, attention)


def make_shape(
    *,
    hidden: int,
    ffn: int,
    heads: int,
    kv_heads: int,
    dim: int,
    vocab: int,
    eps: float,
    groups: int,
    rows: int,
    columns: int,
    page_size: int,
    prefetches: bool,
    int8: bool = False,
    blocks: int = BLOCKS,
    **tuning: Any,
) -> Shape:
    """The shape for `groups` groups of `rows` rows of `columns` new tokens, with as deep a ring as fits."""
    shape = Shape(
        hidden=hidden,
        ffn=ffn,
        heads=heads,
        kv_heads=kv_heads,
        dim=dim,
        vocab=vocab,
        eps=eps,
        tokens=padded_tokens(groups * rows * columns),
        groups=groups,
        rows=rows,
        group_tokens=rows * columns,
        page_size=page_size,
        prefetches=prefetches,
        int8=int8,
        **({"ring": 0} | tuning),
    )
    if shape.ring:
        return dataclasses.replace(shape, blocks=blocks)
    spare = HOPPER.shared_memory - BESIDE - _turns(shape)
    return dataclasses.replace(shape, blocks=blocks, ring=max(0, min(16, spare // WEIGHT_TILE)))
