"""Sums and gathers over the GPUs of a host, by one kernel that writes into the other devices' memory.

    sum      out = Σ_d x_d (+ add_to), in f32, in the order of the devices, rounded once: the same bits on every device
    gather   out = x_0, x_1, … side by side along the last dimension

Each device has a workspace in its own memory whose address all of them know. A call pushes the device's array into a
slot of every other device's workspace, raises a flag there, waits for the others' flags, and adds up what they have
pushed. Nothing is fetched, so a call takes one way over NVLink, and no multicast is used. It is an ordinary kernel,
which XLA records in its CUDA graphs and for which hosts need not meet.

    workspace of a device:   counters [blocks]         calls that a block has made
                             flags    [n, blocks]      last call of device i's block whose piece is there
                             slots    [2, n, piece]    pieces of arrays, by the call's parity and the device
                             lines    [2, n, piece]    the same of small arrays, every word with its call's number
                             tiles                     and their counters: `smcjax.pallas.collectives.peer_tiles`

An array of up to 256 KB goes without flags: each of its words lies in one 64-bit number with that of its call, and who
reads it waits for that, word by word: twice the bytes, but no wait until all of them have arrived before a flag goes.

A block of threads has a piece of each array and talks to the blocks of the same number alone, in places of its own. Its
calls are numbered in memory, so a graph may be repeated. Two slots suffice: when it writes the piece of call s, it has
seen all flags of call s − 1, which others raised after they had read call s − 2, the last that used the slot. An array
larger than a slot takes several calls in one launch. Devices must make the same calls in the same order, as of a
collective of XLA's, and each of them one launch after the other, as XLA's schedule has them.

The references are `jax.lax.psum` and `jax.lax.all_gather`, which `smcjax.matmul` takes wherever this does not apply.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from smcjax.pallas.dispatch import active_implementation, implementations
from smcjax.pallas.mosaic.compat import arith, ir, llvm, mu, plgpu
from smcjax.pallas.mosaic.threads import WARPGROUP, compiler_params, f32, i32, i64, scalar, scalar_layout, thread

Ref = Any
type Words = list[ir.Value]  # four of a vector
MAX_DEVICES = 8
BLOCKS = 128  # of at least 132 multiprocessors: all run at once
VECTOR = 16  # bytes that a thread moves at once
MAX_VECTORS = 8  # of a thread in one call
FLAGS, SLOTS = 4 * BLOCKS, 1 << 16  # where they begin in a workspace, bytes
PIECES = MAX_VECTORS * BLOCKS * WARPGROUP * VECTOR  # bytes of a slot
LINES = 2 * BLOCKS * WARPGROUP * VECTOR  # of one whose words are numbered
MAX_TILES, TILE_BYTES = 512, 4096  # of 16 features of up to 32 tokens, for kernels that exchange tiles themselves
MAX_PUSHED_BYTES = 8 << 20  # bytes that a device writes for a sum: of more, XLA's two steps write less
DTYPES = ("bfloat16", "float32")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PeerMemory:
    """One device's knowledge of the others. An argument of programs, divided among devices.

    Attributes:
        addresses: Int32[n, 2 + 2n], a row a device: its number, 0, and the workspaces' addresses of 64 bits.
        size: n, the number of devices.
    """

    addresses: Any
    size: int = dataclasses.field(metadata={"static": True})

    def sums(self, x: jax.Array) -> bool:
        """True for arrays that `sum` takes and is quicker with than XLA."""
        return self._takes(x, x.size) and x.size * x.dtype.itemsize * (self.size - 1) <= MAX_PUSHED_BYTES

    def gathers(self, x: jax.Array) -> bool:
        """True for arrays that `gather` takes."""
        return self._takes(x, x.shape[-1])

    def _takes(self, x: jax.Array, run: int) -> bool:
        is_whole = run > 0 and run * x.dtype.itemsize % VECTOR == 0
        return active_implementation() == "mosaic" and x.dtype.name in DTYPES and is_whole

    def sum(self, x: jax.Array, add_to: jax.Array | None = None) -> jax.Array:
        """The sum of all devices' x, plus `add_to` [like x], which all have. Within `shard_map`."""
        others = () if add_to is None else (add_to,)
        assert all((y.shape, y.dtype) == (x.shape, x.dtype) for y in others), "the kernel reads both alike"
        out: jax.Array = _over_peers(self.addresses, x, *others, size=self.size, gathered=False)
        return out

    def gather(self, x: jax.Array) -> jax.Array:
        """All devices' x [..., w] side by side, [..., n·w]. Within `shard_map`."""
        out: jax.Array = _over_peers(self.addresses, x, size=self.size, gathered=True)
        return out


