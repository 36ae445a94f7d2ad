"""Greedy speculation along chains on targets with Native Sparse Attention: drafts that are wrong at chosen places."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Int

from smcjax import rejection
from smcjax.decoders import Rejection, Speculation
from smcjax.decoding.distribution import SamplingDistribution
from smcjax.decoding.drafts.proposer import Drafts
from smcjax.decoding.groups import Groups, PairParams
from smcjax.kv import Copies, LayerCache
from smcjax.model import LayerSpec, ModelConfig
from smcjax.model.attention import Projection
from smcjax.model.view import BatchView
from smcjax.sparse.nsa import NSA
from smcjax.sparse.routing import Branches
from tests.decoding.test_nsa import PAPER, TARGET, V, finished, first_rows, params_of
from tests.helpers import Ask
from tests.smc.reference import language_model

END, K = 60, 4
BLOCK = K + 1  # columns of a verification; prompts are read in chunks of 4


CHAINS = [Ask(tuple((3 * i + i * i // 2) % V for i in range(p)), END - p, temperature=0.0) for p in range(1, 9)]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Script:
    """The texts that rows will have, and the first wrong draft of each cycle; K: none is wrong."""

    texts: Int[Array, "R T"]
    wrong: Int[Array, "R cycles"]


@dataclasses.dataclass(frozen=True)
class Scripted:
    """A `Proposer` whose drafts are right up to the place that its script names, wrong there, and right behind."""

    full_support: ClassVar[bool] = False
    branches: ClassVar[bool] = False
    aux_layers: ClassVar[tuple[int, ...]] = ()

    def page_bytes(self, page_size: int) -> int:
        return 0

    def check(self, target: ModelConfig) -> None: ...

    def create_memory(self, params: Any, num_pages: int, page_size: int) -> None: ...

    def prefills_by_kernels(self, memory: Any, columns: int) -> bool:
        return True

    def prefill(self, params: Any, memory: Any, leaders: Any, start: Any, chunk: int, cached: Any) -> None: ...

    def propose(
        self,
        speculation: Speculation,
        params: Script,
        groups: Groups,
        copies: Copies | None,
        distribution: SamplingDistribution,
        *,
        page_size: int,
        keep_logits: bool = False,
    ) -> tuple[Drafts, None]:
        column = jnp.arange(speculation.gamma)[None]
        right = jnp.take_along_axis(params.texts, groups.sequences.length[:, None] + column, axis=1)
        wrong = jnp.take_along_axis(params.wrong, groups.cycle[:, None], axis=1)
        tokens = jnp.where(column == wrong, (right + 1) % V, right)
        logits = jnp.where(jax.nn.one_hot(tokens, V, dtype=bool), 0.0, -jnp.inf)
        return Drafts(tokens, jnp.zeros(tokens.shape, jnp.float32), logits), None


@functools.cache
def alone(kind: NSA) -> list[list[int]]:
    """The likeliest continuation of each prompt, token by token without pages."""
    target = dataclasses.replace(TARGET, layers=(LayerSpec(kind),))
    after = language_model(target, params_of(target), END)
    texts = [list(ask.prompt) for ask in CHAINS]
    for text in texts:
        while len(text) < END:
            text.append(int(after(text).argmax()))
    return [text[len(ask.prompt) :] for text, ask in zip(texts, CHAINS, strict=True)]


def rarest(period: int) -> np.ndarray:
    """The first wrong draft of each cycle, such that each number of accepted ones is met at each place of a period."""
    met = np.zeros((period, K + 1), int)
    wrong = np.full((len(CHAINS), END), K, np.int32)
    for row, ask in zip(wrong, CHAINS, strict=True):
        frontier, cycle = len(ask.prompt), 0
        while frontier < END:
            row[cycle] = met[frontier % period].argmin()
            met[frontier % period, row[cycle]] += frontier + BLOCK < END
            frontier, cycle = frontier + row[cycle] + 1, cycle + 1
    return wrong


def check_chains(kind: NSA, page_size: int, faulty: NSA | None = None) -> None:
    """Greedy answers by drafts, which `faulty` verifies, are those of `kind` alone; all kinds of drafts occur."""
    period = math.lcm(kind.kernel_stride, kind.block_size)
    texts = np.zeros((len(CHAINS), END + BLOCK), np.int32)
    for text, ask, answer in zip(texts, CHAINS, alone(kind), strict=True):
        text[:END] = [*ask.prompt, *answer]
    script = Script(jnp.asarray(texts), jnp.asarray(rarest(period)))
    target = dataclasses.replace(TARGET, layers=(LayerSpec(faulty or kind),))
    program = rejection.Program(Rejection(gamma=K), target, Scripted(), END, page_size)
    state, infos = finished(program, PairParams(params_of(target), script), CHAINS)
    assert [tokens for tokens, _ in first_rows(program.decoding, CHAINS, state)] == alone(kind)

    met, frontier = set(), np.array([len(ask.prompt) for ask in CHAINS])
    for info in infos:
        whole = np.asarray(info.ran) & (frontier + BLOCK < END)  # no draft lies behind the end
        met |= set(zip((frontier % period)[whole].tolist(), np.asarray(info.accepted)[whole].tolist(), strict=True))
        frontier = np.asarray(info.length)[:, 0] - 1
    assert met == {(place, accepted) for place in range(period) for accepted in range(K + 1)}


@pytest.mark.slow
def test_greedy_chains_of_any_quality_are_the_targets() -> None:
    """Frontiers anywhere in a stride and a block, 0 … K drafts accepted at each."""
    check_chains(PAPER, 8)


class WrittenOnce(NSA):
    """A compressed token that a rejected draft has completed stays, and is seen."""

    def paged_branches(
        self, projection: Projection, cache: LayerCache, view: BatchView, earlier: Any = None
    ) -> tuple[Branches, LayerCache]:
        _, new = super().paged_branches(projection, cache, view)
        for name in ("compressed_keys", "compressed_values"):
            new[name] = jnp.where(jnp.isnan(cache[name]), new[name], cache[name])
        last, seen = self.last(view), self.read(new, view)
        routed = self.route(projection, seen, view.positions, last, earlier and earlier.blocks)
        return self._attend(projection, seen, view.positions, last, routed), new


@pytest.mark.slow
def test_control_chains_tell_a_fault() -> None:
    with pytest.raises(AssertionError):
        check_chains(PAPER, 8, WrittenOnce(**dataclasses.asdict(PAPER)))
