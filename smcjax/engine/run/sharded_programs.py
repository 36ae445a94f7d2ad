"""Programs on several devices: each device runs the whole program on its shards of the weights and of the KV.

The function of a `Job` is written for one device. `ShardedPrograms.job` puts it into one `jax.shard_map`: each device
receives its shards of weights and KV, and a replica of every other array (tables, counts, keys, tokens, weights of
particles). All devices compute replicated arrays by the same operations from the same numbers, so no collective is
needed to keep replicas equal. Only the models' matrices sum and gather over devices (`smcjax.matmul`).
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from smcjax.decoding.drafts import fused_step
from smcjax.decoding.groups import Memory, PairParams
from smcjax.engine.run.programs import Job
from smcjax.model.config import ModelConfig
from smcjax.model.eagle import EagleParams
from smcjax.model.folding import folded_shapes
from smcjax.model.parallel import AXIS, TensorParallel, fits, held_by_one
from smcjax.pallas import PeerMemory, Workspaces, reach_each_other, supports_peers
from smcjax.pallas.collectives.peer_memory import workspace_bytes

logger = logging.getLogger("smcjax")

REPLICATED = PartitionSpec()
BY_HEAD = PartitionSpec(None, None, AXIS, None)  # of a KV array [P, entries, heads, D]

_launching = threading.Lock()  # one for the process: several threads may run engines on the same devices


@dataclasses.dataclass(frozen=True)
class ShardedPrograms:
    """Runs a runner's programs on several devices, which share one target and may share its draft model."""

    parallel: TensorParallel  # the devices
    target: ModelConfig  # the whole one; programs are made with `parallel.local(target)`
    draft: ModelConfig | None = None  # the whole one if it is divided like the target; None: it is replicated

    def has_peers(self, implementation: str) -> bool:
        """True if programs of `implementation` sum and gather by kernels that write into peers' memory.

        Otherwise all sums and gathers over devices are XLA's.
        """
        if implementation not in ("auto", "mosaic") or not supports_peers(self.parallel.size):
            return False
        return _reach_each_other(tuple(self.parallel.mesh.devices.flat))

    def divides(self, draft: ModelConfig, dtype: Any, implementation: str) -> bool:
        """True if a draft was measured to be faster divided than replicated: on two devices, by the persistent step.

        A cycle of 8B and 1B takes 7.93 ms with the draft divided and 9.36 ms with it replicated, but 16.94 ms divided
        without the persistent step (docs/explanation/tensor-parallelism.md). More than two devices were not measured.
        The draft must have unquantised weights of `dtype`.
        """
        size, by_layers = self.parallel.size, self.parallel.by_layers
        if size != 2 or jnp.dtype(dtype) != jnp.bfloat16 or not fits(draft, size) or not self.has_peers(implementation):
            return False
        shapes = folded_shapes(held_by_one(draft, size, vocabulary=False), dtype)
        return fused_step.accepts(by_layers.local(draft), by_layers.local_params(draft, shapes, PeerMemory(None, size)))

    def workspaces(self, implementation: str) -> Workspaces | None:
        """Memory through which devices reach each other in programs of `implementation`; None if they do not."""
        return Workspaces(self.parallel.mesh) if self.has_peers(implementation) else None

    def workspace_bytes(self, implementation: str) -> int:
        """Bytes that `workspaces` takes of each device."""
        return workspace_bytes(self.parallel.size) if self.has_peers(implementation) else 0

    def put(self, tree: Any) -> Any:
        """Replicates a host's arrays on all devices."""
        return jax.device_put(tree, self.parallel.everywhere)

    def job(self, job: Job) -> Job:
        """Converts a job of one device to one of all devices. `job.arguments` have the shapes of one device."""
        specs = self._specs(job.arguments)

        def whole(leaf: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(self.parallel.mesh, spec))

        arguments = jax.tree.map(whole, self._global(job.arguments), specs)
        return job._replace(function=self._shard(job.function, specs), arguments=arguments)

    def run(self, function: Callable[[], Any]) -> Any:
        """Computes `function()` on all devices."""
        return jax.jit(self._shard(function, ()))()

    def launch(self, program: Callable[..., Any], *arguments: Any) -> Any:
        """Calls a compiled program under the launch lock, as its collectives block.

        Without the lock two devices could receive two engines' programs in opposite orders and deadlock.
        """
        with _launching:
            return program(*arguments)

    def _shard(self, function: Callable[..., Any], specs: Any) -> Callable[..., Any]:
        def sharded(*arguments: Any) -> Any:
            structure: Any = None
            by_head: list[bool] = []

            def on_each(*pieces: Any) -> tuple[list[Any], list[Any]]:
                nonlocal structure, by_head
                leaves, results = _evaluated(function, *self._local_arguments(pieces))
                structure = jax.tree.structure(results)
                by_head = [spec == BY_HEAD for spec in jax.tree.leaves(self._specs(results))]
                divided = [leaf for leaf, one in zip(leaves, by_head, strict=True) if one]
                return divided, [leaf for leaf, one in zip(leaves, by_head, strict=True) if not one]

            # Tests, not types, show that replicated outputs are equal on all devices.
            mapped = jax.shard_map(
                on_each, mesh=self.parallel.mesh, in_specs=specs, out_specs=(BY_HEAD, REPLICATED), check_vma=False
            )
            divided, others = map(iter, mapped(*arguments))
            leaves = [next(divided if one else others) for one in by_head]
            return jax.tree.unflatten(structure, leaves)

        return sharded

    def _map(
        self, tree: Any, params: Callable[[Any], Any], memory: Callable[[Any], Any], other: Callable[[Any], Any]
    ) -> Any:
        """Maps weights by `params`, divided KV by `memory`, and all other leaves by `other`."""

        def of(part: Any) -> Any:
            if isinstance(part, PairParams):
                return jax.tree.map(params, part)
            if isinstance(part, Memory):
                of_draft = other if self.draft is None else memory
                return Memory(
                    jax.tree.map(other, part.pool),
                    jax.tree.map(memory, part.target),
                    jax.tree.map(of_draft, part.draft),
                )
            return other(part)

        return jax.tree.map(of, tree, is_leaf=lambda part: isinstance(part, PairParams | Memory))

    def _specs(self, tree: Any) -> Any:
        """The `PartitionSpec` of each array."""
        return self._map(tree, lambda leaf: leaf.sharding.spec, lambda _: BY_HEAD, lambda _: REPLICATED)

    def _global(self, tree: Any) -> Any:
        """Shapes over all devices, from the shapes of one device."""

        def all_heads(leaf: Any) -> jax.ShapeDtypeStruct:
            pages, entries, heads, dim = leaf.shape
            return jax.ShapeDtypeStruct((pages, entries, heads * self.parallel.size, dim), leaf.dtype)

        return self._map(tree, lambda leaf: leaf, all_heads, lambda leaf: leaf)

    def _local_arguments(self, pieces: Any) -> Any:
        """Converts a device's arguments to those of a program for one device."""

        def local(part: Any) -> Any:
            if not isinstance(part, PairParams):
                return part
            target, draft = self.parallel.local_params(self.target, part.target, part.peer_memory), part.draft
            if self.draft is not None:
                draft = self.parallel.local_params(self.draft, draft, part.peer_memory)
            elif isinstance(draft, EagleParams):
                draft = draft.joined(target.embed, target.unembed)
            return PairParams(target, draft)

        return jax.tree.map(local, pieces, is_leaf=lambda part: isinstance(part, PairParams))


