"""Programs of single threads inside a Mosaic kernel, for work on integers and small vectors that Pallas has no
operations for.

A program is written once, over one 32-bit word a thread: arithmetic by operators, and `load`, `store`, `where`,
`minimum` and shuffles within a warp by the `Threads` that it is given. On the GPU a word is an MLIR value of one
thread; interpreted, it is a vector over the 128 threads of a warpgroup, so that what tests see is the same program.

    def double(t: Threads, x: Ref) -> None:
        t.store(x, t.index, t.load(x, t.index) * 2)

    run(double, x, interpret=interpret)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from smcjax.pallas.mosaic.compat import arith, ir, llvm, mu, nvvm, pl, plgpu

Ref = Any
Word = Any  # what a program computes with: `_Word` or a vector of 128
Threads = Any  # `_OnGPU` or `_Interpreted`
WARP = 32
WARPGROUP = 128
WARPS = WARPGROUP // WARP
# 2^k · 2^f of x · log₂ e = k + f with k whole, from −126 on. log₂ e has two parts. All constants are those of CUDA's
# `expf`, which XLA calls, so that both have the same bits.
EXP = """{
.reg .f32 k, f, w;
.reg .b32 e;
fma.rn.f32 k, $1, 0f3BBB989D, 0f3F000000;
cvt.sat.f32.f32 k, k;
fma.rm.f32 k, k, 0f437C0000, 0f4B400001;
add.rn.f32 f, k, 0fCB40007F;
neg.f32 f, f;
fma.rn.f32 f, $1, 0f3FB8AA3B, f;
fma.rn.f32 f, $1, 0f32A57060, f;
mov.b32 e, k;
shl.b32 e, e, 23;
mov.b32 w, e;
ex2.approx.ftz.f32 f, f;
mul.rn.f32 $0, f, w;
}"""
# A pair of float16, the lower half first.
WIDEN = """{
.reg .b16 low, high;
mov.b32 {low, high}, $2;
cvt.f32.f16 $0, low;
cvt.f32.f16 $1, high;
}"""


def run(program: Callable[..., None], *args: Any, interpret: bool) -> None:
    """Runs `program(threads, *args)` in every thread of the warpgroup.

    `args` are references, contiguous in GMEM or SMEM, and int32 scalars, which arrive as words.
    """
    # A view of a reference has no type of JAX's.
    is_ref = [hasattr(arg, "transforms") or isinstance(jax.typeof(arg), jax.ref.AbstractRef) for arg in args]
    args = tuple(arg if ref else jnp.asarray(arg, jnp.int32) for arg, ref in zip(args, is_ref, strict=True))
    if interpret:
        program(_Interpreted(), *args)
        return

    @plgpu.inline_mgpu(arg_types=tuple(plgpu.RefType() if ref else scalar_layout() for ref in is_ref))
    def go(_: Any, *args: Any) -> None:
        words = [arg if ref else _Word(scalar(arg)) for arg, ref in zip(args, is_ref, strict=True)]
        program(_OnGPU(), *words)

    go(*args)


def warp_sums(t: Threads, x: Word) -> Word:
    """Sums of `x` over this lane and those before it in its warp."""
    lane = t.index % WARP
    for distance in (1, 2, 4, 8, 16):
        x = t.where(lane >= distance, t.shuffle_up(x, distance) + x, x)
    return x


def silu(t: Threads, x: Word) -> Word:
    """x · sigmoid(x)."""
    return x / (t.exp(t.constant(0.0) - x) + 1.0)


def sums(t: Threads, mine: Word, totals: Ref, turn: int = 0) -> tuple[Word, Word]:
    """Sums of `mine` over the threads before this one, and over all. `totals` has four words in SMEM for each turn."""
    lane, warp = t.index % WARP, t.index // WARP
    of_warp = warp_sums(t, mine)
    t.store(totals, warp + turn * WARPS, of_warp, only=lane == WARP - 1)
    t.synchronize()
    before, total = of_warp - mine, t.constant(0)
    for other in range(WARPS):
        theirs = t.load(totals, t.constant(turn * WARPS + other))
        before = before + t.where(warp < other + 1, 0, theirs)
        total = total + theirs
    return before, total


# ------------------------------------------------------------------------------------------------------------- on GPU


def i32() -> ir.Type:
    """The type of a word."""
    return ir.IntegerType.get_signless(32)


def scalar_layout() -> Any:
    """The layout of a scalar that Pallas passes to a program of threads."""
    return plgpu.Layout.WG_SPLAT(())


def compiler_params() -> Any:
    """Of kernels whose programs are written for threads."""
    return plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)


def i64() -> ir.Type:
    """The type of a global address."""
    return ir.IntegerType.get_signless(64)


def f32() -> ir.Type:
    """The type of a floating-point word."""
    return ir.F32Type.get()


def scalar(x: Any) -> ir.Value:
    """The one register of a scalar that Pallas passes."""
    return x.registers.flat[0]


def word(value: ir.Value) -> Word:
    """A value as programs compute with it."""
    return _Word(value)


def thread() -> ir.Value:
    """Number of the thread in its warpgroup."""
    return arith.remui(mu.inline_ptx("mov.u32 $0, %tid.x;", result_types=i32()), mu.c(WARPGROUP, i32()))


def is_interpreted(t: Threads) -> bool:
    """True where a program runs on vectors of a warpgroup, not in threads of a GPU."""
    return isinstance(t, _Interpreted)


def _value(x: Any, kind: ir.Type | None = None) -> ir.Value:
    """A word's value; a number becomes a constant of this type, or of its own."""
    if isinstance(x, _Word):
        return x.value
    return mu.c(x, kind or (f32() if isinstance(x, float) else i32()))


