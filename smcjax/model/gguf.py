"""GGUF metadata, read into `ModelConfig`, and which of the file's tensors each Hugging Face tensor is.

Three architectures are read: "llama" (whose files hold Llama and Mistral models; some say "mistral"), "qwen2" and
"qwen3". As in `smcjax.model.hf_config`, what the decoder does not compute is refused by name, and so is a key of the
architecture that nobody here knows, unless its value says "off".
"""

from __future__ import annotations

import dataclasses
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np

from smcjax.errors import CheckpointError
from smcjax.gguf_file import GGUFFile
from smcjax.model.config import LayerSpec, ModelConfig, Rope, RopeScaling
from smcjax.model.decoder import rope_frequencies

_ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
_PERMUTED = ("llama", "mistral")  # llama.cpp turns neighbouring pairs there, so q and k rows are interleaved
_EMBED, _HEAD, _ROPE_FACTORS = "token_embd.weight", "output.weight", "rope_freqs.weight"
# Without a say in the logits, or decided by the tensors' shapes.
_HARMLESS = frozenset(("vocab_size", "tensor_data_layout", "rope.scaling.finetuned"))
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
# Llama 3.1 to 3.3 differ in the factor alone, and a file holds no more than what comes of these.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_BY_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_ELSEWHERE = {
    "model.embed_tokens.weight": _EMBED,
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": _HEAD,
}


def gguf_name(name: str) -> str:
    """The GGUF name of a Hugging Face tensor of these architectures."""
    if name in _ELSEWHERE:
        return _ELSEWHERE[name]
    index, rest = name.removeprefix("model.layers.").split(".", 1)
    module, suffix = rest.rsplit(".", 1)
    return f"blk.{index}.{_BY_LAYER[module]}.{suffix}"


@dataclasses.dataclass(frozen=True)
class GGUFTensors:
    """The weights of one GGUF file by GGUF name, rows in the order of Hugging Face's."""

    file: GGUFFile
    config: ModelConfig
    shapes: dict[str, tuple[int, ...]]

    @property
    def path(self) -> Path:
        return self.file.path

    def rows(self, name: str) -> Any:
        """A lazy view of one tensor: `rows(name)[begin:end]` dequantises those rows, float32."""
        order = np.arange(self.shapes[name][0])
        heads = {"attn_q": self.config.num_heads, "attn_k": self.config.num_kv_heads}.get(name.split(".")[-2])
        if heads is not None and self.file.metadata["general.architecture"] in _PERMUTED:
            # [head, pair, half] in the file, [head, half, pair] here
            order = order.reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)
        return _Rows(self.file, name, order)


@dataclasses.dataclass(frozen=True)
class _Rows:
    file: GGUFFile
    name: str
    order: np.ndarray

    def __getitem__(self, rows: slice) -> np.ndarray:
        return self.file.read(self.name, self.order[rows])


def read_gguf(path: Path) -> tuple[ModelConfig, GGUFTensors]:
    """The configuration and the (unread) weights of a GGUF file.

    Raises CheckpointError, naming the key and its value, for what is inconsistent and for whatever this decoder would
    not compute.
    """
    file = GGUFFile.open(path)
    config = _config(_Metadata(file))
    shapes = {name: tensor.shape for name, tensor in file.tensors.items() if name != _ROPE_FACTORS}
    return config, GGUFTensors(file, config, shapes)


