"""One model on several devices of a host: tensor parallelism.

    device i of n has     of every layer its H/n query heads with the rows of qkv and the columns of o that are theirs,
                          F/n entries of the MLP, with their rows of gate and up and columns of down; of embedding and
                          LM head the rows of ⌈V/n⌉ tokens; norms and biases of the residual stream whole
    all devices have      the residual stream, logits, and everything that is no model: the same numbers

So a device's layer is a layer of a smaller model, which its own config describes (`TensorParallel.local`), and what
computes layers knows nothing of other devices but for the kinds of its matrices (`TensorParallel.local_params`) and
attention (`AttentionKind.partition`). Each sums over devices once behind attention and once behind the MLP.

Rows of qkv and gate_up lie shard by shard, each device's q, k and v together, so that one contiguous slice is a
device's fused matrix. Of key-value heads a device has Hkv/n, or one that n/Hkv devices have alike.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from smcjax.matmul import PeerMemory, Quantized, RowParallel, VocabularyParallel, is_packed, matrix
from smcjax.model.config import ModelConfig
from smcjax.model.params import Folded, Params, init_leaf, param_shapes
from smcjax.quantization import QUANTIZATIONS, Quantization, stored_order

AXIS = "model"  # of the mesh
MAX_DEVICES = 64  # that a sentence tries when it says which numbers fit


@dataclasses.dataclass(frozen=True)
class Layout:
    """Says how n devices hold one array together.

    Attributes:
        axis: the dimension that is divided; None: every device has the whole array.
        runs: lengths along it, one behind the other, each with the number of parts that it is divided into: device i
            has part ⌊i · parts / n⌋ of every run. What a last part lacks is filled up with zeros.
    """

    axis: int | None = None
    runs: tuple[tuple[int, int], ...] = ()

    @property
    def spec(self) -> PartitionSpec:
        """The layout as `jax.sharding` has it: the devices' pieces, one behind the other."""
        return PartitionSpec() if self.axis is None else PartitionSpec(*[None] * self.axis, AXIS)

    def pieces(self, array: np.ndarray, size: int) -> list[np.ndarray]:
        """Divides a host's array among `size` devices."""
        if self.axis is None:
            return [array] * size
        by_axis = np.moveaxis(array, self.axis, 0)
        starts = np.cumsum([0, *(length for length, _ in self.runs)])

        def piece(device: int) -> np.ndarray:
            taken = []
            for start, (length, parts) in zip(starts, self.runs, strict=False):
                each = -(-length // parts)
                begin = min(device * parts // size * each, length)
                part = by_axis[start + begin : start + min(begin + each, length)]
                taken.append(part)
                if len(part) < each:
                    taken.append(np.zeros((each - len(part), *part.shape[1:]), part.dtype))
            joined = taken[0] if len(taken) == 1 else np.concatenate(taken)
            return np.ascontiguousarray(np.moveaxis(joined, 0, self.axis or 0))

        return [piece(device) for device in range(size)]


def layouts(config: ModelConfig, size: int, vocabulary: bool = True) -> Params:
    """A tree like `param_shapes(config)`, whose leaves are the arrays' layouts over `size` devices.

    Without `vocabulary` each of them has all rows of embedding and LM head.
    """
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    kv_parts, f = min(size, config.num_kv_heads), config.intermediate_size
    of_rows: dict[str, tuple[tuple[int, int], ...]] = dict.fromkeys(("gate_up", "gate_up_bias"), ((f, size), (f, size)))
    if vocabulary:
        of_rows |= dict.fromkeys(("embed", "lm_head"), ((config.vocab_size, size),))
    of_columns = {"o": ((q, size),), "down": ((f, size),)}

    def layout(path: Any, _: Any) -> Layout:
        last = path[-1]
        if isinstance(last, jax.tree_util.DictKey):  # the kind's own weights
            own = config.layer(path[1].idx).attention.own_weights(config)[last.key]
            return Layout(0, ((config.num_heads, size),) if own.by_query_head else ((config.num_kv_heads, kv_parts),))
        if last.name in ("qkv", "qkv_bias"):  # queries, then the pairs' keys, then their values
            pairs = config.layer(path[1].idx).attention.kv_pairs
            return Layout(0, ((q, size), *((kv, kv_parts),) * (2 * pairs)))
        if last.name in of_rows:
            return Layout(0, of_rows[last.name])
        return Layout(1, of_columns[last.name]) if last.name in of_columns else WHOLE

    found: Params = jax.tree_util.tree_map_with_path(layout, param_shapes(config, "float32"))
    return found


WHOLE = Layout()


def check_split(config: ModelConfig, size: int, model: str, argument: str, *, quantization: str | None = None) -> None:
    """Raises ValueError where `size` devices cannot hold a model together: its name, and that of the argument."""
    columns = 1 if quantization is None else QUANTIZATIONS[quantization].columns
    if fits(config, size, columns):
        return
    if _norms_all_heads(config):
        raise ValueError(
            f"{argument} is {size} and {model} norms the queries and keys of all heads at once, of which each device "
            "would have its own only; use 1."
        )
    fitting = [str(number) for number in range(1, MAX_DEVICES + 1) if fits(config, number, columns)]
    several = f"{', '.join(fitting[:-1])} or {fitting[-1]}" if fitting[1:] else fitting[0]
    if fits(config, size):
        attention, f = config.num_heads * config.head_dim, config.intermediate_size
        raise ValueError(
            f"{argument} is {size} and {model} has matrices of {attention} and {f} columns in {quantization}, of which "
            f"each device must hold a multiple of {columns}; use {several}, or no {quantization}."
        )
    raise ValueError(
        f"{argument} is {size} and {model} has {config.num_heads} attention heads, {config.num_kv_heads} key-value "
        f"heads and intermediate size {config.intermediate_size}, which {size} devices cannot divide evenly; use "
        f"{several}."
    )


def fits(config: ModelConfig, size: int, columns: int = 1) -> bool:
    """True where every one of `size` devices gets as much, and all queries of a device their key-value heads.

    Columns of matrices in eight bits may be stored in an order within each so many `columns`.
    """
    heads, kv_heads, f = config.num_heads, config.num_kv_heads, config.intermediate_size
    inputs = (heads * config.head_dim, f)
    whole = all(width % columns or not (width // size) % columns for width in inputs)
    divide = not heads % size and not f % size and (not kv_heads % size or not size % kv_heads)
    return divide and whole and (size == 1 or not _norms_all_heads(config))


def _norms_all_heads(config: ModelConfig) -> bool:
    return any(spec.qk_norm == "all" for spec in config.layers)


def local_config(config: ModelConfig, size: int) -> ModelConfig:
    """The model that each of `size` devices computes, with all tokens' logits."""
    neighbours = max(1, size // config.num_kv_heads)  # that have a key-value head alike
    attentions = (spec.attention.partition(neighbours, AXIS) for spec in config.layers)
    return dataclasses.replace(
        config,
        layers=tuple(
            dataclasses.replace(spec, attention=own) for spec, own in zip(config.layers, attentions, strict=True)
        ),
        num_heads=config.num_heads // size,
        num_kv_heads=max(1, config.num_kv_heads // size),
        intermediate_size=config.intermediate_size // size,
    )


def held_by_one(config: ModelConfig, size: int, vocabulary: bool = True) -> ModelConfig:
    """A model with as many weights and as much KV as each of `size` devices holds: for counting bytes."""
    return dataclasses.replace(
        local_config(config, size), vocab_size=-(-config.vocab_size // (size if vocabulary else 1))
    )


def devices_of_host(size: int) -> TensorParallel:
    """The first `size` devices of this process. Raises ValueError where there are not as many alike."""
    devices = jax.local_devices()
    if jax.process_count() > 1:
        raise ValueError(
            f"tensor_parallel_size is {size} and this is one of {jax.process_count()} JAX processes; only devices of "
            "one process hold a model together, so use one process, or 1."
        )
    if size > len(devices):
        here = f"{len(devices)} device{'s' if len(devices) > 1 else ''} here ({devices[0].platform})"
        raise ValueError(f"tensor_parallel_size is {size} and JAX has {here}; use at most {len(devices)}.")
    kinds = sorted({device.device_kind for device in devices[:size]})
    if len(kinds) > 1:
        raise ValueError(
            f"tensor_parallel_size is {size} and those devices are not alike ({', '.join(kinds)}); use alike ones."
        )
    return TensorParallel(Mesh(np.array(devices[:size]), (AXIS,), axis_types=(AxisType.Auto,)))


def two_devices() -> TensorParallel | None:
    """The first two devices of this process, for a model each; None where it has not two alike."""
    devices = jax.local_devices()[:2]
    is_pair = len(devices) == 2 and devices[0].device_kind == devices[1].device_kind
    return devices_of_host(2) if is_pair and jax.process_count() == 1 else None


@dataclasses.dataclass(frozen=True)
class TensorParallel:
    """Devices that hold a model together, in a mesh of one axis; without `vocabulary`, its layers alone."""

    mesh: Mesh
    vocabulary: bool = True

    @property
    def size(self) -> int:
        """n, the number of devices."""
        return self.mesh.size

    @property
    def by_layers(self) -> TensorParallel:
        """Returns these devices as they divide a model's layers alone; each has all of embedding and LM head."""
        return dataclasses.replace(self, vocabulary=False)

    def local(self, config: ModelConfig) -> ModelConfig:
        """The model that a device computes: with its heads and its entries of the MLP, and every token."""
        return local_config(config, self.size)

    def whole[P](self, params: P) -> P:
        """The weights on every device, all of them."""
        everywhere: P = jax.device_put(params, self.everywhere)
        return jax.block_until_ready(everywhere)

    def sharding(self, layout: Layout) -> NamedSharding:
        """The layout on these devices."""
        return NamedSharding(self.mesh, layout.spec)

    @property
    def everywhere(self) -> NamedSharding:
        """Each device has all of an array."""
        return self.sharding(WHOLE)

    def place(self, array: np.ndarray, layout: Layout) -> jax.Array:
        """Puts a host's array on the devices, on each its own piece and no more."""
        return self._joined(layout.pieces(array, self.size), layout)

    def place_quantized(
        self, values: np.ndarray, scale: np.ndarray, layout: Layout, dtype: str, kind: Quantization
    ) -> Quantized:
        """Puts a matrix in eight bits, its columns in their own order, and its scales on the devices."""
        placed = [
            stored_order(jax.device_put(piece, device), kind)
            for piece, device in self._dealt(layout.pieces(values, self.size))
        ]
        of_scale = layout if layout.axis == 0 else WHOLE
        return Quantized(self._joined(placed, layout), self.place(scale, of_scale), dtype, kind.name)

    def _dealt(self, pieces: Sequence[Any]) -> list[tuple[Any, jax.Device]]:
        return list(zip(pieces, self.mesh.devices.flat, strict=True))

    def _joined(self, pieces: Sequence[Any], layout: Layout) -> jax.Array:
        shape = list(pieces[0].shape)
        if layout.axis is not None:
            shape[layout.axis] *= self.size
        own = [jax.device_put(piece, device) for piece, device in self._dealt(pieces)]
        return jax.make_array_from_single_device_arrays(tuple(shape), self.sharding(layout), own)

    def placed(self, config: ModelConfig, params: Params) -> Params:
        """Moves each weight to the sharding of its layout. A conversion may have left some elsewhere."""

        def place(layout: Layout, leaf: Any) -> Any:
            if isinstance(leaf, Folded):
                return leaf
            if not is_packed(leaf):
                return jax.device_put(leaf, self.sharding(layout))
            of_scale = layout if layout.axis == 0 else WHOLE
            places = dataclasses.replace(leaf, values=self.sharding(layout), scale=self.sharding(of_scale))
            return jax.device_put(leaf, places)

        return jax.tree.map(place, layouts(config, self.size, self.vocabulary), params)

    def local_params(self, config: ModelConfig, params: Params, peer_memory: PeerMemory | None = None) -> Params:
        """Wraps a device's shards as matrices that sum and gather over devices. Call it within `shard_map`.

        `config` is the whole model's. Collectives run on `peer_memory` if these support them, otherwise on XLA.
        """

        def by_token(leaf: Any) -> Any:
            divided = matrix(leaf).shape[0] < config.vocab_size
            return VocabularyParallel(leaf, AXIS, config.vocab_size, peer_memory) if divided else leaf

        def by_column(leaf: Any) -> RowParallel:
            return RowParallel(leaf, AXIS, peer_memory)

        return dataclasses.replace(
            params,
            embed=by_token(params.embed),
            layers=tuple(
                dataclasses.replace(layer, o=by_column(layer.o), down=by_column(layer.down)) for layer in params.layers
            ),
            lm_head=None if params.lm_head is None else by_token(params.lm_head),
        )

    def random_leaves(self, config: ModelConfig, key: jax.Array, dtype: Any) -> Iterator[jax.Array]:
        """Random weights as `init_leaves` makes them, each device's made there. Not the numbers of one device."""
        flat = jax.tree_util.tree_leaves_with_path(param_shapes(held_by_one(config, self.size, self.vocabulary), dtype))
        layout_of = jax.tree.leaves(layouts(config, self.size, self.vocabulary))
        keys = jax.random.split(key, len(flat))
        for (path, leaf), layout, leaf_key in zip(flat, layout_of, keys, strict=True):
            shape = list(leaf.shape)
            if layout.axis is not None:
                shape[layout.axis] *= self.size
            whole = jax.ShapeDtypeStruct(tuple(shape), leaf.dtype)
            make = jax.jit(init_leaf, static_argnums=(0, 1), out_shardings=self.sharding(layout))
            yield make(jax.tree_util.keystr(path), whole, leaf_key)


def bytes_on_one(tree: Any) -> int:
    """Bytes of these arrays that one device holds, each distinct array counted once."""
    distinct = {id(leaf): leaf for leaf in jax.tree.leaves(tree)}.values()
    return sum(
        int(np.prod(leaf.sharding.shard_shape(leaf.shape))) * jnp.dtype(leaf.dtype).itemsize for leaf in distinct
    )
