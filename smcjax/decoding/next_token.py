"""The next token of each row: a forward over its newest tokens, and a draw from what it predicts.

Ways to the same law: all of it in one persistent kernel (`smcjax.pallas.decode_step`); layer by layer, and behind the
last the head and the draw in one kernel (`smcjax.pallas.sampled_head`); or logits, and then the draw. Only the last
writes logits.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, UInt

from smcjax.decoding.sampling import draw, forbid_stops, likeliest, log_softmax_at, truncate
from smcjax.decoding.sequences import Requests
from smcjax.kv import Copies, KVCache
from smcjax.matmul import is_packed, matrix
from smcjax.model.config import LayerSpec, ModelConfig
from smcjax.model.decoder import rope_angles, unembed
from smcjax.model.paged import paged_hidden_states, plan_reads
from smcjax.model.params import Params
from smcjax.numerics import words_of
from smcjax.pallas import Sharing, decode_step, find_tasks, uses_kernels
from smcjax.pallas.products import QUERIES
from smcjax.pallas.sampled_head import sampled_head
from smcjax.pallas.sampled_head import supports as supports_sampled_head

PAGES_BY_ONE = 128  # of a row's table: up to here the one kernel's attention tasks are single pages


@dataclasses.dataclass(frozen=True)
class Law:
    """What each row's token is drawn from: softmax(logits / temperature), without stop tokens within the minimum."""

    temperature: Float[Array, " R"]  # above 0
    stops: Bool[Array, "R V"]  # impossible within the minimum
    minimum: Int[Array, " R"]
    greedy: Bool[Array, " R"] | None = None  # rows that take the likeliest token; None: none does
    truncation: tuple[Int[Array, " R"], Float[Array, " R"]] | None = None  # top_k and top_p; None: nothing is cut off


@dataclasses.dataclass(frozen=True)
class Steps:
    """K draws a row that follow each other, and all that is known of them before the first: everything but tokens.

    `positions` and `write_pages` are those of each step's T new tokens, as for
    `smcjax.model.paged.paged_hidden_states`.
    """

    positions: Int[Array, "K R T"]
    write_pages: Int[Array, "K R T"]
    keys: Key[Array, "K R"]
    token_number: Int[Array, "K R"]  # of the token to be drawn, from 1
    one_kernel: tuple[decode_step.Shape, decode_step.Tables] | None = None  # its arguments; None: layer by layer


def noise_scale_of(law: Law) -> Float[Array, " R"]:
    """What kernels multiply their noise by: nothing is left of it in rows that are greedy."""
    return jnp.ones_like(law.temperature) if law.greedy is None else jnp.where(law.greedy, 0.0, 1.0)


def law_of(requests: Requests, *, rows: int, truncates: bool) -> Law:
    """The law of each of `rows` rows a request where a request may be greedy (temperature 0), and cut off if asked."""

    def each(per_group: jax.Array) -> jax.Array:
        return jnp.repeat(per_group, rows, axis=0)

    greedy = requests.temperature == 0
    return Law(
        temperature=each(jnp.where(greedy, 1.0, requests.temperature)),
        stops=each(requests.stops),
        minimum=each(requests.min_tokens),
        greedy=each(greedy),
        truncation=(each(requests.top_k), each(requests.top_p)) if truncates else None,
    )


def law_logits(law: Law, token_number: Int[Array, " R"], logits: Float[Array, "R V"]) -> Float[Array, "R V"]:
    """Those whose softmax is the law of the rows' `token_number`-th tokens, from 1; greedy rows aside."""
    logits = forbid_stops(logits / law.temperature[:, None], law.stops, token_number, law.minimum)
    return logits if law.truncation is None else truncate(logits, *law.truncation)


class Head(NamedTuple):
    """Logits not yet made, as the one kernel makes its own: its operands, rounded before they are scaled.

    A verifier must be told the law that was sampled from, to more than bf16's accuracy.
    """

    operand: Float[Array, "*shape E"]  # x∘g in the weights' dtype
    scale: Float[Array, "*shape"]  # 1/rms(x), f32

    @classmethod
    def of(cls, params: Params, residual: Float[Array, "R E"], eps: float) -> Head:
        """Of the residual stream behind the last layer."""
        x = residual.astype(jnp.float32)
        operand = (x * params.final_norm.astype(jnp.float32)).astype(residual.dtype)
        return cls(operand, jax.lax.rsqrt(jnp.mean(x * x, axis=-1) + eps))

    def logits(self, params: Params) -> Float[Array, "*shape V"]:
        """One product for all."""
        return unembed(params, self.operand) * self.scale[..., None]


