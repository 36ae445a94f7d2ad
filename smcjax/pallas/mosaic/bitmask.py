"""Flags as bits of words, and the places of those that are set: what XLA does quickly without sorting or scattering."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Shaped

WORD = 32  # flags of one word


def packed(flags: Any) -> Shaped[Array, "*batch words"]:
    """Flags as bits of words, uint32: flag i is bit i % 32 of word i // 32."""
    words = -(-flags.shape[-1] // WORD)
    flags = jnp.pad(flags, [(0, 0)] * (flags.ndim - 1) + [(0, words * WORD - flags.shape[-1])])
    flags = flags.reshape(*flags.shape[:-1], words, WORD)
    bits = jnp.broadcast_to(jnp.uint32(1) << jnp.arange(WORD, dtype=jnp.uint32), flags.shape)
    return jnp.sum(flags.astype(jnp.uint32) * bits, axis=-1, dtype=jnp.uint32)


def places_of(
    flags: Bool[Array, "*batch entries"], width: int
) -> tuple[Int[Array, "*batch width"], Int[Array, "*batch"]]:
    """The places of the first `width` flags that are set, and how many are; behind the last any place.

    Flags are counted by words, and counts in turn by 32 of them. Who looks for the k-th goes down again, through 32
    counts at each level. So XLA has sums of 32 and gathers to do, where a running count would be a kernel a step and a
    scatter as long as the flags.
    """
    words = packed(flags)
    levels = [jax.lax.population_count(words).astype(jnp.int32)]
    while levels[-1].shape[-1] > 1:
        last = levels[-1]
        last = jnp.pad(last, [(0, 0)] * (last.ndim - 1) + [(0, -last.shape[-1] % WORD)])
        levels[-1] = last
        levels.append(jnp.sum(last.reshape(*last.shape[:-1], -1, WORD), axis=-1, dtype=jnp.int32))
    number = levels.pop()[..., 0]
    lower = np.tri(WORD, dtype=bool)  # [i, j]: j is no later than i

    def taken(x: jax.Array, index: jax.Array, axis: int = -1) -> jax.Array:
        return jnp.take_along_axis(x, index, axis=axis, mode="clip")

    left = jnp.broadcast_to(jnp.arange(width), (*number.shape, width))  # flags before, in what is looked through
    index = jnp.zeros_like(left)
    for counts in reversed(levels):
        of = counts.reshape(*counts.shape[:-1], -1, WORD)
        upto = jnp.sum(
            jnp.where(jnp.broadcast_to(lower, (*of.shape, WORD)), of[..., None, :], 0), axis=-1
        )  # [..., n, 32]
        found = taken(upto, index[..., None], axis=-2)  # [..., width, 32]
        child = jnp.minimum(jnp.sum(found <= left[..., None], axis=-1), WORD - 1)
        left = left - jnp.where(child > 0, taken(found, jnp.maximum(child - 1, 0)[..., None])[..., 0], 0)
        index = index * WORD + child
    word = taken(words, index)
    bits_upto = np.array([(2 << bit) - 1 for bit in range(WORD)], np.uint32)
    upto = jax.lax.population_count(word[..., None] & jnp.broadcast_to(bits_upto, (*word.shape, WORD)))
    bit = jnp.minimum(jnp.sum(upto.astype(jnp.int32) <= left[..., None], axis=-1), WORD - 1)
    return jnp.minimum(index * WORD + bit, flags.shape[-1] - 1), jnp.minimum(number, width)
