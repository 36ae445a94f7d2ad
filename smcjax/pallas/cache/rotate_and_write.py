"""From a layer's fused product to its attention: rotary embedding, and keys and values into their pages, in one kernel.

    q, k, v = split(qkv / rms(x))               where the layer's norm is pending (`smcjax.pallas.layer.norm`)
    q, k = norm(q), norm(k)                     where the model has that
    q, k = rotate(q), rotate(k)
    pages[copy_to] = pages[copy_from]           the slots before the row's first new token: copy-on-write
    pages[page, slot] = k, v                    in place

One block serves one new token, or one slot of one page to copy. No block waits for another: a copy's slots are not
those that this forward writes, and no warp writes the slots that a copy reads (`smcjax.kv.pages.make_room`).
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from smcjax.pallas.cache import rotate_and_write_triton as by_triton
from smcjax.pallas.dispatch import Kernel, Op, runs_mosaic, runs_triton
from smcjax.pallas.layer.norm import PendingNorm, inverse_rms, rms_norm, row_layout, supports_norm
from smcjax.pallas.mosaic.compat import fa, pl, plgpu, store
from smcjax.pallas.mosaic.fuse_launches import Part, Place, launch

THREADS = 128  # of a warpgroup
MAX_COLUMNS = 32  # new tokens a row beside copies: a copy's block looks at each of them
TRASH = 0  # the page that stands for none (`smcjax.kv.pages`)

Ref = Any  # a reference in a kernel: Pallas gives no better type


class HeadNorms(NamedTuple):
    """Weights of the norms of queries and keys before rotation: as many numbers are normed as one vector.

    That is a head (Qwen 3), or all heads of a token (OLMo 2), which the kernel leaves to plain XLA.
    """

    q: Float[Array, " Q"]
    k: Float[Array, " K"]
    eps: float


class Copies(NamedTuple):
    """Page `source[r]` is to be copied to page `target[r]` before row r writes; the trash page on both sides: none."""

    source: Int[Array, " R"]
    target: Int[Array, " R"]


class Write(NamedTuple):
    """The arguments of `rotate_and_write`."""

    qkv: Float[Array, "R T HHH D"]
    cos: Float[Array, "R T half"]
    sin: Float[Array, "R T half"]
    key_pages: Float[Array, "P B Hkv D"]
    value_pages: Float[Array, "P B Hkv D"]
    pages: Int[Array, "R T"]
    slots: Int[Array, "R T"]
    copies: Copies | None = None
    norms: HeadNorms | None = None
    pending: PendingNorm | None = None


Written = tuple[Float[Array, "R T H D"], Float[Array, "P B Hkv D"], Float[Array, "P B Hkv D"]]

# ---------------------------------------------------------------------------------------------------------- reference


def rotate(
    x: Float[Array, "R T H D"], cos: Float[Array, "R T half"], sin: Float[Array, "R T half"]
) -> Float[Array, "R T H D"]:
    """Rotary embedding: pairs are (first half, second half) of a head, as in Hugging Face checkpoints."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, :, None, :], sin[:, :, None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def split_heads(
    qkv: Float[Array, "R T HHH D"],
    *,
    num_kv_heads: int,
    norms: HeadNorms | None = None,
    pending: PendingNorm | None = None,
) -> tuple[Float[Array, "R T H D"], Float[Array, "R T Hkv D"], Float[Array, "R T Hkv D"]]:
    """Queries, keys and values of a fused product of H + 2·Hkv heads; q and k normed where asked, none rotated."""
    heads = qkv.shape[2] - 2 * num_kv_heads
    if pending is not None:
        qkv = pending.divide(qkv).astype(qkv.dtype)
    q, k, v = jnp.split(qkv, [heads, heads + num_kv_heads], axis=2)
    if norms is not None:
        q, k = (
            rms_norm(x.reshape(*x.shape[:2], -1, weight.size), weight, norms.eps).reshape(x.shape)
            for x, weight in ((q, norms.q), (k, norms.k))
        )
    return q, k, v


def split_and_rotate(
    qkv: Float[Array, "R T HHH D"], cos: Float[Array, "R T half"], sin: Float[Array, "R T half"], **terms: Any
) -> tuple[Float[Array, "R T H D"], Float[Array, "R T Hkv D"], Float[Array, "R T Hkv D"]]:
    """The results of `split_heads` (`terms`: its keywords), q and k rotated."""
    q, k, v = split_heads(qkv, **terms)
    return rotate(q, cos, sin), rotate(k, cos, sin), v


def copy_pages(pages: Float[Array, "P B Hkv D"], copies: Copies) -> Float[Array, "P B Hkv D"]:
    """The copies made, as if all pages were read before any is written."""
    return pages.at[copies.target].set(pages[copies.source])


