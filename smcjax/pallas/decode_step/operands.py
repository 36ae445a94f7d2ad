"""Operands of the persistent decode step, and what the parts of a block know of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax

from smcjax.pallas.decode_step.shape import Shape
from smcjax.pallas.mosaic.wgmma import Ref


@dataclasses.dataclass(frozen=True)
class Operands:
    """References of one launch: `layers` of each matrix, the KV pages they write, and what the stages hand on.

    Matrices are bf16, or int8 with a scale a row.
    """

    qkv: Sequence[Ref]  # [(H + 2·Hkv)·D, E] each
    o: Sequence[Ref]  # [E, H·D]
    gate_up: Sequence[Ref]  # [2·F, E]
    down: Sequence[Ref]  # [E, F]
    head: Sequence[Ref]  # [V, E], one or none
    scales: Sequence[Ref]  # [1, S] f32, one of int8 matrices (`Shape.scale_places`), otherwise none
    peers: Sequence[Ref]  # [1, 2 + 2n] int32, addresses of n devices that divide the layers (`peer_tiles`), or none
    norms: Ref  # [2·L + 1, E]: attention, MLP, attention … and the one after the last layer
    step: Ref  # [1] int32: which of the K steps that the tables hold
    cos: Ref  # [K·M, D/2] f32
    sin: Ref  # [K·M, D/2] f32
    slots: Ref  # [K·M] int32: page · B + offset of each token's KV
    limits: Ref  # [K·G, 64] int32: how many slots a query sees · 32 + its row in the group
    lengths: Ref  # [K·G·N] int32: how many slots of a row hold KV, the new tokens' included
    noise_keys: Ref  # [K·M, 2] uint32
    forbids: Ref  # [K·M, 1] uint32: all bits set where `forbidden` counts, otherwise 0
    inverse_temperature: Ref  # [M, 1] f32
    noise_scale: Ref  # [M, 1] f32: 0 takes the likeliest id
    forbidden: Ref  # [M, V/32] uint32: ids that may not be drawn, one bit each
    chunks: Ref  # [G, 1, X, W + 2] int32: `smcjax.pallas.attention.prefix_plan`, tasks of 64 slots
    num_chunks: Ref  # [G, 1] int32: how many there are
    pieces: Ref  # [G, 1, X, 3] int32: tasks of a page
    num_pieces: Ref  # [G, 1] int32: how many there are
    # From here on written:
    x: Ref  # [M, E] the residual stream
    xg: Ref  # [M, E] residual ∘ next norm's weight
    keys: Sequence[Ref]  # [P, B, Hkv, D]
    values: Sequence[Ref]
    q: Ref  # [Hkv·M·q_step, D]
    partial: Ref  # [G·Hkv·S, 64, D] f32
    partial_lse: Ref  # [G·Hkv·S, 64] f32, base 2
    attended: Ref  # [M, H·D]
    h: Ref  # [M, F]
    found: Sequence[Ref]  # [M, 16·blocks] each: best perturbed logit, its id, its logit; largest logit, Σ exp(· − it)


class BlockPart:
    """Part of what a block does in a step. `scratch` are references in shared memory, by name."""

    def __init__(
        self,
        shape: Shape,
        operands: Operands,
        scratch: dict[str, Ref],
        *,
        block: jax.Array,
        step: jax.Array,
        interpret: bool,
    ) -> None:
        self._shape, self._sites, self._g, self._s = shape, shape.sites(), operands, scratch
        self._block, self._step, self._interpret = block, step, interpret