def is_bfloat16(ref: Any) -> bool:
    """True for a reference to numbers of bfloat16."""
    return bool(ir.MemRefType(ref.type).element_type == ir.BF16Type.get())


def _is_float16(ref: Any) -> bool:
    return bool(ir.MemRefType(ref.type).element_type == ir.F16Type.get())


def _operation(of_integers: str | None, of_floats: str | None = None) -> Any:
    """An operator by two names in the dialect `arith`, which is imported when the operator is first applied."""

    def apply(self: _Word, other: Any) -> _Word:
        operation = of_floats if self.value.type == f32() else of_integers
        assert operation is not None, f"not for {self.value.type}"
        return _Word(getattr(arith, operation)(self.value, _value(other, self.value.type)))

    return apply


def _comparison(of_integers: str, of_floats: str) -> Any:
    def apply(self: _Word, other: Any) -> _Word:
        of, b = self.value, _value(other, self.value.type)
        if of.type == f32():
            return _Word(arith.cmpf(arith.CmpFPredicate[of_floats], of, b))
        return _Word(arith.cmpi(arith.CmpIPredicate[of_integers], of, b))

    return apply


class _Word:
    """An i32 or f32 of one thread, or an i1 where it is a comparison. Integers that are divided are not negative."""

    def __init__(self, value: ir.Value) -> None:
        self.value = value

    __add__ = _operation("addi", "addf")
    __sub__ = _operation("subi", "subf")
    __mul__ = _operation("muli", "mulf")
    __truediv__ = _operation(None, "divf")
    __floordiv__ = _operation("divui")
    __mod__ = _operation("remui")
    __and__ = _operation("andi")

    __lt__ = _comparison("slt", "OLT")
    __ge__ = _comparison("sge", "OGE")
    __eq__ = _comparison("eq", "OEQ")
    __ne__ = _comparison("ne", "UNE")
    __hash__ = None  # type: ignore[assignment]


