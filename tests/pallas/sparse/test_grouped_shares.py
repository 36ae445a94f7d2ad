"""Equal shares of the chunks of all lines: each chunk in one share, and a place of its own for each segment."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from smcjax.pallas.mosaic.wgmma import Ref
from smcjax.pallas.sparse.grouped_shares import (
    SEGMENT,
    Counts,
    Segment,
    Share,
    Tuning,
    chunk_cost,
    scratch_words,
    share_of,
    walk,
)

INTERPRET = plgpu.InterpretGPUParams()


@functools.partial(jax.jit, static_argnames=("units", "lines", "blocks"))
def shares(number: tuple[jax.Array, ...], *, units: tuple[int, ...], lines: int, blocks: int) -> jax.Array:
    """The words of all blocks' shares, as the kernel finds them, interpreted."""

    def kernel(*refs: Ref, scratch: Ref) -> None:
        *numbers, out = refs
        block = jax.lax.axis_index("block")
        counts = [Counts(*one) for one in zip(numbers, units, strict=True)]
        found = share_of(block, counts, scratch, lines=lines, blocks=blocks, interpret=True)
        for place, word in enumerate(found):
            out[block, place] = word

    pairs = number[0].size
    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((blocks, len(Share._fields)), jnp.int32),
        grid=(blocks,),
        grid_names=("block",),
        scratch_types={"scratch": plgpu.SMEM((scratch_words(pairs),), jnp.int32)},
        interpret=INTERPRET,
    )(*number)


class Numbers:
    """Stands for a reference to numbers of tasks."""

    def __init__(self, values: np.ndarray) -> None:
        self.values, self.shape = values, values.shape

    def __getitem__(self, at: tuple[jax.Array, jax.Array]) -> jax.Array:
        return jnp.asarray(self.values)[at]


def visited(
    number: list[np.ndarray], units: tuple[int, ...], lines: int, blocks: int, change: int = 0
) -> list[tuple[int, Segment]]:
    """All segments, in the order of the blocks that have them; `change` makes shares so much larger than they are."""
    words = shares(tuple(map(jnp.asarray, number)), units=units, lines=lines, blocks=blocks)
    words = np.asarray(words) + np.array([0, 0, 0, change])
    found: list[tuple[int, Segment]] = []
    counts = [Counts(Numbers(one), unit) for one, unit in zip(number, units, strict=True)]
    with jax.disable_jit():
        for block, row in enumerate(np.asarray(words)):

            def visit(segment: Segment, block: int = block) -> None:
                found.append((block, Segment(*map(int, segment))))

            walk(Share(*map(jnp.int32, row)), jnp.int32(block), counts, [visit] * len(number), lines=lines)
    return found


def chunks(tasks: np.ndarray, unit: int) -> np.ndarray:
    return -(-tasks * unit // 64)


def costs(number: list[np.ndarray], units: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Chunks [groups, sets, branches] of each line, and what they cost with the line."""
    of_lines = np.stack([chunks(*one) for one in zip(number, units, strict=True)], axis=2)
    return of_lines, np.where(of_lines > 0, SEGMENT + of_lines * [chunk_cost(unit) for unit in units], 0)


@pytest.mark.parametrize("seed", range(3))
def test_each_chunk_is_in_one_share(seed: int) -> None:
    """It is in the share in which its cost begins; segments have places of their own; a line's first has their number.

    Shares are equal parts of all costs.
    """
    rng = np.random.default_rng(seed)
    groups, sets, lines, blocks = (int(rng.integers(1, most)) for most in (4, 4, 3, 12))
    units = tuple(int(unit) for unit in rng.choice([8, 16, 64], 2))
    number = [rng.integers(0, 5, (groups, sets)).astype(np.int32) for _ in units]
    number[0][rng.random((groups, sets)) < 0.3] = 0
    number[1] *= rng.integers(1, 9)
    found = visited(number, units, lines, blocks)
    of_line, cost = (x.reshape(-1).repeat(lines) for x in costs(number, units))
    size = max(-(-int(cost.sum()) // blocks), *map(chunk_cost, units))
    begins = cost.cumsum() - cost + SEGMENT  # of each line's chunks
    each = np.array([chunk_cost(unit) for unit in units])[np.arange(of_line.size) // lines % len(units)]
    taken = np.zeros((of_line.size, of_line.max() + 1), int)
    for block, one in found:
        taken[one.line, one.begin : one.end] += 1
        assert one.begin < one.end <= of_line[one.line]
        at = begins[one.line] + each[one.line] * np.arange(int(one.begin), int(one.end))
        assert (at // size == block).all()
        assert (one.group, one.of_set) == divmod(one.line // (len(units) * lines), sets)
        assert one.number_of_line == one.line % lines
    assert (taken.sum(axis=1) == of_line).all()
    assert taken.max() <= 1
    of_blocks = np.zeros(blocks, int)
    for block, one in found:
        assert one.number == of_blocks[block]
        of_blocks[block] += one.end - one.begin
    assert len({one.line + block for block, one in found}) == len(found)
    for block, one in found:
        if one.begin == 0:
            of_this = [other for other, segment in found if segment.line == one.line]
            assert of_this == list(range(block, block + one.segments))


def test_control_shares_of_another_size_are_not_all() -> None:
    number = [np.full((2, 2), 5, np.int32)]
    for change in (0, SEGMENT, -SEGMENT):
        taken = sum(one.end - one.begin for _, one in visited(number, (64,), 1, 4, change))
        assert (taken == 20) == (change == 0)


def test_many_pairs() -> None:
    """More pairs than threads are added up in turns; without any tasks all shares are empty."""
    number = np.random.default_rng(0).integers(0, 9, (75, 4)).astype(np.int32)
    for times in (1, 0):
        of_pair = costs([times * number], (64,))[1].reshape(-1)
        words = np.asarray(shares((jnp.asarray(times * number),), units=(64,), lines=1, blocks=5))
        size = max(chunk_cost(64), -(-of_pair.sum() // 5))
        assert (words[:, 3] == size).all()
        ends = of_pair.cumsum()
        for block, (first, end, before, _) in enumerate(words):
            wanted = range(block * size, min((block + 1) * size, of_pair.sum()))
            if not wanted:
                assert (first, end, before) == (0, 0, 0)
                continue
            assert before == ends[first] - of_pair[first] <= wanted[0] < ends[first]
            assert ends[end - 1] - of_pair[end - 1] <= wanted[-1] < ends[end - 1]


def test_stages_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="stages must be a multiple of subs"):
        Tuning(subs=2, stages=3)
