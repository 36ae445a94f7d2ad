"""The pipeline that makes the bundled pair: tokenizer, rows, loss, and the whole of it in small."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smcjax.model import Params, load_checkpoint, logits
from smcjax.tasks.word_problems import completion, generate

pytest.importorskip("flax")
pytest.importorskip("optax")

import pair_data as data
import train_pair
from tokenizers import Tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return data.train_tokenizer(512, 500)


# -- tokenizer --------------------------------------------------------------------------------------------------------


def test_a_question_has_the_same_tokens_with_and_without_its_solution(tokenizer: Tokenizer) -> None:
    newline = tokenizer.encode("\n", add_special_tokens=False).ids
    assert len(newline) == 1
    for problem in generate(3, 200, "eval"):
        question = tokenizer.encode(problem.question).ids
        with_newline = tokenizer.encode(problem.question + "\n").ids
        whole = tokenizer.encode(problem.question + completion(problem)).ids
        assert with_newline == question + newline
        assert whole[: len(with_newline)] == with_newline
        assert question.count(data.BOS) == whole.count(data.BOS) == 1
        assert question[0] == data.BOS
        assert newline[0] not in question


@settings(deadline=None)
@given(text=st.text())
def test_any_text_survives_the_tokenizer(tokenizer: Tokenizer, text: str) -> None:
    text = text.encode("utf-8", "ignore").decode()
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_saved_tokenizer_loads_in_transformers(tokenizer: Tokenizer, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    data.save_tokenizer(tokenizer, tmp_path, 512)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    problem = generate(3, 1, "eval")[0]
    assert loaded(problem.question)["input_ids"] == tokenizer.encode(problem.question).ids
    assert (loaded.pad_token_id, loaded.bos_token_id, loaded.eos_token_id) == (data.PAD, data.BOS, data.EOS)
    chat = loaded.apply_chat_template([{"role": "user", "content": problem.question}], tokenize=False)
    assert chat == "<bos>" + problem.question + "\n"


# -- rows -------------------------------------------------------------------------------------------------------------


def test_rows_hold_whole_training_problems_and_do_not_depend_on_the_workers(tokenizer: Tokenizer) -> None:
    widths = data.bucket_widths(tokenizer, (0.5, 1.0))
    rows = data.make_rows(tokenizer, 0, 60, widths, workers=1, chunk=20)
    again = data.make_rows(tokenizer, 0, 60, widths, workers=2, chunk=20)
    for bucket, other, width in zip(rows, again, widths, strict=True):
        np.testing.assert_array_equal(bucket, other)
        assert bucket.shape[1] == width
    texts = [tokenizer.decode(row.tolist()) for bucket in rows for row in bucket]
    expected = [p for chunk in range(3) for p in generate(data.DATA_SEED + chunk, 20, "train")]
    assert set(texts) <= {problem.question + completion(problem) for problem in expected}
    assert len(texts) >= 58  # but for the few that are longer than any width


# -- loss and learning rate -------------------------------------------------------------------------------------------


def test_loss_is_the_decoders_own_and_counts_what_it_should(tokenizer: Tokenizer) -> None:
    config = train_pair.model_config("32x2", tokenizer.get_vocab_size())
    params = train_pair.initial_params(config, jax.random.key(0))
    ids = data.encode_problems(tokenizer, 5, 3)
    tokens = np.full((3, max(map(len, ids)) + 5), data.PAD, np.int32)
    for row, problem in zip(tokens, ids, strict=True):
        row[: len(problem)] = problem
    newline = tokenizer.token_to_id("Ċ")

    @jax.jit
    def found(params: Params, tokens: jax.Array) -> tuple[Any, jax.Array]:
        losses = train_pair.row_losses(config, params, tokens, newline, 0.25)
        return losses, jax.nn.log_softmax(logits(config, params, tokens))

    (weights, nll), expected = jax.tree.map(np.asarray, found(params, jnp.asarray(tokens)))
    for row, problem in enumerate(ids):
        start = problem.index(newline)
        for position in range(tokens.shape[1] - 1):
            target = tokens[row, position + 1]
            want = 0.0 if position + 1 >= len(problem) else 1.0 if position + 1 >= start else 0.25
            assert weights[row, position] == want
            if want:
                np.testing.assert_allclose(nll[row, position], -expected[row, position, target], rtol=1e-4, atol=1e-4)
        assert weights[row, -1] == 0


def test_gradient_of_the_lookup_is_the_scattered_one() -> None:
    table = jax.random.normal(jax.random.key(0), (11, 4))
    tokens = jax.random.randint(jax.random.key(1), (3, 7), 0, 11)
    weights = jax.random.normal(jax.random.key(2), (3, 7, 4))
    ours = jax.grad(lambda t: (train_pair.look_up(t, tokens) * weights).sum())(table)
    plain = jax.grad(lambda t: (t[tokens] * weights).sum())(table)
    np.testing.assert_allclose(ours, plain, rtol=1e-5, atol=1e-6)


def test_learning_rate_rises_then_falls_to_zero() -> None:
    rates = [float(train_pair.learning_rate(jnp.asarray(step), jnp.asarray(100.0), 1.0, 10)) for step in range(101)]
    assert rates[0] == pytest.approx(0.1)
    assert np.argmax(rates) in (9, 10)
    assert rates[100] == pytest.approx(0, abs=1e-6)
    assert np.all(np.diff(rates[10:]) <= 0)


# -- the whole --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_smoke_run_writes_two_loadable_directories_and_reports(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    standard = jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow")  # of optax and the script
    with train_pair.implementations("xla"), standard[0], standard[1]:
        train_pair.main(["--smoke", "--output", str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    reports = [json.loads(line) for line in lines if line.startswith("{")]
    assert [report["model"] for report in reports] == ["target", "draft"]
    losses = [float(line.split("solution loss")[1].split()[0]) for line in lines if "loss" in line]
    assert len(losses) == 2
    assert max(losses) < 0.96 * np.log(512), "training lowers the loss from that of a guess"
    vocabularies = set()
    for name, report in zip(("target", "draft"), reports, strict=True):
        assert [report[split]["n"] for split in ("eval", "train")] == [4, 4]
        files = {path.name for path in (tmp_path / name).iterdir()}
        assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= files
        config, _ = load_checkpoint(tmp_path / name, dtype="float32")
        assert config.eos_token_ids == (data.EOS,)
        tokenizer = Tokenizer.from_file(str(tmp_path / name / "tokenizer.json"))
        vocabularies.add(json.dumps(tokenizer.get_vocab(), sort_keys=True))
    assert len(vocabularies) == 1
