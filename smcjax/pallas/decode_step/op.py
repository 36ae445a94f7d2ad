"""A decode step as one call: weights, rows and KV in, a token a row and the KV out. The kernel: `kernel.py`."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Num, UInt

from smcjax.pallas.attention.prefix_plan import Sharing, query_limits
from smcjax.pallas.decode_step.conclude import Embedded, conclude, conclude_reference, embedded, padded_candidates
from smcjax.pallas.decode_step.kernel import LAYER_STAGES, launch
from smcjax.pallas.decode_step.operands import Operands
from smcjax.pallas.decode_step.shape import CHUNK, TILE, Shape, make_shape, supports
from smcjax.pallas.dispatch import active_implementation
from smcjax.pallas.mosaic.gumbel_max import DTYPES, Candidates, whole_words
from smcjax.pallas.mosaic.wgmma import QUERIES

__all__ = [
    "CHUNK",
    "LAYER_STAGES",
    "Draws",
    "Embedded",
    "Operands",
    "Shape",
    "Tables",
    "Weights",
    "decode_step",
    "embedded",
    "launch",
    "make_operands",
    "make_shape",
    "make_tables",
    "supports",
    "takes",
    "with_forbidden",
]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Weights:
    """A decoder's weights, layer by layer, without biases and norms of heads.

    All matrices are bf16, or int8 with columns in the order of `smcjax.quantization.interleave`. `embed` is a leaf of
    `Params`, whose rows tokens are looked up in, in bf16 (`smcjax.matmul.matrix`).
    """

    qkv: tuple[Num[Array, "qkv E"], ...]
    o: tuple[Num[Array, "E HD"], ...]
    gate_up: tuple[Num[Array, "FF E"], ...]
    down: tuple[Num[Array, "E F"], ...]
    norms: Float[Array, "norms E"]  # attention and MLP of each layer in turn, and the final one
    embed: Any  # [V, E]
    unembed: Num[Array, "V E"]
    scales: Float[Array, "1 S"] | None = None  # of int8: of each layer's qkv, o, gate_up, down, then of unembed
    peers: Int[Array, "1 addresses"] | None = None  # of devices that divide the layers, of which these are a part


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Draws:
    """The draws of each row's token in each of K steps: argmax of logits / temperature + noise_scale · Gumbel noise."""

    keys: UInt[Array, "K R 2"]  # Threefry key words
    temperature: Float[Array, " R"]
    noise_scale: Float[Array, " R"]  # 1, or 0 to take the likeliest
    forbidden: UInt[Array, "R words"]  # ids of probability 0, 32 to a word, the lowest bit first
    forbids: Bool[Array, "K R"]  # whether they are, at this step


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tables:
    """Operands of K steps that are known before the first (`operands.Operands`)."""

    cos: Float[Array, "KM half"]
    sin: Float[Array, "KM half"]
    slots: Int[Array, " KM"]
    limits: Int[Array, "KG 64"]
    lengths: Int[Array, " KR"]
    noise_keys: UInt[Array, "KM 2"]
    forbids: UInt[Array, "KM 1"]
    inverse_temperature: Float[Array, "M 1"]
    noise_scale: Float[Array, "M 1"]
    forbidden: UInt[Array, "M words"]


class Stepped(NamedTuple):
    """Results of a step."""

    token: Int[Array, " R"]
    logprob: Float[Array, " R"]
    following: Embedded  # where the next step begins, whose only new tokens are these
    residual: Float[Array, "R E"]  # after the last layer, before the final norm: of the token that was last
    keys: tuple[Float[Array, "P B Hkv D"], ...]
    values: tuple[Float[Array, "P B Hkv D"], ...]


def kernel_pages(block_table: Int[Array, "R M"], page_size: int) -> tuple[Int[Array, "R m"], int]:
    """The table and size of pages as the kernel has them: one of several chunks is as many pages side by side."""
    parts = page_size // CHUNK
    if parts < 2 or page_size % CHUNK:
        return block_table, page_size
    each = parts * block_table[:, :, None] + jnp.arange(parts, dtype=block_table.dtype)[None, None]
    return each.reshape(len(block_table), -1), CHUNK


