"""Writes the goldens of the tests of the real model, by transformers and torch, which share nothing with this package.

    python scripts/goldens/make_real_model_goldens.py SmolLM2-135M-Instruct.Q4_1.gguf tests/data/real_model

Needs torch, transformers, gguf and sentencepiece, in an environment of its own; the tokens of llama.cpp also npm's
node-llama-cpp, in the directory that --llama-cpp names. Weights are dequantised by gguf and given to transformers'
LlamaForCausalLM in float32; sentencepiece is trained here on a few sentences.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import tempfile
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np

TEXT = (
    "The old lighthouse keeper climbed 217 steps every evening. From the top she could see the harbour, the fishing "
    "boats coming home, and, on clear days, the mountains of the neighbouring country. def area(r): return 3.14159 * "
    "r ** 2  # naïve\n\nQ: Where did she go?\nA:"
)
PROMPTS = (
    "Once upon a time there was a small dragon who",
    "The three largest cities of Italy are",
    "def fibonacci(n):\n",
)
CHATS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [
        {"role": "system", "content": "You answer in one short sentence."},
        {"role": "user", "content": "Why is the sky blue?"},
        {"role": "assistant", "content": "Air scatters blue light most."},
        {"role": "user", "content": "And at sunset, with 2,024 clouds? 🎉"},
    ],
]
TRICKY = [
    "Hello 123 <|im_start|>user\nhi<|im_end|>",
    "½ ² 12a Ⅳ١٢٣ 1,234.5 12345678",
    "  leading and trailing  ",
    "a\n\n\nb \n c\t\td\r\n\r\n x",
    "I'm we'RE they'LL don't",
    "naïve café ﬁ é e\u0301",
    "日本語のテキスト 中文 मानक हिन्दी ไทย עברית العربية",
    "🎉👩‍👩‍👧 emoji \u00a0nbsp\u3000wide ａｂｃ１２",
    "x=1;y==2>=3 && $a|b^c~ foo/bar\n//baz CamelCaseHTTPServer",
    "<|im_end|>\n<|endoftext|><file_sep>end",
    "",
    " ",
    "\n",
    "   \n   ",
]
PRE_TOKENIZERS = ("smollm", "gpt-2", "default", "llama-bpe", "qwen2", "tekken")
COLUMNS, NEW_TOKENS = 512, 64


def texts() -> list[str]:
    """Tricky ones and random ones of tricky characters."""
    draw = random.Random(0)
    alphabet = "abzAZ019 \n\t\r'.,!?-_éñ中日½Ⅳ🎉<|>$^~/sStTmd"
    return TRICKY + ["".join(draw.choice(alphabet) for _ in range(draw.randint(1, 40))) for _ in range(80)]


def value_of(reader: Any, key: str) -> Any:
    return reader.fields[key].contents()


def torch_model(reader: Any) -> Any:
    """transformers' LlamaForCausalLM of the file's weights, float32, eager attention."""
    import gguf
    import torch
    import transformers

    heads, kv_heads = (value_of(reader, f"llama.attention.head_count{kind}") for kind in ("", "_kv"))
    settings: dict[str, Any] = {"attn_implementation": "eager"}
    config = transformers.LlamaConfig(
        vocab_size=49152,
        hidden_size=value_of(reader, "llama.embedding_length"),
        intermediate_size=value_of(reader, "llama.feed_forward_length"),
        num_hidden_layers=value_of(reader, "llama.block_count"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=value_of(reader, "llama.context_length"),
        rms_norm_eps=value_of(reader, "llama.attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": value_of(reader, "llama.rope.freq_base")},
        tie_word_embeddings=True,
        **settings,
    )
    names = {
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    state = {}
    for tensor in reader.tensors:
        weight = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        if tensor.name.startswith("blk."):
            _, layer, kind, _ = tensor.name.split(".")
            if kind in ("attn_q", "attn_k"):
                # transformers' permutation for llama.cpp is view(n, 2, d/2, E).transpose(1, 2); this is its inverse
                n = heads if kind == "attn_q" else kv_heads
                weight = weight.view(n, -1, 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
            state[f"model.layers.{layer}.{names[kind]}.weight"] = weight
        else:
            name = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
            state[name[tensor.name]] = weight
    model = transformers.LlamaForCausalLM(config)
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert missing == ["lm_head.weight"], missing
    assert not unexpected, unexpected
    return model.eval()


def published_tokenizer(reader: Any) -> Any:
    """SmolLM2's tokenizer as its tokenizer.json describes it: digits apart, then GPT-2's words and bytes."""
    import tokenizers
    import transformers
    from tokenizers import decoders, models, pre_tokenizers

    tokens, kinds = value_of(reader, "tokenizer.ggml.tokens"), value_of(reader, "tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in value_of(reader, "tokenizer.ggml.merges")]
    inner = tokenizers.Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([token for token, kind in zip(tokens, kinds, strict=True) if kind == 3])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner,
        bos_token=tokens[value_of(reader, "tokenizer.ggml.bos_token_id")],
        eos_token=tokens[value_of(reader, "tokenizer.ggml.eos_token_id")],
        chat_template=value_of(reader, "tokenizer.chat_template"),
    )


def scores(model: Any, ids: list[int], columns: np.ndarray) -> dict[str, Any]:
    """The ids, and of each one's logits those in `columns`, log Σ exp and the likeliest token's id."""
    import torch

    logits = model(torch.tensor([ids])).logits[0].double()
    return {
        "ids": np.array(ids, np.int32),
        "columns": columns.astype(np.int32),
        "logits": logits[:, columns].numpy().astype(np.float32),
        "logsumexp": logits.logsumexp(-1).numpy(),
        "argmax": logits.argmax(-1).numpy().astype(np.int32),
    }


def greedy(model: Any, ids: list[int], eos: int | None = None) -> list[int]:
    """The likeliest token, 64 times or until the end."""
    import torch

    cache, new, given = None, [], ids
    for _ in range(NEW_TOKENS):
        out = model(torch.tensor([given]), past_key_values=cache, use_cache=True)
        top = out.logits[0, -1].topk(2)
        print(f"{float(top.values[0] - top.values[1]):.4f}", end=" ")
        cache, given = out.past_key_values, [int(top.indices[0])]
        new += given
        if given == [eos]:
            break
    print()
    return new


def vocabulary_alone(reader: Any, pre: str, path: Path) -> None:
    """A GGUF file of this vocabulary cut into words by another rule, for llama.cpp, which wants some keys more."""
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    for key in ("context_length", "embedding_length", "block_count", "feed_forward_length"):
        writer.add_uint32(f"llama.{key}", 32)
    writer.add_uint32("llama.attention.head_count", 1)
    writer.add_uint32("llama.rope.dimension_count", 32)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(value_of(reader, "tokenizer.ggml.tokens"))
    writer.add_token_types(value_of(reader, "tokenizer.ggml.token_type"))
    writer.add_token_merges(value_of(reader, "tokenizer.ggml.merges"))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_tensor("token_embd.weight", np.zeros((1, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


NODE = """
import {getLlama} from "node-llama-cpp"; import fs from "fs";
const llama = await getLlama({gpu: false, build: "never", logLevel: "error"});
const model = await llama.loadModel({modelPath: process.argv[2], vocabOnly: true});
const texts = JSON.parse(fs.readFileSync(process.argv[3]));
console.log(JSON.stringify(texts.map(text => Array.from(model.tokenize(text, true))))); process.exit(0);
"""


def llama_cpp_tokens(path: Path, texts: list[str], place: Path) -> list[list[int]]:
    """llama.cpp's token ids, without a BOS, special tokens found."""
    listed = path.with_suffix(".json")
    listed.write_text(json.dumps(texts))
    (place / "tokens.mjs").write_text(NODE)
    command = ["node", "tokens.mjs", str(path), str(listed)]
    result = subprocess.run(command, cwd=place, stdout=subprocess.PIPE, text=True, check=True)
    ids: list[list[int]] = json.loads(result.stdout.strip().splitlines()[-1])
    return ids


