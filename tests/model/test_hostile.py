"""Model directories that are wrong on purpose: one sentence each, in no time, and nothing of them is run."""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from smcjax.engine.load.loading import Models, load_models
from smcjax.errors import CheckpointError
from smcjax.model import load_checkpoint, save_checkpoint
from smcjax.model.files.checkpoint import load_config, open_tensors, read_stack
from smcjax.model.files.tensor_files import Source
from tests.checkpoints import write_model, write_shards
from tests.limits import at_most_more, within


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("hostile")
    write_model(directory, 272, 1)
    load(directory)  # what is imported on the first use is no part of what a file costs
    return directory


@pytest.fixture
def copy(model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model, tmp_path / "model"))


def load(directory: Path) -> Models:
    return load_models(directory, None, needs_draft=False, dtype="float32")


def refusal(directory: Path, seconds: float = 5) -> str:
    with within(seconds), at_most_more(1024), pytest.raises(CheckpointError) as caught:
        load(directory)
    message = str(caught.value)
    assert message.isprintable()
    assert len(message.replace(str(directory), "")) < 500
    return message


def rewrite(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


OPENED = [
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
]


@pytest.mark.parametrize("name", OPENED)
def test_files_of_another_kind(copy: Path, name: str) -> None:
    kind = ("FIFO", "device", "directory")[OPENED.index(name) % 3]
    path = copy / name
    path.unlink(missing_ok=True)
    if kind == "FIFO":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    message = refusal(copy)
    assert name in message
    assert f"cannot be read (it is a {kind}, not a regular file)" in message


@pytest.mark.parametrize("name", [name for name in OPENED if name != "model.safetensors"])
def test_files_that_are_too_large(copy: Path, name: str) -> None:
    with (copy / name).open("wb") as file:
        file.truncate(1 << 40)
    message = refusal(copy)
    assert name in message
    assert "1,099,511,627,776 bytes" in message


def test_templates_of_another_directory(copy: Path) -> None:
    (copy / "additional_chat_templates").mkdir()
    os.mkfifo(copy / "additional_chat_templates" / "rag.jinja")
    assert "rag.jinja cannot be read (it is a FIFO" in refusal(copy)


def test_shards_of_another_kind(copy: Path) -> None:
    shard = copy / "model-1.safetensors"
    names = load_file(copy / "model.safetensors").keys()
    (copy / "model.safetensors").unlink()
    os.mkfifo(shard)
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(names, shard.name)}))
    assert "model-1.safetensors cannot be read (it is a FIFO" in refusal(copy)


@pytest.mark.parametrize(
    "name", ["adapter_config.json", "hf_quant_config.json", "quantize_config.json", "quant_config.json"]
)
def test_files_that_say_that_the_weights_are_not_the_model(copy: Path, name: str) -> None:
    (copy / name).write_text("{}")
    assert f"holds {name}, which stands for" in refusal(copy)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("model.norm.weight", np.nan), ("lm_head.weight", np.inf), ("lm_head.weight", 1e39)),
        ("model.layers.0.self_attn.k_proj.weight", -np.inf),
    ],
)
def test_weights_that_are_no_numbers_are_refused_by_tensor_and_row(copy: Path, name: str, value: float) -> None:
    tensors = load_file(copy / "model.safetensors")
    changed = tensors[name].astype(np.float64)
    changed[3, ...] = np.where(np.arange(changed[3].size) == 2, value, changed[3]) if changed.ndim == 2 else value
    save_file({**tensors, name: changed}, copy / "model.safetensors")
    sign = "nan" if np.isnan(value) else "-inf" if value < 0 else "inf"
    for dtype in ("float32", "bfloat16"):
        for quantization in (None, "int8"):
            with np.errstate(over="ignore"), pytest.raises(CheckpointError) as caught:
                load_checkpoint(copy, dtype, quantization)
            assert f"tensor {name!r} in {copy / 'model.safetensors'} has {sign} in row 3 " in str(caught.value)


