"""The persistent decode-step kernel as a model's step: which models it computes, and its view of their weights."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from smcjax.matmul import RowParallel, is_packed, is_whole, matrix
from smcjax.model.config import LayerSpec, ModelConfig
from smcjax.model.params import Folded, Params
from smcjax.model.view import BatchView
from smcjax.pallas import PeerMemory, Sharing, find_tasks
from smcjax.pallas.collectives.peer_memory import MAX_TILES
from smcjax.pallas.decode_step import op as decode_step
from smcjax.pallas.mosaic.tiles import FEATURES
from smcjax.pallas.mosaic.wgmma import QUERIES

MAX_PAGES_UNPREFETCHED = 128  # of a row's table: up to here the kernel's attention tasks are single pages

# All that the kernel computes. A model's other parts it would leave out without a word.
MATRICES = ("qkv", "o", "gate_up", "down")
SUMMED = ("o", "down")  # over devices, where these divide the layers
LAYER_PARAMS = (*MATRICES, "attn_norm", "mlp_norm")
MODEL_PARAMS = ("embed", "layers", "final_norm", "lm_head")
CONFIG = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim"),
    *("max_position_embeddings", "rms_norm_eps", "tie_embeddings", "layers"),
    *("bos_token_id", "eos_token_ids", "dtype"),
)


@dataclasses.dataclass(frozen=True)
class FusedStepPlan:
    """Operands shared by all fused steps of one cycle."""

    tasks: dict[int, Sharing]  # attention's, by the number of rows that are read together: `Shape.rows`
    prefetches: bool  # `prefetches` of their table
    norms: Float[Array, "norms E"]  # all of the model's, in its order
    scales: Float[Array, "1 S"] | None  # of int8 matrices


def accepts(config: ModelConfig, params: Params) -> bool:
    """True for a model that has nothing but what the kernel computes, by a list of that.

    A field that is not on the list counts as absent where it is None, or has its default in a config.
    """
    rope = config.layers[0].rope  # any, but one for all layers

    def has_only(part: Any, known: tuple[str, ...]) -> bool:
        return all(field.name in known or getattr(part, field.name) is None for field in dataclasses.fields(part))

    return (
        all(layer == LayerSpec(rope=rope) for layer in config.layers)
        and all(
            field.name in CONFIG or getattr(config, field.name) == field.default for field in dataclasses.fields(config)
        )
        and has_only(params, MODEL_PARAMS)
        and all(has_only(layer, LAYER_PARAMS) for layer in params.layers)
        and all(map(is_whole, (params.embed, params.unembed)))
        and (_are_whole(params, MATRICES) or _are_divided(config, params))
    )


def _are_whole(params: Params, names: tuple[str, ...]) -> bool:
    return all(is_whole(getattr(layer, name)) for layer in params.layers for name in names)


def _are_divided(config: ModelConfig, params: Params) -> bool:
    """True for layers whose o and down are parts that the kernel sums over devices itself: plain, of few features."""
    parts = [getattr(layer, name) for layer in params.layers for name in SUMMED]
    return (
        all(isinstance(leaf, RowParallel) and isinstance(leaf.peer_memory, PeerMemory) for leaf in parts)
        and not any(is_packed(leaf.part) for leaf in parts)
        and _are_whole(params, tuple(name for name in MATRICES if name not in SUMMED))
        and config.hidden_size <= MAX_TILES * FEATURES
    )


def _peers_of(params: Params) -> Any:
    """The addresses of devices that divide the layers; None where there are none."""
    o = params.layers[0].o
    return o.peer_memory.addresses if isinstance(o, RowParallel) else None


def fused_step_shape(config: ModelConfig, params: Params, view: BatchView, columns: int) -> decode_step.Shape | None:
    """The kernel's shape for the rows of `view` with `columns` new tokens each, None where it does not apply.

    The kernel reads the KV of a group's rows together, or of half of them where all queries are too many for a tile.
    """
    leaves = [getattr(layer, name) for layer in params.layers for name in MATRICES] + [params.unembed]
    stored = {jnp.dtype(matrix(leaf).values.dtype).name for leaf in leaves}
    if not (accepts(config, params) and stored in ({"bfloat16"}, {"int8"})):
        return None
    total, rows = view.block_table.shape[0], view.rows
    queries = rows * columns * (config.num_heads // config.num_kv_heads)
    together = rows // 2 if queries > QUERIES and rows % 2 == 0 else rows
    table, page_size = decode_step.kernel_pages(view.block_table, view.page_size)
    shape = make_shape(
        config,
        groups=total // together,
        rows=together,
        columns=columns,
        page_size=page_size,
        prefetches=prefetches(table),
        int8=stored == {"int8"},
    )
    return shape if decode_step.takes(shape, params.embed.dtype) else None


def plan_fused_steps(
    config: ModelConfig, params: Params, view: BatchView, shapes: list[decode_step.Shape]
) -> FusedStepPlan:
    """The operands that steps of these shapes over `view` share."""
    table, page_size = decode_step.kernel_pages(view.block_table, view.page_size)
    terms = (table, view.lengths, view.num_immutable)
    tasks = {
        together: tasks_of(config, *terms, rows=together, page_size=page_size)
        for together in sorted({shape.rows for shape in shapes})
    }
    return FusedStepPlan(tasks, prefetches(table), norms_of(params), scales_of(params))


def tasks_of(
    config: ModelConfig,
    block_table: Int[Array, "R M"],
    lengths: Int[Array, " R"],
    num_immutable: Int[Array, " R"],
    *,
    rows: int,
    page_size: int,
) -> Sharing:
    """The kernel's attention tasks where `rows` rows are read together: `find_tasks`' terms."""
    return find_tasks(
        block_table,
        lengths,
        num_immutable if prefetches(block_table) else None,
        rows=rows,
        queries=config.num_heads // config.num_kv_heads,
        page_size=page_size,
        chunk=decode_step.CHUNK,
        tiles=1,
    )


def prefetches(block_table: Int[Array, "R M"]) -> bool:
    """True where the kernel fetches chunks of KV ahead of attention's turn, which pays where there are many."""
    return block_table.shape[1] > MAX_PAGES_UNPREFETCHED


