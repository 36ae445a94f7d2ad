"""Makes tests/data/eagle3: a tiny EAGLE-3 head in the public layout, and what a plain torch forward makes of it.

    python3.11 -m venv env && env/bin/pip install torch==2.13.0 numpy safetensors
    env/bin/python scripts/goldens/make_eagle_goldens.py tests/data/eagle3

The forward is written from the description (arXiv 2503.01840, section 3.1) and shares nothing with smcjax. Its slot t
holds the feature of position t with the token of position t + 1, and is rotated by t.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

V, DRAFT_V, E, TARGET_E, H, HKV, D, F, EPS, THETA = 384, 96, 64, 64, 4, 2, 16, 48, 1e-5, 10_000.0
SCALING: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CONFIG = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "draft_vocab_size": DRAFT_V,
    "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
    "eos_token_id": 2,
    "head_dim": D,
    "hidden_act": "silu",
    "hidden_size": E,
    "initializer_range": 0.02,
    "intermediate_size": F,
    "max_position_embeddings": 512,
    "max_window_layers": 3,
    "model_type": "llama",
    "num_attention_heads": H,
    "num_hidden_layers": 1,
    "num_key_value_heads": HKV,
    "pretraining_tp": 1,
    "rms_norm_eps": EPS,
    "rope_scaling": SCALING,
    "rope_theta": THETA,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": V,
}


def make_weights() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)

    def matrix(rows: int, columns: int) -> Any:
        return (torch.randn(rows, columns, generator=generator) * 1.5 / columns**0.5).to(torch.bfloat16)

    def norm() -> Any:
        return (1 + 0.2 * torch.randn(E, generator=generator)).to(torch.bfloat16)

    ids = torch.randperm(V, generator=generator)[:DRAFT_V].sort().values
    attention, mlp = "midlayer.self_attn", "midlayer.mlp"
    return {
        "fc.weight": matrix(E, 3 * TARGET_E),
        "midlayer.input_layernorm.weight": norm(),
        "midlayer.hidden_norm.weight": norm(),
        "midlayer.post_attention_layernorm.weight": norm(),
        f"{attention}.q_proj.weight": matrix(H * D, 2 * E),
        f"{attention}.k_proj.weight": matrix(HKV * D, 2 * E),
        f"{attention}.v_proj.weight": matrix(HKV * D, 2 * E),
        f"{attention}.o_proj.weight": matrix(E, H * D),
        f"{mlp}.gate_proj.weight": matrix(F, E),
        f"{mlp}.up_proj.weight": matrix(F, E),
        f"{mlp}.down_proj.weight": matrix(E, F),
        "norm.weight": norm(),
        "lm_head.weight": matrix(DRAFT_V, E),
        "d2t": ids - torch.arange(DRAFT_V),
        "t2d": torch.isin(torch.arange(V), ids),
    }


def rotated(x: Any, positions: Any) -> Any:
    """x [H, T, D] turned by halves, with Llama 3.1's stretched frequencies."""
    frequency = THETA ** (-torch.arange(0, D, 2, dtype=torch.float64) / D)
    turns = SCALING["original_max_position_embeddings"] * frequency / (2 * torch.pi)
    low, high = SCALING["low_freq_factor"], SCALING["high_freq_factor"]
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    frequency = frequency * (keep + (1 - keep) / SCALING["factor"])
    angle = (positions[:, None].double() * frequency).float()
    cos, sin = angle.cos(), angle.sin()
    first, second = x[..., : D // 2], x[..., D // 2 :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def forward(w: dict[str, Any], embed: Any, tokens: Any, features: Any) -> tuple[Any, Any]:
    """Outputs [T, E] of the layer and logits [T, Vd] for slots of features [T, E] with the tokens one position on."""

    def normed(x: Any, weight: str) -> Any:
        return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * w[weight]

    def heads(x: Any, name: str, count: int) -> Any:
        return (x @ w[f"midlayer.self_attn.{name}_proj.weight"].T).view(len(x), count, D).transpose(0, 1)

    slots = torch.arange(len(tokens))
    left = normed(embed[tokens], "midlayer.input_layernorm.weight")
    x = torch.cat([left, normed(features, "midlayer.hidden_norm.weight")], -1)
    q, k = rotated(heads(x, "q", H), slots), rotated(heads(x, "k", HKV), slots)
    k, v = (y.repeat_interleave(H // HKV, 0) for y in (k, heads(x, "v", HKV)))
    scores = (q @ k.transpose(1, 2) / D**0.5).masked_fill(slots[None, :] > slots[:, None], -torch.inf)
    attended = (scores.softmax(-1) @ v).transpose(0, 1).reshape(len(tokens), -1)
    hidden = features + attended @ w["midlayer.self_attn.o_proj.weight"].T
    inner = normed(hidden, "midlayer.post_attention_layernorm.weight")
    gate, up = (inner @ w[f"midlayer.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    hidden = hidden + (torch.nn.functional.silu(gate) * up) @ w["midlayer.mlp.down_proj.weight"].T
    return hidden, normed(hidden, "norm.weight") @ w["lm_head.weight"].T


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    directory = parser.parse_args().directory
    directory.mkdir(parents=True, exist_ok=True)
    stored = make_weights()
    save_file(stored, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(CONFIG, indent=1) + "\n")

    w = {name: tensor.float() for name, tensor in stored.items()}
    target_id = torch.arange(DRAFT_V) + stored["d2t"]
    generator = torch.Generator().manual_seed(1)
    embed = torch.randn(V, E, generator=generator).to(torch.bfloat16).float()
    steps, slots = 4, 9
    streams = torch.randn(slots, 3, TARGET_E, generator=generator)
    tokens = torch.randint(V, (slots,), generator=generator)
    features = streams.reshape(slots, -1) @ w["fc.weight"].T
    hidden, logits = forward(w, embed, tokens, features)
    # A chain: each step appends the likeliest token and the head's own last output as its feature.
    chain, chain_logits = [], []
    drafted, known = tokens, features
    for _ in range(steps):
        hidden_now, logits_now = forward(w, embed, drafted, known)
        chain.append(target_id[logits_now[-1].argmax()])
        chain_logits.append(logits_now[-1])
        drafted = torch.cat([drafted, chain[-1][None]])
        known = torch.cat([known, hidden_now[-1:]])
    golden = {
        "embed": embed.to(torch.float16),  # bfloat16's numbers of this size are float16's too
        "streams": streams,
        "tokens": tokens,
        "hidden": hidden,
        "logits": logits,
        "chain": torch.stack(chain),
        "chain_logits": torch.stack(chain_logits),
    }
    assert torch.equal(golden["embed"].float(), embed)
    np.savez_compressed(directory / "golden.npz", **{name: tensor.numpy() for name, tensor in golden.items()})


if __name__ == "__main__":
    main()