def supports_peers(size: int) -> bool:
    """True for `size` devices that the kernel runs on, where all are like JAX's default device."""
    with implementations("auto"):
        return size <= MAX_DEVICES and active_implementation() == "mosaic"


def reach_each_other(devices: Sequence[jax.Device]) -> bool:
    """True for GPUs that CUDA says can have each other's memory, which XLA then allows all of a process."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    found = ctypes.c_int()
    pairs = itertools.permutations((device.local_hardware_id for device in devices), 2)
    return all(cuda.cuDeviceCanAccessPeer(ctypes.byref(found), *pair) == 0 and found.value for pair in pairs)


def exchanges_at(size: int) -> int:
    """Where in a workspace are the counters of `smcjax.pallas.collectives.peer_tiles`, with its tiles behind them."""
    return SLOTS + 2 * size * (PIECES + LINES)


def workspace_bytes(size: int) -> int:
    """Bytes that a workspace takes of each of `size` devices."""
    return exchanges_at(size) + 4 * MAX_TILES + 2 * size * MAX_TILES * TILE_BYTES


class Workspaces:
    """Memory of the devices of a mesh of one axis, through which they push arrays to each other.

    Each of several engines has its own. What is given back is kept for the next one: programs that still run may be
    writing there. It begins at zero again behind them, as devices of which one has failed have not made the same calls.
    """

    _idle: dict[tuple[jax.Device, ...], list[jax.Array]] = {}  # noqa: RUF012

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        idle = self._idle.setdefault(tuple(mesh.devices.flat), [])
        self._memory = self._cleared(idle.pop()) if idle else self._made()
        self.give_back = weakref.finalize(self, idle.append, self._memory)  # leaves the memory to others, once

    def _made(self) -> jax.Array:
        size, (axis,) = self.mesh.size, self.mesh.axis_names
        shape, sharding = (size, workspace_bytes(size) // 4), NamedSharding(self.mesh, PartitionSpec(axis))
        return jax.jit(lambda: jnp.zeros(shape, jnp.int32), out_shardings=sharding)().block_until_ready()

    @staticmethod
    def _cleared(memory: jax.Array) -> jax.Array:
        """Zeros in place of `memory`, on every device before any begins a call. Consumes it."""
        clear = jax.jit(jnp.zeros_like, donate_argnums=0, keep_unused=True, out_shardings=memory.sharding)
        cleared: jax.Array = clear(memory).block_until_ready()
        return cleared

    def peer_memory(self) -> PeerMemory:
        """The devices' addresses, on the devices."""
        starts = {shard.device: shard.data.unsafe_buffer_pointer() for shard in self._memory.addressable_shards}
        devices = list(self.mesh.devices.flat)
        rows = np.asarray([[number, *(starts[device] for device in devices)] for number in range(len(devices))])
        sharding = NamedSharding(self.mesh, PartitionSpec(*self.mesh.axis_names))
        return PeerMemory(jax.device_put(rows.astype(np.int64).view(np.int32), sharding), len(devices))


# ------------------------------------------------------------------------------------------------------------- kernel


def word_of(value: int) -> ir.Value:
    """A number of 32 bits."""
    return mu.c(value, i32())


def plus(base: ir.Value, *offsets: ir.Value | int) -> ir.Value:
    """An address so many bytes behind `base`."""
    for offset in offsets:
        base = arith.addi(base, mu.c(offset, i64()) if isinstance(offset, int) else offset)
    return base


def times(value: ir.Value, factor: int) -> ir.Value:
    """A 32-bit number times `factor`, in 64 bits."""
    return arith.muli(arith.extui(i64(), value), mu.c(factor, i64()))


def load_one(kind: str, where: ir.Value, result: Any) -> Any:
    """Loads from an address, by a load of this kind."""
    return mu.inline_ptx(f"ld.{kind} $0, [$1];", where, result_types=result, has_side_effects=True)


