"""The script that makes the recall pair: what it weighs and counts, and the whole of it in small."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smcjax.model import ModelConfig, load_checkpoint
from smcjax.model.attention import FULL
from smcjax.sparse.nsa import NSA
from smcjax.tasks import recall

pytest.importorskip("flax")
pytest.importorskip("optax")
import recall_data as data
import recall_measure
import train_recall
from sparse_training import attend_by


def test_losses_are_means_by_weight() -> None:
    """The loss of all, from the logits of a dense forward: answers weigh 1 and the rest what is asked for."""
    args = train_recall.parse(["dense", "--smoke"])
    config = train_recall.model_config(train_recall.RECIPES["dense"], smoke=True)
    params = train_recall.starting_params(config, jax.random.key(3))
    rows = jnp.asarray(data.make_rows(1, 2, 256, "train", 1), jnp.int32)
    stage = train_recall.Stage(256, 0.0)
    found = jax.jit(lambda params: train_recall.losses(config, params, rows, stage, args))(params)
    logits = jax.jit(lambda params: recall_measure.logits_of(config, params, rows, attend_by("xla", config)))(params)
    nll = -jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), rows[:, 1:, None], axis=-1)[..., 0]
    answers = np.asarray(recall_measure.in_answers(rows))[:, :-1]
    weights = np.where(answers, 1.0, args.other_weight)
    assert float(found.all) == pytest.approx(float((weights * nll).sum() / weights.sum()), rel=1e-5)
    assert float(found.answers) == pytest.approx(float(nll[answers].mean()), rel=1e-5)
    assert float(found.routing) == 0.0


def test_a_sparse_model_starts_as_its_dense_twin() -> None:
    """Where all blocks are selected, gates that leave it to the selection give nearly what dense attention gives."""
    config = train_recall.model_config(train_recall.RECIPES["small"], smoke=True)
    kind = config.layer(0).attention
    assert isinstance(kind, NSA)
    every = dataclasses.replace(kind, num_blocks=16)
    config = config.with_layers([dataclasses.replace(config.layer(0), attention=every)] * config.num_layers)
    params = train_recall.starting_params(config, jax.random.key(0))
    rows = jnp.asarray(data.make_rows(1, 1, 256, "train", 1), jnp.int32)
    twin = config.with_layers([dataclasses.replace(config.layer(0), attention=FULL)] * config.num_layers)
    few = config.with_layers([dataclasses.replace(config.layer(0), attention=kind)] * config.num_layers)

    def found(config: ModelConfig) -> jax.Array:
        return jax.jit(lambda: recall_measure.logits_of(config, params, rows, attend_by("xla", config)))()

    wanted, got, control = map(found, (twin, config, few))
    near, far = (float(jnp.abs(x - wanted).mean() / jnp.abs(wanted).mean()) for x in (got, control))
    assert near < 0.15, "the other gates let a twentieth of two branches through"
    assert far > 2 * near, "control"


@pytest.mark.slow
def test_smoke_run_writes_a_sparse_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with jax.numpy_dtype_promotion("standard"):  # optax raises floats to integers
        train_recall.main(["draft", "small", "--smoke", "--output", str(tmp_path)])
    reports = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert [(report["model"], report["length"]) for report in reports] == [("draft", 512), ("small", 512)]
    assert [report["lines"]["n"] for report in reports] == [16, 16]
    for name, kind in (("draft", type(FULL)), ("small", NSA)):
        config, params = load_checkpoint(tmp_path / name, dtype="float32")
        assert isinstance(config.layer(0).attention, kind)
        assert config.eos_token_ids == (recall.EOS,)
        assert {path.name for path in (tmp_path / name).iterdir()} >= {"tokenizer.json", "tokenizer_config.json"}
    sparse = train_recall.started(config, train_recall.starting_params(config, jax.random.key(0)), tmp_path / "draft")
    _, draft = load_checkpoint(tmp_path / "draft", dtype="float32")
    np.testing.assert_array_equal(sparse.layers[0].qkv, draft.layers[0].qkv)
    assert sparse.layers[0].attention is not None
    assert params.layers[0].attention["phi_k"].shape == sparse.layers[0].attention["phi_k"].shape
