"""The models of a benchmark: shapes by name, on one device or divided among several, with random weights and KV.

A long context's prefill is not what a cycle's benchmark measures. With random KV, tables, counts and pages are those
that a real prompt leaves; only where the numbers come from differs.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

from smcjax.bench.shapes import ATTENTIONS, SHAPES
from smcjax.engine.load.loading import prepared
from smcjax.engine.run.memory import require_room_for_weights, weight_bytes
from smcjax.engine.run.sharded_programs import DisaggregatedPrograms, ShardedPrograms
from smcjax.kv import TRASH, allocate, release
from smcjax.model.config import ModelConfig
from smcjax.model.parallel import TensorParallel, check_split, devices_of_host, held_by_one, two_devices
from smcjax.model.params import Params, init_leaves, param_shapes
from smcjax.model.quantize import quantize_leaves
from smcjax.noise import key_of
from smcjax.quantization import QUANTIZATIONS, check_quantization


@dataclasses.dataclass(frozen=True)
class Models:
    """The shapes that a benchmark runs on, by name, and how their weights are kept.

    `attention` names the kind that the target has in all layers; None leaves the shape's own. `target_layers`: how many
    of its layers the target has; None: all. `tensor_parallel_size` devices hold the target together, and the draft
    where that is `draft_divided`. With `separate_draft` each of two devices has both models whole, and one drafts while
    the other scores.
    """

    target: str
    draft: str
    quantization: str | None = None
    draft_quantization: str | None = None
    attention: str | None = None
    target_layers: int | None = None
    tensor_parallel_size: int = 1
    draft_divided: bool = False
    separate_draft: bool = False

    def __post_init__(self) -> None:
        for name in (self.target, self.draft):
            if name not in SHAPES:
                raise ValueError(f"shape {name!r} is unknown; use one of {', '.join(SHAPES)}.")
        if self.attention is not None and self.attention not in ATTENTIONS:
            raise ValueError(f"attention {self.attention!r} is unknown; use one of {', '.join(ATTENTIONS)}, or None.")
        check_quantization("quantization", self.quantization)
        check_quantization("draft_quantization", self.draft_quantization)
        layers = SHAPES[self.target].num_layers
        if self.target_layers is not None and not 1 <= self.target_layers <= layers:
            raise ValueError(f"target_layers must be 1 to {layers}, those of {self.target}, got {self.target_layers}.")
        size = self.tensor_parallel_size
        if size > 1:
            check_split(self.target_config, size, self.target, "tensor_parallel_size", quantization=self.quantization)
        if self.draft_divided:
            option, kind = "draft_tensor_parallel_size", self.draft_quantization
            check_split(self.draft_config, size, self.draft, option, quantization=kind)

    @functools.cached_property
    def parallel(self) -> TensorParallel | None:
        """The devices that hold models together; None: one device. Raises ValueError where there are not so many."""
        return devices_of_host(self.tensor_parallel_size) if self.tensor_parallel_size > 1 else None

    @functools.cached_property
    def disaggregated(self) -> TensorParallel | None:
        """The two devices of which one drafts. Raises ValueError where there are not two."""
        if not self.separate_draft:
            return None
        found = two_devices()
        if found is None:
            raise ValueError("separate_draft is True and JAX has not two devices alike here; leave it out.")
        return found

    @property
    def devices(self) -> int:
        """The number of devices that run the models."""
        return 2 if self.separate_draft else self.tensor_parallel_size

    @property
    def sharded(self) -> ShardedPrograms | None:
        """How programs run on several devices."""
        if self.disaggregated is not None:
            return DisaggregatedPrograms(self.disaggregated, self.target_config)
        if self.parallel is None:
            return None
        draft = self.draft_config if self.draft_divided else None
        return ShardedPrograms(self.parallel, self.target_config, draft)

    def collectives_of(self, implementation: str) -> str | None:
        """Names how devices sum and gather: "peers", wherever these take it, or "xla"; None on one device."""
        if self.sharded is None:
            return None
        return "peers" if self.sharded.has_peers(implementation) else "xla"

    def workspace_bytes(self, implementation: str) -> int:
        """Bytes of each device through which devices reach each other."""
        return 0 if self.sharded is None else self.sharded.workspace_bytes(implementation)

    @property
    def local_target(self) -> ModelConfig:
        """The target as one device computes it."""
        return self.target_config if self.parallel is None else self.parallel.local(self.target_config)

    @property
    def local_draft(self) -> ModelConfig:
        """The draft as one device computes it."""
        divided = self.parallel is not None and self.draft_divided
        return self.parallel.local(self.draft_config) if self.parallel and divided else self.draft_config

    @property
    def held_target(self) -> ModelConfig:
        """A model with as many weights as one device holds of the target."""
        return held_by_one(self.target_config, self.tensor_parallel_size)

    @property
    def held_draft(self) -> ModelConfig:
        """A model with as many weights as one device holds of the draft."""
        return held_by_one(self.draft_config, self.tensor_parallel_size if self.draft_divided else 1, vocabulary=False)

    @property
    def target_config(self) -> ModelConfig:
        """The target's shape."""
        config = SHAPES[self.target]
        config = dataclasses.replace(config, num_layers=self.target_layers or config.num_layers)
        if self.attention is None:
            return config
        kind = ATTENTIONS[self.attention]
        return config.with_layers(
            dataclasses.replace(config.layer(index), attention=kind) for index in range(config.num_layers)
        )

    @property
    def draft_config(self) -> ModelConfig:
        """The draft's shape."""
        return SHAPES[self.draft]

    def require_room(self, *, with_draft: bool) -> None:
        """Raises ValueError where there are not so many devices, or the weights alone are more than their memory."""
        _ = self.parallel, self.disaggregated
        weights = {self.target: weight_bytes(self.held_target, self.quantization)}
        if with_draft:
            weights[self.draft] = weight_bytes(self.held_draft, self.draft_quantization)
        mend = "use smaller ones, such as tiny-target and tiny-draft, or fewer layers of the target"
        require_room_for_weights(weights, mend, self.devices)

    def target_params(self, implementation: str) -> Params:
        """Random weights of the target, as `LLM` keeps them for this implementation."""
        made = self._random(self.parallel, self.target_config, 0, self.quantization, implementation)
        return made if self.disaggregated is None else self.disaggregated.whole(made)

    def draft_params(self, implementation: str) -> Params:
        """Random weights of the draft, as `LLM` keeps them for this implementation."""
        parallel = self.disaggregated or self.parallel
        if parallel is not None and not self.draft_divided:
            return parallel.whole(self._random(None, self.draft_config, 1, self.draft_quantization, implementation))
        by_layers = None if parallel is None else parallel.by_layers
        return self._random(by_layers, self.draft_config, 1, self.draft_quantization, implementation)

    def _random(
        self,
        parallel: TensorParallel | None,
        config: ModelConfig,
        seed: int,
        quantization: str | None,
        implementation: str,
    ) -> Params:
        if parallel is None:
            return prepared(random_params(config, seed, quantization), config, implementation)
        leaves = parallel.random_leaves(config, key_of(seed), config.dtype)
        made = _made(config, leaves, quantization)
        return parallel.placed(config, prepared(made, config, implementation))


