"""Programs on several devices: each runs the whole program on its pieces of the models and of their KV.

The function of a `Job` is written for one device and is told of no other. `Spread.job` puts it into one
`jax.shard_map`: weights and KV come in as the pieces that lie on each device, whatever else there is (tables, counts,
keys, tokens, weights of particles) comes in whole on every device and leaves so. Every device computes those by the
same operations from the same numbers, so nothing has to be sent to keep them alike; models alone sum and gather, in
their matrices (`smcjax.matmul`).
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

from smcjax.decoding import fused_step
from smcjax.decoding.groups import Memory, PairParams
from smcjax.engine.run.programs import Job
from smcjax.model.config import ModelConfig
from smcjax.model.eagle import EagleParams
from smcjax.model.folding import folded_shapes
from smcjax.model.parallel import AXIS, TensorParallel, fits, held_by_one
from smcjax.pallas import Peers, Workspaces, reach_each_other, supports_peers
from smcjax.pallas.collectives.peer_memory import workspace_bytes

logger = logging.getLogger("smcjax")

WHOLE = PartitionSpec()
BY_HEAD = PartitionSpec(None, None, AXIS, None)  # of an array that pages hold, [P, entries, heads, D]

_launching = threading.Lock()  # of the process: engines on the same devices may be used by several threads


@dataclasses.dataclass(frozen=True)
class Spread:
    """The devices that a runner's programs run on, and which of its models they hold together.

    Attributes:
        parallel: the devices.
        target: the whole target; its programs are made with `parallel.local(target)`.
        draft: the whole draft model where it is divided like the target; None: each device has all of the proposer.
        by_peers: whether devices may write into each other's memory; otherwise XLA's collectives do it all.
    """

    parallel: TensorParallel
    target: ModelConfig
    draft: ModelConfig | None = None
    by_peers: bool = True

    def has_peers(self, implementation: str) -> bool:
        """True where devices write into each other's memory in programs of `implementation`: there are kernels for it.

        Otherwise all sums and gathers over devices are XLA's.
        """
        if not self.by_peers or implementation == "xla" or not supports_peers(self.parallel.size):
            return False
        return _reach_each_other(tuple(self.parallel.mesh.devices.flat))

    def divides(self, draft: ModelConfig, dtype: Any, implementation: str) -> bool:
        """True for a draft that was quicker divided than whole on each device: on two, by the persistent step.

        A cycle of 8B and 1B takes 7.93 ms so and 9.36 otherwise, but 16.94 by plain layers
        (docs/explanation/tensor-parallelism.md). More devices were not measured. The draft's weights are plain, of this
        dtype.
        """
        size, by_layers = self.parallel.size, self.parallel.by_layers
        if size != 2 or jnp.dtype(dtype) != jnp.bfloat16 or not fits(draft, size) or not self.has_peers(implementation):
            return False
        shapes = folded_shapes(held_by_one(draft, size, vocabulary=False), dtype)
        return fused_step.accepts(by_layers.local(draft), by_layers.seen(draft, shapes, Peers(None, size)))

    def workspaces(self, implementation: str) -> Workspaces | None:
        """Memory through which devices reach each other in programs of `implementation`; None where they do not."""
        return Workspaces(self.parallel.mesh) if self.has_peers(implementation) else None

    def workspace_bytes(self, implementation: str) -> int:
        """Bytes of each device that `workspaces` takes."""
        return workspace_bytes(self.parallel.size) if self.has_peers(implementation) else 0

    def put(self, tree: Any) -> Any:
        """Sends a host's arrays to all devices."""
        return jax.device_put(tree, self.parallel.everywhere)

    def job(self, job: Job) -> Job:
        """The job on all devices; its arguments describe memory and state as one device has them."""
        specs = self._specs(job.arguments)

        def whole(leaf: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(self.parallel.mesh, spec))

        arguments = jax.tree.map(whole, self._global(job.arguments), specs)
        return job._replace(function=self._spread(job.function, specs), arguments=arguments)

    def run(self, function: Callable[[], Any]) -> Any:
        """Computes `function()` on all devices."""
        return jax.jit(self._spread(function, ()))()

    def launch(self, program: Callable[..., Any], *arguments: Any) -> Any:
        """Calls a compiled program, in which devices wait for each other: after other threads' calls, or before them.

        Otherwise one device could get two engines' programs in another order than the next, and both wait for ever.
        """
        with _launching:
            return program(*arguments)

    def _spread(self, function: Callable[..., Any], specs: Any) -> Callable[..., Any]:
        def spread(*arguments: Any) -> Any:
            structure: Any = None
            by_head: list[bool] = []

            def on_each(*pieces: Any) -> tuple[list[Any], list[Any]]:
                nonlocal structure, by_head
                leaves, results = _evaluated(function, *self._seen(pieces))
                structure = jax.tree.structure(results)
                by_head = [spec == BY_HEAD for spec in jax.tree.leaves(self._specs(results))]
                divided = [leaf for leaf, one in zip(leaves, by_head, strict=True) if one]
                return divided, [leaf for leaf, one in zip(leaves, by_head, strict=True) if not one]

            # That what leaves whole is the same everywhere is not proved by types, but tested.
            mapped = jax.shard_map(
                on_each, mesh=self.parallel.mesh, in_specs=specs, out_specs=(BY_HEAD, WHOLE), check_vma=False
            )
            divided, others = map(iter, mapped(*arguments))
            leaves = [next(divided if one else others) for one in by_head]
            return jax.tree.unflatten(structure, leaves)

        return spread

    def _map(
        self, tree: Any, params: Callable[[Any], Any], memory: Callable[[Any], Any], other: Callable[[Any], Any]
    ) -> Any:
        """Maps the leaves of a tree by what they are part of: weights, KV that is divided, or anything else."""

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
        """Says of each array how devices have it."""
        return self._map(tree, lambda leaf: leaf.sharding.spec, lambda _: BY_HEAD, lambda _: WHOLE)

    def _global(self, tree: Any) -> Any:
        """The arrays of all devices, of those that one has."""

        def all_heads(leaf: Any) -> jax.ShapeDtypeStruct:
            pages, entries, heads, dim = leaf.shape
            return jax.ShapeDtypeStruct((pages, entries, heads * self.parallel.size, dim), leaf.dtype)

        return self._map(tree, lambda leaf: leaf, all_heads, lambda leaf: leaf)

    def _seen(self, pieces: Any) -> Any:
        """A device's arguments as programs of one device know them."""

        def seen(part: Any) -> Any:
            if not isinstance(part, PairParams):
                return part
            target, draft = self.parallel.seen(self.target, part.target, part.peers), part.draft
            if self.draft is not None:
                draft = self.parallel.seen(self.draft, draft, part.peers)
            elif isinstance(draft, EagleParams):
                draft = draft.joined(target.embed, target.unembed)
            return PairParams(target, draft)

        return jax.tree.map(seen, pieces, is_leaf=lambda part: isinstance(part, PairParams))


