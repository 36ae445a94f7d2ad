"""GGUF files of tiny models against the same weights in safetensors, and what is refused of them."""

from __future__ import annotations

import dataclasses
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import chex
import gguf
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from hf_oracle import make_config, oracle_logits, random_weights, write_directory
from hypothesis import given
from hypothesis import strategies as st

from smcjax.errors import CheckpointError
from smcjax.gguf_file import GGUFFile
from smcjax.model import LayerSpec, RopeScaling, load_checkpoint, logits
from smcjax.model.attention import FULL, SlidingWindow
from smcjax.model.files.checkpoint import load_config
from smcjax.model.quantize import quantize_params
from smcjax.tokenizer.tokenizer import Tokenizer
from tests.checkpoints import refusal
from tests.gguf_files import Writing, add_tensor, as_stored, write_gguf, write_vocabulary

KINDS = (Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1)


def config_of(family: str, **changes: Any) -> dict[str, Any]:
    """Rows of all matrices are made of whole blocks of 32."""
    return make_config(family, intermediate_size=64, **changes)


def file_of(tmp_path: Path, *more: Writing, family: str = "llama", **changes: Any) -> Path:
    """A file of random weights, to which `more` may add."""
    raw = config_of(family, **changes)
    return write_gguf(tmp_path / "m.gguf", raw, random_weights(raw), Kind.F32, *more)


def assert_loads_alike(path: Path, directory: Path) -> None:
    """Configuration and every weight, bit by bit."""
    config, params = load_checkpoint(path, "float32")
    expected_config, expected = load_checkpoint(directory, "float32")
    eps = np.float32(expected_config.rms_norm_eps)  # as GGUF keeps it
    assert config == dataclasses.replace(expected_config, rms_norm_eps=float(eps))
    assert config == dataclasses.replace(load_config(path), dtype="float32")
    chex.assert_trees_all_equal(params, expected)