class _Metadata:
    """Typed access to the architecture's keys that remembers what was asked for, so that the rest can be refused."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self._seen: set[str] = set()
        self.architecture = file.metadata.get("general.architecture")
        if self.architecture not in _ARCHITECTURES:
            raise self.refusal("general.architecture", f"only {', '.join(_ARCHITECTURES)} are implemented")

    def refusal(self, key: str, reason: str) -> CheckpointError:
        shown = repr(self.file.metadata.get(key))
        shown = shown if len(shown) <= 80 else shown[:77] + "..."
        return CheckpointError(f"{self.file.path}: {key} is {shown}, but {reason}")

    def name(self, key: str) -> str:
        return f"{self.architecture}.{key}"

    def raw(self, key: str) -> Any:
        self._seen.add(self.name(key))
        return self.file.metadata.get(self.name(key))

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive integer; of a list, one a layer, the value that all share."""
        value = self.raw(key)
        if isinstance(value, list) and value:
            if any(other != value[0] for other in value):
                raise self.refusal(self.name(key), "only layers that are all alike are implemented")
            value = value[0]
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 1 << 31:
            raise self.refusal(self.name(key), "it must be a positive integer; convert the model again")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.raw(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
            raise self.refusal(self.name(key), "it must be a finite positive number; convert the model again")
        return float(value)

    def refuse_unknown(self) -> None:
        for key, value in self.file.metadata.items():
            known = key in self._seen or key.removeprefix(f"{self.architecture}.") in _HARMLESS
            if key.startswith(f"{self.architecture}.") and not known and value:
                raise self.refusal(key, "this decoder does not know that key; use another model")


def _config(keys: _Metadata) -> ModelConfig:
    tensors = keys.file.tensors
    embedding = tensors.get(_EMBED)
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(f"{keys.file.path} has no matrix {_EMBED}; convert the model again")
    vocab_size = embedding.shape[0]
    tokens = keys.file.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and len(tokens) > vocab_size:
        raise CheckpointError(
            f"{keys.file.path} has {len(tokens)} tokens, but {_EMBED} has {vocab_size} rows; convert the model again"
        )
    hidden_size, num_layers = keys.integer("embedding_length"), keys.integer("block_count")
    if num_layers > len(tensors):
        raise keys.refusal(keys.name("block_count"), f"the file has {len(tensors)} tensors; convert the model again")
    num_heads, num_kv_heads, head_dim = _heads(keys, hidden_size)
    for key in ("expert_count", "expert_used_count"):
        if keys.raw(key):
            raise keys.refusal(keys.name(key), "mixtures of experts are not implemented; use a dense model")
    max_positions = keys.integer("context_length")
    if keys.raw("attention.sliding_window") is not None:
        window = keys.integer("attention.sliding_window")
        if window < max_positions:
            raise keys.refusal(keys.name("attention.sliding_window"), "only full attention is implemented")
    if keys.raw("attention.causal") is False:
        raise keys.refusal(keys.name("attention.causal"), "only causal attention is implemented; use a decoder")
    parsed = ModelConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=keys.integer("feed_forward_length"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=max_positions,
        rms_norm_eps=keys.number("attention.layer_norm_rms_epsilon"),
        tie_embeddings=_HEAD not in tensors,
        bos_token_id=_token_id(keys, "bos_token_id", vocab_size),
        eos_token_ids=tuple(
            dict.fromkeys(token for key in _END_KEYS if (token := _token_id(keys, key, vocab_size)) is not None)
        ),
    )
    theta = keys.number("rope.freq_base", 10_000.0)
    layer = LayerSpec(
        rope=Rope(theta, _rope_scaling(keys, parsed, theta)),
        qkv_bias=keys.architecture == "qwen2" or "blk.0.attn_q.bias" in tensors,
        o_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_down.bias" in tensors,
        qk_norm=keys.architecture == "qwen3",
    )
    parsed = dataclasses.replace(parsed, layers=(layer,))
    keys.refuse_unknown()
    return parsed


def _heads(keys: _Metadata, hidden_size: int) -> tuple[int, int, int]:
    num_heads = keys.integer("attention.head_count")
    num_kv_heads = keys.integer("attention.head_count_kv", num_heads)
    if num_heads % num_kv_heads:
        raise keys.refusal(keys.name("attention.head_count_kv"), f"it must divide the head_count = {num_heads}")
    if hidden_size % num_heads and keys.raw("attention.key_length") is None:
        raise keys.refusal(
            keys.name("embedding_length"),
            f"it is no multiple of the head_count = {num_heads}, and no key_length is set",
        )
    head_dim = keys.integer("attention.key_length", hidden_size // num_heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if keys.integer(key, head_dim) != head_dim:
            raise keys.refusal(keys.name(key), f"only the width of a key, {head_dim}, is implemented")
    if head_dim % 2:
        raise keys.refusal(keys.name("attention.key_length"), "rotary embedding turns pairs, so it must be even")
    return num_heads, num_kv_heads, head_dim


def _rope_scaling(keys: _Metadata, config: ModelConfig, theta: float) -> RopeScaling | None:
    """Llama 3's scaling, where the file's factors are those that come of it; any other is refused."""
    kind, factor = keys.raw("rope.scaling.type"), keys.raw("rope.scaling.factor")
    if kind not in (None, "none", "linear") or (kind != "none" and factor not in (None, 0.0, 1.0)):
        key = "rope.scaling.type" if kind is not None else "rope.scaling.factor"
        raise keys.refusal(keys.name(key), "only Llama 3's scaling is implemented; use another model")
    if keys.raw("rope.scale_linear") not in (None, 0.0, 1.0):
        raise keys.refusal(keys.name("rope.scale_linear"), "only Llama 3's scaling is implemented; use another model")
    keys.raw("rope.scaling.original_context_length"), keys.raw("rope.scaling.attn_factor")  # of the kinds refused above
    if _ROPE_FACTORS not in keys.file.tensors:
        return None
    shape = keys.file.tensors[_ROPE_FACTORS].shape
    if shape == (config.head_dim // 2,):
        found = keys.file.read(_ROPE_FACTORS)
        if np.all(found == 1.0):
            return None
        largest = float(found.max())
        if math.isfinite(largest) and largest > 1:
            scaling = RopeScaling(largest, **_LLAMA3)  # type: ignore[arg-type]
            plain, scaled = (rope_frequencies(Rope(theta, s), config.head_dim) for s in (None, scaling))
            if np.allclose(found, plain / scaled, rtol=1e-5, atol=0):
                return scaling
    raise CheckpointError(
        f"{keys.file.path}: {_ROPE_FACTORS} {list(shape)} is not of Llama 3's scaling (low_freq_factor 1, "
        "high_freq_factor 4, of 8192 positions), the only one that is implemented; use another model"
    )


def _token_id(keys: _Metadata, key: str, vocab_size: int) -> int | None:
    name = f"tokenizer.ggml.{key}"
    token = keys.file.metadata.get(name)
    if token is None:
        return None
    if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
        raise keys.refusal(name, f"it must be an id below the {vocab_size} of the embedding; convert the model again")
    return token
