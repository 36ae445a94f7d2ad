"""Policies for the L2 of copies by the copy engine (TMA) in a Mosaic kernel: which lines it gives up first or last.

Weights of a step stream through the L2 once and, taken for as good as anything else, drive out what is read again:
activations, small KV, tables, code. And what a kernel leaves for the next one may be written to memory for nothing when
a stream drives it out.

Pallas' copies say nothing of that. So Pallas makes the copy, and another instruction takes the place of the one that it
writes, with the same operands and a policy. (NVVM's own operation takes no policy beside a predicate.) JAX 0.12 writes
loads as text of PTX, JAX 0.11 as NVVM's operation. In kernels of `Lane` semantics the instruction is there at once. In
others there is an operation of Mosaic's dialect, which is marked: the rule that lowers it later is here followed by the
exchange. Interpreted, there is no L2.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from smcjax.pallas.mosaic.compat import after_lowering, ir, llvm, mu, plgpu
from smcjax.pallas.mosaic.threads import i64
from smcjax.pallas.mosaic.wgmma import Ref

LOAD = "nvvm.cp.async.bulk.tensor.shared.cluster.global"
STORE = "nvvm.cp.async.bulk.tensor.global.shared.cta"
TEXT = "llvm.inline_asm"
_COPIES = ("mosaic_gpu.async_load", "mosaic_gpu.async_store")
_POLICIES = {"evict_first": 0x12F0000000000000, "evict_last": 0x14F0000000000000}  # as `createpolicy` makes them
_MARK = "smcjax.policy"


def load_to_leave(source: Ref, target: Ref, barrier: Ref, *, interpret: bool) -> None:
    """`plgpu.copy_gmem_to_smem` of what is not read again soon: its lines leave the L2 first."""
    plgpu.copy_gmem_to_smem(source, target, barrier)
    _last_copy("evict_first", interpret=interpret)


def store_to_stay(source: Ref, target: Ref, *, interpret: bool) -> None:
    """`plgpu.copy_smem_to_gmem` of what is soon read and then written anew: its lines leave the L2 last.

    So it never goes to memory.
    """
    plgpu.copy_smem_to_gmem(source, target)
    _last_copy("evict_last", interpret=interpret)


# -------------------------------------------------------------------------------------------------------------- within


def _last_copy(policy: str, *, interpret: bool) -> None:
    """Gives the copy that was traced last, which must be of tiles, a policy."""
    if interpret:
        return
    _exchange_after_lowering()

    @plgpu.inline_mgpu()
    def go(_: Any) -> None:
        block = ir.InsertionPoint.current.block
        within = block.owner.operation
        if within.name != "mosaic_gpu.custom_primitive":
            _replace(_last_of(block, _is_copy), policy)
        else:
            copy = _last_of(within.block, lambda one: one.name in _COPIES)
            copy.attributes[_MARK] = ir.StringAttr.get(policy)

    go()


def _last_of(block: ir.Block, kind: Callable[[ir.Operation], bool]) -> ir.Operation:
    """The operation of a kind that was written last."""
    return next(one.operation for one in reversed(list(block.operations)) if kind(one.operation))


def _is_copy(operation: ir.Operation) -> bool:
    """True for an instruction that copies tiles."""
    written: Any = operation.opview
    is_text = operation.name == TEXT and "cp.async.bulk.tensor" in str(written.asm_string)
    return is_text or operation.name in (LOAD, STORE)


def _exchange(copy: Any) -> None:
    """Gives what a copy has been lowered to a policy, if the copy is marked."""
    if _MARK in copy.attributes:
        written = _last_of(ir.InsertionPoint.current.block, _is_copy)
        _replace(written, ir.StringAttr(copy.attributes[_MARK]).value)


@functools.cache
def _exchange_after_lowering() -> None:
    """Hooks the exchange into Mosaic, which is imported for a kernel and not before."""
    for name in _COPIES:
        after_lowering(name, _exchange)


def _replace(operation: ir.Operation, policy: str) -> None:
    """Puts an instruction with a policy in the place of a copy."""
    copy: Any = operation.opview
    if operation.name == TEXT:
        predicate, target, descriptor, barrier, *coordinates = copy.operands
        ends = [target, barrier]
    else:
        predicate, descriptor, coordinates = copy.predicate, copy.tmaDescriptor, copy.coordinates
        ends = [copy.srcMem] if operation.name == STORE else [copy.dstMem, copy.mbar]
    if operation.name == STORE:
        name, where = "global.shared::cta.tile.bulk_group", "[$2, {at}], [$3]"
    else:
        name, where = "shared::cluster.global.tile.mbarrier::complete_tx::bytes", "[$3], [$2, {at}], [$4]"
    hint, first = mu.c(_POLICIES[policy], i64()), 3 + len(ends)
    at = ", ".join(f"${first + i}" for i in range(len(coordinates)))
    llvm.inline_asm(
        ir.Type.parse("!llvm.void"),
        [predicate, hint, descriptor, *ends, *coordinates],
        f"@$0 cp.async.bulk.tensor.{len(coordinates)}d.{name}.L2::cache_hint {where.format(at=f'{{{at}}}')}, $1;",
        ",".join(["b", "l", "l", *("r" for _ in (*ends, *coordinates))]),
        has_side_effects=True,
    )
    operation.erase()