def rotate_and_write_reference(
    qkv: Float[Array, "R T HHH D"],
    cos: Float[Array, "R T half"],
    sin: Float[Array, "R T half"],
    key_pages: Float[Array, "P B Hkv D"],
    value_pages: Float[Array, "P B Hkv D"],
    pages: Int[Array, "R T"],
    slots: Int[Array, "R T"],
    copies: Copies | None = None,
    norms: HeadNorms | None = None,
    pending: PendingNorm | None = None,
) -> Written:
    """Splits, norms and rotates a layer's fused product; makes the copies; writes keys and values to their pages.

    Returns rotated queries [R, T, H, D] and the pages, with token (r, t) at slot `slots[r, t]` of `pages[r, t]`,
    updated in place where the caller gives them up. Of a copied page only the slots before the row's first written
    token are sure to be the source's (a row that writes nothing has the whole page copied; the reference always copies
    whole pages). No page to copy from may be written in those slots by another row of the same call. `pending` is the
    norm that the product, made of x itself, still lacks.
    """
    q, k, v = split_and_rotate(qkv, cos, sin, num_kv_heads=key_pages.shape[2], norms=norms, pending=pending)

    def put(array: jax.Array, new: jax.Array) -> jax.Array:
        if copies is not None:
            array = copy_pages(array, copies)
        return array.at[pages, slots].set(new.astype(array.dtype))

    return q, put(key_pages, k), put(value_pages, v)


# ------------------------------------------------------------------------------------------------------------- kernel


def _vector(heads: int, width: int) -> int:
    """Elements that each of 128 threads takes at once from an array [heads, width]; 0 where they cannot share it."""
    for vector in (8, 4, 2, 1):
        at_once = THREADS * vector // width  # heads
        if THREADS * vector % width == 0 and at_once % 4 == 0 and heads % at_once == 0:
            return vector
    return 0


def _layout(heads: int, width: int) -> Any:
    """Registers of a warpgroup for [heads, width]: a warp takes whole heads, a thread a few consecutive elements."""
    vector = _vector(heads, width)
    of_a_warp = THREADS * vector // width // 4
    if of_a_warp == 1:
        return plgpu.Layout.TILED(fa.Tiling(((4, width), (vector,))), (-3,), (-2,), -1)
    return plgpu.Layout.TILED(fa.Tiling(((4 * of_a_warp, width), (of_a_warp, width), (vector,))), (-5,), (-3, -2), -1)


def _load(ref: Ref, layout: Any) -> jax.Array:
    return plgpu.load(ref, layout=layout, optimized=False)


def _across(values: jax.Array, shape: tuple[int, ...], axis: int) -> jax.Array:
    """A vector along `axis`, repeated along the other."""
    return lax.broadcast_in_dim(values, shape, [axis])