def test_the_largest_numbers_are_weights(copy: Path) -> None:
    tensors = load_file(copy / "model.safetensors")
    tensors["model.norm.weight"][:] = np.finfo(np.float32).max / 2
    tensors["model.norm.weight"][1] = -np.finfo(np.float32).tiny
    save_file(tensors, copy / "model.safetensors")
    for dtype in ("float32", "bfloat16"):
        load_checkpoint(copy, dtype)


def test_weights_beside_int8_ones_are_checked(copy: Path) -> None:
    """A matrix that a directory in int8 stores in float is rounded as it is read."""
    save_checkpoint(*load_checkpoint(copy, "float32"), copy, quantization="int8")
    tensors, name = load_file(copy / "model.safetensors"), "model.layers.0.self_attn.k_proj.weight"
    plain = tensors[name].astype(np.float32) * tensors.pop(f"{name}_scale")
    save_file({**tensors, name: plain}, copy / "model.safetensors")
    load_checkpoint(copy, "float32", "int8")
    plain[5, 1] = np.nan
    save_file({**tensors, name: plain}, copy / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"{name}.* has nan in row 5"):
        load_checkpoint(copy, "float32", "int8")


def test_a_head_that_differs_from_a_tied_embedding_is_said(copy: Path, caplog: pytest.LogCaptureFixture) -> None:
    load(copy)
    assert not caplog.records
    rewrite(copy / "config.json", tie_word_embeddings=True)
    assert not load(copy).target.tie_embeddings
    [record] = caplog.records
    assert "lm_head.weight differ and tie_word_embeddings is true" in record.getMessage()


def test_no_head_and_nothing_said_of_tying(copy: Path) -> None:
    """Llama's default is a head of its own, so that an absent one is missing, not tied."""
    tensors = load_file(copy / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, copy / "model.safetensors")
    raw = json.loads((copy / "config.json").read_text())
    for said in ({"tie_word_embeddings": False}, {}):
        del raw["tie_word_embeddings"]
        raw |= said
        (copy / "config.json").write_text(json.dumps(raw))
        assert "missing lm_head.weight" in refusal(copy)
        raw.setdefault("tie_word_embeddings", None)
    rewrite(copy / "config.json", tie_word_embeddings=True)
    assert load(copy).target.tie_embeddings


HUGE: list[dict[str, Any]] = [
    {"num_hidden_layers": 10**6},
    {"num_hidden_layers": 4096},
    {"num_hidden_layers": 10**18},
    {"hidden_size": 10**9},
    {"hidden_size": 1 << 18, "head_dim": 8},
    {"intermediate_size": 1 << 20},
    {"vocab_size": 10**12},
    {"vocab_size": 1 << 24},
    {"num_attention_heads": 10**9, "num_key_value_heads": 10**9},
    {"num_attention_heads": 4096, "num_key_value_heads": 4096, "head_dim": 1 << 14},
    {"head_dim": 10**9},
    {"max_position_embeddings": 10**12},
    {"eos_token_id": [257] * 10**5},
    {"rope_theta": int("9" * 400)},
]


@pytest.mark.parametrize("changes", HUGE, ids=[str(changes)[:50] for changes in HUGE])
def test_sizes_beyond_reason_are_refused_before_any_work(copy: Path, changes: dict[str, Any]) -> None:
    rewrite(copy / "config.json", **changes)
    message = refusal(copy, seconds=2)
    assert "config" in message
    if "rope_theta" not in changes:
        assert next(iter(changes)) in message