class Apart(Spread):
    """Two devices, of which each has all of both models, and one drafts while the other scores.

    In the pipelined cycle alone (`smcjax.decoding.apart`): whatever else there is, both compute. Weights and KV are on
    both from the first, so nothing is sent when a cycle needs them; of the answers' KV each device keeps one model's.
    """

    def has_peers(self, implementation: str) -> bool:
        """False: what devices say to each other in a cycle is one small sum."""
        return False

    def _map(
        self, tree: Any, params: Callable[[Any], Any], memory: Callable[[Any], Any], other: Callable[[Any], Any]
    ) -> Any:
        return jax.tree.map(other, tree)

    def _seen(self, pieces: Any) -> Any:
        return pieces


@functools.cache  # one remark a process
def _reach_each_other(devices: tuple[jax.Device, ...]) -> bool:
    reached = reach_each_other(devices)
    if not reached:
        logger.warning("GPUs cannot write into each other's memory; sums over them are XLA's, which take longer.")
    return reached


def _evaluated(function: Callable[..., Any], *arguments: Any) -> tuple[list[jax.Array], Any]:
    """The leaves of `function(*arguments)` and, with their structure, their shapes. Traced.

    Constants without elements are made within: as operands of `shard_map`, which those that a trace comes by become,
    XLA's compiler ends the process over them (jaxlib 0.11.2; `x.at[::1].set(y)` has one).
    """
    traced, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
    constants = [jax.lax.full(x.shape, 0, x.dtype) if x.size == 0 else x for x in traced.consts]
    return jax.core.eval_jaxpr(traced.jaxpr, constants, *jax.tree.leaves(arguments)), shapes