def make_tables(
    shape: Shape,
    cos: Float[Array, "K R T half"],
    sin: Float[Array, "K R T half"],
    positions: Int[Array, "K R T"],
    slots: Int[Array, "K R T"],
    draws: Draws,
) -> Tables:
    """The tables of K steps of T tokens a row; `slots` are page · B + offset of the new tokens' keys and values.

    Angles are f32, positions and slots int32.
    A row that may write nowhere names the trash page; its token means nothing.
    """
    _, rows, columns = positions.shape

    def each(x: jax.Array) -> jax.Array:
        """[K, R, …] to [K, R, T, …]: what is drawn after all but a row's last token is not read."""
        return jnp.repeat(x[:, :, None], columns, axis=2)

    def by_token(x: jax.Array) -> jax.Array:
        """[K, R, T, …] to [K·M, …], zeros beyond a step's last."""
        x = _padded(shape, x.reshape(x.shape[0], rows * columns, *x.shape[3:]))
        return x.reshape(-1, *x.shape[2:])

    lengths = positions[:, :, -1] + 1
    limits = query_limits(
        positions.reshape(-1, columns), lengths.reshape(-1), rows=shape.rows, group=shape.per_kv_head, size=QUERIES
    )
    if shape.paired:  # the second half are the same queries, which see nothing but prefetched chunks
        half = QUERIES // 2
        limits = limits.at[:, half:].set(limits[:, :half] & 31)
    return Tables(
        cos=by_token(cos),
        sin=by_token(sin),
        slots=by_token(slots.astype(jnp.int32)),
        limits=limits,
        lengths=lengths.reshape(-1).astype(jnp.int32),
        noise_keys=by_token(each(draws.keys)),
        forbids=by_token(each(whole_words(draws.forbids)[..., None])),
        inverse_temperature=by_token(each(1.0 / draws.temperature[None, :, None])),
        noise_scale=by_token(each(draws.noise_scale[None, :, None])),
        forbidden=by_token(each(draws.forbidden[None])),
    )


def with_forbidden(shape: Shape, tables: Tables, forbidden: UInt[Array, "R words"]) -> Tables:
    """The tables with other forbidden ids of each row, which are so at every step."""
    columns = shape.group_tokens // shape.rows
    words = _padded(shape, jnp.repeat(forbidden, columns, axis=0)[None])[0]
    return dataclasses.replace(tables, forbidden=words, forbids=jnp.full_like(tables.forbids, 0xFFFFFFFF))


def _padded(shape: Shape, x: jax.Array) -> jax.Array:
    """[K, R·T, …] to [K, M, …]."""
    missing = shape.tokens - x.shape[1]
    return jnp.pad(x, [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2)) if missing else x


def takes(shape: Shape, dtype: Any) -> bool:
    """True where the kernel computes steps of this shape now, with an embedding of this dtype.

    No reference is here: the layers of a model, one by one, compute what the kernel does not take.
    """
    return active_implementation() == "mosaic" and supports(shape, dtype)


