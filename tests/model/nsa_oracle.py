"""Native Sparse Attention one query at a time in plain NumPy and float64, without a cache.

Options and weights have the names and shapes of the golden cases (tests/data/nsa_golden). `fault` makes one of the
mistakes in `FAULTS`, for controls.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

CMP, SLC, WIN = range(3)
FAULTS = ("map 0-based", "strict <", "w + 1", "first head only", "init 0", "LSE over branches")
WEIGHTS_OF_PHI = {"linear": ("",), "mlp": ("1", "b1", "2", "b2")}


@dataclasses.dataclass
class Found:
    """All that a layer computes over T positions."""

    branches: np.ndarray  # [T, H, 3, D]
    gates: np.ndarray  # [T, H, 3]
    out: np.ndarray  # [T, H, D]
    selected: np.ndarray  # [T, S, n], ascending, -1 behind the last
    score: np.ndarray  # [T, S, blocks], nan where there is no candidate
    margin: np.ndarray  # [T, S]
    ck: np.ndarray  # [N, Hkv, D]
    cv: np.ndarray


def rotated(x: np.ndarray, position: int, theta: float | None) -> np.ndarray:
    """Pairs (i, i + D/2) turned by position · theta^(-2i/D)."""
    if theta is None:
        return x
    half = x.shape[-1] // 2
    angle = position * theta ** (-2 * np.arange(half) / x.shape[-1])
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], axis=-1)


def softmax(logits: np.ndarray) -> np.ndarray:
    if not logits.size:
        return logits
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def phi(o: dict[str, Any], w: dict[str, np.ndarray], of: str, head: int, block: np.ndarray) -> np.ndarray:
    """One compressed key or value of l stored ones [l, D]."""
    x = block + w[f"pe_{of}"][head]
    parts = [w[f"phi_{of}{part}"][head] for part in WEIGHTS_OF_PHI[o["phi"]]]
    vec = np.concatenate(list(x))
    if o["phi"] == "linear":
        return parts[0] @ vec
    first, b1, second, b2 = parts
    hidden = first @ vec + b1
    return second @ (hidden / (1 + np.exp(-hidden))) + b2


def overlap(o: dict[str, Any], token: int, block: int) -> float:
    start, first = token * o["d"], block * o["block"]
    return max(0, min(start + o["l"], first + o["block"]) - max(start, first)) / o["d"]


def overlap_0_based(o: dict[str, Any], token: int, block: int) -> float:
    """The paper's double sum with its indices read from 0."""
    per_block, per_token = o["block"] // o["d"], o["l"] // o["d"]
    return sum(per_block * block - m - n == token for m in range(per_block) for n in range(per_token))


def block_scores(
    o: dict[str, Any], p: np.ndarray, t: int, fault: str | None = None
) -> tuple[np.ndarray, tuple[int, ...], float]:
    """Scores of candidate blocks, those taken, ascending, and the margin, from p [heads, visible tokens]."""
    candidates = t // o["block"] + 1
    if fault == "first head only":
        p = p[:1]
    map_ = overlap_0_based if fault == "map 0-based" else overlap
    weight = np.array([[map_(o, i, j) for j in range(candidates)] for i in range(p.shape[1])])
    score = p.sum(axis=0) @ weight.reshape(p.shape[1], candidates)
    init = 0 if fault == "init 0" else o["init"]
    forced = [j for j in range(candidates) if j < init or j > candidates - 1 - o["local"]]
    rest = sorted((j for j in range(candidates) if j not in forced), key=lambda j: (-score[j], j))
    free = max(0, o["n"] - len(forced))
    margin = np.inf
    if free and len(rest) > free:
        margin = score[rest[free - 1]] - score[rest[free]]
    return score, tuple(sorted(forced + rest[:free])), margin


def layer(
    o: dict[str, Any],
    w: dict[str, Any],
    x: np.ndarray,
    fault: str | None = None,
    given: dict[int, np.ndarray] | None = None,
) -> Found:
    """One layer over x [T, E], its normed input; `given` has the blocks [S, n] of positions that select none anew."""
    w = {name: np.asarray(value, np.float64) for name, value in w.items()}
    x, theta, kv_heads = np.asarray(x, np.float64), o["theta"], o["kv_heads"]
    length, group, dim = len(x), o["heads"] // kv_heads, o["dim"]
    size, d, n = o["l"], o["d"], o["n"]
    shared = o["kv"] == "shared"
    of = {CMP: 0, SLC: 0 if shared else 1, WIN: 0 if shared else 2}
    q = np.einsum("hde,te->thd", w["wq"], x)
    k, v = (np.einsum("bkde,te->btkd", w[name], x) for name in ("wk", "wv"))
    q_rot = np.stack([rotated(q[t], t, theta) for t in range(length)])
    k_rot = np.stack([rotated(k[:, t], t, theta) for t in range(length)], axis=1)

    number = 0 if length < size else (length - size) // d + 1
    ck, cv = np.zeros((2, number, kv_heads, dim))
    for i in range(number):
        for head in range(kv_heads):
            ck[i, head] = rotated(phi(o, w, "k", head, k[0, i * d : i * d + size, head]), i * d, theta)
            cv[i, head] = phi(o, w, "v", head, v[0, i * d : i * d + size, head])

    blocks = (length - 1) // o["block"] + 1
    found = Found(
        np.zeros((length, o["heads"], 3, dim)),
        np.zeros((length, o["heads"], 3)),
        np.zeros((length, o["heads"], dim)),
        np.full((length, kv_heads, n), -1),
        np.full((length, kv_heads, blocks), np.nan),
        np.full((length, kv_heads), np.inf),
        ck,
        cv,
    )
    window = o["w"] + (fault == "w + 1")
    for t in range(length):
        found.gates[t] = 1 / (1 + np.exp(-(w["wg"] @ x[t] + w["bg"])))
        last = t - (fault == "strict <")
        visible = 0 if last + 1 < size else (last + 1 - size) // d + 1
        lowest = max(0, t - window + 1)
        logits = {
            h: ck[:visible, h // group] @ q_rot[t, h] / np.sqrt(dim) if visible else np.zeros(0)
            for h in range(o["heads"])
        }
        for s in range(kv_heads):
            heads = range(s * group, (s + 1) * group)
            score, taken, margin = block_scores(o, np.stack([softmax(logits[h]) for h in heads]), t, fault)
            if given is not None and t in given:
                taken = tuple(block for block in given[t][s].tolist() if block >= 0)
            found.score[t, s, : len(score)] = score
            found.selected[t, s, : len(taken)], found.margin[t, s] = taken, margin
            slots = [r for j in taken for r in range(j * o["block"], min((j + 1) * o["block"], t + 1))]
            for h in heads:
                of_slc = k_rot[of[SLC], slots, s] @ q_rot[t, h] / np.sqrt(dim)
                of_win = k_rot[of[WIN], lowest : t + 1, s] @ q_rot[t, h] / np.sqrt(dim)
                parts = [
                    (logits[h], cv[:visible, s]),
                    (of_slc, v[of[SLC], slots, s]),
                    (of_win, v[of[WIN], lowest : t + 1, s]),
                ]
                mass = np.array([np.exp(scores).sum() for scores, _ in parts])
                for branch, (scores, values) in enumerate(parts):
                    found.branches[t, h, branch] = softmax(scores) @ values
                    if fault == "LSE over branches":
                        found.branches[t, h, branch] *= 3 * mass[branch] / mass.sum()
                found.out[t, h] = found.gates[t, h] @ found.branches[t, h]
    return found
