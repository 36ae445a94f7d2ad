"""The Triton function of `rotate_and_write_triton.py`."""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rotate_and_write(
    qkv,  # [R, T, H + 2·Hkv, D]
    cos,  # [R, T, D/2] f32
    sin,  # [R, T, D/2] f32
    pages,  # [R, T] int32
    slots,  # [R, T] int32
    source,  # [R] int32: with copies only, like the next
    target,  # [R] int32
    x,  # [R, T, E]: with a pending norm only
    q_norm,  # [D]: with norms only, like the next
    k_norm,  # [D]
    _keys,  # [P, B, Hkv, D], the memory of the second result
    _values,  # of the third
    q,  # [R, T, H, D]
    keys,
    values,
    COLUMNS: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    PAGE: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED_WIDTH: tl.constexpr,
    PENDING_EPS: tl.constexpr,
    EPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Rotates and writes some heads of one new token, or copies them in one slot of a row's page."""
    DIM: tl.constexpr = 2 * HALF
    row, index = tl.program_id(0), tl.program_id(1)
    head = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    column = tl.arange(0, HALF)

    if index < COLUMNS:
        token = row * COLUMNS + index
        valid = (head < HEADS + 2 * KV_HEADS)[:, None]
        at = (token.to(tl.int64) * (HEADS + 2 * KV_HEADS) + head)[:, None] * DIM + column[None, :]
        dtype = qkv.dtype.element_ty
        first = tl.load(qkv + at, mask=valid, other=0.0).to(tl.float32)
        second = tl.load(qkv + at + HALF, mask=valid, other=0.0).to(tl.float32)

        # The product was made of x itself: what it still lacks is 1 / rms(x).
        if PENDING_EPS is not None:
            place = tl.arange(0, PADDED_WIDTH)
            of_token = tl.load(x + token.to(tl.int64) * WIDTH + place, mask=place < WIDTH, other=0.0).to(tl.float32)
            divided = tl.rsqrt(tl.sum(of_token * of_token, axis=0) / WIDTH + PENDING_EPS)
            first = (first * divided).to(dtype).to(tl.float32)
            second = (second * divided).to(dtype).to(tl.float32)

        # Heads of queries and keys are normed, rounded behind the scale and behind the weight like the reference.
        is_q, is_v = (head < HEADS)[:, None], (head >= HEADS + KV_HEADS)[:, None]
        first_out, second_out = first, second
        if EPS is not None:
            mean = (tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)) / DIM
            scale = tl.rsqrt(mean + EPS)[:, None]
            weight = tl.where(is_q, tl.load(q_norm + column)[None, :], tl.load(k_norm + column)[None, :]).to(tl.float32)
            first_out = ((first * scale).to(dtype).to(tl.float32) * weight).to(dtype).to(tl.float32)
            above = HALF + column
            weight = tl.where(is_q, tl.load(q_norm + above)[None, :], tl.load(k_norm + above)[None, :]).to(tl.float32)
            second_out = ((second * scale).to(dtype).to(tl.float32) * weight).to(dtype).to(tl.float32)

        # Halves of a head rotate against each other. Values do not.
        c = tl.load(cos + token * HALF + column)[None, :]
        s = tl.load(sin + token * HALF + column)[None, :]
        a = tl.where(is_v, first, first_out * c - second_out * s).to(dtype)
        b = tl.where(is_v, second, second_out * c + first_out * s).to(dtype)

        at = (token.to(tl.int64) * HEADS + head)[:, None] * DIM + column[None, :]
        tl.store(q + at, a, mask=is_q)
        tl.store(q + at + HALF, b, mask=is_q)
        slot = tl.load(pages + token).to(tl.int64) * PAGE + tl.load(slots + token)
        at = (slot * KV_HEADS + head - HEADS)[:, None] * DIM + column[None, :]
        is_k = (head >= HEADS)[:, None] & (head < HEADS + KV_HEADS)[:, None]
        tl.store(keys + at, a, mask=is_k)
        tl.store(keys + at + HALF, b, mask=is_k)
        at -= KV_HEADS * DIM
        tl.store(values + at, a, mask=is_v & valid)
        tl.store(values + at + HALF, b, mask=is_v & valid)
    else:
        # Only slots before the first that a token of the row is written to: tokens and copies need not wait for each
        # other.
        before = PAGE
        for back in tl.static_range(COLUMNS):
            other = row * COLUMNS + COLUMNS - 1 - back
            before = tl.where(tl.load(pages + other) == 0, before, tl.load(slots + other))
        from_page, to_page = tl.load(source + row).to(tl.int64), tl.load(target + row).to(tl.int64)
        place_in_page = index - COLUMNS
        copied = (head < KV_HEADS)[:, None] & (to_page != 0) & (place_in_page < before)
        inner = head[:, None] * DIM + column[None, :]
        old, new = (
            (from_page * PAGE + place_in_page) * (KV_HEADS * DIM) + inner,
            (to_page * PAGE + place_in_page) * (KV_HEADS * DIM) + inner,
        )
        for part in tl.static_range(2):
            tl.store(keys + new + part * HALF, tl.load(keys + old + part * HALF, mask=copied), mask=copied)
            tl.store(values + new + part * HALF, tl.load(values + old + part * HALF, mask=copied), mask=copied)
