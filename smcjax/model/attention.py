"""Kinds of attention: which keys a query sees, and by what its scores are scaled. Frozen, hashable, static."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Full:
    """Causal attention to every earlier position and the query's own. `scale` None: 1/√head_dim."""

    scale: float | None = None


FULL = Full()


@dataclasses.dataclass(frozen=True)
class SlidingWindow:
    """Causal attention to the last `window` positions, the query's own among them. `scale` None: 1/√head_dim."""

    window: int
    scale: float | None = None


AttentionKind = Full | SlidingWindow