class _OnGPU:
    @property
    def index(self) -> Word:
        return _Word(thread())

    def constant(self, x: float) -> Word:
        return _Word(_value(x))

    def where(self, condition: Word, a: Any, b: Any) -> Word:
        return _Word(arith.select(condition.value, _value(a), _value(b)))

    def exp2(self, x: Word) -> Word:
        """2 to the power of x, to 2 units in the last place."""
        return _Word(mu.inline_ptx("ex2.approx.ftz.f32 $0, $1;", x.value, result_types=f32()))

    def log2(self, x: Word) -> Word:
        """−inf of 0; absolute error 2⁻²² between 0.5 and 2, elsewhere 3 units in the last place."""
        return _Word(mu.inline_ptx("lg2.approx.ftz.f32 $0, $1;", x.value, result_types=f32()))

    def exp(self, x: Word) -> Word:
        """e to the power of x: the bits that XLA's own programs have, to 2 units in the last place."""
        return _Word(mu.inline_ptx(EXP, x.value, result_types=f32()))

    def inverse_root(self, x: Word) -> Word:
        """1/√x, to 2 units in the last place."""
        return _Word(mu.inline_ptx("rsqrt.approx.ftz.f32 $0, $1;", x.value, result_types=f32()))

    def multiply_add(self, a: Word, b: Any, c: Word) -> Word:
        """a · b + c, rounded once; b a word or a number."""
        terms = a.value, _value(b, f32()), c.value
        return _Word(mu.inline_ptx("fma.rn.f32 $0, $1, $2, $3;", *terms, result_types=f32()))

    def bits(self, x: Word) -> Word:
        """A floating-point word's bits: an integer of the same order for numbers that are not negative."""
        return _Word(arith.bitcast(i32(), x.value))

    def minimum(self, a: Word, b: Any) -> Word:
        return _Word(arith.minsi(a.value, _value(b)))

    def maximum(self, a: Word, b: Any) -> Word:
        return _Word(arith.maxsi(a.value, _value(b)))

    def warp_maximum(self, x: Word) -> Word:
        """The largest integer of the warp."""
        return _Word(mu.redux(x.value, mu.c(0xFFFFFFFF, i32()), mu.ReductionKind.MAX))

    def warp_minimum(self, x: Word) -> Word:
        """The smallest integer of the warp."""
        return _Word(mu.redux(x.value, mu.c(0xFFFFFFFF, i32()), mu.ReductionKind.MIN))

    def shuffle_xor(self, x: Word, distance: int) -> Word:
        return _Word(mu.shfl_bfly(x.value, distance))

    def shuffle_up(self, x: Word, distance: int) -> Word:
        every = mu.c(0xFFFFFFFF, i32())
        return _Word(nvvm.shfl_sync(every, x.value, mu.c(distance, i32()), mu.c(0, i32()), nvvm.ShflKind.up))

    def load(self, ref: Any, index: Word) -> Word:
        """A word, a number of bfloat16 made one of f32, or a bool as 0 or 1."""
        space, address, size = self.address_of(ref, index)
        if size == 1:
            byte = mu.inline_ptx(f"ld.{space}.u8 $0, [$1];", address, result_types=i32(), has_side_effects=True)
            return _Word(byte)
        if is_bfloat16(ref):
            half = mu.inline_ptx(f"ld.{space}.u16 $0, [$1];", address, result_types=i32(), has_side_effects=True)
            return _Word(arith.bitcast(f32(), arith.shli(half, mu.c(16, i32()))))
        assert size == 4, "words only"
        kind = f32() if ir.MemRefType(ref.type).element_type == f32() else i32()
        return _Word(mu.inline_ptx(f"ld.{space}.b32 $0, [$1];", address, result_types=kind, has_side_effects=True))

    def store(self, ref: Any, index: Word, x: Word, only: Word | None = None) -> None:
        """Stores a word, a bool of a comparison, or a number of f32 rounded to bfloat16."""
        space, address, size = self.address_of(ref, index)
        value = x.value if x.value.type in (i32(), f32()) else arith.extui(i32(), x.value)
        if is_bfloat16(ref):
            terms = (mu.c(0.0, f32()), value)  # of a pair the second is the lower half
            value = mu.inline_ptx("cvt.rn.bf16x2.f32 $0, $1, $2;", *terms, result_types=i32())
        mu.inline_ptx(
            f"st.{space}.b{8 * size} [$0], $1;",
            address,
            value,
            predicate=None if only is None else only.value,
            has_side_effects=True,
        )

    def load4(self, ref: Any, index: Word) -> list[Word]:
        """Four words from `index` on, a multiple of 4."""
        space, address, size = self.address_of(ref, index)
        assert size == 4, "words only"
        kind = f32() if ir.MemRefType(ref.type).element_type == f32() else i32()
        load = f"ld.{space}.v4.b32 {{$0, $1, $2, $3}}, [$4];"
        found = mu.inline_ptx(load, address, result_types=[kind] * 4, has_side_effects=True)
        return [_Word(value) for value in found]

    def load_bools(self, ref: Any, index: Word) -> Word:
        """Four bools from `index` on, a multiple of 4, as a word: 0 or 1 in each byte, the first in the lowest."""
        space, address, size = self.address_of(ref, index)
        assert size == 1, "bools only"
        return _Word(mu.inline_ptx(f"ld.{space}.b32 $0, [$1];", address, result_types=i32(), has_side_effects=True))

    def load8(self, ref: Any, index: Word) -> list[Word]:
        """Eight numbers of bfloat16 or float16 from `index` on, a multiple of 8, made f32."""
        space, address, _ = self.address_of(ref, index)
        assert is_bfloat16(ref) or _is_float16(ref), "numbers of 16 bits only"
        load = f"ld.{space}.v4.b32 {{$0, $1, $2, $3}}, [$4];"
        pairs = mu.inline_ptx(load, address, result_types=[i32()] * 4, has_side_effects=True)
        if _is_float16(ref):
            return [_Word(number) for pair in pairs for number in mu.inline_ptx(WIDEN, pair, result_types=[f32()] * 2)]
        upper = mu.c(-(1 << 16), i32())
        halves = [half for pair in pairs for half in (arith.shli(pair, mu.c(16, i32())), arith.andi(pair, upper))]
        return [_Word(arith.bitcast(f32(), half)) for half in halves]

    def store4(self, ref: Any, index: Word, words: list[Word], only: Word | None = None) -> None:
        """Stores four words from `index` on, a multiple of 4, in SMEM."""
        space, address, _ = self.address_of(ref, index)
        mu.inline_ptx(
            f"st.{space}.v4.b32 [$0], {{$1, $2, $3, $4}};",
            address,
            *(word.value for word in words),
            predicate=None if only is None else only.value,
            has_side_effects=True,
        )

    def store8(self, ref: Any, index: Word, words: list[Word]) -> None:
        """Stores eight numbers of f32, rounded to bfloat16, from `index` on, a multiple of 8."""
        space, address, _ = self.address_of(ref, index)
        assert is_bfloat16(ref), "bfloat16 only"
        rounded = [
            mu.inline_ptx("cvt.rn.bf16x2.f32 $0, $1, $2;", upper.value, lower.value, result_types=i32())
            for lower, upper in zip(words[::2], words[1::2], strict=True)
        ]
        mu.inline_ptx(f"st.{space}.v4.b32 [$0], {{$1, $2, $3, $4}};", address, *rounded, has_side_effects=True)

    def synchronize(self) -> None:
        """Waits for the warpgroup; what any thread of it stored in SMEM is seen by all."""
        mu.warpgroup_barrier()

    def address_of(self, ref: Any, index: Word) -> tuple[str, ir.Value, int]:
        """State space, byte address, bytes an element (a bool takes one)."""
        element = ir.MemRefType(ref.type).element_type
        size = max(mu.bitwidth(element), 8) // 8
        if mu.is_smem_ref(ref):
            base = llvm.ptrtoint(i32(), mu.memref_ptr(ref))
            return "shared", arith.addi(base, arith.muli(index.value, mu.c(size, i32()))), size
        base = llvm.ptrtoint(i64(), mu.memref_ptr(ref))
        offset = arith.muli(arith.extui(i64(), index.value), mu.c(size, i64()))
        return "global", arith.addi(base, offset), size


