"""The EAGLE-3 head of the recall pair, which comes with the package: it drafts what the target says."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smcjax.model import load_checkpoint
from smcjax.model.files.eagle_files import is_eagle, load_eagle
from smcjax.model.files.hub import BUNDLED, bundled_model
from smcjax.tasks import recall

pytest.importorskip("flax")
pytest.importorskip("optax")
import recall_measure
import train_eagle

STEPS, LENGTH, FIRST = 4, 1280, 1024


@pytest.mark.slow
def test_it_drafts_what_the_target_says() -> None:
    """On a document of held-out keys, a chain of four drafts. Control: a head whose weights are random."""
    directory = bundled_model(BUNDLED["recall-eagle"])
    assert is_eagle(directory)
    target, params = load_checkpoint(bundled_model(BUNDLED["recall"]), "float32")
    config, head = load_eagle(directory, target, "float32")
    tokens = recall.tokens(np.random.default_rng(5), LENGTH, "eval")[None].astype(np.int32)
    weights = recall_measure.in_answers(tokens).astype(np.float32)
    assert not weights[:, :FIRST].any()
    weights[:, -1] = 0
    read = jax.jit(functools.partial(train_eagle.read_target, target), static_argnums=(1, 3, 4))
    streams, wanted = read(params, config.aux_layers, jnp.asarray(tokens), 1 + FIRST, "xla")
    agree = jax.jit(functools.partial(train_eagle.loss_of, config), static_argnums=(5, 6))

    def agreed(own: train_eagle.EagleParams) -> np.ndarray:
        whole = own.joined(params.embed, params.unembed)
        return np.asarray(agree(whole, streams, wanted, jnp.asarray(tokens), jnp.asarray(weights), STEPS, FIRST)[1])

    assert agreed(head).min() > 0.8
    assert agreed(train_eagle.starting_params(config, jax.random.key(0))).max() < 0.2