@pytest.mark.parametrize(
    ("family", "tied"), [("llama", True), ("mistral", False), ("qwen2", False), ("qwen3", True), ("olmo2", False)]
)
def test_every_architecture_loads_as_from_safetensors(family: str, tied: bool, tmp_path: Path) -> None:
    changes = {"sliding_window": None} if family == "mistral" else {}
    raw = config_of(family, tie_word_embeddings=tied, **changes)
    weights = random_weights(raw)
    write_directory(tmp_path / "hf", raw, weights)
    assert_loads_alike(write_gguf(tmp_path / "model.gguf", raw, weights), tmp_path / "hf")
    same = write_gguf(tmp_path / "named.gguf", raw, weights, architecture=family)  # "mistral" for Mistral too
    assert_loads_alike(same, tmp_path / "hf")


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_every_type_is_dequantised_and_unpermuted(kind: Kind, tmp_path: Path) -> None:
    raw = config_of("llama", attention_bias=True, mlp_bias=True)
    weights = random_weights(raw)
    write_directory(tmp_path / "hf", raw, {name: as_stored(values, kind) for name, values in weights.items()})
    assert_loads_alike(write_gguf(tmp_path / "model.gguf", raw, weights, kind), tmp_path / "hf")


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_1, Kind.BF16], ids=lambda kind: kind.name)
def test_eight_bits_and_what_they_cost(kind: Kind, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Rows of dequantised numbers are rounded, and of narrow types one line says how far; float types say nothing."""
    raw = config_of("llama")
    weights = random_weights(raw)
    path = write_gguf(tmp_path / "model.gguf", raw, weights, kind)
    params = load_checkpoint(path, "float32", quantization="int8")[1]
    _, plain = load_checkpoint(path, "float32")
    chex.assert_trees_all_equal(params, quantize_params(plain), strict=True)
    lines = [record.getMessage() for record in caplog.records if "rounded to eight bits" in record.getMessage()]
    if kind == Kind.BF16:
        assert not lines
        return
    errors, squares = 0.0, 0.0
    for name, value in weights.items():
        if value.ndim == 2 and "embed" not in name:
            wide = as_stored(value, kind).astype(np.float64)
            scale = np.abs(wide).max(axis=1, keepdims=True) / 127
            errors += ((np.round(wide / scale) * scale - wide) ** 2).sum()
            squares += (wide**2).sum()
    cost = f"{100 * math.sqrt(errors / squares):.2f}%"
    assert lines == [
        f"{path}: matrices in {kind.name} are rounded to eight bits (int8, a scale a row); the error's root mean "
        f"square is {cost} of the weights'."
    ]


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_logits_are_those_of_the_definition(family: str, tmp_path: Path) -> None:
    raw, tokens = config_of(family), [5, 17, 3, 88, 2, 41]
    weights = random_weights(raw)
    config, params = load_checkpoint(write_gguf(tmp_path / "model.gguf", raw, weights), "float32")
    found = logits(config, params, jnp.array([tokens]))
    np.testing.assert_allclose(found[0], oracle_logits(raw, weights, tokens), rtol=2e-4, atol=2e-4)


def llama3_factors(factor: float, theta: float, width: int) -> np.ndarray:
    """Returns the factors of Llama 3's scaled RoPE [width / 2], f32, by the formula of llama.cpp's converter."""
    factors = []
    for frequency in theta ** -(np.arange(0, width, 2) / width):
        wavelength = 2 * math.pi / frequency
        smooth = (8192 / wavelength - 1) / (4 - 1)
        factors.append(
            1.0 if wavelength < 8192 / 4 else factor if wavelength > 8192 else 1 / ((1 - smooth) / factor + smooth)
        )
    return np.array(factors, np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_comes_back_from_its_factors(factor: float, tmp_path: Path) -> None:
    def of(numbers: np.ndarray) -> Path:
        def add(writer: gguf.GGUFWriter) -> None:
            writer.add_tensor("rope_freqs.weight", numbers)

        return file_of(tmp_path, add, head_dim=64, rope_theta=500000.0)

    factors = llama3_factors(factor, 500000.0, 64)
    assert load_checkpoint(of(factors))[0].layer(0).rope.scaling == RopeScaling(factor, 1.0, 4.0, 8192)
    assert load_config(of(np.ones(32, np.float32))).layer(0).rope.scaling is None
    for wrong in (factors * 1.01, factors[:-1], np.linspace(1, factor, 32, dtype=np.float32), np.zeros(32, np.float32)):
        refusal(of(wrong), "rope_freqs.weight")


def test_a_window_is_of_every_layer(tmp_path: Path) -> None:
    raw = config_of("mistral", sliding_window=16)
    weights = random_weights(raw)

    def of(window: int) -> Callable[[gguf.GGUFWriter], None]:
        return lambda writer: writer.add_sliding_window(window)

    write_directory(tmp_path / "hf", raw, weights)
    assert_loads_alike(write_gguf(tmp_path / "a.gguf", raw, weights, Kind.F32, of(16)), tmp_path / "hf")
    unfelt = load_config(write_gguf(tmp_path / "b.gguf", raw, weights, Kind.F32, of(256)))
    assert unfelt.layers == (LayerSpec(),)
    for family in ("qwen2", "olmo2"):  # llama.cpp does not say where a window holds; OLMo 3 has OLMo 2's architecture
        refusal(file_of(tmp_path, of(16), family=family), f"{family}.attention.sliding_window is 16")


def test_gemma_3_loads_as_from_safetensors(tmp_path: Path) -> None:
    """The converter has added 1 to the norms; pattern and local rope are the architecture's own."""
    raw = config_of("gemma3_text", num_hidden_layers=7, rope_scaling={"rope_type": "linear", "factor": 8.0})
    del raw["layer_types"]
    weights = random_weights(raw)

    def more(writer: gguf.GGUFWriter) -> None:
        writer.add_sliding_window(raw["sliding_window"])
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(8.0)

    write_directory(tmp_path / "hf", raw, weights)
    path = write_gguf(tmp_path / "model.gguf", raw, weights, Kind.F32, more)
    assert_loads_alike(path, tmp_path / "hf")
    config = load_config(path)
    assert [config.layer(index).attention for index in range(7)] == [SlidingWindow(8)] * 5 + [FULL, SlidingWindow(8)]
    largest = load_config(file_of(tmp_path, more, family="gemma3_text", num_hidden_layers=62))  # the 27B model
    assert largest.layer(0).attention == SlidingWindow(8, (32 // 4) ** -0.5), "whose queries have a scale of their own"
    refusal(file_of(tmp_path, family="gemma3_text"), "gemma3.attention.sliding_window is None")


def test_stop_ids_are_eos_and_end_of_turn(tmp_path: Path) -> None:
    config = load_config(file_of(tmp_path, lambda writer: writer.add_eot_token_id(7), family="qwen2", eos_token_id=4))
    assert config.eos_token_ids == (4, 7)
    assert config.bos_token_id == 1


ENDS = ["<|eot_id|>", "<|im_end|>", "<end_of_turn>", "<|end|>", "<|eom_id|>", "<|endoftext|>", "<|end_of_text|>"]


def names_of_tokens(names: dict[int, tuple[str, int]]) -> Callable[[gguf.GGUFWriter], None]:
    """A vocabulary in which these ids have a text and a type; all others are normal tokens."""

    def add(writer: gguf.GGUFWriter) -> None:
        texts = {index: (f"t{index}", 1) for index in range(96)} | names
        writer.add_token_list([texts[index][0] for index in range(96)])
        writer.add_token_types([texts[index][1] for index in range(96)])

    return add


@pytest.mark.parametrize("name", ENDS)
def test_a_token_named_as_the_end_of_a_turn_ends_one(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """llama.cpp ends a turn there whatever the keys say; of a normal token the text is but a text."""

    def read(**kinds: int) -> tuple[tuple[int, ...], list[str]]:
        names = {9: (name, kinds["kind"]), 4: ("<|the_end|>", 3), 11: ("<|im_start|>", 3)}
        path = file_of(tmp_path, names_of_tokens(names), eos_token_id=4)
        caplog.clear()
        with caplog.at_level("INFO", "smcjax"):
            config = load_checkpoint(path)[0]
        assert load_config(path).eos_token_ids == config.eos_token_ids
        return config.eos_token_ids, [record.getMessage() for record in caplog.records]

    for kind in (3, 4):
        ids, [line] = read(kind=kind)
        assert ids == (4, 9)
        assert f"m.gguf: {name!r} (9) ends an answer by its name, as in llama.cpp" in line
    assert read(kind=1) == ((4,), [])


def test_what_the_keys_name_is_not_said_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    names = names_of_tokens({4: ("<|im_end|>", 3), 7: ("<|eot_id|>", 3)})
    path = file_of(tmp_path, names, lambda writer: writer.add_eot_token_id(7), eos_token_id=4)
    with caplog.at_level("INFO", "smcjax"):
        assert load_checkpoint(path)[0].eos_token_ids == (4, 7)
    assert not caplog.records


def test_another_type_of_file_is_refused_by_name(tmp_path: Path) -> None:
    """An adapter, or a projector of images, has the architecture of the model that it is for."""
    refusal(file_of(tmp_path, lambda writer: writer.add_type("adapter")), "general.type is 'adapter'")


WRONG_METADATA: list[tuple[str, str, Any]] = [
    ("add_uint32", "llama.expert_count", 8),
    ("add_uint32", "llama.attention.sliding_window", 0),
    ("add_uint32", "llama.attention.value_length", 16),
    ("add_uint32", "llama.rope.dimension_count", 4),
    ("add_string", "llama.rope.scaling.type", "yarn"),
    ("add_float32", "llama.rope.scaling.factor", 4.0),
    ("add_float32", "llama.rope.scale_linear", 2.0),
    ("add_bool", "llama.attention.causal", False),
    ("add_float32", "llama.logit_scale", 16.0),
    ("add_uint32", "tokenizer.ggml.eot_token_id", 96),
    ("add_string", "tokenizer.ggml.eom_token_id", "x"),
]


@pytest.mark.parametrize(("method", "key", "value"), WRONG_METADATA, ids=[key for _, key, _ in WRONG_METADATA])
def test_what_the_decoder_does_not_compute_is_refused_by_key(method: str, key: str, value: Any, tmp_path: Path) -> None:
    refusal(file_of(tmp_path, lambda writer: getattr(writer, method)(key, value)), f"{key} is {value!r}")


@pytest.mark.parametrize(
    ("name", "value", "key"),
    [
        ("num_key_value_heads", 3, "head_count_kv"),
        ("num_hidden_layers", 10**9, "block_count"),
        ("num_hidden_layers", 0, "block_count"),
        ("max_position_embeddings", 0, "context_length"),
        ("rms_norm_eps", float("nan"), "layer_norm_rms_epsilon"),
        ("rope_theta", float("inf"), "rope.freq_base"),
        ("num_attention_heads", [4, 8], "head_count"),
    ],
)
def test_values_that_cannot_be(name: str, value: Any, key: str, tmp_path: Path) -> None:
    raw = config_of("llama")
    refusal(write_gguf(tmp_path / "m.gguf", {**raw, name: value}, random_weights(raw), architecture="qwen2"), key)


def test_other_architectures_are_refused(tmp_path: Path) -> None:
    raw = config_of("llama")
    path = write_gguf(tmp_path / "m.gguf", raw, random_weights(raw), architecture="phi3")
    refusal(path, "general.architecture is 'phi3', but only llama")


def test_every_tensor_is_accounted_for(tmp_path: Path) -> None:
    raw = config_of("llama")
    weights = random_weights(raw)
    k, down = "model.layers.1.self_attn.k_proj.weight", "model.layers.0.mlp.down_proj.weight"
    path = tmp_path / "m.gguf"
    write_gguf(path, raw, {name: values for name, values in weights.items() if name != k})
    assert "missing blk.1.attn_k.weight" in refusal(path)
    write_gguf(path, raw, {**weights, down: weights[down][:, :32]})
    assert "blk.0.ffn_down.weight is [32, 32] instead of [32, 64]" in refusal(path)
    extra = np.ones((32, 32), np.float32)
    write_gguf(path, raw, weights, Kind.F32, lambda writer: add_tensor(writer, "blk.0.ssm_in.weight", extra, Kind.F32))
    assert "unexpected blk.0.ssm_in.weight" in refusal(path)
    write_gguf(path, raw, {name: values for name, values in weights.items() if "embed" not in name})
    assert "no matrix token_embd.weight" in refusal(path)


def test_a_type_that_gguf_cannot_dequantise_is_refused_by_name(tmp_path: Path) -> None:
    path = file_of(tmp_path, lambda writer: writer.add_tensor("blk.0.extra.weight", np.ones((2, 32), np.int32)))
    refusal(path, "tensor 'blk.0.extra.weight'", "type I32")
    content = bytearray(path.read_bytes())
    at = content.index(b"output_norm.weight") + len(b"output_norm.weight") + 4 + 8
    content[at : at + 4] = (200).to_bytes(4, "little")
    path.write_bytes(content)
    assert "type 200" in refusal(path)


HEADER = 4200  # bytes of `small` before its tensors, about


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A whole file, vocabulary and all."""
    raw = config_of("llama", num_hidden_layers=1, vocab_size=96)

    def vocabulary(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list([f"t{i}" for i in range(96)])
        writer.add_token_scores([-float(i) for i in range(96)])
        writer.add_token_types([1] * 96)
        writer.add_array("general.languages", ["en"])

    path = tmp_path_factory.mktemp("small") / "small.gguf"
    return write_gguf(path, raw, random_weights(raw), Kind.Q8_0, vocabulary).read_bytes()


def test_truncated_anywhere(small: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    for length in (*range(4, 400), *range(400, len(small), 997), len(small) - 1):
        path.write_bytes(small[:length])
        assert "download" in refusal(path)
    for length in range(4):
        path.write_bytes(small[:length])
        assert "not a GGUF" in refusal(path)


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("damaged") / "m.gguf"


def said(read: Callable[[Path], Any], path: Path) -> str:
    """The sentence that refuses a file, "" where it is read."""
    try:
        read(path)
    except CheckpointError as error:
        return str(error)
    return ""


@given(st.lists(st.tuples(st.integers(4, HEADER), st.integers(0, 255)), min_size=1, max_size=3))
def test_a_damaged_header_gives_one_sentence_or_none(
    small: bytes, damaged: Path, changes: list[tuple[int, int]]
) -> None:
    content = bytearray(small)
    for at, value in changes:
        content[at] = value
    damaged.write_bytes(content)
    for read in (load_config, load_checkpoint, Tokenizer.load):
        assert "\n" not in said(read, damaged)


@pytest.mark.parametrize("at", [8, 16])
def test_counts_that_no_file_has(small: bytes, at: int, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    for count in (1 << 20, 1 << 40, (1 << 64) - 1):
        path.write_bytes(small[:at] + count.to_bytes(8, "little") + small[at + 8 :])
        assert "not a valid GGUF file" in refusal(path)


def test_versions_and_kinds_of_files(small: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(small[:4] + (1).to_bytes(4, "little") + small[8:])
    assert "version 1" in refusal(path)
    path.write_bytes(small[:4] + (3).to_bytes(4, "big") + small[8:])
    assert "little-endian" in refusal(path)
    (tmp_path / "model.safetensors").write_bytes(b"\x00" * 64)
    assert "is a file and not a GGUF one" in refusal(tmp_path / "model.safetensors")
    os.mkfifo(tmp_path / "pipe.gguf")
    assert "not a regular file" in refusal(tmp_path / "pipe.gguf")
    assert "not a regular file" in refusal(Path("/dev/zero"))


def test_without_the_package_the_command_is_named(
    small: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(small)
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert "uv run --extra gguf smcjax" in refusal(path)


def test_a_file_without_tensors_has_metadata(tmp_path: Path) -> None:
    path = write_vocabulary(tmp_path / "v.gguf", lambda writer: writer.add_array("a.list", [1, 2, 3]))
    assert GGUFFile.open(path).metadata["a.list"] == [1, 2, 3]
    assert "no matrix token_embd.weight" in refusal(path)