class DisaggregatedPrograms(ShardedPrograms):
    """Two devices with both models each, one of which drafts while the other scores.

    Only the pipelined cycle is disaggregated (`smcjax.decoding.disaggregation`); both devices compute all else. Both
    have all weights and all KV of prompts, so a cycle sends neither. Of answers each device keeps one model's KV.
    """

    def has_peers(self, implementation: str) -> bool:
        """False: the only collective of a cycle is one small sum."""
        return False

    def _map(
        self, tree: Any, params: Callable[[Any], Any], memory: Callable[[Any], Any], other: Callable[[Any], Any]
    ) -> Any:
        return jax.tree.map(other, tree)

    def _local_arguments(self, pieces: Any) -> Any:
        return pieces


@functools.cache  # one warning a process
def _reach_each_other(devices: tuple[jax.Device, ...]) -> bool:
    reached = reach_each_other(devices)
    if not reached:
        logger.warning("GPUs cannot write into each other's memory; sums over them are XLA's, which take longer.")
    return reached


def _evaluated(function: Callable[..., Any], *arguments: Any) -> tuple[list[jax.Array], Any]:
    """Traces `function(*arguments)`; returns the leaves of its results, and the results' tree of shapes.

    A constant without elements, such as that of `x.at[::1].set(y)`, would become an operand of `shard_map`, and XLA's
    compiler aborts the process over such an operand (jaxlib 0.11.2). So it is made within the function.
    """
    traced, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
    constants = [jax.lax.full(x.shape, 0, x.dtype) if x.size == 0 else x for x in traced.consts]
    return jax.core.eval_jaxpr(traced.jaxpr, constants, *jax.tree.leaves(arguments)), shapes
