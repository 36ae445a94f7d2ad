"""The script that trains EAGLE-3 heads: its training-time test is drafting itself, and what its losses weigh."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smcjax.model.eagle import EagleConfig, EagleParams, eagle_forward, eagle_logits, fuse
from smcjax.model.files.eagle_files import load_eagle, save_eagle
from smcjax.model.params import init_params
from smcjax.tasks import recall
from tests.helpers import tiny_config

pytest.importorskip("flax")
pytest.importorskip("optax")
import train_eagle

TARGET = tiny_config(7, num_layers=7, num_kv_heads=2, num_heads=4)
STEPS, LENGTH = 4, 9


@pytest.fixture(scope="module")
def head() -> tuple[EagleConfig, EagleParams]:
    config = train_eagle.head_config(TARGET)
    params = train_eagle.starting_params(config, jax.random.key(1))
    target = init_params(TARGET, jax.random.key(0))
    return config, params.joined(30 * target.embed, target.unembed)


def test_steps_are_those_of_drafting(head: tuple[EagleConfig, EagleParams]) -> None:
    """Step k's output at entry i is a head's that drafts from i − k on. Control: one step less is another number."""
    config, params = head
    tokens = jax.random.randint(jax.random.key(2), (2, LENGTH), 0, 7)
    features = fuse(params, jax.random.normal(jax.random.key(3), (2, LENGTH, 3, TARGET.hidden_size)))
    outputs = jax.jit(train_eagle.unrolled, static_argnums=(0, 4))(config, params, tokens, features, STEPS)
    forward = jax.jit(eagle_forward, static_argnums=0)
    for end in (STEPS - 1, 6, LENGTH - 1):
        for step in range(STEPS):
            known = np.array(features)
            for entry in range(end - step, end):  # whose output is the next one's feature
                known[:, entry + 1] = forward(config, params, tokens, jnp.asarray(known))[:, entry]
            want = forward(config, params, tokens, jnp.asarray(known))[:, end]
            np.testing.assert_allclose(outputs[step][:, end], want, atol=2e-5)
            if step:
                assert np.abs(outputs[step - 1][:, end] - want).max() > 1e-3


def test_which_tokens_of_documents_count() -> None:
    """Tokens of answers and the end of text count; outputs are needed from some steps before on."""
    args = train_eagle.parse(["--smoke", "--task", "recall", "--output", "/tmp/nowhere"])
    texts = train_eagle.documents(args, 512)
    words = recall.vocabulary()
    for row, counted in zip(texts.rows, texts.counted, strict=True):
        told = [words[token] for token, before in zip(row[1:], counted, strict=False) if before]
        assert told[0] == "\n"
        assert told[-1] == words[recall.EOS]
        assert "".join(told[1:-1]).startswith("1 ")
    first = texts.first(3)
    assert not texts.counted[:, : first + 1 + 3].any()
    assert texts.counted[:, first + 1 + 3].any()


def test_a_head_that_is_written_is_read_again(head: tuple[EagleConfig, EagleParams], tmp_path: Path) -> None:
    config, params = head
    own = dataclasses.replace(params, embed=None, lm_head=None)
    save_eagle(tmp_path, config, own)
    read, loaded = load_eagle(tmp_path, TARGET, "float32")
    assert read == config
    chex.assert_trees_all_equal(loaded, own)
    with pytest.raises(ValueError, match="token_ids is an array"):
        save_eagle(tmp_path, config, dataclasses.replace(own, token_ids=jnp.arange(7)))


def test_losses_are_means_by_weight(head: tuple[EagleConfig, EagleParams]) -> None:
    """Cross-entropy with the target's law where answers count, less by step; entries without a whole chain do not."""
    config, params = head
    rng = np.random.default_rng(4)
    tokens, weights = rng.integers(0, 7, (2, LENGTH)), (rng.random((2, LENGTH)) < 0.6).astype(np.float32)
    streams, wanted = rng.normal(size=(2, LENGTH, 3, 8)), rng.normal(size=(2, LENGTH, 7))
    given = [jnp.asarray(x, jnp.float32) for x in (streams, wanted)]
    loss, agreed = jax.jit(train_eagle.loss_of, static_argnums=(0, 6))(
        config, params, given[0], given[1][:, 1:], jnp.asarray(tokens, jnp.int32), jnp.asarray(weights), 2
    )
    features = fuse(params, given[0])[:, :-1]
    outputs = train_eagle.unrolled(config, params, jnp.asarray(tokens[:, 1:], jnp.int32), features, 2)
    law, want = np.exp(wanted) / np.exp(wanted).sum(-1, keepdims=True), 0.0
    for step, x in enumerate(outputs):
        logits = np.asarray(eagle_logits(config, params, x), np.float64)
        nll = -(law[:, 1:] * (logits - np.log(np.exp(logits).sum(-1, keepdims=True)))).sum(-1)
        counts = weights[:, 1 + step :] > 0
        want += 0.8**step * nll[:, step:][counts].mean()
        right = logits.argmax(-1) == wanted[:, 1:].argmax(-1)
        assert float(agreed[step]) == pytest.approx(right[:, step:][counts].mean())
    assert float(loss) == pytest.approx(want, rel=1e-4)