class Drawn(NamedTuple):
    """A token a row."""

    token: Int[Array, " R"]
    logprob: Float[Array, " R"]  # under the law, at temperature 1 of rows that are greedy
    # Where the whole law was asked for, one of:
    logits: Float[Array, "R V"] | None = None  # whose softmax it is
    head: Head | None = None  # from which `law_logits` makes these
    following: decode_step.Embedded | None = None  # where the next step begins if it runs in one kernel


def sample(
    law: Law,
    keys: Key[Array, " R"],
    token_number: Int[Array, " R"],
    logits: Float[Array, "R V"],
    *,
    keep_logits: bool = False,
) -> Drawn:
    """A token a row; its log-probability is NaN where a logit is."""
    logits = law_logits(law, token_number, logits)
    token = draw(keys, logits)
    if law.greedy is not None:
        token = jnp.where(law.greedy, likeliest(logits), token)
    return Drawn(token, log_softmax_at(logits, token), logits if keep_logits else None)


def sample_in_head(
    law: Law,
    keys: Key[Array, " R"],
    token_number: Int[Array, " R"],
    hidden: Float[Array, "R E"],
    unembed: Float[Array, "V E"],
    stop_words: UInt[Array, "R words"],
) -> Drawn:
    """As `sample` of these hidden states' logits, which are kept nowhere; `stop_words` are the law's stops, packed."""
    forbids = token_number <= law.minimum
    terms = (words_of(keys), law.temperature, noise_scale_of(law), stop_words.T, forbids)
    return Drawn(*sampled_head(hidden, unembed, *terms))


@dataclasses.dataclass(frozen=True)
class OneKernelPlan:
    """What the steps of one cycle have in common that run in one kernel."""

    tasks: dict[int, Sharing]  # what rows share, by how many are read together: `Shape.rows`
    prefetches: bool  # `prefetches` of their table
    norms: Float[Array, "norms E"]  # all of the model's, in its order
    scales: Float[Array, "1 S"] | None  # of int8 matrices


@dataclasses.dataclass(frozen=True)
class Plan:
    """What the steps of one cycle have in common. Either way uses its own; XLA drops what is not used."""

    sharing: Sharing | None  # layer by layer: what rows of a group share
    one_kernel: OneKernelPlan | None = None  # None where no step may run so
    keeps_laws: bool = False  # whether the laws that are drawn from are wanted whole
    stop_words: UInt[Array, "R words"] | None = None  # the law's stops, 32 to a word; None where no kernel draws
    draws_in_head: bool = False  # layer by layer: whether the head's kernel draws


def plan(
    config: ModelConfig,
    params: Params,
    block_table: Int[Array, "R M"],
    lengths: Int[Array, " R"],
    settled: Int[Array, " R"],
    law: Law,
    *,
    rows: int,
    columns: int,
    page_size: int,
    implementation: str,
    keeps_laws: bool = False,
) -> Plan:
    """For `next_token` of 1 to `columns` tokens a row and groups of `rows` rows: `plan_reads`' terms."""
    sharing = plan_reads(
        config,
        params,
        block_table,
        lengths,
        settled,
        rows=rows,
        columns=columns,
        page_size=page_size,
        implementation=implementation,
    )
    total = block_table.shape[0]
    by_kernel = uses_kernels() and not is_packed(params.unembed)
    by_kernel &= law.truncation is None and not keeps_laws
    vocab, hidden = config.vocab_size, config.hidden_size
    by_kernel &= supports_sampled_head(rows=total, hidden=hidden, vocab=vocab, dtype=params.embed.dtype)
    widths = range(1, columns + 1)
    ahead = prefetches(block_table)
    terms: dict[str, Any] = {
        "rows": rows,
        "page_size": page_size,
        "prefetches": ahead,
        "implementation": implementation,
    }
    shapes = [one_kernel_of(config, params, total, columns=width, **terms) for width in widths]
    if law.truncation is not None or not any(shapes):
        return Plan(sharing, None, keeps_laws, pack_bits(law.stops) if by_kernel else None, by_kernel)
    tasks = {
        together: tasks_of(
            config, block_table, lengths, settled, rows=together, page_size=page_size, implementation=implementation
        )
        for together in sorted({shape.rows for shape in shapes if shape is not None})
    }
    one_kernel = OneKernelPlan(tasks, ahead, norms_of(params), scales_of(params))
    return Plan(sharing, one_kernel, keeps_laws, pack_bits(law.stops), by_kernel)


def tasks_of(
    config: ModelConfig,
    block_table: Int[Array, "R M"],
    lengths: Int[Array, " R"],
    settled: Int[Array, " R"],
    *,
    rows: int,
    page_size: int,
    implementation: str = "auto",
) -> Sharing:
    """The one kernel's attention tasks: `find_sharing`'s terms."""
    return find_tasks(
        block_table,
        lengths,
        settled if prefetches(block_table) else None,
        rows=rows,
        queries=config.num_heads // config.num_kv_heads,
        page_size=page_size,
        chunk=decode_step.CHUNK,
        tiles=1,
        implementation=implementation,
    )


