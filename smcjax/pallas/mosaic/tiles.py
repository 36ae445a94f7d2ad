"""Operations of single threads that Pallas does not offer, most of them for the decode step.

Strided gathers and scatters of a [16, M] tile (16 features of M tokens), a row statistic, copies whose source is chosen
at run time, slots to clear, a proxy fence, a quick exponential. What computes has a twin in plain Pallas for interpret
mode.

A tile lives in the registers of one warpgroup in the *tile layout*: element (r, m) is number r·M + m, and thread t has
the elements t·v … t·v + v − 1 with v = M/8.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from smcjax.pallas.mosaic.compat import arith, ir, llvm, mgpu, mu, pl, plgpu, vector
from smcjax.pallas.mosaic.threads import WARPGROUP, f32, i32, i64, scalar, scalar_layout, thread
from smcjax.pallas.mosaic.wgmma import Ref, of_part, swizzled

FEATURES = 16  # rows of a tile


def tile_layout(tokens: int) -> Any:
    """The layout of a [16, tokens] tile; `tokens` is 8, 16 or 32."""
    return plgpu.Layout.WG_STRIDED((FEATURES, tokens), vec_size=tokens // 8)


def load_tile(ref: Ref) -> jax.Array:
    """A [16, M] tile of f32 from shared memory."""
    return plgpu.load(ref, layout=tile_layout(ref.shape[1]))


def _c(value: int) -> ir.Value:
    return mu.c(value, i32())


def _address(ref: ir.Value, element: ir.Value, size: int) -> ir.Value:
    """Byte address of a flat element number (32 bits) of a contiguous GMEM reference."""
    base = llvm.ptrtoint(i64(), mu.memref_ptr(ref))
    return arith.addi(base, arith.muli(arith.extui(i64(), element), mu.c(size, i64())))


def _elements(tokens: int) -> list[tuple[ir.Value, ir.Value]]:
    """(feature, token) of each of this thread's v elements."""
    v = tokens // 8
    first = arith.muli(thread(), _c(v))
    out = []
    for j in range(v):
        element = arith.addi(first, _c(j))
        out.append((arith.divui(element, _c(tokens)), arith.remui(element, _c(tokens))))
    return out


def tile_of(values: list[ir.Value], tokens: int, dtype: ir.Type, signed: bool | None) -> mgpu.FragmentedArray:
    """The [16, tokens] tile of which a thread has these elements, as `values_of` gives them."""
    register = vector.from_elements(ir.VectorType.get((len(values),), dtype), values)
    registers = np.empty((1,), object)
    registers[0] = register
    return mgpu.FragmentedArray(_registers=registers, _layout=tile_layout(tokens).to_mgpu(), _is_signed=signed)


def _flat(row: ir.Value, width: int, column: ir.Value) -> ir.Value:
    return arith.addi(arith.muli(row, _c(width)), column)


