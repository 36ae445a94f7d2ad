"""int8 weights as a tensor core's operand: the order of their columns, and their way through registers.

A product of bfloat16 wants, of every 16 columns, 2q, 2q + 1, 2q + 8 and 2q + 9 in thread q of four. Matrices are stored
so that these lie together (`smcjax.quantization.interleave`), where the thread loads four bytes, and in the order in
which it makes bfloat16 of them: the first and third, then the second and fourth. With low the lower seven bits of a
byte and sign its highest, (128 + low) − 128·(1 + sign) is its value, and both terms are a bfloat16 that has these bits
in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from smcjax.pallas.mosaic.compat import fa, ir, mgpu, mu, plgpu
from smcjax.pallas.mosaic.wgmma import QUERIES, Ref
from smcjax.quantization import restore


def operands(ref: Ref, width: int, *, interpret: bool = False) -> Iterator[jax.Array]:
    """64 stored rows in shared memory as bfloat16 that `plgpu.wgmma` takes for its first factor; `width` columns each.

    Blocks of columns are converted one by one, so that few are in registers. `ref` is `wgmma.swizzled_int8`.
    """
    starts = range(0, ref.shape[1], width)
    if interpret:
        whole = restore(ref[...].astype(jnp.bfloat16))
        yield from (whole[:, start : start + width] for start in starts)
        return
    stored = plgpu.load(ref, layout=plgpu.Layout.WGMMA_UPCAST_2X, optimized=False)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA_UPCAST_2X,),
        return_type=plgpu.ShapeDtypeStruct((QUERIES, width), jnp.bfloat16, layout=plgpu.Layout.WGMMA),
    )
    def converted(_: Any, x: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        registers = np.empty(fa.WGMMA_LAYOUT.registers_shape(x.shape), dtype=object)
        pair = ir.VectorType.get((2,), ir.BF16Type.get())
        for index, four in np.ndenumerate(x.registers):
            for half, two in enumerate(_to_bfloat16(mu.bitcast(four, ir.IntegerType.get_signless(32)))):
                registers[(index[0], 2 * index[1] + half, *index[2:-1])] = mu.bitcast(two, pair)
        return mgpu.FragmentedArray(_registers=registers, _layout=fa.WGMMA_LAYOUT, _is_signed=None)

    for start in starts:
        yield converted(stored if width == ref.shape[1] else lax.slice(stored, (0, start), (QUERIES, start + width)))


def _to_bfloat16(word: ir.Value) -> list[ir.Value]:
    """Converts a word's bytes, the first and third, then the others, two to a word."""
    terms = "lop3.b32 a, w, 0x007f007f, 0x43004300, 0xea; lop3.b32 b, w, 0x00800080, 0x43004300, 0xea;"  # w & m | 128s
    ptx = f"{{.reg .b32 w, a, b; %s {terms} sub.bf16x2 $0, a, b;}}"
    return [mu.inline_ptx(ptx % of, word, result_types=word.type) for of in ("mov.b32 w, $1;", "shr.u32 w, $1, 8;")]