@functools.partial(jax.jit, static_argnames=("shape", "interpret"))
def decode_step(
    shape: Shape,
    weights: Weights,
    begin: Embedded,
    step: Int[Array, ""] | int,
    tables: Tables,
    sharing: Sharing,
    keys: tuple[Float[Array, "P B Hkv D"], ...],
    values: tuple[Float[Array, "P B Hkv D"], ...],
    *,
    interpret: Any = None,
) -> Stepped:
    """Next token of each row after its T new ones, its log-probability under softmax(logits / temperature), and the KV.

    `begin` is the new tokens, row by row: `embedded`, or what an earlier step says of those that it drew. `step` from 0
    to K − 1 is which of the tables' steps this is, `sharing` the tasks over slots up to and with the new tokens', with
    one part and chunks of 64 where the shape prefetches. KV is bf16, log-probabilities are f32.
    `supports(shape, dtype)` must hold: nothing here checks it. Pages may be several of the shape's (`kernel_pages`).

    A jit of its own, so that a cycle's steps trace and lower the kernel once.
    """
    pools = [pool.reshape(-1, shape.page_size, *pool.shape[2:]) for pool in (*keys, *values)]
    layers = len(keys)
    operands = make_operands(shape, weights, begin, step, tables, sharing, tuple(pools[:layers]), tuple(pools[layers:]))
    if interpret is None:
        launch(shape, operands, stages=LAYER_STAGES, with_head=True)
    else:
        _launch_by_stage(shape, operands, interpret)
    rows, columns = shape.groups * shape.rows, shape.group_tokens // shape.rows
    found = Candidates(*(ref[...] for ref in operands.found))
    sizes = {"count": shape.blocks * TILE, "rows": rows, "columns": columns}
    if isinstance(weights.embed, jax.Array):
        token, logprob, following = conclude(found, weights.embed, weights.norms, **sizes, interpret=interpret)
    else:  # int8 rows, which the kernel does not read
        token, logprob, following = conclude_reference(found, weights.embed, weights.norms[0], **sizes)
    return Stepped(
        token=token,
        logprob=logprob,
        following=following,
        residual=operands.x[...][columns - 1 : rows * columns : columns],
        keys=tuple(jax.freeze(ref).reshape(keys[0].shape) for ref in operands.keys),
        values=tuple(jax.freeze(ref).reshape(values[0].shape) for ref in operands.values),
    )


def make_operands(
    shape: Shape,
    weights: Weights,
    begin: Embedded,
    step: Int[Array, ""] | int,
    tables: Tables,
    sharing: Sharing,
    keys: tuple[Float[Array, "P B Hkv D"], ...],
    values: tuple[Float[Array, "P B Hkv D"], ...],
) -> Operands:
    """Makes what a launch reads and writes of the arguments of `decode_step`."""
    padded = shape.tokens
    bf16, f32 = weights.embed.dtype, jnp.float32
    candidates = padded_candidates(shape.blocks * TILE)

    def scratch(*dims: int, dtype: Any = bf16) -> Any:
        return jax.new_ref(lax.empty(dims, dtype))

    shares = shape.groups * shape.kv_heads * shape.splits
    return Operands(
        qkv=weights.qkv,
        o=weights.o,
        gate_up=weights.gate_up,
        down=weights.down,
        head=(weights.unembed,),
        scales=() if weights.scales is None else (weights.scales,),
        peers=() if weights.peers is None else (weights.peers,),
        norms=weights.norms,
        step=jnp.asarray(step, jnp.int32).reshape(1),
        **{field.name: getattr(tables, field.name) for field in dataclasses.fields(Tables)},
        chunks=sharing.chunks,
        num_chunks=sharing.num_chunks,
        pieces=sharing.pieces,
        num_pieces=sharing.num_pieces,
        x=jax.new_ref(begin.x),
        xg=jax.new_ref(begin.xg),
        keys=tuple(jax.new_ref(pages) for pages in keys),
        values=tuple(jax.new_ref(pages) for pages in values),
        q=scratch(shape.kv_heads * padded * shape.q_step, shape.dim),
        partial=scratch(shares, QUERIES, shape.dim, dtype=f32),
        partial_lse=scratch(shares, QUERIES, dtype=f32),
        attended=scratch(padded, shape.heads * shape.dim),
        h=scratch(padded, shape.ffn),
        found=tuple(scratch(padded, candidates, dtype=dtype) for dtype in DTYPES),
    )


def _launch_by_stage(shape: Shape, operands: Operands, interpret: Any) -> None:
    """Each stage of each layer as a launch of its own: interpret mode has no semaphores."""
    run = functools.partial(launch, shape, interpret=interpret)
    per_layer, rows = ("qkv", "o", "gate_up", "down", "keys", "values"), shape.scale_places()["head"]
    for layer in range(len(operands.qkv)):
        own: dict[str, Any] = {name: (getattr(operands, name)[layer],) for name in per_layer}
        own["norms"] = operands.norms[2 * layer : 2 * layer + 3]
        own["scales"] = tuple(ref[:, layer * rows : (layer + 1) * rows] for ref in operands.scales)
        for stage in ("qkv", "attend", "merge", "o", "gate_up", "down"):
            run(dataclasses.replace(operands, **own), stages=(stage,), with_head=False)
    run(operands, stages=(), with_head=True)