def gather(
    ref: Ref,
    row: jax.Array | int,
    row_step: int,
    column: jax.Array,
    *,
    tokens: int,
    column_step: int = 1,
    interpret: bool = False,
) -> jax.Array:
    """tile[r, m] = ref[row + m·row_step, column + r·column_step] of a contiguous [rows, width] GMEM reference."""
    _, width = ref.shape
    dtype = jnp.dtype(ref.dtype)
    if interpret:
        columns = []
        for m in range(tokens):
            if column_step:
                columns.append(ref[row + m * row_step, pl.ds(column, FEATURES)])
            else:
                columns.append(jnp.broadcast_to(ref[row + m * row_step, column], (FEATURES,)))
        return jnp.stack(columns, axis=1)

    load = {"bfloat16": "ld.global.b16", "float32": "ld.global.f32", "uint32": "ld.global.b32"}[dtype.name]
    signed = False if dtype.name == "uint32" else None

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), scalar_layout(), scalar_layout()),
        return_type=plgpu.ShapeDtypeStruct((FEATURES, tokens), dtype, layout=tile_layout(tokens)),
    )
    def go(_: Any, ref: ir.Value, row: Any, column: Any) -> mgpu.FragmentedArray:
        row, column = scalar(row), scalar(column)
        values = []
        for r, m in _elements(tokens):
            at = _flat(
                arith.addi(row, arith.muli(m, _c(row_step))), width, arith.addi(column, arith.muli(r, _c(column_step)))
            )
            where = _address(ref, at, dtype.itemsize)
            if dtype.itemsize == 2:
                bits = mu.inline_ptx(
                    f"{{.reg .b16 h; {load} h, [$1]; cvt.u32.u16 $0, h;}}",
                    where,
                    result_types=i32(),
                    has_side_effects=True,
                )
                small = arith.trunci(ir.IntegerType.get_signless(16), bits)
                values.append(arith.bitcast(ir.BF16Type.get(), small))
            else:
                kind = f32() if dtype.name == "float32" else i32()
                values.append(mu.inline_ptx(f"{load} $0, [$1];", where, result_types=kind, has_side_effects=True))
        kinds = {"bfloat16": ir.BF16Type.get, "float32": f32, "uint32": i32}
        return tile_of(values, tokens, kinds[dtype.name](), signed)

    return go(ref, jnp.asarray(row, jnp.int32), jnp.asarray(column, jnp.int32))


def _store_bf16(where: ir.Value, value: ir.Value) -> None:
    mu.inline_ptx("{.reg .b16 h; cvt.rn.bf16.f32 h, $1; st.global.b16 [$0], h;}", where, value, has_side_effects=True)


def values_of(tile: mgpu.FragmentedArray, tokens: int) -> list[ir.Value]:
    """A thread's v elements of a [16, tokens] tile."""
    register = tile.registers.flat[0]
    return [llvm.extractelement(register, _c(j)) for j in range(tokens // 8)]


def scatter(
    ref: Ref, row: jax.Array, row_step: int, column: jax.Array, value: jax.Array, *, interpret: bool = False
) -> None:
    """ref[row + m·row_step, column + r] = value[r, m], the reverse of `gather`; a bf16 `ref` rounds an f32 tile."""
    tokens = value.shape[1]
    _, width = ref.shape
    narrow = jnp.dtype(ref.dtype).itemsize == 2
    if interpret:
        for m in range(tokens):
            ref[row + m * row_step, pl.ds(column, FEATURES)] = value[:, m].astype(ref.dtype)
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), scalar_layout(), scalar_layout(), tile_layout(tokens)))
    def go(_: Any, ref: ir.Value, row: Any, column: Any, value: mgpu.FragmentedArray) -> None:
        row, column = scalar(row), scalar(column)
        for (r, m), x in zip(_elements(tokens), values_of(value, tokens), strict=True):
            at = _flat(arith.addi(row, arith.muli(m, _c(row_step))), width, arith.addi(column, r))
            if narrow:
                _store_bf16(_address(ref, at, 2), x)
            else:
                bits = x if x.type == i32() else arith.bitcast(i32(), x)
                mu.inline_ptx("st.global.b32 [$0], $1;", _address(ref, at, 4), bits, has_side_effects=True)

    go(ref, jnp.asarray(row, jnp.int32), jnp.asarray(column, jnp.int32), value)