def test_a_config_of_more_layers_than_the_files_hold_makes_no_tree(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rewrite(copy / "config.json", num_hidden_layers=4000)
    monkeypatch.setattr("smcjax.engine.load.loading.weight_bytes", lambda config: pytest.fail("sizes a tree"))
    message = refusal(copy)
    assert "num_hidden_layers 4000" in message
    assert "use the config.json that belongs to them" in message


def test_a_dtype_that_chooses_nothing_is_no_reason_to_refuse(copy: Path) -> None:
    raw = json.loads((copy / "config.json").read_text())
    raw = {name: value for name, value in raw.items() if name not in ("dtype", "torch_dtype")}
    meant = dict.fromkeys(("auto", "float", "float32", "torch.float32", None), "float32")
    meant |= dict.fromkeys(("half", "torch.half", "float16"), "float16")
    meant |= dict.fromkeys(("float64", "double", "torch.float64"), "float64")
    for key, spelling in itertools.product(("dtype", "torch_dtype"), meant):
        (copy / "config.json").write_text(json.dumps({**raw, key: spelling}))
        assert load_config(copy).dtype == meant[spelling]
    assert load(copy).target.dtype == "float32"


def test_one_file_beside_an_index_says_which_is_read(copy: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_shards(copy)
    with caplog.at_level(logging.WARNING, "smcjax"):
        load(copy)
    [record] = caplog.records
    assert record.getMessage().startswith(f"{copy / 'model.safetensors'} is read and the files that")


def test_one_file_and_an_index_that_disagree_are_refused(copy: Path) -> None:
    tensors = write_shards(copy)
    save_file({**tensors, "lm_head.weight": tensors["lm_head.weight"][:-1]}, copy / "model.safetensors")
    assert "holds two models, model.safetensors and the files that" in refusal(copy)
    (copy / "model-2.safetensors").unlink()
    assert "model-2.safetensors is missing" in refusal(copy)


def test_an_index_of_the_one_file(copy: Path, caplog: pytest.LogCaptureFixture) -> None:
    names = load_file(copy / "model.safetensors").keys()
    weight_map = dict.fromkeys(names, "model.safetensors")
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    load(copy)
    assert not caplog.records


@pytest.mark.parametrize(
    "name", ["x" * 5000 + ".safetensors", "a\0.safetensors", "a/b.safetensors", "/etc/x.safetensors", "\ud800", 10**18]
)
def test_shard_names(copy: Path, name: Any) -> None:
    tensors = load_file(copy / "model.safetensors")
    (copy / "model.safetensors").unlink()
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(tensors, name)}))
    assert "is no safetensors file beside it" in refusal(copy)


def edited(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    """Changes a safetensors header; the data stay."""

    def edit(path: Path) -> None:
        data = path.read_bytes()
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + size])
        change(header)
        encoded = json.dumps(header).encode()
        path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + data[8 + size :])

    return edit