def _kernel(
    place: Place,
    qkv_ref: Ref,  # [R, T, H + 2 Hkv, D] GMEM, as all that follow
    cos_ref: Ref,  # [R, T, D/2] f32
    sin_ref: Ref,  # [R, T, D/2] f32
    pages_ref: Ref,  # [R, T] int32
    slots_ref: Ref,  # [R, T] int32
    *refs: Ref,  # with copies: source [R], target [R]; with a pending norm: x [R, T, E]; with norms: of q [D], of k
    # [D]; keys, values [P, B, Hkv, D] (both read and written); q [R, T, H, D]
    copying: bool,
    pending_eps: float | None,
    eps: float | None,
) -> None:
    *optional, keys_ref, values_ref, q_ref = refs
    copy_refs, optional = (optional[:2], optional[2:]) if copying else ([], optional)
    pending_refs, norm_refs = (optional[:1], optional[1:]) if pending_eps is not None else ([], optional)
    q_norm_ref, k_norm_ref = norm_refs or (None, None)
    _, columns, heads, dim = q_ref.shape
    _, _, kv_heads, _ = keys_ref.shape
    half = dim // 2
    first, second = pl.ds(0, half), pl.ds(half, half)
    row, index = place["row"], place["index"]

    layout = _layout(kv_heads, half)  # of queries too

    def new(start: int, count: int, part: Any, layout: Any) -> jax.Array:
        """Part of `count` heads of the product from `start` on."""
        return _load(qkv_ref.at[row, index, pl.ds(start, count), part], layout)

    def rotated(
        a: jax.Array, b: jax.Array, cos: jax.Array, sin: jax.Array, norm_ref: Ref | None
    ) -> tuple[jax.Array, jax.Array]:
        """Both halves of some heads."""
        shape = a.shape
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        cos, sin = _across(cos, shape, 1), _across(sin, shape, 1)
        # The norm of a head, over both halves: rounded to the model's dtype behind the scale and behind the weight, as
        # the reference is.
        if norm_ref is not None:
            mean = ((a * a).sum(axis=1) + (b * b).sum(axis=1)) / dim
            scale = _across(lax.rsqrt(mean + eps), shape, 0)

            def normed(x: jax.Array, part: Any) -> jax.Array:
                weight = _load(norm_ref.at[part], layout.reduce(0)).astype(jnp.float32)
                x = (x * scale).astype(q_ref.dtype).astype(jnp.float32) * _across(weight, shape, 1)
                return x.astype(q_ref.dtype).astype(jnp.float32)

            a, b = normed(a, first), normed(b, second)
        return (a * cos - b * sin).astype(q_ref.dtype), (b * cos + a * sin).astype(q_ref.dtype)

    def token() -> None:
        page, slot = pages_ref[row, index], slots_ref[row, index]
        # Everything is read before anything is written or waited for: loads do not move up across stores and barriers.
        cos, sin = (_load(ref.at[row, index], layout.reduce(0)) for ref in (cos_ref, sin_ref))
        q_1, q_2 = (new(0, heads, part, layout) for part in (first, second))
        k_1, k_2 = (new(heads, kv_heads, part, layout) for part in (first, second))
        v = new(heads + kv_heads, kv_heads, pl.ds(0, dim), _layout(kv_heads, dim))
        # qkv was made of x itself: what the product still lacks is one number a token, 1 / rms(x), made of x [E] again.
        if pending_eps is not None:
            x = plgpu.load(pending_refs[0].at[row, index], layout=row_layout(pending_refs[0].shape[2]))
            scale = inverse_rms(x.astype(jnp.float32), pending_eps)
            q_1, q_2, k_1, k_2, v = (
                (y.astype(jnp.float32) * scale).astype(q_ref.dtype) for y in (q_1, q_2, k_1, k_2, v)
            )
        # Halves [heads, D/2] rotate against each other, so they are two arrays in the same layout from the beginning.
        q, k = rotated(q_1, q_2, cos, sin, q_norm_ref), rotated(k_1, k_2, cos, sin, k_norm_ref)
        for part, q_half, k_half in zip((first, second), q, k, strict=True):
            store(q_ref.at[row, index, :, part], q_half)
            store(keys_ref.at[page, slot, :, part], k_half)
        store(values_ref.at[page, slot], v)

    if not copying:
        token()
        return

    def copy() -> None:
        # Blocks behind the row's tokens take one slot [Hkv, D] each of the page that the row copies.
        source, target, slot = copy_refs[0][row], copy_refs[1][row], index - columns
        before = jnp.int32(keys_ref.shape[1])
        for t in reversed(range(columns)):  # the slot of the first token that is written
            before = jnp.where(pages_ref[row, t] == TRASH, before, slots_ref[row, t])

        @pl.when(jnp.logical_and(target != TRASH, slot < before))
        def _copy() -> None:
            k, v = (_load(ref.at[source, slot], _layout(kv_heads, dim)) for ref in (keys_ref, values_ref))
            store(keys_ref.at[target, slot], k)
            store(values_ref.at[target, slot], v)

    # Tokens and copies need not wait for each other: a copy ends before the first slot that a token of its row writes.
    pl.when(index < columns)(token)
    pl.when(index >= columns)(copy)


# ------------------------------------------------------------------------------------------------------------ wrapper


