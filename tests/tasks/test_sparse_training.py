"""Attention for training equals the kinds' own, in value and gradient; routing learns from dense attention."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sparse_training

from smcjax.model import LayerSpec, ModelConfig, Params
from smcjax.model.attention import FULL, AttentionKind, Projection, SlidingWindow
from smcjax.model.decoder import Attend, hidden_states
from smcjax.sparse.nsa import NSA
from tests.helpers import noisy_params, tiny_config

LENGTH = 75
SPARSE = NSA(kernel_size=4, kernel_stride=2, block_size=8, num_blocks=4, window=7)
KINDS: list[AttentionKind] = [
    SPARSE,
    dataclasses.replace(SPARSE, kv="shared", init_blocks=0, local_blocks=1, kernel_size=8),
    SlidingWindow(7),
]


def config_of(kind: AttentionKind) -> ModelConfig:
    return tiny_config(50, layers=(LayerSpec(kind),), num_heads=4, num_kv_heads=2, head_dim=8, hidden_size=16)


def squares(attend: Attend, config: ModelConfig, tokens: jax.Array, params: Params) -> jax.Array:
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    weights = jnp.arange(config.hidden_size, dtype=jnp.float32)[None, None]
    return (hidden_states(config, params, tokens, positions, attend) ** 2 * weights).mean()


@functools.cache
def gradient(config: ModelConfig, attend: Attend) -> Any:
    tokens = jax.random.randint(jax.random.key(1), (2, LENGTH), 0, 50)
    function = functools.partial(squares, attend, config, tokens)
    return jax.jit(jax.value_and_grad(function))(noisy_params(config))


def own(kind: AttentionKind) -> Attend:
    """The kind's attention without pages."""

    def attend(_: int, new: Projection) -> jax.Array:
        return kind.dense(new, jnp.broadcast_to(jnp.arange(LENGTH), new.qkv.shape[:2]))

    return attend


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_values_and_gradients_are_the_kinds(kind: AttentionKind) -> None:
    config = config_of(kind)
    wanted, wanted_gradients = gradient(config, own(kind))
    got, gradients = gradient(config, sparse_training.attend_by("xla", config))
    assert float(got) == pytest.approx(float(wanted), rel=1e-5)
    size = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(wanted_gradients))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-5 * size), gradients, wanted_gradients
    )


def test_gradients_tell_one_block_from_another() -> None:
    """The control: with one block fewer neither value nor gradients agree."""
    config = config_of(SPARSE)
    fewer = config_of(dataclasses.replace(SPARSE, num_blocks=3))
    wanted, _ = gradient(config, own(SPARSE))
    got, _ = gradient(config, sparse_training.attend_by("xla", fewer))
    assert float(got) != pytest.approx(float(wanted), rel=1e-4)


def test_sparse_layers_can_attend_to_all() -> None:
    kind = dataclasses.replace(SPARSE, kv="shared")
    config = config_of(kind)
    got, _ = gradient(config, sparse_training.attend_by("xla", config, dense=True))
    wanted, _ = gradient(config, own(FULL))
    assert float(got) == pytest.approx(float(wanted), rel=1e-5)
    with pytest.raises(ValueError, match=r"kv must be 'shared' to attend to all, got 'per_branch'\."):
        gradient(config_of(SPARSE), sparse_training.attend_by("xla", config_of(SPARSE), dense=True))


# -- routing ----------------------------------------------------------------------------------------------------------


def routing(kind: NSA, params: Params, queries: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
    """The loss of the last layer of a model that attends to all, and what it is computed of."""
    config = config_of(kind)
    tokens = jax.random.randint(jax.random.key(1), (2, LENGTH), 0, 50)
    dense, found = sparse_training.attend_by("xla", config, dense=True), []

    def attend(index: int, new: Projection) -> jax.Array:
        found.append(sparse_training.routing_loss(kind, new, queries))
        return dense(index, new)

    positions = jnp.broadcast_to(jnp.arange(LENGTH), tokens.shape)
    hidden_states(config, params, tokens, positions, attend)
    return found[-1], found


ROUTED = dataclasses.replace(SPARSE, kv="shared")
QUERIES = jnp.asarray([[40, 55, 74], [33, 60, 70]])


def test_what_makes_queries_and_keys_learns_to_route() -> None:
    """Everything below the last layer, and of it what its queries, keys and compressed keys are made by."""
    config = config_of(ROUTED)
    params = noisy_params(config)
    gradients = jax.jit(jax.grad(lambda params: routing(ROUTED, params, QUERIES)[0]))(params)
    for path, leaf in jax.tree_util.tree_flatten_with_path(gradients.layers[-1])[0]:
        name = jax.tree_util.keystr(path)
        learns = any(part in name for part in ("attn_norm", "qkv", "phi_k", "position_k"))
        assert bool(jnp.any(leaf != 0)) == learns, name
    values = jnp.split(gradients.layers[-1].qkv, [config.num_heads * config.head_dim], axis=-1)[1]
    values = jnp.split(values, 2, axis=-1)[1]
    assert not jnp.any(values)
    assert jnp.any(gradients.embed)
    assert jnp.any(gradients.layers[0].qkv)


def test_the_loss_is_a_cross_entropy_by_hand() -> None:
    """One query, from its definition: dense attention's mass of each free block, and the scores' logarithms."""
    kind, config = ROUTED, config_of(ROUTED)
    new: list[Projection] = []
    dense = sparse_training.attend_by("xla", config, dense=True)

    def attend(index: int, projection: Projection) -> jax.Array:
        new.append(projection)
        return dense(index, projection)

    tokens = jax.random.randint(jax.random.key(1), (1, LENGTH), 0, 50)
    positions = jnp.broadcast_to(jnp.arange(LENGTH), tokens.shape)
    at = 60

    @jax.jit
    def of_first_layer() -> tuple[Any, ...]:
        hidden_states(config, noisy_params(config), tokens, positions, attend)
        loss = sparse_training.routing_loss(kind, new[0], jnp.asarray([[at]]))
        return new[0].heads(), kind.dense_branches(new[0], positions).scores, loss

    heads, scores, loss = of_first_layer()
    q, keys, _ = (np.asarray(x[0], np.float64) for x in heads)
    scores = np.asarray(scores[0, at], np.float64) / 2  # [Hkv, blocks], a mean over the group's two heads
    free = np.arange(kind.init_blocks, at // 8 - kind.local_blocks + 1)
    total = 0.0
    for head in range(2):
        logits = keys[: at + 1, head] @ q[at, 2 * head : 2 * head + 2].T / np.sqrt(8)
        weights = np.exp(logits - logits.max(axis=0))
        mass = (weights / weights.sum(axis=0)).mean(axis=1)
        mass = np.pad(mass, (0, 80 - len(mass))).reshape(-1, 8).sum(axis=1)[free]
        mass[mass < sparse_training.WORTH_FINDING] = 0
        share = scores[head, free] / scores[head, free].sum()
        total -= (mass * np.log(share)).sum() / 2
    assert float(loss) == pytest.approx(total, rel=1e-4)