NORM = "model.norm.weight"
LIES: dict[str, Callable[[dict[str, Any]], None]] = {
    "beyond the file": lambda header: header[NORM].update(data_offsets=[0, 10**15]),
    "overlapping": lambda header: header[NORM].update(data_offsets=[0, 64]),
    "negative": lambda header: header[NORM].update(data_offsets=[-64, 0]),
    "reversed": lambda header: header[NORM].update(data_offsets=[64, 0]),
    "a shape that is not the bytes": lambda header: header[NORM].update(shape=[10**9, 10**9]),
    "a shape that overflows": lambda header: header[NORM].update(shape=[2**63, 2**63]),
    "a negative shape": lambda header: header[NORM].update(shape=[-16]),
    "another dtype": lambda header: header[NORM].update(dtype="F128"),
    "a long name": lambda header: header.update({"x" * 10_000: header.pop(NORM)}),
    "a name of two lines": lambda header: header.update({"a\nb": header.pop(NORM)}),
    "text for a tensor": lambda header: header.update({NORM: "x"}),
    "many tensors": lambda header: header.update(
        {f"x{i}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(10_000)}
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_headers_that_lie(copy: Path, lie: str) -> None:
    edited(LIES[lie])(copy / "model.safetensors")
    refusal(copy)


def widened(path: Path, name: str, shape: list[int]) -> None:
    """Gives a tensor of float32 another shape, and the file the size that this takes, in a hole."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header, end = json.loads(data[8 : 8 + size]), 0
    header.pop("__metadata__", None)
    header[name]["shape"] = shape
    for entry in header.values():
        begin, end = end, end + 4 * math.prod(entry["shape"])
        entry["data_offsets"] = [begin, end]
    encoded = json.dumps(header).encode()
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded)
    os.truncate(path, 8 + len(encoded) + end)


def test_a_file_of_a_terabyte_is_named(copy: Path) -> None:
    widened(copy / "model.safetensors", "model.embed_tokens.weight", [1 << 24, 1 << 14])
    message = refusal(copy)
    assert f"{copy / 'model.safetensors'} cannot be read (Cannot allocate memory" in message


def test_a_matrix_that_no_memory_holds_is_named(copy: Path) -> None:
    """The file's address space is to be had, and the matrix's is not."""
    rows = 1 << 29  # of 16 columns: 32 GiB in the file, more than any allocator keeps of what tests have freed
    widened(copy / "model.safetensors", "model.embed_tokens.weight", [rows, 16])
    source = Source(dict(open_tensors(copy)))
    shape = jax.ShapeDtypeStruct((rows, 16), np.dtype(np.float32))
    with at_most_more(1024), pytest.raises(CheckpointError) as caught:
        read_stack(source, [("model.embed_tokens.weight", rows)], shape)
    message = str(caught.value)
    assert f"tensor 'model.embed_tokens.weight' in {copy / 'model.safetensors'} cannot be read" in message


CODE = """
    import pathlib
    pathlib.Path({marker!r}).write_text("run")
    class Own:
        pass
    """


def test_no_code_of_a_directory_is_run_whatever_the_input_says(copy: Path, tmp_path: Path) -> None:
    """`y` on stdin is a line of the conversation, not a consent; where code is not needed the rest is used."""
    marker = tmp_path / "marker"
    (copy / "own.py").write_text(textwrap.dedent(CODE.format(marker=str(marker))))
    code = {"AutoTokenizer": ["own.Own", "own.Own"], "AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"}
    rewrite(copy / "tokenizer_config.json", auto_map=code, tokenizer_class="Own")
    rewrite(copy / "config.json", auto_map=code, model_type="llama")
    assert load(copy).tokenizer is not None
    (copy / "tokenizer.json").rename(copy / "vocab.json")
    options = ["--decoding", "autoregressive", "--max-model-len", "64", "--max-tokens", "2", "--temperature", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "smcjax", "chat", "--model", str(copy), *options],
        input="y\ny\n",
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert not marker.exists()
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "nothing of a model directory is run; add the tokenizer.json" in done.stderr
    assert "auto_map" in done.stderr


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
@pytest.mark.parametrize("code", [{"AutoTokenizer": "own.Own"}, ["own.Own", None]])
def test_code_is_refused_by_the_file_that_asks_for_it(copy: Path, name: str, code: Any) -> None:
    (copy / "tokenizer.json").rename(copy / "vocab.json")
    rewrite(copy / name, auto_map=code)
    assert f"{name} asks for a tokenizer by code of its own (auto_map is" in refusal(copy)


def test_a_length_without_bound_as_transformers_writes_it(copy: Path) -> None:
    rewrite(copy / "tokenizer_config.json", model_max_length=int(1e30))
    assert load(copy).tokenizer is not None


def test_code_of_a_model_alone_is_no_matter(copy: Path) -> None:
    rewrite(copy / "config.json", auto_map={"AutoModelForCausalLM": "own.Own"})
    load(copy)


@pytest.mark.parametrize("key", ["gguf_file", "fast_tokenizer_files"])
def test_settings_that_name_other_files(copy: Path, key: str) -> None:
    rewrite(copy / "tokenizer_config.json", **{key: "/etc/passwd"})
    assert f"asks for another file ({key} is '/etc/passwd')" in refusal(copy)