def _load_vector(kind: str, where: ir.Value) -> Words:
    ptx = f"ld.{kind}.v4.b32 {{$0,$1,$2,$3}}, [$4];"
    return list(mu.inline_ptx(ptx, where, result_types=[i32()] * 4, has_side_effects=True))


def _store_vector(where: ir.Value, words: Words, only: ir.Value) -> None:
    mu.inline_ptx("st.global.v4.b32 [$0], {$1,$2,$3,$4};", where, *words, predicate=only, has_side_effects=True)


def _store_numbered(where: ir.Value, words: Words, call: ir.Value) -> None:
    """Stores a vector's four words, each in one 64-bit number with that of the call above it."""
    pack = "mov.b64 a, {$1,$5}; mov.b64 b, {$2,$5}; mov.b64 c, {$3,$5}; mov.b64 d, {$4,$5};"
    store = "st.relaxed.sys.global.v2.b64 [$0], {a,b}; st.relaxed.sys.global.v2.b64 [$0+16], {c,d};"
    mu.inline_ptx(f"{{.reg .b64 a, b, c, d; {pack} {store}}}", where, *words, call, has_side_effects=True)


def _wait_numbered(where: ir.Value, call: ir.Value) -> Words:
    """The four words of a vector, as soon as all have come with this call's number."""
    load = "ld.relaxed.sys.global.v2.b64 {a,b}, [$4]; ld.relaxed.sys.global.v2.b64 {c,d}, [$4+16];"
    unpack = "mov.b64 {k,p}, a; mov.b64 {l,q}, b; mov.b64 {m,r}, c; mov.b64 {n,s}, d;"
    differ = "xor.b32 p, p, $5; xor.b32 q, q, $5; xor.b32 r, r, $5; xor.b32 s, s, $5;"
    differ += "or.b32 p, p, q; or.b32 r, r, s; or.b32 p, p, r; setp.ne.b32 late, p, 0; @late bra again;"
    give = "mov.b32 $0, k; mov.b32 $1, l; mov.b32 $2, m; mov.b32 $3, n;"
    registers = ".reg .pred late; .reg .b64 a, b, c, d; .reg .b32 k, l, m, n, p, q, r, s;"
    ptx = f"{{{registers} again: {load} {unpack} {differ} {give}}}"
    return list(mu.inline_ptx(ptx, where, call, result_types=[i32()] * 4, has_side_effects=True))


def _floats(words: Words, dtype: Any) -> list[ir.Value]:
    """The numbers of a vector, f32."""
    if dtype == jnp.float32:
        return [arith.bitcast(f32(), word) for word in words]
    halves = ((arith.shli(word, word_of(16)), arith.andi(word, mu.c(-65536, i32()))) for word in words)
    return [arith.bitcast(f32(), bits) for pair in halves for bits in pair]


def _packed(values: list[ir.Value], dtype: Any) -> Words:
    """A vector of f32 numbers, each rounded once."""
    if dtype == jnp.float32:
        return [arith.bitcast(i32(), value) for value in values]
    pairs = zip(values[1::2], values[::2], strict=True)
    return [mu.inline_ptx("cvt.rn.bf16x2.f32 $0, $1, $2;", *pair, result_types=i32()) for pair in pairs]


def _sum_vector(pieces: Sequence[Words], added: Words | None, dtype: Any) -> Words:
    """The sum of the devices' vectors in their order, and of the one that all have."""
    total, *others = (_floats(words, dtype) for words in (*pieces, *([] if added is None else [added])))
    for other in others:
        total = [arith.addf(a, b) for a, b in zip(total, other, strict=True)]
    return _packed(total, dtype)


