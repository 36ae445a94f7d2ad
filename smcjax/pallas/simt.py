"""Programs of single threads inside a Mosaic kernel, for integer work that Pallas has no operations for.

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
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith, llvm, nvvm
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils as mu
from jax.experimental.pallas import mosaic_gpu as plgpu

Ref = Any
Word = Any  # what a program computes with: `_Word` or a vector of 128
Threads = Any  # `_OnGPU` or `_Interpreted`
WARP = 32
WARPGROUP = 128
SCALAR = plgpu.Layout.WG_SPLAT(())


def run(program: Callable[..., None], *args: Any, interpret: bool) -> None:
    """Runs `program(threads, *args)` in every thread of the warpgroup.

    `args` are references, contiguous in GMEM or SMEM, and int32 scalars, which arrive as words.
    """
    is_ref = [isinstance(jax.typeof(arg), jax.ref.AbstractRef) for arg in args]
    args = tuple(arg if ref else jnp.asarray(arg, jnp.int32) for arg, ref in zip(args, is_ref, strict=True))
    if interpret:
        program(_Interpreted(), *args)
        return

    @plgpu.inline_mgpu(arg_types=tuple(plgpu.RefType() if ref else SCALAR for ref in is_ref))
    def go(_: Any, *args: Any) -> None:
        words = [arg if ref else _Word(scalar(arg)) for arg, ref in zip(args, is_ref, strict=True)]
        program(_OnGPU(), *words)

    go(*args)


# ------------------------------------------------------------------------------------------------------------- on GPU


def i32() -> ir.Type:
    """The type of a word."""
    return ir.IntegerType.get_signless(32)


def i64() -> ir.Type:
    """The type of a global address."""
    return ir.IntegerType.get_signless(64)


def scalar(x: Any) -> ir.Value:
    """The one register of a scalar that Pallas passes."""
    return x.registers.flat[0]


def word(value: ir.Value) -> Word:
    """A value as programs compute with it."""
    return _Word(value)


def thread() -> ir.Value:
    """This thread's number in its warpgroup."""
    return arith.remui(mu.inline_ptx("mov.u32 $0, %tid.x;", result_types=i32()), mu.c(WARPGROUP, i32()))


def _value(x: Any) -> ir.Value:
    return x.value if isinstance(x, _Word) else mu.c(x, i32())


def _compare(predicate: arith.CmpIPredicate) -> Callable[[Any, Any], Any]:
    return lambda self, other: _Word(arith.cmpi(predicate, self.value, _value(other)))


class _Word:
    """An i32 of one thread, or an i1 where it is a comparison. Division is of numbers that are not negative."""

    def __init__(self, value: ir.Value) -> None:
        self.value = value

    def __add__(self, other: Any) -> _Word:
        return _Word(arith.addi(self.value, _value(other)))

    def __sub__(self, other: Any) -> _Word:
        return _Word(arith.subi(self.value, _value(other)))

    def __mul__(self, other: Any) -> _Word:
        return _Word(arith.muli(self.value, _value(other)))

    def __floordiv__(self, other: Any) -> _Word:
        return _Word(arith.divui(self.value, _value(other)))

    def __mod__(self, other: Any) -> _Word:
        return _Word(arith.remui(self.value, _value(other)))

    def __and__(self, other: Any) -> _Word:
        return _Word(arith.andi(self.value, other.value))

    __lt__ = _compare(arith.CmpIPredicate.slt)
    __ge__ = _compare(arith.CmpIPredicate.sge)
    __eq__ = _compare(arith.CmpIPredicate.eq)
    __ne__ = _compare(arith.CmpIPredicate.ne)
    __hash__ = None  # type: ignore[assignment]


class _OnGPU:
    @property
    def index(self) -> Word:
        return _Word(thread())

    def constant(self, x: int) -> Word:
        return _Word(mu.c(x, i32()))

    def where(self, condition: Word, a: Any, b: Any) -> Word:
        return _Word(arith.select(condition.value, _value(a), _value(b)))

    def minimum(self, a: Word, b: Any) -> Word:
        return _Word(arith.minsi(a.value, _value(b)))

    def shuffle_xor(self, x: Word, distance: int) -> Word:
        return _Word(mu.shfl_bfly(x.value, distance))

    def shuffle_up(self, x: Word, distance: int) -> Word:
        every = mu.c(0xFFFFFFFF, i32())
        return _Word(nvvm.shfl_sync(every, x.value, mu.c(distance, i32()), mu.c(0, i32()), nvvm.ShflKind.up))

    def load(self, ref: Any, index: Word) -> Word:
        space, address, _ = self._address(ref, index)
        return _Word(mu.inline_ptx(f"ld.{space}.b32 $0, [$1];", address, result_types=i32(), has_side_effects=True))

    def store(self, ref: Any, index: Word, x: Word, only: Word | None = None) -> None:
        space, address, size = self._address(ref, index)
        value = x.value if x.value.type == i32() else arith.extui(i32(), x.value)
        mu.inline_ptx(
            f"st.{space}.b{8 * size} [$0], $1;",
            address,
            value,
            predicate=None if only is None else only.value,
            has_side_effects=True,
        )

    def synchronize(self) -> None:
        """Waits for the warpgroup; what any thread of it stored in SMEM is seen by all."""
        mu.warpgroup_barrier()

    def _address(self, ref: Any, index: Word) -> tuple[str, ir.Value, int]:
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
    """The same operations on vectors over the threads of a warpgroup."""

    @property
    def index(self) -> Word:
        return jnp.arange(WARPGROUP, dtype=jnp.int32)

    def constant(self, x: int) -> Word:
        return jnp.full(WARPGROUP, x, jnp.int32)

    def where(self, condition: Word, a: Any, b: Any) -> Word:
        return jnp.where(condition, a, b)

    def minimum(self, a: Word, b: Any) -> Word:
        return jnp.minimum(a, b)

    def shuffle_xor(self, x: Word, distance: int) -> Word:
        return x[self.index ^ distance]

    def shuffle_up(self, x: Word, distance: int) -> Word:
        return jnp.where(self.index % WARP >= distance, x[jnp.maximum(self.index - distance, 0)], x)

    def load(self, ref: Any, index: Word) -> Word:
        return ref[...].reshape(-1)[index]

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

    def synchronize(self) -> None:
        """Vectors are in step already."""
