"""EAGLE-3 heads: a plain torch forward's numbers, the public layout, and refusals of what does not go together."""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from smcjax.errors import CheckpointError
from smcjax.model.decoder import AuxHiddenStates, forward, hidden_states
from smcjax.model.eagle import EagleConfig, EagleParams, eagle_forward, eagle_logits, fuse
from smcjax.model.files.checkpoint import load_config
from smcjax.model.files.eagle_files import eagle_config, is_eagle, load_eagle
from smcjax.pallas import rms_norm
from tests.helpers import noisy_params, tiny_config

DATA = Path(__file__).parents[1] / "data"
HEAD = DATA / "eagle3"
TARGET = load_config(DATA / "hf_golden" / "llama31_rope_tied")


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    with np.load(HEAD / "golden.npz") as stored:
        return {name: jnp.asarray(array) for name, array in stored.items()}


@pytest.fixture(scope="module")
def head(golden: dict[str, Any]) -> tuple[EagleConfig, EagleParams]:
    config, params = load_eagle(HEAD, TARGET, "float32")
    return config, params.joined(golden["embed"].astype(jnp.float32), None)


@functools.partial(jax.jit, static_argnums=0)
def _of_tokens(config: EagleConfig, params: EagleParams, tokens: jax.Array, features: jax.Array) -> Any:
    x = eagle_forward(config, params, tokens[None], features[None])
    return x[0], eagle_logits(config, params, x)[0]


def of_tokens(
    head: tuple[EagleConfig, EagleParams], tokens: jax.Array, features: jax.Array
) -> tuple[np.ndarray, np.ndarray]:
    """Outputs and the draft vocabulary's logits behind each entry."""
    x, logits = _of_tokens(*head, tokens, features)
    return np.asarray(x), np.asarray(logits)


def test_outputs_and_logits_are_torchs(head: tuple[EagleConfig, EagleParams], golden: dict[str, Any]) -> None:
    """Positions are one on and the tokens' ids the target's; every other token has no chance. Control: a token on."""
    features = fuse(head[1], golden["streams"][None])[0]
    x, logits = of_tokens(head, golden["tokens"], features)
    ids = np.asarray(head[1].token_ids)
    np.testing.assert_allclose(x, golden["hidden"], atol=2e-5)
    np.testing.assert_allclose(logits[:, ids], golden["logits"], atol=5e-5)
    assert np.isneginf(np.delete(logits, ids, axis=1)).all()
    late, _ = of_tokens(head, jnp.roll(golden["tokens"], 1), features)
    assert np.abs(late - golden["hidden"]).max() > 0.1


def test_its_own_output_stands_for_the_next_feature(
    head: tuple[EagleConfig, EagleParams], golden: dict[str, Any]
) -> None:
    """Four greedy drafts, token by token. Control: the output normed, or the last true feature again."""

    def chain(feature_of: Any) -> tuple[list[int], np.ndarray]:
        tokens, features = golden["tokens"], fuse(head[1], golden["streams"][None])[0]
        behind = []
        for _ in golden["chain"]:
            x, logits = of_tokens(head, tokens, features)
            behind.append(logits[-1])
            tokens = jnp.append(tokens, logits[-1].argmax().astype(np.int32))
            features = jnp.concatenate([features, feature_of(x, features)[-1:]])
        return tokens[len(golden["tokens"]) :].tolist(), np.stack(behind)[:, np.asarray(head[1].token_ids)]

    tokens, logits = chain(lambda x, _: x)
    assert tokens == golden["chain"].tolist()
    np.testing.assert_allclose(logits, golden["chain_logits"], atol=1e-4)
    for wrong in (lambda x, _: rms_norm(jnp.asarray(x), head[1].final_norm, 1e-5), lambda _, features: features):
        assert np.abs(chain(wrong)[1] - golden["chain_logits"]).max() > 0.1