def _kernel(*refs: Ref, size: int, vectors: int, row: int, rounds: int, each: int, gathered: bool) -> None:
    """Blocks of 128 threads: `rounds` calls of `each` vectors a thread. `row`: vectors of a row that is gathered."""
    dtype = refs[1].dtype

    # Pallas has no access to another device's memory by address, so a call is written in MLIR and PTX for one thread.
    def call_of(index: jax.Array) -> None:
        @plgpu.inline_mgpu(arg_types=((plgpu.RefType(),) * len(refs), scalar_layout()))
        def go(_: Any, refs: Sequence[ir.Value], index: Any) -> None:
            bases = [llvm.ptrtoint(i64(), mu.memref_ptr(ref)) for ref in refs]
            _call(bases, scalar(index))

        go(refs, index)

    def _call(bases: Sequence[ir.Value], index: ir.Value) -> None:
        ult, eq = arith.CmpIPredicate.ult, arith.CmpIPredicate.eq
        # Addresses of the operands in this device's memory; `addresses` holds those of all devices' workspaces.
        addresses, x, *added, out = bases
        t, block = thread(), mu.inline_ptx("mov.u32 $0, %ctaid.x;", result_types=i32())
        rank = load_one("global.b32", addresses, i32())

        def start(device: ir.Value) -> ir.Value:
            return load_one("global.b64", plus(addresses, 8, times(device, 8)), i64())

        def other(distance: ir.Value) -> ir.Value:
            return arith.remui(arith.addi(rank, distance), word_of(size))

        # The block's number of the call is one above its counter in memory, so that a graph of CUDA's may run again and
        # again. It says which of the two slots is used and what flags are waited for.
        own = start(rank)
        counter = plus(own, times(block, 4))
        call = arith.addi(load_one("global.b32", counter, i32()), arith.addi(index, word_of(1)))
        # One thread counts the launch's calls, in the last of them; only this block reads its counter.
        is_last = arith.andi(arith.cmpi(eq, index, word_of(rounds - 1)), arith.cmpi(eq, t, word_of(0)))

        def counted() -> None:
            """Behind a barrier: all threads have the number of their call."""
            mu.inline_ptx("st.global.b32 [$0], $1;", counter, call, predicate=is_last, has_side_effects=True)

        def combined(pieces: Sequence[Words], number: ir.Value, only: ir.Value) -> None:
            """Puts a vector of all devices' where it belongs."""
            if not gathered:
                also = [_load_vector("global", plus(base, times(number, VECTOR))) for base in added]
                total = _sum_vector(pieces, also[0] if also else None, dtype)
                _store_vector(plus(out, times(number, VECTOR)), total, only)
                return
            # [rows, row] of each device becomes [rows, size, row]: a vector of a device lies in that device's part of
            # the row.
            line, column = arith.divui(number, word_of(row)), arith.remui(number, word_of(row))
            for device, words in enumerate(pieces):
                at = arith.addi(arith.muli(line, word_of(size * row)), arith.addi(column, word_of(device * row)))
                _store_vector(plus(out, times(at, VECTOR)), words, only)

        if rounds == each == 1:  # every word goes with its call's number, and needs no flag
            # Way 1, small arrays: one call, a vector a thread. The counter is raised once all threads have read it.
            mu.warpgroup_barrier()
            counted()
            number = arith.addi(arith.muli(block, word_of(WARPGROUP)), t)
            is_ours = arith.cmpi(ult, number, word_of(vectors))
            with mu.when(is_ours):
                # A vector of 16 bytes becomes 32 on its way: each of its four words with the call's number beside it.
                words = _load_vector("global", plus(x, times(number, VECTOR)))

                def line_of(device: ir.Value) -> ir.Value:
                    slots = arith.addi(arith.muli(arith.andi(call, word_of(1)), word_of(size)), device)
                    return plus(times(slots, LINES), times(number, 2 * VECTOR), SLOTS + 2 * size * PIECES)

                # Each device begins with its next neighbour, so that at any time all of them write to different ones.
                for distance in range(1, size + 1):  # to itself last
                    _store_numbered(plus(start(other(word_of(distance))), line_of(rank)), words, call)
                # The numbers stand for flags: a word has come when this call's number lies beside it. Devices are read
                # in their order, which is the order of the sum. No barrier: a thread reads what the same threads of the
                # others have pushed.
                pieces = [_wait_numbered(plus(own, line_of(word_of(device))), call) for device in range(size)]
                combined(pieces, number, is_ours)
            return

        def slot(device: ir.Value) -> ir.Value:
            return plus(
                times(arith.addi(arith.muli(arith.andi(call, word_of(1)), word_of(size)), device), PIECES), SLOTS
            )

        def flag(device: ir.Value) -> ir.Value:
            return plus(times(arith.addi(arith.muli(device, word_of(BLOCKS)), block), 4), FLAGS)

        # A call's vectors are dealt to all blocks in turn; their places in a slot do not depend on the array.
        # Way 2, larger arrays: push, raise flags, wait, combine.
        numbers, inside, places = [], [], []
        for v in range(each):
            place = arith.addi(arith.muli(arith.addi(block, word_of(v * BLOCKS)), word_of(WARPGROUP)), t)
            number = arith.addi(place, arith.muli(index, word_of(each * BLOCKS * WARPGROUP)))
            inside.append(arith.cmpi(ult, number, word_of(vectors)))
            numbers.append(arith.select(inside[-1], number, word_of(0)))
            places.append(times(place, VECTOR))
        # Phase 1: push. All loads are asked for before the first store needs one.
        mine = [_load_vector("global", plus(x, times(number, VECTOR))) for number in numbers]
        # Each device begins with its next neighbour, so that at any time all of them write to different ones. Its own
        # piece it does not copy: it is read from x.
        for distance in range(1, size):
            there = plus(start(other(word_of(distance))), slot(rank))
            for place, words, only in zip(places, mine, inside, strict=True):
                _store_vector(plus(there, place), words, only)
        # All threads of the block must have pushed before a flag says so for the block.
        mu.warpgroup_barrier()
        # Phase 2: flags, by one thread for each other device. The store releases what the barrier has gathered before
        # it, over NVLink as well; the load acquires what the other device's block pushed before it raised its flag. A
        # flag only ever grows, so a block that is a call ahead is taken as there, too: hence the comparison and not
        # equality.
        with mu.when(arith.cmpi(ult, arith.subi(t, word_of(1)), word_of(size - 1))):  # a thread a device
            peer = other(t)
            raised = plus(start(peer), flag(rank))
            mu.inline_ptx("st.release.sys.global.b32 [$0], $1;", raised, call, has_side_effects=True)
            wait = "again: ld.acquire.sys.global.b32 v, [$0]; sub.s32 v, v, $1; setp.lt.s32 p, v, 0; @p bra again;"
            wait = f"{{.reg .pred p; .reg .b32 v; {wait}}}"
            mu.inline_ptx(wait, plus(own, flag(peer)), call, has_side_effects=True)
        # A few threads have waited for the flags; behind the barrier all may read what those stand for.
        mu.warpgroup_barrier()
        # Since the first barrier every thread has read the counter, so it may change.
        counted()

        # Phase 3: combine, device by device in one order, so that all devices get the same bits. Pushed pieces are
        # loaded past the L1, which does not see what others write to memory.
        def piece(device: int, number: ir.Value, place: ir.Value) -> Words:
            is_own = arith.cmpi(eq, rank, word_of(device))
            pushed, whole = plus(own, slot(word_of(device)), place), plus(x, times(number, VECTOR))
            return _load_vector("relaxed.sys.global", arith.select(is_own, whole, pushed))

        for number, place, only in zip(numbers, places, inside, strict=True):
            combined([piece(device, number, place) for device in range(size)], number, only)

    _repeated(rounds, call_of)


