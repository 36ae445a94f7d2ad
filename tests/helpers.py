"""Tiny models, requests, and jitted entry points that tests share."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from smcjax import smc
from smcjax.decoding.sequences import Requests
from smcjax.model import LayerSpec, ModelConfig, Params, init_params
from tests.weights import normal

init = jax.jit(smc.init, static_argnames=("program", "num_pages"))
step = jax.jit(smc.step, static_argnames="program")
run = jax.jit(smc.run, static_argnames=("program", "num_cycles"))
select = jax.jit(smc.select, static_argnames="program")
release = jax.jit(smc.State.release)


def tiny_config(vocab_size: int = 5, **changes: Any) -> ModelConfig:
    """Two layers, two query heads on one key-value head; `changes` are fields of `ModelConfig` or of all its layers."""
    fields: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": 8,
        "intermediate_size": 12,
        "num_layers": 2,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 4,
        "max_position_embeddings": 64,
    }
    return model_config(**{**fields, **changes})


def model_config(**values: Any) -> ModelConfig:
    """The config of these fields of `ModelConfig` and of `LayerSpec`; the latter hold for every layer."""
    variant = {field.name: values.pop(field.name) for field in dataclasses.fields(LayerSpec) if field.name in values}
    return ModelConfig(**values, **({"layers": (LayerSpec(**variant),)} if variant else {}))


def tiny_params(config: ModelConfig, seed: int, sharpness: float = 1.5) -> Params:
    """Random weights whose next-token laws differ clearly between contexts and between seeds; the same in a trace."""
    with jax.ensure_compile_time_eval():
        params = init_params(config, jax.random.key(seed))
        assert params.lm_head is not None
        return dataclasses.replace(params, lm_head=jnp.asarray(np.asarray(params.lm_head) * np.float32(sharpness)))


def noisy_params(config: ModelConfig) -> Params:
    """Random weights in which norms and biases differ from 1 and 0 too; the same in a trace."""
    with jax.ensure_compile_time_eval():
        params = init_params(config, jax.random.key(0))
        leaves, tree = jax.tree.flatten(params)
        keys = jax.random.split(jax.random.key(1), len(leaves))
        noisy = [
            jnp.asarray(np.asarray(x) + np.float32(0.2) * normal(key, x.shape))
            for x, key in zip(leaves, keys, strict=True)
        ]
        return jax.tree.unflatten(tree, noisy)


def published(*sizes: int, **options: Any) -> smc.SMC:
    """SMC that keeps every draft, unless the options have a control."""
    return smc.SMC(*sizes, **{"control": 0.0, **options})


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two different models over one vocabulary."""

    target: ModelConfig
    draft: ModelConfig
    params: smc.PairParams

    def program(self, max_model_len: int, page_size: int = 4, **config: Any) -> smc.Program:
        """Few particles and drafts where `config` says nothing, and no control."""
        config = {"n_particles": 3, "gamma": 3, **config}
        return smc.Program(published(**config), self.target, self.draft, max_model_len, page_size)


def tiny_pair(vocab_size: int = 5, target_layers: int = 2) -> Pair:
    """A target of `target_layers` layers and a one-layer draft of other widths."""
    target = tiny_config(vocab_size, num_layers=target_layers)
    draft = tiny_config(vocab_size, num_layers=1, hidden_size=6, num_heads=1, head_dim=6)
    return Pair(target, draft, smc.PairParams(tiny_params(target, 1), tiny_params(draft, 2)))


@dataclasses.dataclass(frozen=True)
class Ask:
    """One request as a test writes it."""

    prompt: tuple[int, ...]
    max_tokens: int = 8
    min_tokens: int = 0
    temperature: float = 1.0
    stops: tuple[int, ...] = ()
    seed: int = 0
    top_k: int | None = None
    top_p: float = 1.0
    control: float | None = None

    def limit(self, max_model_len: int) -> int:
        """Tokens, prompt included, at which a row is cut."""
        return min(max_model_len, len(self.prompt) + self.max_tokens)


def batch(asks: Sequence[Ask], vocab_size: int, max_model_len: int, width: int = 0) -> tuple[jax.Array, Requests]:
    """Prompts padded with token 0 to the longest, at least `width`, and their `Requests`."""
    length = max(width, *(len(ask.prompt) for ask in asks))
    prompts = np.zeros((len(asks), length), np.int32)
    stops = np.zeros((len(asks), vocab_size), bool)
    for row, ask in enumerate(asks):
        prompts[row, : len(ask.prompt)] = ask.prompt
        stops[row, list(ask.stops)] = True
    return jnp.asarray(prompts), Requests(
        prompt_length=jnp.asarray([len(ask.prompt) for ask in asks], jnp.int32),
        limit=jnp.asarray([ask.limit(max_model_len) for ask in asks], jnp.int32),
        min_tokens=jnp.asarray([ask.min_tokens for ask in asks], jnp.int32),
        temperature=jnp.asarray([ask.temperature for ask in asks], jnp.float32),
        top_k=jnp.asarray([ask.top_k or vocab_size for ask in asks], jnp.int32),
        top_p=jnp.asarray([ask.top_p for ask in asks], jnp.float32),
        stops=jnp.asarray(stops),
        control=jnp.asarray([-1 if ask.control is None else ask.control for ask in asks], jnp.float32),
        key=jax.vmap(jax.random.key)(jnp.asarray([ask.seed for ask in asks], jnp.uint32)),
    )


def with_nan_behind(params: smc.PairParams, token: int) -> smc.PairParams:
    """Weights by which the target gives NaN behind the token."""
    target = params.target
    return dataclasses.replace(params, target=dataclasses.replace(target, embed=target.embed.at[token].set(jnp.nan)))


def start(program: smc.Program, params: smc.PairParams, asks: Sequence[Ask], **kwargs: Any) -> smc.State:
    """A population for each request, x₀ drawn."""
    prompts, requests = batch(asks, program.target.vocab_size, program.max_model_len)
    return init(program, params, prompts, requests, **kwargs)


def finish(program: smc.Program, params: smc.PairParams, state: smc.State) -> tuple[smc.State, list[smc.Info]]:
    """Steps until no group runs."""
    infos = []
    while bool(state.running.any()):
        state, info = step(program, params, state)
        infos.append(info)
        assert len(infos) <= program.max_model_len + 1, "a group runs on for ever"
    return state, infos


def outputs(state: smc.State) -> list[list[tuple[int, ...]]]:
    """Generated tokens of every row, by group."""
    groups, n = state.log_weight.shape
    tokens, length = np.asarray(state.sequences.tokens), np.asarray(state.sequences.length)
    begin = np.repeat(np.asarray(state.requests.prompt_length), n)
    rows = [tuple(tokens[r, begin[r] : length[r]].tolist()) for r in range(groups * n)]
    return [rows[g * n : (g + 1) * n] for g in range(groups)]


def assert_pages_sound(table: jax.Array, pool: Any, trash: int = 0) -> None:
    """Law 5: counts are the histogram of the tables, and the free stack holds exactly the pages of count 0."""
    refcount, num_free = np.asarray(pool.refcount), int(pool.num_free)
    expected = np.bincount(np.asarray(table).ravel(), minlength=refcount.size)
    expected[trash] = 0
    np.testing.assert_array_equal(refcount, expected)
    free = np.sort(np.asarray(pool.free)[:num_free])
    np.testing.assert_array_equal(free, np.flatnonzero(expected == 0)[1:])  # page 0, the trash page, is neither