def scatter_to_slots(
    pages: Sequence[Ref],
    layer: jax.Array,
    slots: Ref,
    first: jax.Array,
    head: jax.Array,
    column: jax.Array,
    value: jax.Array,
    *,
    interpret: bool = False,
) -> None:
    """pages[layer][slot // B, slot % B, head, column + r] = bf16(value[r, m]) with slot = slots[first + m].

    KV pages are [P, B, Hkv, D].
    """
    tokens = value.shape[1]
    _, page_size, kv_heads, dim = pages[0].shape
    if interpret:
        for m in range(tokens):
            slot = slots[first + m]
            page, offset = lax.div(slot, page_size), lax.rem(slot, page_size)
            pages[0][page, offset, head, pl.ds(column, FEATURES)] = value[:, m].astype(pages[0].dtype)
        return

    refs = (plgpu.RefType(),) * len(pages)

    @plgpu.inline_mgpu(
        arg_types=(
            refs,
            scalar_layout(),
            plgpu.RefType(),
            scalar_layout(),
            scalar_layout(),
            scalar_layout(),
            tile_layout(tokens),
        )
    )
    def go(
        _: Any, pages: Any, layer: Any, slots: Any, first: Any, head: Any, column: Any, value: mgpu.FragmentedArray
    ) -> None:
        base = _chosen([llvm.ptrtoint(i64(), mu.memref_ptr(ref)) for ref in pages], scalar(layer))
        start = _flat(scalar(head), dim, scalar(column))
        for (r, m), x in zip(_elements(tokens), values_of(value, tokens), strict=True):
            slot = mu.inline_ptx(
                "ld.global.b32 $0, [$1];",
                _address(slots, arith.addi(scalar(first), m), 4),
                result_types=i32(),
                has_side_effects=True,
            )
            element = arith.addi(
                arith.muli(arith.extui(i64(), slot), mu.c(kv_heads * dim, i64())),
                arith.extui(i64(), arith.addi(start, r)),
            )
            _store_bf16(arith.addi(base, arith.muli(element, mu.c(2, i64()))), x)

    go(
        tuple(pages),
        jnp.asarray(layer, jnp.int32),
        slots,
        jnp.asarray(first, jnp.int32),
        jnp.asarray(head, jnp.int32),
        jnp.asarray(column, jnp.int32),
        value,
    )


def _chosen(values: Sequence[ir.Value], index: ir.Value) -> ir.Value:
    """values[index]."""
    out = values[0]
    for i, value in enumerate(values[1:], 1):
        out = arith.select(arith.cmpi(arith.CmpIPredicate.eq, index, _c(i)), value, out)
    return out


@contextlib.contextmanager
def of_layer(refs: Sequence[Ref], layer: jax.Array, *, interpret: bool = False) -> Iterator[Ref]:
    """A reference that stands for refs[layer] as the source of the TMA copies made within.

    Their tiles have one shape, so copies differ in the descriptor only. Descriptors of one kind are made here one after
    the other, and the layer's is found by its distance: no branch for each layer, whose code would grow with the
    model. Copies look descriptors up through the launch context, so that is where the choice is made.
    """
    if interpret or len(refs) == 1:
        yield refs[0]
        return

    @plgpu.inline_mgpu(arg_types=((plgpu.RefType(),) * len(refs), scalar_layout()))
    def begin(ctx: Any, refs: Any, layer: Any) -> None:
        _choose_descriptor(ctx, refs, scalar(layer))

    @plgpu.inline_mgpu()
    def end(ctx: Any) -> None:
        del ctx._get_tma_desc

    begin(tuple(refs), jnp.asarray(layer, jnp.int32))
    yield refs[0]
    end()


_DESCRIPTOR = 128  # bytes of a TMA descriptor


def _choose_descriptor(ctx: Any, refs: Sequence[ir.Value], layer: ir.Value) -> None:
    """Makes descriptors those of refs[layer], until `_get_tma_desc` is deleted from `ctx`."""
    _hold_descriptors_as_words(ctx.scratch)
    plain = ctx._get_tma_desc

    def choose(_: ir.Value, *kind: Any, **named: Any) -> ir.Value:
        descriptors = [plain(one, *kind, **named) for one in refs]
        offsets = [_constant_offset(descriptor) for descriptor in descriptors]
        if any(b - a != _DESCRIPTOR for a, b in itertools.pairwise(offsets)):
            raise RuntimeError(f"TMA descriptors of the layers do not lie one after the other: {offsets}")
        distance = arith.muli(arith.extui(i64(), layer), mu.c(_DESCRIPTOR, i64()))
        first = llvm.ptrtoint(i64(), descriptors[0])
        return llvm.inttoptr(descriptors[0].type, arith.addi(first, distance))

    ctx._get_tma_desc = choose