def test_streams_are_those_that_enter_the_layers() -> None:
    """The stream in front of layer k is the last one of the model that ends there; behind the last its norm follows."""
    config = tiny_config(7, num_layers=3)
    params, tokens = noisy_params(config), jnp.asarray([[1, 2, 3, 4, 5]])
    positions = jnp.arange(5)[None]

    def attend(index: int, projection: Any) -> jax.Array:
        return config.layer(index).attention.dense(projection, positions)

    aux = AuxHiddenStates((0, 1, 2, 3))
    normed = hidden_states(config, params, tokens, positions, attend, aux)
    assert aux.streams.shape == (1, 5, 4, config.hidden_size)
    np.testing.assert_array_equal(aux.streams[:, :, 0], params.embed[tokens])
    for count in (1, 2, 3):
        shorter = dataclasses.replace(config, num_layers=count)
        want = forward(shorter, dataclasses.replace(params, layers=params.layers[:count]), tokens)
        last = rms_norm(aux.streams[:, :, count], params.final_norm, config.rms_norm_eps)
        np.testing.assert_allclose(last, want, atol=1e-5)
    np.testing.assert_allclose(last, normed, atol=1e-6)
    assert np.abs(aux.streams[:, :, 1] - aux.streams[:, :, 2]).max() > 1e-2, "control"


def parsed(**changes: Any) -> dict[str, Any]:
    values = {**json.loads((HEAD / "config.json").read_text()), **changes}
    return {key: value for key, value in values.items() if value != "absent"}


IDS = "eagle_aux_hidden_state_layer_ids"


def test_layers_are_named_by_inputs_by_outputs_or_not_at_all() -> None:
    deep = dataclasses.replace(TARGET, num_layers=32)
    assert eagle_config(parsed(**{IDS: [3, 1, 2]}), TARGET).aux_layers == (1, 2, 3)
    assert eagle_config(parsed(**{IDS: "absent", "eagle_config": {IDS: [1, 15, 28]}}), deep).aux_layers == (2, 16, 29)
    assert eagle_config(parsed(**{IDS: "absent"}), deep).aux_layers == (2, 16, 29)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 32}, "hidden_size is 32 .* the target's hidden size is 64; use the head made for it"),
        ({"target_hidden_size": 128}, "target_hidden_size is 128 .* the target's hidden size is 64"),
        ({"vocab_size": 400}, "vocab_size is 400 .* the target has 384 token ids"),
        ({"draft_vocab_size": 385}, "draft_vocab_size is 385 .* the target has 384"),
        ({"num_hidden_layers": 2}, "num_hidden_layers is 2 .* one layer"),
        ({"attention_bias": True}, "attention_bias is True .* without biases"),
        ({"mlp_bias": True}, "mlp_bias is True .* without biases"),
        ({"norm_before_residual": True}, "norm_before_residual is True .* does not know that key"),
        ({IDS: [0, 1]}, r"ids is \[0, 1\] .* three different layers of the target's 3"),
        ({IDS: [0, 1, 4]}, "three different layers"),
        ({IDS: [0, 1, True]}, "three JSON integers"),
        ({IDS: "absent"}, "is None in the head's config, .* L = 3 layers; name three"),
        ({"eagle_config": {IDS: [0, 1, 2]}}, "names layers as well"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "eagle_config.use_aux_hidden_state is False"),
        ({"eagle_config": {"fc_norm": True}}, "eagle_config.fc_norm is True"),
    ],
    ids=lambda value: None if isinstance(value, str) else "-".join(value),
)
def test_configs_that_do_not_go_with_the_target_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        eagle_config(parsed(**changes), TARGET)


def written(directory: Path, config: dict[str, Any] | None = None, **tensors: Any) -> Path:
    """A copy of the head with other keys and tensors; None takes a tensor away."""
    shutil.copytree(HEAD, directory, dirs_exist_ok=True)
    (directory / "config.json").write_text(json.dumps(parsed(**(config or {}))))
    stored = {**load_file(HEAD / "model.safetensors"), **tensors}
    save_file({name: array for name, array in stored.items() if array is not None}, directory / "model.safetensors")
    return directory


STORED = load_file(HEAD / "model.safetensors")
D2T, T2D = STORED["d2t"], STORED["t2d"]


def put(array: np.ndarray, index: int, value: Any) -> np.ndarray:
    changed = array.copy()
    changed[index] = value
    return changed