def prefetches(block_table: Int[Array, "R M"]) -> bool:
    """Whether the one kernel fetches chunks of KV ahead of attention's turn, which pays where there are many."""
    return block_table.shape[1] > PAGES_BY_ONE


def norms_of(params: Params) -> Float[Array, "norms E"]:
    """All norms' weights in the order of a forward."""
    norms = [norm for layer in params.layers for norm in (layer.attn_norm, layer.mlp_norm)]
    folded = jnp.ones_like(params.final_norm)
    return jnp.stack([*(folded if norm is None else norm for norm in norms), params.final_norm])


def scales_of(params: Params) -> Float[Array, "1 S"] | None:
    """Of quantised matrices, as `decode_step.Weights` wants them."""
    if not is_packed(params.unembed):
        return None
    of_layers = [m.scale for layer in params.layers for m in (layer.qkv, layer.o, layer.gate_up, layer.down)]
    return jnp.concatenate([*of_layers, params.unembed.scale])[None]


def weights_of(
    params: Params, norms: Float[Array, "norms E"], scales: Float[Array, "1 S"] | None
) -> decode_step.Weights:
    """The one kernel's view of a decoder's parameters; `norms_of` and `scales_of` them."""
    layers = params.layers
    return decode_step.Weights(
        qkv=tuple(matrix(layer.qkv).values for layer in layers),
        o=tuple(matrix(layer.o).values for layer in layers),
        gate_up=tuple(matrix(layer.gate_up).values for layer in layers),
        down=tuple(matrix(layer.down).values for layer in layers),
        norms=norms,
        embed=params.embed,
        unembed=matrix(params.unembed).values,
        scales=scales,
    )


def shape_of(
    config: ModelConfig,
    *,
    groups: int,
    rows: int,
    columns: int,
    page_size: int,
    prefetches: bool,
    int8: bool = False,
    **tuning: int,
) -> decode_step.Shape:
    """The one kernel's static shape."""
    return decode_step.make_shape(
        hidden=config.hidden_size,
        ffn=config.intermediate_size,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        dim=config.head_dim,
        vocab=config.vocab_size,
        eps=config.rms_norm_eps,
        groups=groups,
        rows=rows,
        columns=columns,
        page_size=page_size,
        prefetches=prefetches,
        int8=int8,
        **tuning,
    )


def prepare(
    config: ModelConfig,
    params: Params,
    steps: Steps,
    law: Law,
    *,
    plan: Plan,
    rows: int = 1,
    page_size: int,
    implementation: str = "auto",
) -> Steps:
    """The same steps, with tables for the one kernel where that takes them; a few launches for all K."""
    if plan.one_kernel is None or plan.stop_words is None:
        return steps
    _, total, columns = steps.positions.shape
    shape = one_kernel_of(
        config,
        params,
        total,
        rows=rows,
        columns=columns,
        page_size=page_size,
        prefetches=plan.one_kernel.prefetches,
        implementation=implementation,
    )
    if shape is None:
        return steps
    cos, sin = (
        x.reshape(*steps.positions.shape, -1)
        for x in rope_angles(config.layer(0).rope, config.head_dim, steps.positions.reshape(-1, columns))
    )
    draws = decode_step.Draws(
        keys=words_of(steps.keys),
        temperature=law.temperature,
        noise_scale=noise_scale_of(law),
        forbidden=plan.stop_words,
        forbids=steps.token_number <= law.minimum,
    )
    slots = steps.write_pages * page_size + steps.positions % page_size
    tables = decode_step.make_tables(shape, cos, sin, steps.positions, slots, draws)
    return dataclasses.replace(steps, one_kernel=(shape, tables))


