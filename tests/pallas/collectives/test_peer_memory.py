"""Sums and gathers over devices' memory: how devices take turns, what lowers, and on GPUs the very numbers."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from smcjax.pallas import PeerMemory, Workspaces, implementations
from smcjax.pallas.collectives.peer_memory import MAX_PUSHED_BYTES, workspace_bytes

CALLS = 4


def spoiled(slots: int, order: tuple[str, ...] = ("push", "flag", "wait", "read")) -> bool:
    """True where two devices can reach a call, in some interleaving of their steps, that reads another call's piece.

    A device is where it stands, what is in its slots, and the last call that its flag names.
    """
    start = ((0, (0,) * slots, 0),) * 2
    seen, left = {start}, [start]
    while left:
        state = left.pop()
        for me in (0, 1):
            (at, own, flag), (there, theirs, raised) = state[me], state[1 - me]
            call, step = at // len(order) + 1, order[at % len(order)]
            if call > CALLS or (step == "wait" and flag < call):
                continue
            if step == "read" and own[call % slots] != call:
                return True
            if step == "push":
                theirs = tuple(call if slot == call % slots else held for slot, held in enumerate(theirs))
            mine, other = (at + 1, own, flag), (there, theirs, call if step == "flag" else raised)
            following = (mine, other) if me == 0 else (other, mine)
            if following not in seen:
                seen.add(following)
                left.append(following)
    assert len(seen) > CALLS * len(order)
    return False


def test_two_slots_suffice_in_every_interleaving() -> None:
    assert not spoiled(2)


def test_controls_of_the_protocol() -> None:
    assert spoiled(1), "the next call overwrites what was not read yet"
    assert spoiled(2, ("flag", "push", "wait", "read")), "a flag that is raised too early"
    assert spoiled(2, ("push", "flag", "read", "wait")), "a piece that is read too early"


def peer_memory(size: int) -> PeerMemory:
    return PeerMemory(jax.ShapeDtypeStruct((1, 2 + 2 * size), jnp.int32), size)


def test_what_is_taken_by_kernels_and_what_is_left_to_xla() -> None:
    x = jax.ShapeDtypeStruct((72, 8192), jnp.bfloat16)
    with implementations("mosaic"):
        assert peer_memory(2).sums(x)
        assert peer_memory(8).sums(x)
        assert peer_memory(2).sums(x.update(dtype=jnp.float32))
        assert not peer_memory(2).sums(x.update(dtype=jnp.int32))
        assert not peer_memory(2).sums(x.update(shape=(1, 4)))
        assert peer_memory(2).sums(x.update(shape=(MAX_PUSHED_BYTES // 2**14, 8192)))
        assert not peer_memory(2).sums(x.update(shape=(MAX_PUSHED_BYTES // 2**14 + 1, 8192)))
        assert not peer_memory(3).sums(x.update(shape=(MAX_PUSHED_BYTES // 2**14, 8192))), "it is pushed to two"
        assert peer_memory(2).gathers(x.update(shape=(72, 64128), dtype=jnp.float32))
        assert not peer_memory(2).gathers(x.update(shape=(4, 6), dtype=jnp.float32)), "rows of no whole vectors"
    with implementations("xla"):
        assert not peer_memory(2).sums(x)
        assert not peer_memory(2).gathers(x)


@pytest.mark.parametrize("size", [3, 8])
@pytest.mark.parametrize(("shape", "dtype"), [((8, 2048), jnp.bfloat16), ((5, 12), jnp.float32)])
def test_kernels_lower_for_cuda(size: int, shape: tuple[int, ...], dtype: Any) -> None:
    x = jax.ShapeDtypeStruct(shape, dtype)

    def both(peer_memory: PeerMemory, x: Any, added: Any) -> Any:
        return peer_memory.sum(x, added), peer_memory.gather(x)

    with implementations("mosaic"):
        lowered = jax.jit(both).trace(peer_memory(size), x, x).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("mosaic_gpu_v2") == 2
    assert [out.shape for out in lowered.out_info] == [shape, (*shape[:-1], shape[-1] * size)]


def test_a_workspace_that_is_taken_again_is_zero_where_it_was() -> None:
    mesh = jax.make_mesh((1,), ("model",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])
    first = Workspaces(mesh)
    assert first._memory.nbytes == workspace_bytes(1)
    place = first._memory.unsafe_buffer_pointer()
    first.give_back()
    idle = Workspaces._idle[tuple(mesh.devices.flat)]
    idle.append(jax.jit(lambda x: x + 1, donate_argnums=0)(idle.pop()))  # as calls leave it
    again = Workspaces(mesh)
    assert again._memory.unsafe_buffer_pointer() == place
    assert not again._memory.any()
    del Workspaces._idle[tuple(mesh.devices.flat)]


@pytest.mark.gpu
@pytest.mark.skipif(jax.local_device_count() < 2, reason="needs two devices")
@pytest.mark.parametrize("size", [2, 4, 8])
def test_numbers_are_those_of_xla_to_the_last_bit(size: int) -> None:
    """Arrays of few and of many calls go one behind the other in one program, over and over."""
    if jax.local_device_count() < size:
        pytest.skip(f"needs {size} devices")
    mesh = jax.make_mesh((size,), ("model",), axis_types=(AxisType.Auto,), devices=jax.devices()[:size])
    by_device, whole = PartitionSpec("model"), PartitionSpec()
    workspaces = Workspaces(mesh)
    shapes = ((8, 64), (3, 4), (72, 8192), (600, 8192), (1, 2048))
    arrays = [jax.random.normal(jax.random.key(i), (size, *shape)) for i, shape in enumerate(shapes)]

    def on_each(arrays: Any, peer_memory: PeerMemory, turn: Any) -> Any:
        return [(peer_memory.sum(x[0] + turn, x[0, ::-1] * 0 + 1), peer_memory.gather(x[0] + turn)) for x in arrays]

    mapped = jax.shard_map(
        on_each, mesh=mesh, in_specs=(by_device, by_device, whole), out_specs=by_device, check_vma=False
    )
    program = jax.jit(mapped)
    for turn in range(100):
        for x, (total, side) in zip(arrays, program(arrays, workspaces.peer_memory(), jnp.float32(turn)), strict=True):
            parts = list(np.asarray(x) + np.float32(turn))
            want = functools.reduce(np.add, [*parts, np.ones_like(parts[0])])
            for got in np.split(np.asarray(total), size):
                np.testing.assert_array_equal(got, want)
            for got in np.split(np.asarray(side), size):
                np.testing.assert_array_equal(got, np.concatenate(parts, axis=-1))
    workspaces.give_back()
