"""GGUF metadata, read into `ModelConfig`, and the weights of the file, rows in the order of Hugging Face's.

The architectures of `smcjax.model.families` are read. As in `smcjax.model.files.hf_config`, what the decoder does not
compute is refused by name, and so is a key of the architecture that this package does not know, unless its value
says "off".
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from smcjax.errors import CheckpointError
from smcjax.gguf_file import GGUFFile
from smcjax.model.config import LayerSpec, ModelConfig
from smcjax.model.families import Family, families
from smcjax.model.families.gguf_keys import ROPE_FACTORS, GGUFKeys

_EMBED, _HEAD = "token_embd.weight", "output.weight"
_FLOATS = ("F16", "BF16", "F32", "F64")
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_WHOLE = (3, 4)  # tokenizer.ggml.token_type of control tokens and of user-defined ones, which no merge makes
# Tokens that llama.cpp ends an answer at by their text; converters often name but one of a model's in the keys.
_ENDS = frozenset(
    (
        *("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|im_end|>", "<|endoftext|>", "<|end|>", "<end_of_turn>"),
        *("<EOT>", "_<EOT>", "<end_of_utterance>", "<|return|>", "<|call|>"),
    )
)
GGUF_NAMES = {  # by part of `Params`, as in `smcjax.model.families`
    "embed": "token_embd",
    "attn_norm": "blk.{}.attn_norm",
    "q": "blk.{}.attn_q",
    "k": "blk.{}.attn_k",
    "v": "blk.{}.attn_v",
    "q_norm": "blk.{}.attn_q_norm",
    "k_norm": "blk.{}.attn_k_norm",
    "o": "blk.{}.attn_output",
    "attn_post_norm": "blk.{}.post_attention_norm",
    "mlp_norm": "blk.{}.ffn_norm",
    "gate": "blk.{}.ffn_gate",
    "up": "blk.{}.ffn_up",
    "down": "blk.{}.ffn_down",
    "mlp_post_norm": "blk.{}.post_ffw_norm",
    "final_norm": "output_norm",
    "lm_head": "output",
}


@dataclasses.dataclass(frozen=True)
class GGUFTensors:
    """The weights of one GGUF file by GGUF name, rows in the order of Hugging Face's."""

    file: GGUFFile
    config: ModelConfig
    shapes: dict[str, tuple[int, ...]]

    @property
    def path(self) -> Path:
        return self.file.path

    def narrow(self, name: str) -> str | None:
        """The type of a tensor's numbers, such as "Q4_K"; None of a float type."""
        kind: str = self.file.tensors[name].kind.name
        return None if kind in _FLOATS else kind

    def rows(self, name: str) -> Any:
        """A lazy view of one tensor: `rows(name)[begin:end]` dequantises those rows, float32."""
        order = np.arange(self.shapes[name][0])
        heads = {"attn_q": self.config.num_heads, "attn_k": self.config.num_kv_heads}.get(name.split(".")[-2])
        if heads is not None and _families()[self.file.metadata["general.architecture"]].gguf_interleaves:
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
    config = _config(GGUFKeys(file))
    shapes = {name: tensor.shape for name, tensor in file.tensors.items() if name != ROPE_FACTORS}
    return config, GGUFTensors(file, config, shapes)


def ends_by_name(file: GGUFFile) -> dict[str, int]:
    """Tokens that end an answer by their text, each with its id, where no key of the file names it."""
    tokens, kinds = (file.metadata.get(f"tokenizer.ggml.{key}") for key in ("tokens", "token_type"))
    if not isinstance(tokens, list) or not isinstance(kinds, list):
        return {}
    named = {file.metadata.get(f"tokenizer.ggml.{key}") for key in _END_KEYS}
    return {
        text: token
        for token, (text, kind) in enumerate(zip(tokens, kinds, strict=False))
        if kind in _WHOLE and text in _ENDS and token not in named
    }


def _families() -> dict[str, Family]:
    """Families by the architectures of their GGUF files."""
    return {name: family for family in families() for name in family.gguf}


def _config(keys: GGUFKeys) -> ModelConfig:
    if keys.file.metadata.get("general.type", "model") != "model":
        raise keys.refusal("general.type", "only models are read; pass the file of the model itself")
    known = _families()
    family = known.get(keys.architecture) if isinstance(keys.architecture, str) else None
    if family is None or family.read_gguf is None:
        raise keys.refusal("general.architecture", f"only {', '.join(known)} are implemented")
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
        raise keys.refusal("block_count", f"the file has {len(tensors)} tensors; convert the model again")
    num_heads, num_kv_heads, head_dim = _heads(keys, hidden_size)
    for key in ("expert_count", "expert_used_count"):
        if keys.raw(key):
            raise keys.refusal(key, "mixtures of experts are not implemented; use a dense model")
    max_positions = keys.integer("context_length")
    if keys.raw("attention.causal") is False:
        raise keys.refusal("attention.causal", "only causal attention is implemented; use a decoder")
    by_key = [token for key in _END_KEYS if (token := _token_id(keys, key, vocab_size)) is not None]
    shape = ModelConfig(
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
        eos_token_ids=tuple(dict.fromkeys((*by_key, *ends_by_name(keys.file).values()))),
    )
    layer = LayerSpec(
        qkv_bias="blk.0.attn_q.bias" in tensors,
        o_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_down.bias" in tensors,
    )
    parsed = family.read_gguf(keys, shape, layer)
    keys.refuse_unknown()
    return parsed


def _heads(keys: GGUFKeys, hidden_size: int) -> tuple[int, int, int]:
    num_heads = keys.integer("attention.head_count")
    num_kv_heads = keys.integer("attention.head_count_kv", num_heads)
    if num_heads % num_kv_heads:
        raise keys.refusal("attention.head_count_kv", f"it must divide the head_count = {num_heads}")
    if hidden_size % num_heads and keys.raw("attention.key_length") is None:
        raise keys.refusal(
            "embedding_length",
            f"it is no multiple of the head_count = {num_heads}, and no key_length is set",
        )
    head_dim = keys.integer("attention.key_length", hidden_size // num_heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if keys.integer(key, head_dim) != head_dim:
            raise keys.refusal(key, f"only the width of a key, {head_dim}, is implemented")
    if head_dim % 2:
        raise keys.refusal("attention.key_length", "rotary embedding turns pairs, so it must be even")
    return num_heads, num_kv_heads, head_dim


def _token_id(keys: GGUFKeys, key: str, vocab_size: int) -> int | None:
    name = f"tokenizer.ggml.{key}"
    token = keys.file.metadata.get(name)
    if token is None:
        return None
    if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
        raise keys.refusal(name, f"it must be an id below the {vocab_size} of the embedding; convert the model again")
    return token
