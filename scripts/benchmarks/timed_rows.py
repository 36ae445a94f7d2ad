"""A row of `bench_sparse.py` on the device: who drafts, its requests, its programs, and windows of its cycles."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int
from replayed_sets import Counted, Replay, watched
from sparse_rows import Line

from smcjax.bench.cycle import WARMUP, Bench, Case, Models, random_batch
from smcjax.bench.models import random_memory
from smcjax.decoding.drafts.eagle import Eagle
from smcjax.decoding.drafts.ngram import NGram
from smcjax.decoding.groups import PairParams
from smcjax.engine.load.loading import make_decoder
from smcjax.engine.run.jobs import stepping
from smcjax.engine.run.programs import Programs, Wanted
from smcjax.engine.run.runner import Runner
from smcjax.model.config import LayerSpec, ModelConfig
from smcjax.model.eagle import ATTENTION, EagleConfig, EagleParams, eagle_shapes
from smcjax.model.params import Params
from smcjax.noise import key_of
from smcjax.sparse.nsa import NSA

PERIOD = NSA.kernel_stride  # positions of a compressed token, over which the requests of a batch are spread
CALLED = ("empty", "join", "step")  # programs of a row
HEAD_VOCABULARY = 32_000  # token ids of a head: as published ones of an 8B have


def head_config(target: ModelConfig) -> EagleConfig:
    """A head of the target's sizes, of at most `HEAD_VOCABULARY` of its token ids."""
    layer = dataclasses.replace(
        target, num_layers=1, layers=(LayerSpec(ATTENTION, target.layer(0).rope),), tie_embeddings=False
    )
    count = target.num_layers
    aux_layers = (2, count // 2, count - 3) if 2 < count // 2 < count - 3 else (0, 1, count)
    return EagleConfig(layer, min(HEAD_VOCABULARY, target.vocab_size // 2), target.hidden_size, aux_layers)


def random_head(config: EagleConfig, target: Params) -> EagleParams:
    """A head of random weights with the target's embedding."""
    shapes = eagle_shapes(config, config.layer.dtype, token_ids=True)
    leaves, tree = jax.tree.flatten(dataclasses.replace(shapes, token_ids=None))
    keys = jax.random.split(key_of(3), len(leaves))
    made = [
        jnp.ones(leaf.shape, leaf.dtype)
        if leaf.ndim == 1
        else jax.random.normal(key, leaf.shape, leaf.dtype) / math.sqrt(leaf.shape[-1])
        for leaf, key in zip(leaves, keys, strict=True)
    ]
    params: EagleParams = jax.tree.unflatten(tree, made)
    return dataclasses.replace(params, embed=target.embed, token_ids=jnp.arange(config.draft_vocab_size))


def contexts_of(context: int, requests: int) -> Int[np.ndarray, " requests"]:
    """Tokens of each of a batch's requests: `context`, and up to a `PERIOD` less, evenly spread over it."""
    return context - np.arange(requests) * PERIOD // requests


class LineBench(Bench):
    """A row at one context and load, whoever drafts for it. No prompt is read, as the memory is full of random numbers.

    With `counts` the sets of a verification are counted behind the timed cycles: `sets`.
    """

    def __init__(
        self, line: Line, models: Models, case: Case, target: Params, drafts: Mapping[str, Any], *, counts: bool = False
    ) -> None:
        self.models, self.case, self.line, self.counts = models, case, line, counts
        self.sets: Counted | None = None
        self.head = head_config(models.target_config) if line.draft == "head" else None
        proposer: Any = {"": None, "lookup": NGram()}.get(line.draft)
        if self.head is not None:
            proposer = Eagle(self.head)
        geometry = (case.max_model_len, case.page_size, case.implementation)
        decoder = make_decoder(case.decoding, models.target_config, proposer, *geometry)
        params = PairParams(target, drafts.get(line.draft))
        self.runner = Runner(decoder, params, case.num_pages, Programs())
        length = case.context + 1  # with the first token of the answer, which a cycle reads
        self.batch = random_batch(case.groups, length, case.max_model_len, models.target_config.vocab_size)
        self.batch.prompt_length[:] = contexts_of(length, case.groups)

    def wanted(self) -> Wanted:
        """The programs that the windows call, with replayed sets where the row has such; and one that counts others."""
        wanted = super().wanted()
        jobs = {key: job for key, job in wanted.jobs.items() if key[-1] in CALLED}
        if self.line.replayed is None and not self.counts:
            return wanted._replace(jobs=jobs)
        (key,) = (key for key in jobs if key[-1] == "step")
        step = jobs[key]._replace(identity=None)  # what a job says of itself does not tell one's sets from another's
        if self._replay is not None:
            jobs[key] = step._replace(function=watched(step.function, self._replay))
        else:
            jobs[*key[:-1], "count"] = step._replace(function=watched(step.function, None, gives_sets=True))
        return wanted._replace(jobs=jobs)

    @functools.cached_property
    def _replay(self) -> Replay | None:
        """Sets for all layers that select."""
        if self.line.replayed is None:
            return None
        config = self.models.target_config
        kind = selecting(config)
        return Replay.of(
            kind,
            layers=sum(self.refreshes),
            requests=self.case.groups,
            queries=self.case.decoding.speculation.scored,
            sets=config.num_kv_heads,
            first=int(self.batch.prompt_length.min()) - 1,
            overlap=self.line.replayed,
        )

    @property
    def refreshes(self) -> tuple[bool, ...]:
        """True for each sparse layer that selects blocks anew."""
        sparse, layers = self.case.decoding.speculation.sparse, len(self.models.target_config.selecting)
        return (True,) * layers if sparse is None else tuple(sparse.refreshes(layers))

    def _count(self) -> Counted:
        """The sets of one more cycle, which a program takes that gives back what layers select, if none are stored."""
        runner = self.runner
        if self._replay is not None:
            first = np.asarray(runner.state.sequences.length)[:, None] - 1
            return self._replay.counted(first + np.arange(self.case.decoding.speculation.scored))
        program = runner.programs[stepping(runner.program), runner.size, "count"]
        (runner.state, *_), sets = program(runner.params, runner.state)
        return Counted(selecting(self.models.target_config), *map(np.asarray, sets))

    @property
    def held_bytes(self) -> int:
        """Bytes of the weights and of the KV."""
        leaves = jax.tree.leaves((self.runner.params, jax.eval_shape(self.runner._new_memory)))
        return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)

    def start(self) -> None:
        """Takes memory full of random numbers and puts the batch into it, which runs from then on.

        Reading prompts would give no more than other numbers there, and a program to compile for each row.
        """
        runner, size = self.runner, self.case.groups
        runner.take_memory(random_memory)
        runner.resize(size, [-1] * size)
        runner.join(self.batch, {})
        runner.state = dataclasses.replace(runner.state, running=jnp.ones(size, bool))

    def windows_ms(self, windows: int, cycles: int) -> list[float]:
        """Milliseconds a cycle of each window, one after the other behind the warm-up. Frees the KV.

        Counts sets at last, where they are to be counted.
        """
        try:
            self.start()
            for _ in range(WARMUP):
                info, _ = self.runner.step(self.runner.program)
            jax.block_until_ready(info.done)
            found = []
            for _ in range(windows):
                began = time.perf_counter()
                for _ in range(cycles):
                    info, _ = self.runner.step(self.runner.program)
                jax.block_until_ready(self.runner.state)
                found.append((time.perf_counter() - began) / cycles * 1e3)
            if bool(info.done.any()):
                raise RuntimeError(
                    "a request ended inside the benchmark: its weights broke, so the timing says nothing"
                )
            self.sets = self._count() if self.counts else None
            return found
        finally:
            self.runner.discard()

    def bytes_read(self) -> tuple[int, int]:
        """Bytes of weights and of KV that a cycle reads at least."""
        phases = [phase for phase in self._phases() if self.line.draft == "" or phase.name == "verify"]
        weights = sum(phase.times * phase.weight_bytes for phase in phases)
        kv = sum(phase.times * phase.kv_bytes for phase in phases)
        if self.head is not None:
            layer, gamma = self.head.layer, self.case.decoding.speculation.gamma
            leaves = jax.tree.leaves(eagle_shapes(self.head, layer.dtype))
            weights += gamma * sum(math.prod(leaf.shape) for leaf in leaves) * layer.itemsize
            own = ATTENTION.cache(layer).bytes_of(ATTENTION.least_read(self.case.context), layer.itemsize)
            kv += gamma * self.case.groups * own
        return weights, kv


def selecting(config: ModelConfig) -> NSA:
    """The kind of the layers that select, which is one."""
    (kind,) = set(config.selecting.values())
    assert isinstance(kind, NSA)
    return kind
