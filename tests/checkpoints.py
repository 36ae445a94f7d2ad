"""Model directories that tests make: tiny random pairs with a byte-level tokenizer."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from safetensors.numpy import load_file, save_file
from tokenizers import decoders, models, pre_tokenizers

from smcjax.errors import CheckpointError
from smcjax.model import ModelConfig, Params, init_params, load_checkpoint, save_checkpoint

GOLDEN = Path(__file__).parent / "data" / "hf_golden"
BOS, EOS = 256, 257
TOKENIZER_SIZE = 258
CHAT_TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@dataclasses.dataclass(frozen=True)
class Pair:
    """Directories of a target and of a draft."""

    target: str
    draft: str


def refusal(path: Path | str, *words: str, quantization: str | None = None) -> str:
    """The one sentence that refuses to load a model, which has these words and names its place."""
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(path, quantization=quantization)
    message = str(caught.value)
    assert message.isprintable()
    assert str(path) in message
    assert len(message.replace(str(path), "")) < 500
    for word in words:
        assert word in message
    return message


def write_tokenizer(directory: Path, **changes: Any) -> None:
    """One token a byte, `<s>` 256, `</s>` 257; no BOS is added. Spaces and letters are their ASCII codes."""
    directory.mkdir(parents=True, exist_ok=True)
    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    of_byte = tokenizers.Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(characters)}, merges=[]))
    of_byte.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    of_byte.decoder = decoders.ByteLevel()
    of_byte.add_special_tokens(["<s>", "</s>"])
    of_byte.save(str(directory / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": CHAT_TEMPLATE, **changes}
    (directory / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in settings.items() if v is not None}))


def byte_config(vocab_size: int, **changes: Any) -> ModelConfig:
    """A one-layer decoder over the byte tokenizer, its vocabulary padded to `vocab_size`."""
    fields: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_layers": 1,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 8,
        "max_position_embeddings": 1024,
        "bos_token_id": BOS,
        "eos_token_ids": (EOS,),
    }
    return ModelConfig(**{**fields, **changes})


def biased_params(config: ModelConfig, seed: int, bias: np.ndarray) -> Params:
    """Random weights whose logits have `bias` [V] added, more or less.

    No layer writes channel 0 of the residual stream, so it keeps the large constant that every embedding has there,
    and the head's column 0 is a bias.
    """
    params = init_params(config, jax.random.key(seed))
    assert params.lm_head is not None

    def changed(leaf: jax.Array, place: Any, value: Any, factor: float = 1.0) -> jax.Array:
        host = np.asarray(leaf) * np.float32(factor)
        host[place] = value
        return jnp.asarray(host)

    every = slice(None)
    layers = tuple(
        dataclasses.replace(layer, o=changed(layer.o, 0, 0.0), down=changed(layer.down, 0, 0.0))
        for layer in params.layers
    )
    return dataclasses.replace(
        params,
        embed=changed(params.embed, (every, 0), 1.0, factor=25.0),
        layers=layers,
        lm_head=changed(params.lm_head, (every, 0), bias),
    )


def letter_bias(vocab_size: int) -> np.ndarray:
    """Letters and EOS likely, every other byte rare."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bias = np.full(vocab_size, -8.0)
    bias[[alphabet.index(c) for c in "abcdefghijklmnopqrstuvwxyz"]] = 1.0
    bias[EOS] = 1.0
    return bias


def write_model(directory: Path, vocab_size: int, seed: int, **changes: Any) -> str:
    """A random byte-level model with its tokenizer."""
    config = byte_config(vocab_size, **changes)
    save_checkpoint(config, biased_params(config, seed, letter_bias(vocab_size)), directory, dtype="float32")
    write_tokenizer(directory)
    return str(directory)


def write_shards(directory: Path) -> dict[str, np.ndarray]:
    """The tensors of a directory's model.safetensors, written into two shards beside it, with their index."""
    tensors = load_file(directory / "model.safetensors")
    weight_map = {name: f"model-{1 + (i >= 4)}.safetensors" for i, name in enumerate(sorted(tensors))}
    for file in set(weight_map.values()):
        save_file({name: value for name, value in tensors.items() if weight_map[name] == file}, directory / file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return tensors


def write_pair(root: Path) -> Pair:
    """A target padded to 272 ids and a draft of another width padded to 264."""
    return Pair(write_model(root / "target", 272, 1), write_model(root / "draft", 264, 2, hidden_size=12))