def norms_of(params: Params) -> Float[Array, "norms E"]:
    """The weights of the norms that a model has, in the order of a forward, 1 for those that are folded."""
    norms = [norm for layer in params.layers for norm in (layer.attn_norm, layer.mlp_norm) if norm is not None]
    folded = jnp.ones_like(params.final_norm)
    return jnp.stack([*(folded if isinstance(norm, Folded) else norm for norm in norms), params.final_norm])


def scales_of(params: Params) -> Float[Array, "1 S"] | None:
    """The scales of quantised matrices, as `decode_step.Weights` wants them."""
    if not is_packed(params.unembed):
        return None
    of_layers = [getattr(layer, name).scale for layer in params.layers for name in MATRICES]
    return jnp.concatenate([*of_layers, params.unembed.scale])[None]


def weights_of(
    params: Params, norms: Float[Array, "norms E"], scales: Float[Array, "1 S"] | None
) -> decode_step.Weights:
    """The kernel's view of a decoder's parameters; `norms_of` and `scales_of` them."""
    of_layers = {name: tuple(matrix(getattr(layer, name)).values for layer in params.layers) for name in MATRICES}
    return decode_step.Weights(
        **of_layers,
        norms=norms,
        embed=params.embed,
        unembed=matrix(params.unembed).values,
        scales=scales,
        peers=_peers_of(params),
    )


def make_shape(config: ModelConfig, **terms: Any) -> decode_step.Shape:
    """The kernel's static shape for this model and the other terms of `decode_step.make_shape`."""
    return decode_step.make_shape(
        hidden=config.hidden_size,
        ffn=config.intermediate_size,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        dim=config.head_dim,
        vocab=config.vocab_size,
        eps=config.rms_norm_eps,
        **terms,
    )