def supports_write(*, num_heads: int, num_kv_heads: int, head_dim: int, dtype: Any) -> bool:
    """True for models whose heads the kernel divides among the threads of a warpgroup."""
    return (
        jnp.dtype(dtype) == jnp.bfloat16
        and head_dim in (64, 128)
        and num_heads % num_kv_heads == 0
        and _vector(num_kv_heads, head_dim // 2) > 0
        and _vector(num_kv_heads, head_dim) > 0
    )


def _supports(
    qkv: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    key_pages: jax.Array,
    value_pages: jax.Array,
    pages: jax.Array,
    slots: jax.Array,
    copies: Copies | None = None,
    norms: HeadNorms | None = None,
    pending: PendingNorm | None = None,
) -> bool:
    num_kv_heads, head_dim = key_pages.shape[2:]
    num_heads = qkv.shape[-2] - 2 * num_kv_heads
    dtypes = {qkv.dtype, key_pages.dtype, value_pages.dtype, *(() if norms is None else (norms.q.dtype, norms.k.dtype))}
    if len(dtypes) > 1 or (norms is not None and {norms.q.size, norms.k.size} != {head_dim}):
        return False
    if pending is not None and not supports_norm(rows=pages.size, width=pending.x.shape[-1], dtype=pending.x.dtype):
        return False
    return supports_write(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=qkv.dtype)


class Task(NamedTuple):
    """Arguments of `rotate_and_write` that are arrays, but for pages."""

    inputs: tuple[jax.Array, ...]  # qkv, cos, sin, pages, slots
    copies: Copies | None
    x: jax.Array | None  # of the pending norm
    norms: tuple[jax.Array, jax.Array] | None  # weights, of q and of k


class Eps(NamedTuple):
    """Terms of the norms, which are part of the kernel's code; None: no such norm."""

    pending: float | None
    norms: float | None


def split_arguments(write: Write) -> tuple[Task, tuple[jax.Array, jax.Array], Eps]:
    """The arguments as the kernel takes them, pages apart.

    Copies beside more columns than the kernel looks at are made before it.
    """
    pools, copies, norms, pending = (write.key_pages, write.value_pages), write.copies, write.norms, write.pending
    if copies is not None and write.pages.shape[1] > MAX_COLUMNS:
        pools, copies = (copy_pages(pools[0], copies), copy_pages(pools[1], copies)), None
    inputs = (write.qkv, write.cos, write.sin, write.pages, write.slots)
    x = None if pending is None else pending.x
    task = Task(inputs, copies, x, None if norms is None else (norms.q, norms.k))
    return task, pools, Eps(None if pending is None else pending.eps, None if norms is None else norms.eps)


def write_part(task: Task, keys_ref: Ref, values_ref: Ref, eps: Eps) -> Part:
    """The kernel's blocks; their result is q. Pages are references, which they change."""
    qkv, pages = task.inputs[0], task.inputs[3]
    rows, columns = pages.shape
    page_size, num_kv_heads, head_dim = keys_ref.shape[1:]
    num_heads = qkv.shape[-2] - 2 * num_kv_heads
    copying, x, norms = task.copies is not None, task.x, task.norms
    return Part(
        functools.partial(_kernel, copying=copying, pending_eps=eps.pending, eps=eps.norms),
        {"row": rows, "index": columns + (page_size if copying else 0)},
        (*task.inputs, *(task.copies or ()), *(() if x is None else (x,)), *(norms or ()), keys_ref, values_ref),
        (jax.ShapeDtypeStruct((rows, columns, num_heads, head_dim), keys_ref.dtype),),
    )


@functools.partial(jax.jit, static_argnames=("eps", "interpret"))
def _rotate_and_write(task: Task, pools: tuple[jax.Array, jax.Array], *, eps: Eps, interpret: Any) -> Written:
    """A jit of its own, so that a model's layers trace and lower the kernel once."""
    # References, so that the kernel's results are its operands' buffers.
    keys_ref, values_ref = (jax.new_ref(pool) for pool in pools)
    (made,) = launch("rotate_and_write", write_part(task, keys_ref, values_ref, eps), interpret=interpret)
    return made[0], jax.freeze(keys_ref), jax.freeze(values_ref)


def rotate_and_write_mosaic(
    qkv: Float[Array, "R T HHH D"],
    cos: Float[Array, "R T half"],
    sin: Float[Array, "R T half"],
    key_pages: Float[Array, "P B Hkv D"],
    value_pages: Float[Array, "P B Hkv D"],
    pages: Int[Array, "R T"],
    slots: Int[Array, "R T"],
    copies: Copies | None = None,
    norms: HeadNorms | None = None,
    pending: PendingNorm | None = None,
    *,
    interpret: Any = None,
) -> Written:
    """Computes `rotate_and_write` by the kernel; `interpret` is `plgpu.InterpretGPUParams()` to run on a CPU."""
    given = Write(qkv, cos, sin, key_pages, value_pages, pages, slots, copies, norms, pending)
    task, pools, eps = split_arguments(given)
    return _rotate_and_write(task, pools, eps=eps, interpret=interpret)


def _supports_triton(*given: Any, **named: Any) -> bool:
    return by_triton.supports(Write(*given, **named))


def rotate_and_write_triton(*given: Any, interpret: Any = None, **named: Any) -> Written:
    """Computes `rotate_and_write` by the Triton kernel; copies beside more columns than it looks at before it."""
    write = Write(*given, **named)
    if write.copies is not None and write.pages.shape[1] > MAX_COLUMNS:
        keys, values = (copy_pages(pool, write.copies) for pool in (write.key_pages, write.value_pages))
        write = write._replace(key_pages=keys, value_pages=values, copies=None)
    return by_triton.rotate_and_write_triton(write, interpret=interpret)


rotate_and_write = Op(rotate_and_write_reference)
rotate_and_write.register(Kernel(runs_mosaic, rotate_and_write_mosaic, _supports))
rotate_and_write.register(Kernel(runs_triton, rotate_and_write_triton, _supports_triton))
