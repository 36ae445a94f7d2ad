"""Sums over devices, tile by tile as in `peer_memory.py`, inside a kernel of a whole step (`decode_step/kernel.py`).

Blocks of the same number have the same tiles on every device. Each thread pushes its numbers, each in 64 bits with the
number of the exchange, waits for the others' and adds up in the order of devices: no flag, fence or barrier.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from smcjax.pallas.collectives.peer_memory import (
    MAX_TILES,
    TILE_BYTES,
    Ref,
    exchanges_at,
    load_one,
    plus,
    times,
    word_of,
)
from smcjax.pallas.mosaic.compat import arith, ir, llvm, mu, plgpu
from smcjax.pallas.mosaic.threads import f32, i32, i64, scalar, scalar_layout, thread
from smcjax.pallas.mosaic.tiles import tile_layout, tile_of, values_of


def exchanged(addresses: Ref, tile: jax.Array, number: Any, turn: Any, last: Any) -> jax.Array:
    """The sum of all devices' [16, M] tiles, f32.

    `number` is the tile's, below `MAX_TILES`; `turn` counts its exchanges in this launch, and `last` is 1 at its last.
    """
    tokens, size = tile.shape[1], addresses.shape[1] // 2 - 1
    layout = tile_layout(tokens)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), layout, scalar_layout(), scalar_layout(), scalar_layout()),
        return_type=plgpu.ShapeDtypeStruct(tile.shape, jnp.float32, layout=layout),
    )
    def go(_: Any, addresses: ir.Value, tile: Any, *scalars: Any) -> Any:
        number, turn, last = map(scalar, scalars)
        base, t = llvm.ptrtoint(i64(), mu.memref_ptr(addresses)), thread()
        # The table of addresses begins with this device's rank; the start of device d's workspace is word d + 1 of 64
        # bits.
        rank = load_one("global.b32", base, i32())

        def start(device: ir.Value) -> ir.Value:
            return load_one("global.b64", plus(base, 8, times(device, 8)), i64())

        own = start(rank)
        # The number of this exchange: what the workspace has counted in earlier launches, plus this launch's turns. All
        # devices count alike, so they agree on it.
        counter = plus(own, exchanges_at(size), times(number, 4))
        call = arith.addi(load_one("global.b32", counter, i32()), arith.addi(turn, word_of(1)))

        def place(device: ir.Value) -> ir.Value:
            # Two slots in turns by the number's lowest bit; in each a place for every device, and in that for every
            # tile.
            slot = arith.addi(arith.muli(arith.andi(call, word_of(1)), word_of(size)), device)
            slot = arith.addi(arith.muli(slot, word_of(MAX_TILES)), number)
            return plus(times(slot, TILE_BYTES), times(t, tokens), exchanges_at(size) + 4 * MAX_TILES)

        # A word of f32 travels with the number of its exchange in one store of 64 bits, so it is its own flag.
        words = [arith.bitcast(i32(), value) for value in values_of(tile, tokens)]
        for distance in range(1, size + 1):  # to itself last
            there = plus(start(arith.remui(arith.addi(rank, word_of(distance)), word_of(size))), place(rank))
            for j, word in enumerate(words):
                ptx = "{.reg .b64 a; mov.b64 a, {$1,$2}; st.relaxed.sys.global.b64 [$0], a;}"
                mu.inline_ptx(ptx, plus(there, 8 * j), word, call, has_side_effects=True)
        # Reads what every device, itself included, has pushed here, in the order of devices: all devices have the same
        # bits.
        total = _added([plus(own, place(word_of(device))) for device in range(size)], len(words), call)
        mu.warpgroup_barrier()  # all have the number of the exchange
        eq = arith.CmpIPredicate.eq
        # Only the last exchange of a launch is stored, by one thread, for the next launch to count on from.
        ends = arith.andi(arith.cmpi(eq, t, word_of(0)), arith.cmpi(eq, last, word_of(1)))
        mu.inline_ptx("st.global.b32 [$0], $1;", counter, call, predicate=ends, has_side_effects=True)
        return tile_of(total, tokens, f32(), None)

    out: jax.Array = go(addresses, tile, *(jnp.asarray(x, jnp.int32) for x in (number, turn, last)))
    return out


def _added(places: Sequence[ir.Value], count: int, call: ir.Value) -> list[ir.Value]:
    """The sums of `count` numbers at these places, which are waited for."""
    # Waits, word by word, until the word has this exchange's number.
    load = "again: ld.relaxed.sys.global.b64 a, [$1]; mov.b64 {k,p}, a; setp.ne.b32 late, p, $2; @late bra again;"
    ptx = f"{{.reg .pred late; .reg .b64 a; .reg .b32 k, p; {load} mov.b32 $0, k;}}"
    total: list[ir.Value] = []
    for place in places:
        words = [
            mu.inline_ptx(ptx, plus(place, 8 * j), call, result_types=i32(), has_side_effects=True)
            for j in range(count)
        ]
        values = [arith.bitcast(f32(), word) for word in words]
        total = [arith.addf(a, b) for a, b in zip(total, values, strict=True)] if total else values
    return total
