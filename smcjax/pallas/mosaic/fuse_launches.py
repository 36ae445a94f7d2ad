"""Kernels that do not wait for one another in one launch: the blocks of one behind those of the other in one grid.

    launch("both", Part(first, {"row": 8}, (x,), (y_type,)), Part(second, {"row": 2, "column": 4}, (z,), (w_type,)))

A launch costs a microsecond before anything runs, and few blocks leave most of a GPU idle. A block asks its number
which part it is of, so a part is written as if it were alone: it is told its place in its own grid. Every block has
the registers of the part that needs most.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from jax import lax

from smcjax.pallas.mosaic.compat import pl, plgpu

Place = Mapping[str, jax.Array]  # a block's place along each axis of its part's grid


class Part(NamedTuple):
    """One of a launch's kernels: `body(place, *operands, *results)` in each block of its grid, of one warpgroup."""

    body: Callable[..., None]
    grid: Mapping[str, int]  # blocks along each axis
    operands: tuple[Any, ...]  # arrays, and references, which `body` may write
    results: tuple[jax.ShapeDtypeStruct, ...]

    @property
    def blocks(self) -> int:
        return math.prod(self.grid.values())


def launch(
    name: str, *parts: Part, compiler_params: plgpu.CompilerParams | None = None, interpret: Any = None
) -> list[tuple[jax.Array, ...]]:
    """Runs the parts in one launch, named so; returns the results of each.

    Blocks start in the order of parts: those that take longest had better come first. No part may read what another
    writes. A part alone has the grid that it says.
    """
    operands = [len(part.operands) for part in parts]
    results = [len(part.results) for part in parts]

    def kernel(*refs: Any) -> None:
        taken = iter(refs)
        ins = [tuple(itertools.islice(taken, count)) for count in operands]
        outs = [tuple(itertools.islice(taken, count)) for count in results]
        if len(parts) == 1:
            parts[0].body({axis: lax.axis_index(axis) for axis in parts[0].grid}, *ins[0], *outs[0])
            return
        block, first = lax.axis_index("block"), 0
        for part, own_ins, own_outs in zip(parts, ins, outs, strict=True):
            here = (block >= first) & (block < first + part.blocks)
            pl.when(here)(functools.partial(_run, part, block - first, *own_ins, *own_outs))
            first += part.blocks

    grid = parts[0].grid if len(parts) == 1 else {"block": sum(part.blocks for part in parts)}
    made = plgpu.kernel(
        kernel,
        out_type=[of for part in parts for of in part.results],
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        compiler_params=compiler_params,
        interpret=interpret,
        kernel_name=name,
    )(*(operand for part in parts for operand in part.operands))
    taken = iter(made)
    return [tuple(itertools.islice(taken, count)) for count in results]


def _run(part: Part, number: jax.Array, *refs: Any) -> None:
    """Runs the part's block of this number: the last axis is the fastest."""
    place = {}
    for axis, size in reversed(list(part.grid.items())):
        place[axis], number = lax.rem(number, size), lax.div(number, size)
    part.body(place, *refs)