def random_params(config: ModelConfig, seed: int, quantization: str | None = None) -> Params:
    """Random weights made on the device, leaf by leaf, and quantised so."""
    return _made(config, init_leaves(config, key_of(seed), config.dtype), quantization)


def _made(config: ModelConfig, leaves: Iterable[jax.Array], quantization: str | None) -> Params:
    shapes = param_shapes(config, config.dtype)
    return quantize_leaves(shapes, leaves, None if quantization is None else QUANTIZATIONS[quantization])


@functools.cache
def _filling(shape: tuple[int, ...], dtype: Any, sharding: Any) -> Callable[[jax.Array], jax.Array]:
    """Returns a program that makes Gaussian numbers from a key: on one device or divided among several."""
    return jax.jit(lambda key: jax.random.normal(key, shape, dtype), out_shardings=sharding)


def random_memory(memory: Any) -> Any:
    """A decoder's memory with Gaussian numbers in all pages of all layers; the allocator as it was. Consumes it.

    Each array is given up before the one in its place is made, so that memory for one of them is never held twice.
    """
    leaves, treedef = jax.tree.flatten(memory)
    keys = jax.random.split(key_of(2), len(leaves))
    for number, (key, leaf) in enumerate(zip(keys, leaves, strict=True)):
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            fill = _filling(leaf.shape, leaf.dtype, leaf.sharding)
            leaf.delete()
            leaves[number] = fill(key)
    return jax.tree.unflatten(treedef, leaves)


@functools.partial(jax.jit, static_argnums=1, donate_argnums=0)
def own_pages(state: Any, first: int) -> Any:
    """The state in which every row has pages of its own from its `first`-th on, instead of sharing them.

    Through the allocator, so that every count stays the number of table entries that name the page. What the new
    pages hold is whatever they held: fill the memory before.
    """
    sequences, memory = state.sequences, state.memory
    table = sequences.block_table
    replaced = (jnp.arange(table.shape[1]) >= first)[None] & (table != TRASH)
    pool = release(memory.pool, jnp.where(replaced, table, TRASH))
    pool, fresh = allocate(pool, replaced)
    sequences = dataclasses.replace(sequences, block_table=jnp.where(replaced, fresh, table))
    return dataclasses.replace(state, sequences=sequences).with_memory(pool=pool)
