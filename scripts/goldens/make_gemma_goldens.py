"""Writes the goldens of Gemma 3, of other models with sliding windows, and of OLMo 2, by transformers and torch.

    python scripts/goldens/make_gemma_goldens.py tests/data/gemma [--gguf FILE] [--llama-cpp DIRECTORY]

Needs torch, transformers, gguf, safetensors and ml_dtypes, in an environment of its own. Tiny models are random: config
and seed are kept, and numpy makes the weights again (`hf_oracle.random_weights`). `--gguf` adds the real model's
logits and greedy tokens, `--llama-cpp` (a directory with npm's node-llama-cpp) the token ids of its texts.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import make_real_model_goldens as real
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "model"))
from hf_oracle import make_config, random_weights, write_directory

LINEAR = {"rope_type": "linear", "factor": 8.0}
FEW_SHOT = "The capital of Italy is Rome. The capital of France is"  # the model is a base one
LENGTH, POSITIONS = 40, [0, 5, 12, 23, 39]
TINY = {
    "gemma3-pattern": make_config(
        "gemma3_text",
        num_hidden_layers=8,
        num_key_value_heads=1,
        rope_theta=1e6,
        rope_local_base_freq=1e4,
        sliding_window=6,
        sliding_window_pattern=6,
        layer_types=None,
        tie_word_embeddings=True,
    ),
    "gemma3-linear": make_config(
        "gemma3_text",
        num_hidden_layers=3,
        rope_local_base_freq=1e4,
        rope_scaling=LINEAR,
        sliding_window=9,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        query_pre_attn_scalar=24,
    ),
    "gemma3-new-spelling": make_config(
        "gemma3_text",
        rope_parameters={
            "full_attention": {**LINEAR, "rope_theta": 5e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 2e3},
        },
        sliding_window=1,
        layer_types=["full_attention", "sliding_attention"],
        attention_bias=True,
    ),
    "gemma3-wide": make_config(
        "gemma3_text",
        hidden_size=512,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=256,
        query_pre_attn_scalar=256,
        sliding_window=16,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "mistral-window": make_config("mistral", sliding_window=7),
    "qwen2-window": make_config(
        "qwen2", num_hidden_layers=4, use_sliding_window=True, sliding_window=9, max_window_layers=2
    ),
    "qwen3-window": make_config(
        "qwen3", use_sliding_window=True, sliding_window=5, layer_types=["sliding_attention", "full_attention"]
    ),
    "olmo2": make_config("olmo2"),
    "olmo2-one-kv-head": make_config(
        "olmo2", num_hidden_layers=3, num_key_value_heads=1, head_dim=12, attention_bias=True, tie_word_embeddings=True
    ),
}
del TINY["gemma3-new-spelling"]["rope_theta"]
TEXTS = [
    *("a" + " " * spaces + "b" for spaces in (1, 2, 3, 30, 31, 32, 33, 64, 65)),
    *("\n" * lines for lines in (1, 5, 31, 32, 40)),
    "<start_of_turn>user\nHi there<end_of_turn>\n<start_of_turn>model\n",
    "<table><tr> <td>1</td>",
    "x<unused5>y [multimodal] z",
    "  ▁ x",
    "<0x41>A",
    "\t\t\tif x:\n        return  y\n",
    real.TEXT,
]


def tiny_logits(raw: dict[str, Any], tokens: np.ndarray) -> np.ndarray:
    """Logits [positions, V] of the model whose weights come of seed 0."""
    import torch
    import transformers

    with tempfile.TemporaryDirectory() as place:
        write_directory(Path(place), raw, random_weights(raw))
        model = transformers.AutoModelForCausalLM.from_pretrained(
            place, dtype=torch.float32, attn_implementation="eager"
        )
        with torch.inference_mode():
            return model(torch.tensor(tokens[None])).logits[0, POSITIONS].numpy()


def real_goldens(path: Path) -> dict[str, Any]:
    """Logits and greedy tokens of the file as transformers reads it, in float32."""
    import torch
    import transformers

    given = {"gguf_file": path.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, **given)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, **given, dtype=torch.float32, attn_implementation="eager"
    )
    ids = tokenizer(real.TEXT)["input_ids"]
    columns = np.sort(np.random.default_rng(0).choice(262144, real.COLUMNS, replace=False))
    with torch.inference_mode():
        arrays = real.scores(model, ids, columns)
        for number, prompt in enumerate((FEW_SHOT, *real.PROMPTS)):
            prompt_ids = tokenizer(prompt)["input_ids"]
            arrays[f"prompt{number}"] = np.array(prompt_ids, np.int32)
            arrays[f"greedy{number}"] = np.array(real.greedy(model, prompt_ids), np.int32)
            print(repr(tokenizer.decode(arrays[f"greedy{number}"])))
    return arrays


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--gguf", type=Path)
    parser.add_argument("--llama-cpp", type=Path)
    args = parser.parse_args()

    tokens = np.random.default_rng(7).integers(0, 96, LENGTH)
    logits: dict[str, Any] = {name: tiny_logits(raw, tokens) for name, raw in TINY.items()}
    np.savez_compressed(args.out / "tiny.npz", tokens=tokens, positions=np.array(POSITIONS), **logits)
    (args.out / "tiny.json").write_text(json.dumps(TINY, indent=1) + "\n")
    if args.gguf:
        np.savez_compressed(args.out / "real.npz", **real_goldens(args.gguf))
    if args.llama_cpp:
        texts = [text for text in real.texts() + TEXTS if text]
        written = {"texts": texts, "ids": real.llama_cpp_tokens(args.gguf, texts, args.llama_cpp)}
        (args.out / "tokens.json").write_text(json.dumps(written, ensure_ascii=False, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
