"""A family of models: what its files say beyond what all families say alike, and under which names its weights lie."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from smcjax.model.config import LayerSpec, ModelConfig
from smcjax.model.families.gguf_keys import GGUFKeys
from smcjax.model.families.hf_keys import HFKeys

# Names of tensors, without ".weight" or ".bias", by part of `Params`; "{}" is a layer's index.
HUGGING_FACE = {
    "embed": "model.embed_tokens",
    "attn_norm": "model.layers.{}.input_layernorm",
    "q": "model.layers.{}.self_attn.q_proj",
    "k": "model.layers.{}.self_attn.k_proj",
    "v": "model.layers.{}.self_attn.v_proj",
    "attention": "model.layers.{}.self_attn",
    "q_norm": "model.layers.{}.self_attn.q_norm",
    "k_norm": "model.layers.{}.self_attn.k_norm",
    "o": "model.layers.{}.self_attn.o_proj",
    "mlp_norm": "model.layers.{}.post_attention_layernorm",
    "gate": "model.layers.{}.mlp.gate_proj",
    "up": "model.layers.{}.mlp.up_proj",
    "down": "model.layers.{}.mlp.down_proj",
    "final_norm": "model.norm",
    "lm_head": "lm_head",
}


@dataclasses.dataclass(frozen=True)
class Family:
    """One model class of Hugging Face, and the GGUF architectures that hold it.

    Attributes:
        architecture, model_type: its names in a config.json.
        read: completes the sizes of a config.json with the layers and whatever else is the family's own.
        write: the keys of a config.json that are the family's own; None for sizes that the class does not have.
        gguf: architectures in GGUF files.
        read_gguf: completes the sizes of a GGUF file, of which each layer is at first the given one; None without any.
        gguf_interleaves: llama.cpp turns neighbouring pairs, so that q and k rows are interleaved in the file.
        max_position_embeddings, bos_token_id, eos_token_id, tie_embeddings, rms_norm_eps: what an absent key means.
        num_kv_heads: likewise; None: as many as query heads.
        head_dim: likewise; None: hidden_size / num_attention_heads.
        names: of the tensors in Hugging Face's files, like `HUGGING_FACE`.
        norm_offset: added there to the stored weights of norms.
    """

    architecture: str
    model_type: str
    read: Callable[[HFKeys, ModelConfig], ModelConfig]
    write: Callable[[ModelConfig], dict[str, Any] | None]
    max_position_embeddings: int
    gguf: tuple[str, ...] = ()
    read_gguf: Callable[[GGUFKeys, ModelConfig, LayerSpec], ModelConfig] | None = None
    gguf_interleaves: bool = False
    num_kv_heads: int | None = None
    head_dim: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    tie_embeddings: bool = False
    rms_norm_eps: float = 1e-6
    names: Mapping[str, str] = dataclasses.field(default_factory=lambda: HUGGING_FACE)
    norm_offset: float = 0.0