def _repeated(times: int, call: Callable[[jax.Array], None]) -> None:
    if times == 1:
        call(jnp.int32(0))
        return

    def body(index: jax.Array, carry: None) -> None:
        call(index)
        return carry

    lax.fori_loop(0, times, body, None)


@functools.partial(jax.jit, static_argnames=("size", "gathered"))
def _over_peers(addresses: jax.Array, x: jax.Array, *added: jax.Array, size: int, gathered: bool) -> jax.Array:
    """A jit of its own, so that a model's layers trace and lower the kernel once."""
    *shape, width = x.shape
    vectors, row = x.size * x.dtype.itemsize // VECTOR, max(1, width * x.dtype.itemsize // VECTOR)
    # An array of more vectors than a slot holds takes several calls, of equally many vectors a thread.
    needed = -(-vectors // (BLOCKS * WARPGROUP))
    rounds = -(-needed // MAX_VECTORS)
    kernel = functools.partial(
        _kernel,
        size=size,
        vectors=vectors,
        row=row,
        rounds=rounds,
        each=-(-needed // rounds),
        gathered=gathered,
    )
    blocks = min(BLOCKS, -(-vectors // WARPGROUP))  # the others have nothing to do in any call
    out: jax.Array = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((*shape, width * size) if gathered else x.shape, x.dtype),
        grid=(blocks,),
        grid_names=("block",),
        compiler_params=compiler_params(),
        kernel_name="peer_gather" if gathered else "peer_sum",
    )(addresses, x, *added)
    return out