@pytest.mark.parametrize(
    ("config", "tensors", "message"),
    [
        ({}, {"d2t": None}, "has no d2t, which says what the draft's 96 token ids are"),
        ({}, {"d2t": put(D2T, 95, 300)}, "makes the draft's token 95 the target's 395, which has 384"),
        ({}, {"d2t": put(D2T, 1, D2T[0] - 1)}, "d2t in .* names 1 of the target's tokens twice"),
        ({}, {"d2t": D2T[:-1]}, r"d2t in .* is \[95\] instead of \[96\]"),
        ({}, {"d2t": D2T.astype(np.float32)}, "'d2t' .* has dtype F32, but only I64, I32"),
        ({}, {"t2d": ~T2D}, "d2t and t2d in .* name different tokens"),
        ({}, {"lm_head.weight": None}, "has no lm_head.weight, which a head of 96 of the target's 384"),
        ({}, {"fc.weight": None}, "missing fc.weight"),
        ({}, {"fc.bias": np.zeros(64, np.float32)}, "unexpected fc.bias"),
        ({"hidden_size": 32, "target_hidden_size": 64}, {}, "has no embed_tokens.weight, and the target's has 64"),
        ({"intermediate_size": 56}, {}, "of another shape midlayer.mlp"),
    ],
    ids=[
        *("no d2t", "d2t beyond the target", "d2t names one twice", "short d2t", "d2t in floats", "another t2d"),
        *("no lm_head", "no fc", "a bias", "another width", "another MLP"),
    ],
)
def test_files_that_do_not_add_up_are_refused(
    config: dict[str, Any], tensors: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=message):
        load_eagle(written(tmp_path, config, **tensors), TARGET, "float32")


def test_a_head_may_have_the_whole_vocabulary(tmp_path: Path) -> None:
    """By a matrix of its own or by the target's; and its own embedding goes before the target's."""
    no_map: dict[str, Any] = {"draft_vocab_size": 384}
    full = np.ones((384, 64), np.float32)
    path = written(tmp_path, no_map, **{"lm_head.weight": full, "embed_tokens.weight": 2 * full, "d2t": None})
    config, params = load_eagle(path, TARGET, "float32")
    assert not config.prunes
    assert params.token_ids is None
    joined = params.joined(jnp.zeros((1, 1)), jnp.zeros((1, 1)))
    assert (float(joined.embed[0, 0]), float(joined.lm_head[0, 0])) == (2.0, 1.0)
    identity = {"lm_head.weight": None, "d2t": np.zeros(384, np.int64), "t2d": np.ones(384, bool)}
    params = load_eagle(written(tmp_path, no_map, **identity), TARGET, "float32")[1]
    assert params.token_ids is None
    assert params.joined(jnp.zeros((1, 1)), jnp.ones((1, 1))).lm_head.shape == (1, 1)


def test_what_a_head_does_not_say_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The layers by default, and whose embedding; what is said is not said again."""
    deep = dataclasses.replace(TARGET, num_layers=32)
    with caplog.at_level("INFO", "smcjax"):
        load_eagle(written(tmp_path / "a", {IDS: "absent"}), deep, "float32")
        lines = [record.getMessage() for record in caplog.records]
        assert lines == [
            f"{tmp_path / 'a'} has no {IDS}: the head reads the inputs of the layers (2, 16, 29).",
            f"{tmp_path / 'a'} has no embed_tokens.weight: the head uses the target's.",
        ]
        caplog.clear()
        own = {"embed_tokens.weight": np.ones((384, 64), np.float32)}
        load_eagle(written(tmp_path / "b", {IDS: [1, 2, 3]}, **own), TARGET, "float32")
        assert not caplog.records


def test_a_heads_weights_are_numbers_and_its_own(tmp_path: Path) -> None:
    bad = put(STORED["fc.weight"], 7, np.nan)
    with pytest.raises(CheckpointError, match=r"'fc\.weight' in .* has nan in row 7"):
        load_eagle(written(tmp_path, **{"fc.weight": bad}), TARGET, "float32")
    (written(tmp_path) / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"holds adapter_config\.json"):
        load_eagle(tmp_path, TARGET, "float32")


def test_heads_are_known_by_their_architecture() -> None:
    assert is_eagle(HEAD)
    assert not is_eagle(DATA / "hf_golden" / "llama31_rope_tied")
    assert not is_eagle(DATA / "nothing")