def _hold_descriptors_as_words(scratch: Any) -> None:
    """The launch passes its descriptors by value as one array of bytes, for which LLVM needs time quadratic in their
    number: minutes for the hundred of a whole model. As 64-bit words it is an eighth of the elements."""
    if "finalize_size" in scratch.__dict__:
        return
    plain = scratch.finalize_size

    def finalize() -> None:
        allocation, load, _ = scratch._find_alloc_load_and_device_ptr()
        plain()
        words = llvm.ArrayType.get(i64(), -(-scratch.next_offset // 8))
        allocation.elem_type = ir.TypeAttr.get(words)
        load.result.set_type(words)

    scratch.finalize_size = finalize


def _constant_offset(descriptor: ir.Value) -> int:
    """The offset of a descriptor in the launch's scratch: the constant of the address computation that made it."""
    address: Any = descriptor.owner
    return int(ir.DenseI32ArrayAttr(address.attributes["rawConstantIndices"])[0])


def inverse_rms(x: Ref, out: Ref, eps: float, *, interpret: bool = False) -> None:
    """out[r, m] = 1 / rms(x[m]) for every r, in a fixed order of addition. x [M, E] bf16 GMEM, out [16, M] f32 SMEM."""
    tokens, width = x.shape
    if interpret:
        for m in range(tokens):
            row = x[m].astype(jnp.float32)
            out[:, m] = jnp.broadcast_to(lax.rsqrt(jnp.mean(row * row) + eps), (FEATURES,))
        return
    loads = width // 256  # a lane loads 8 bf16 at a time
    if width % 256:
        raise ValueError(f"rows of {width} elements do not divide among 32 lanes of 8")

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType()))
    def go(_: Any, x: ir.Value, out: ir.Value) -> None:
        t = thread()
        warp, lane = arith.divui(t, _c(32)), arith.remui(t, _c(32))
        base = llvm.ptrtoint(i32(), mu.memref_ptr(out))
        for i in range(tokens // 4):
            token = arith.addi(warp, _c(4 * i))
            words: list[ir.Value] = []
            for j in range(loads):
                column = arith.muli(arith.addi(lane, _c(32 * j)), _c(8))
                words += mu.inline_ptx(
                    "ld.global.v4.b32 {$0,$1,$2,$3}, [$4];",
                    _address(x, _flat(token, width, column), 2),
                    result_types=[i32()] * 4,
                    has_side_effects=True,
                )
            total = mu.c(0.0, f32())
            for word in words:
                for bits in (arith.shli(word, _c(16)), arith.andi(word, mu.c(-65536, i32()))):
                    value = arith.bitcast(f32(), bits)
                    total = mu.inline_ptx("fma.rn.f32 $0, $1, $1, $2;", value, total, result_types=f32())
            for distance in (16, 8, 4, 2, 1):
                total = arith.addf(total, mu.shfl_bfly(total, distance))
            mean = arith.addf(arith.mulf(total, mu.c(1.0 / width, f32())), mu.c(eps, f32()))
            scale = mu.inline_ptx("rsqrt.approx.f32 $0, $1;", mean, result_types=f32())
            where = arith.addi(base, arith.muli(_flat(lane, tokens, token), _c(4)))
            mu.inline_ptx(
                "st.shared.f32 [$0], $1;",
                where,
                scale,
                predicate=arith.cmpi(arith.CmpIPredicate.ult, lane, _c(FEATURES)),
                has_side_effects=True,
            )

    go(x, out)


def clear_slots(
    slots: Ref,
    firsts: Sequence[jax.Array],
    members: Sequence[jax.Array],
    lengths: Sequence[jax.Array],
    width: int,
    *,
    interpret: bool = False,
) -> None:
    """Zeros in those of a chunk's slots that no row holds. [C, D] bf16 SMEM, as products read it (`swizzled`).

    The chunk is pieces of `width` slots: the i-th those from `firsts[i]` on of the rows whose bits are in `members[i]`;
    row r holds `lengths[r]`. A thread clears 64 of a slot's elements, each eight of them so that they meet all banks.
    """
    count, dim = slots.shape
    if interpret:
        ends = []
        for part, (first, rows) in enumerate(zip(firsts, members, strict=True)):
            longest = [jnp.where(((rows >> r) & 1) != 0, length, 0) for r, length in enumerate(lengths)]
            ends.append(functools.reduce(jnp.maximum, longest) - first + part * width)
        slot = lax.broadcasted_iota(jnp.int32, slots.shape, 0)
        slots[...] = jnp.where(slot < of_part(slot, ends, width), slots[...], 0)
        return
    halves = dim // 64
    if count * halves > WARPGROUP or dim % 64:
        raise ValueError(f"{count} slots of {dim} elements are more than 64 elements a thread")

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(swizzled()), *((scalar_layout(),) * len(x) for x in (firsts, members, lengths))),
    )
    def go(_: Any, slots: ir.Value, *scalars: Any) -> None:
        firsts, members, lengths = ([scalar(x) for x in some] for some in scalars)
        t = thread()
        slot, half = arith.remui(t, _c(count)), arith.divui(t, _c(count))
        piece = arith.divui(slot, _c(width))
        rows, longest = _chosen(members, piece), _c(0)
        for r, length in enumerate(lengths):
            reads = arith.cmpi(arith.CmpIPredicate.ne, arith.andi(rows, _c(1 << r)), _c(0))
            longest = arith.maxsi(longest, arith.select(reads, length, _c(0)))
        held = arith.subi(longest, _chosen(firsts, piece))
        empty = arith.cmpi(arith.CmpIPredicate.sge, arith.remui(slot, _c(width)), held)
        if count * halves < WARPGROUP:
            empty = arith.andi(empty, arith.cmpi(arith.CmpIPredicate.ult, half, _c(halves)))
        tile = arith.addi(arith.muli(arith.divui(slot, _c(8)), _c(halves)), half)  # 8 rows of 128 bytes each
        row = arith.remui(slot, _c(8))
        where = arith.addi(arith.muli(tile, _c(1024)), arith.muli(row, _c(128)))
        base = arith.addi(llvm.ptrtoint(i32(), mu.memref_ptr(slots)), where)
        for i in range(8):
            mu.inline_ptx(
                "st.shared.v4.b32 [$0], {$1,$1,$1,$1};",
                arith.addi(base, arith.xori(arith.muli(row, _c(16)), _c(16 * i))),
                _c(0),
                predicate=empty,
                has_side_effects=True,
            )

    go(slots, *(tuple(some) for some in (firsts, members, lengths)))


def proxy_fence(*, interpret: bool = False) -> None:
    """Orders this thread's ordinary accesses, of global and of its block's shared memory, and the copy engine's (TMA).

    One fence a memory: `fence.proxy.async` for both at once makes every thread wait until its own stores have reached
    the whole GPU (MEMBAR.ALL.GPU). Nobody here relies on that: what a block has written it announces by a release.
    """
    if interpret:
        return

    @plgpu.inline_mgpu()
    def go(_: Any) -> None:
        mu.inline_ptx("fence.proxy.async.global;", has_side_effects=True)
        mu.inline_ptx("fence.proxy.async.shared::cta;", has_side_effects=True)

    go()


def exp2(x: jax.Array, *, interpret: bool = False) -> jax.Array:
    """2^x of f32 [m, n] accumulators, to 2 ulp, by one instruction; denormal results are 0."""
    if interpret:
        return jnp.exp2(x)
    layout = plgpu.Layout.WGMMA

    @plgpu.inline_mgpu(arg_types=(layout,), return_type=plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=layout))
    def go(_: Any, x: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        return x.exp2(approx=True)

    return go(x)