def sentencepiece_golden() -> dict[str, Any]:
    """A SentencePiece BPE model of 420 pieces, and what sentencepiece itself makes of texts."""
    import sentencepiece

    with tempfile.TemporaryDirectory() as place:
        lines = (Path(__file__).parents[2] / "README.md").read_text().splitlines()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter([line for line in lines if line] + [TEXT] * 3),
            model_prefix=f"{place}/m",
            model_type="bpe",
            vocab_size=900,
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=True,
            split_digits=True,
            allow_whitespace_only_pieces=True,
            user_defined_symbols=["<tool>"],
            minloglevel=2,
        )
        model = sentencepiece.SentencePieceProcessor(model_file=f"{place}/m.model")
    plain = [text for text in texts() if "<" not in text] + [TEXT]
    count = model.get_piece_size()

    def kind(i: int) -> int:
        names = ((model.is_unknown, 2), (model.is_control, 3), (model.is_unused, 5), (model.is_byte, 6))
        found = [value for test, value in names if test(i)]
        return found[0] if found else 4 if model.id_to_piece(i) == "<tool>" else 1

    return {
        "pieces": [model.id_to_piece(i) for i in range(count)],
        "scores": [model.get_score(i) for i in range(count)],
        "types": [kind(i) for i in range(count)],
        "texts": plain,
        "ids": [model.encode(text) for text in plain],
        "decoded": [model.decode(model.encode(text)) for text in plain],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("gguf", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--llama-cpp", type=Path, help="directory with node_modules/node-llama-cpp")
    args = parser.parse_args()

    import gguf
    import torch

    def write(name: str, value: Any) -> None:
        (args.out / name).write_text(json.dumps(value, ensure_ascii=False, separators=(",", ":")) + "\n")

    reader = gguf.GGUFReader(args.gguf)
    write("sentencepiece.json", sentencepiece_golden())
    tokenizer = published_tokenizer(reader)
    all_texts = texts()
    tokens: dict[str, Any] = {
        "texts": all_texts,
        "ids": [tokenizer(text)["input_ids"] for text in all_texts],
        "decoded": [tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) for text in all_texts],
        "chats": CHATS,
        "chat_ids": [
            tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in CHATS
        ],
    }
    if args.llama_cpp:
        composed = [unicodedata.normalize("NFC", text) for text in all_texts]  # llama.cpp leaves Qwen's NFC out
        tokens["composed"] = composed
        with tempfile.TemporaryDirectory() as place:
            for pre in PRE_TOKENIZERS:
                vocabulary_alone(reader, pre, Path(place) / f"{pre}.gguf")
                tokens[pre] = llama_cpp_tokens(Path(place) / f"{pre}.gguf", composed, args.llama_cpp)
    write("tokens.json", tokens)

    model = torch_model(reader)
    ids = tokenizer(TEXT)["input_ids"]
    columns = np.sort(np.random.default_rng(0).choice(49152, COLUMNS, replace=False))
    with torch.inference_mode():
        arrays = scores(model, ids, columns)
        for number, prompt in enumerate(PROMPTS):
            given = tokenizer(prompt)["input_ids"]
            arrays[f"prompt{number}"] = np.array(given, np.int32)
            arrays[f"greedy{number}"] = np.array(greedy(model, given), np.int32)
        for number, given in enumerate(tokens["chat_ids"]):
            arrays[f"answer{number}"] = np.array(greedy(model, given, tokenizer.eos_token_id), np.int32)
            print(tokenizer.decode(arrays[f"answer{number}"]))
    np.savez_compressed(args.out / "goldens.npz", **arrays)


if __name__ == "__main__":
    main()