# --------------------------------------------------------------------------------------------------------- interpreted


class _Interpreted:
    """Operations of `_OnGPU` on vectors over the threads of a warpgroup."""

    @property
    def index(self) -> Word:
        return jnp.arange(WARPGROUP, dtype=jnp.int32)

    def constant(self, x: float) -> Word:
        return jnp.full(WARPGROUP, x, jnp.float32 if isinstance(x, float) else jnp.int32)

    def where(self, condition: Word, a: Any, b: Any) -> Word:
        return jnp.where(condition, a, b)

    def exp2(self, x: Word) -> Word:
        return jnp.exp2(x)

    def log2(self, x: Word) -> Word:
        return jnp.log2(x)

    def exp(self, x: Word) -> Word:
        return jnp.exp(x)

    def inverse_root(self, x: Word) -> Word:
        return lax.rsqrt(x)

    def multiply_add(self, a: Word, b: Any, c: Word) -> Word:
        return a * jnp.asarray(b, jnp.float32) + c

    def bits(self, x: Word) -> Word:
        return lax.bitcast_convert_type(x, jnp.int32)

    def minimum(self, a: Word, b: Any) -> Word:
        return jnp.minimum(a, b)

    def maximum(self, a: Word, b: Any) -> Word:
        return jnp.maximum(a, b)

    def warp_maximum(self, x: Word) -> Word:
        return jnp.repeat(x.reshape(WARPS, WARP).max(axis=1), WARP)

    def warp_minimum(self, x: Word) -> Word:
        return jnp.repeat(x.reshape(WARPS, WARP).min(axis=1), WARP)

    def shuffle_xor(self, x: Word, distance: int) -> Word:
        return x[self.index ^ distance]

    def shuffle_up(self, x: Word, distance: int) -> Word:
        return jnp.where(self.index % WARP >= distance, x[jnp.maximum(self.index - distance, 0)], x)

    def load(self, ref: Any, index: Word) -> Word:
        found = ref[...].reshape(-1)[index]
        wider = {jnp.dtype(jnp.bfloat16): jnp.float32, jnp.dtype(bool): jnp.int32}
        return found.astype(wider.get(ref.dtype, ref.dtype))

    def load_bools(self, ref: Any, index: Word) -> Word:
        return sum(self.load(ref, index + i) * (1 << 8 * i) for i in range(4))

    def load4(self, ref: Any, index: Word) -> list[Word]:
        return [self.load(ref, index + i) for i in range(4)]

    def load8(self, ref: Any, index: Word) -> list[Word]:
        return list(ref[...].reshape(-1)[index[:, None] + jnp.arange(8)[None]].astype(jnp.float32).T)

    def store4(self, ref: Any, index: Word, words: list[Word], only: Word | None = None) -> None:
        """At once: SMEM is the warpgroup's own."""
        here = index if only is None else jnp.where(only, index, ref.size)
        flat = ref[...].reshape(-1).at[here[:, None] + jnp.arange(4)[None]].set(jnp.stack(words, axis=1), mode="drop")
        ref[...] = flat.reshape(ref.shape)

    def store(self, ref: Any, index: Word, x: Word, only: Word | None = None) -> None:
        """One element after the other: other warpgroups may be storing to other elements at the same time."""
        index, x = jnp.broadcast_to(index, WARPGROUP), jnp.broadcast_to(x, WARPGROUP).astype(ref.dtype)
        only = jnp.broadcast_to(True if only is None else only, WARPGROUP)
        # Neighbours that store to one place store the same: the last of them will do.
        again = jnp.logical_and(index[:-1] == index[1:], only[1:])
        only = jnp.logical_and(only, jnp.append(jnp.logical_not(again), True))

        def one(i: jax.Array, carry: None) -> None:
            @pl.when(only[i])
            def _store() -> None:
                ref[jnp.unravel_index(index[i], ref.shape)] = x[i]

        lax.fori_loop(0, WARPGROUP, one, None)

    def store8(self, ref: Any, index: Word, words: list[Word]) -> None:
        """One run of eight after the other, each within a row of the array, as in `store`."""
        index, runs = jnp.broadcast_to(index, WARPGROUP), jnp.stack(words, axis=1).astype(ref.dtype)

        def one(i: jax.Array, carry: None) -> None:
            *place, first = jnp.unravel_index(index[i], ref.shape)
            ref[(*place, pl.ds(first, 8))] = runs[i]

        lax.fori_loop(0, WARPGROUP, one, None)

    def synchronize(self) -> None:
        """Vectors are in step already."""


# ------------------------------------------------------------------------------------------------------------ clusters


def synchronize_cluster(t: Threads, barrier: Ref | None) -> None:
    """Waits for all blocks of the cluster; what any thread of it stored, in GMEM too, is seen by all.

    `barrier` is a `plgpu.ClusterBarrier` of the cluster's axes, at which each warpgroup arrives once: needed where this
    is interpreted, for the GPU has one of its own; None for a block alone.
    """
    if isinstance(t, _OnGPU):
        mu.inline_ptx("barrier.cluster.arrive.release.aligned;", has_side_effects=True)
        mu.inline_ptx("barrier.cluster.wait.acquire.aligned;", has_side_effects=True)
    elif barrier is not None:
        plgpu.barrier_arrive(barrier)
        plgpu.barrier_wait(barrier)