def next_token(
    config: ModelConfig,
    params: Params,
    cache: KVCache,
    tokens: Int[Array, "R T"],
    block_table: Int[Array, "R M"],
    steps: Steps,
    step: Int[Array, ""] | int,
    law: Law,
    *,
    plan: Plan,
    begin: decode_step.Embedded | None = None,
    copies: Copies | None = None,
    implementation: str = "auto",
) -> tuple[Drawn, KVCache]:
    """A token for each row after the T new ones of this step, and the cache with their KV written.

    `step` from 0 to K − 1 is which of `steps`, which were prepared with this `plan` and `law`; `begin` what `beginning`
    says of the tokens. What `sample` says of the token holds. `tokens` int32; the log-probability is f32.
    """
    if steps.one_kernel is not None and plan.one_kernel is not None:
        shape, tables = steps.one_kernel
        if copies is not None:
            cache = cache.copy_pages(copies)
        one_kernel = plan.one_kernel
        weights, tasks = weights_of(params, one_kernel.norms, one_kernel.scales), one_kernel.tasks[shape.rows]
        if begin is None:
            begin = decode_step.embedded(weights.embed, weights.norms[0], tokens)
        done = decode_step.decode_step(shape, weights, begin, step, tables, tasks, cache.keys, cache.values)
        head = Head.of(params, done.residual, config.rms_norm_eps) if plan.keeps_laws else None
        drawn = Drawn(done.token, done.logprob, head=head, following=done.following)
        return drawn, KVCache(keys=done.keys, values=done.values)
    hidden, cache = paged_hidden_states(
        config,
        params,
        cache,
        tokens,
        steps.positions[step],
        block_table,
        steps.write_pages[step],
        copies=copies,
        sharing=plan.sharing,
        implementation=implementation,
    )
    keys, number = steps.keys[step], steps.token_number[step]
    if plan.draws_in_head and plan.stop_words is not None:
        return sample_in_head(law, keys, number, hidden[:, -1], params.unembed, plan.stop_words), cache
    logits = unembed(params, hidden[:, -1])
    return sample(law, keys, number, logits, keep_logits=plan.keeps_laws), cache


def beginning(params: Params, steps: Steps, drawn: Drawn) -> decode_step.Embedded | None:
    """Where those of `steps` begin whose only new tokens were drawn so; None where they go layer by layer."""
    if steps.one_kernel is None:
        return None
    if drawn.following is not None:
        return drawn.following
    return decode_step.embedded(params.embed, norms_of(params)[0], drawn.token)


# All that the one kernel computes. What a model has beyond this it would leave out without a word.
FUSED_MATRICES = ("qkv", "o", "gate_up", "down")
FUSED_LAYER = (*FUSED_MATRICES, "attn_norm", "mlp_norm")
FUSED_PARAMS = ("embed", "layers", "final_norm", "lm_head")
FUSED_CONFIG = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim"),
    *("max_position_embeddings", "rms_norm_eps", "tie_embeddings", "layers"),
    *("bos_token_id", "eos_token_ids", "dtype"),
)


def is_plain(config: ModelConfig, params: Params) -> bool:
    """True for a model that has nothing but what the one kernel computes, by a list of that.

    A field that is not on the list counts as absent where it is None, or has its default in a config.
    """
    layers = all(
        field.name in FUSED_LAYER or getattr(layer, field.name) is None
        for layer in params.layers
        for field in dataclasses.fields(layer)
    )
    model = all(
        field.name in FUSED_PARAMS or getattr(params, field.name) is None for field in dataclasses.fields(params)
    )
    rope = config.layers[0].rope  # any, but one for all layers
    return (
        layers
        and model
        and all(layer == LayerSpec(rope=rope) for layer in config.layers)
        and all(
            field.name in FUSED_CONFIG or getattr(config, field.name) == field.default
            for field in dataclasses.fields(config)
        )
    )


def one_kernel_of(
    config: ModelConfig,
    params: Params,
    total: int,
    *,
    rows: int,
    columns: int,
    page_size: int,
    prefetches: bool,
    implementation: str,
) -> decode_step.Shape | None:
    """The kernel's shape for `total` rows of `columns` tokens, None where it does not apply.

    It reads the KV of a group's rows together, or of half of them where their queries are too many for one tile.
    """
    leaves = [getattr(layer, name) for layer in params.layers for name in FUSED_MATRICES] + [params.unembed]
    stored = {jnp.dtype(matrix(leaf).values.dtype).name for leaf in leaves}
    if not (is_plain(config, params) and stored in ({"bfloat16"}, {"int8"}) and uses_kernels()):
        return None
    queries = rows * columns * (config.num_heads // config.num_kv_heads)
    together = rows // 2 if queries > QUERIES and rows % 2 == 0 else rows
    shape = shape_of(
        config,
        groups=total // together,
        rows=together,
        columns=columns,
        page_size=page_size,
        prefetches=prefetches,
        int8=stored == {"int8"},
    )
    return shape if decode_step.supports(shape, params.embed.dtype) else None


def pack_bits(mask: Bool[Array, "R V"]) -> UInt[Array, "R words"]:
    """32 flags to a word, the first in the lowest bit; V is a multiple of 32."""
    bits = mask.reshape(mask.shape[0], -1, 32).astype(jnp.uint32)
    return jnp.sum(bits << jnp.arange(32, dtype=jnp.uint32), axis=-1, dtype=jnp.uint32)
