"""What the L2 is told of copies by the copy engine (TMA) inside a Mosaic kernel: which lines it gives up first or last.

Weights of a step stream through the L2 once and, taken for as good as anything else, drive out what is read again:
activations, small KV, tables, code. And what a kernel leaves for the next one may be written to memory for nothing when
a stream drives it out.

Pallas' copies say nothing of that. So here Pallas makes the copy, and another instruction takes the place of the one
that it wrote, with the same operands and a policy. (NVVM's own operation takes no policy beside a predicate.)
Interpreted, there is no L2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith, llvm
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mu
from jax.experimental.pallas import mosaic_gpu as plgpu

from smcjax.pallas.products import SWIZZLED, Ref
from smcjax.pallas.simt import SCALAR, i64, scalar

_LOAD = "nvvm.cp.async.bulk.tensor.shared.cluster.global"
_STORE = "nvvm.cp.async.bulk.tensor.global.shared.cta"


def load_to_leave(source: Ref, target: Ref, barrier: Ref, *, interpret: bool) -> None:
    """`plgpu.copy_gmem_to_smem` of what nobody reads again soon: its lines leave the L2 first.

    In kernels of `Lane` semantics; others write their copies' instructions only later.
    """
    plgpu.copy_gmem_to_smem(source, target, barrier)
    if interpret:
        return

    @plgpu.inline_mgpu()
    def go(_: Any) -> None:
        load = _last_of(_LOAD)
        _replace(
            load,
            "cp.async.bulk.tensor.{rank}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
            "[$1], [$2, {coordinates}], [$3], $4;",
            (load.dstMem, "r"),
            (load.tmaDescriptor, "l"),
            (load.mbar, "r"),
            (_policy("evict_first"), "l"),
        )

    go()


def store_to_stay(source: Ref, target: Ref, place: Sequence[jax.Array], *, interpret: bool) -> None:
    """Starts target[place] = source, whose lines leave the L2 last, as a group of its own.

    For what is soon read and then written anew: so it never goes to memory. `source` is SMEM, `SWIZZLED`; `target` GMEM
    as the kernel was given it. Behind `plgpu.commit_smem`; `plgpu.wait_smem_to_gmem` waits for it.
    """
    if interpret:
        target[tuple(place)] = source[...]
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(SWIZZLED), plgpu.RefType(), *(SCALAR,) * len(place)))
    def go(ctx: Any, source: ir.Value, target: ir.Value, *place: Any) -> None:
        index = ir.IndexType.get()
        ctx.async_copy(
            src_ref=source,
            dst_ref=target,
            gmem_slice=tuple(arith.index_cast(index, scalar(at)) for at in place),
            gmem_transform=mgpu.TileTransform((8, 64)),
            swizzle=128,
            arrive=True,
        )
        store = _last_of(_STORE)
        _replace(
            store,
            "cp.async.bulk.tensor.{rank}d.global.shared::cta.tile.bulk_group.L2::cache_hint "
            "[$1, {coordinates}], [$2], $3;",
            (store.tmaDescriptor, "l"),
            (store.srcMem, "r"),
            (_policy("evict_last"), "l"),
        )

    go(source, target, *place)


# -------------------------------------------------------------------------------------------------------------- within

_POLICIES = {"evict_first": 0x12F0000000000000, "evict_last": 0x14F0000000000000}  # as `createpolicy` makes them


def _policy(name: str) -> ir.Value:
    return mu.c(_POLICIES[name], i64())


def _last_of(name: str) -> Any:
    """The operation of this name that was written last."""
    operations = list(ir.InsertionPoint.current.block.operations)
    return next(one.opview for one in reversed(operations) if one.operation.name == name)


def _replace(copy: Any, instruction: str, *operands: tuple[ir.Value, str]) -> None:
    """Puts an instruction of these operands, each with its constraint, in the place of a copy.

    `{rank}` and `{coordinates}` in it are the copy's, whose coordinates come behind the other operands.
    """
    values, kinds = zip(*operands, strict=True)
    where, first = list(copy.coordinates), 1 + len(operands)
    coordinates = ", ".join(f"${first + i}" for i in range(len(where)))
    llvm.inline_asm(
        ir.Type.parse("!llvm.void"),
        [copy.predicate, *values, *where],
        "@$0 " + instruction.format(rank=len(where), coordinates=f"{{{coordinates}}}"),
        ",".join(["b", *kinds, *("r" for _ in where)]),
        has_side_effects=True,
    )
    copy.operation.erase()
