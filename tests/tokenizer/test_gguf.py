"""Tokenizers of GGUF files against transformers, llama.cpp and sentencepiece (`make_real_model_goldens.py`)."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers
from tokenizers import Tokenizer as Inner

from smcjax.errors import CheckpointError
from smcjax.gguf_file import GGUFFile
from smcjax.model.files.hub import packaged_model
from smcjax.tokenizer.tokenizer import Tokenizer
from tests.gguf_files import DATA, Writing, write_vocabulary

GOLDEN = json.loads((DATA / "tokens.json").read_text())
PIECES = json.loads((DATA / "sentencepiece.json").read_text())
ADDS_BOS = ("llama-bpe", "tekken")


def load(path: Path) -> Tokenizer:
    tokenizer = Tokenizer.load(path)
    assert tokenizer is not None
    return tokenizer


@pytest.fixture(scope="module")
def real() -> Tokenizer:
    return load(packaged_model("smollm2"))


def test_the_real_model_tokenizes_as_transformers_does(real: Tokenizer) -> None:
    assert [real.encode(text) for text in GOLDEN["texts"]] == GOLDEN["ids"]
    assert [real.decode(ids) for ids in GOLDEN["ids"]] == GOLDEN["decoded"]
    assert (real.bos_token_id, real.eos_token_id, len(real)) == (1, 2, 49152)


def test_the_real_models_own_chat_template(real: Tokenizer) -> None:
    assert [real.apply_chat_template(chat) for chat in GOLDEN["chats"]] == GOLDEN["chat_ids"]


def real_vocabulary(pre: str) -> Writing:
    """The real model's vocabulary, cut into words by another rule."""
    metadata = GGUFFile.open(packaged_model("smollm2")).metadata

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(metadata["tokenizer.ggml.tokens"])
        writer.add_token_types(metadata["tokenizer.ggml.token_type"])
        writer.add_token_merges(metadata["tokenizer.ggml.merges"])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)

    return add


@pytest.mark.parametrize("pre", ["smollm", "gpt-2", "default", "llama-bpe", "qwen2", "tekken"])
def test_every_pre_tokenizer_cuts_as_llama_cpp_does(pre: str, tmp_path: Path) -> None:
    tokenizer = load(write_vocabulary(tmp_path / "v.gguf", real_vocabulary(pre)))
    bos = [1] if pre in ADDS_BOS else []
    begins = "<|im_start|>"
    for text, ids in zip(GOLDEN["composed"], GOLDEN[pre], strict=True):
        assert tokenizer.encode(text) == (ids if text.startswith(begins) else bos + ids), text


def test_qwen_composes_and_the_others_do_not(tmp_path: Path) -> None:
    qwen, other = (
        load(write_vocabulary(tmp_path / f"{pre}.gguf", real_vocabulary(pre))) for pre in ("qwen2", "llama-bpe")
    )
    assert qwen.encode("e\u0301") == qwen.encode("\u00e9")
    assert other.encode("e\u0301") != other.encode("\u00e9")


def sentencepiece(**changes: Any) -> Writing:
    """The vocabulary of the golden's SentencePiece model."""

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list(PIECES["pieces"])
        writer.add_token_scores(changes.get("scores", PIECES["scores"]))
        writer.add_token_types(changes.get("types", PIECES["types"]))
        writer.add_unk_token_id(0)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        if "prefix" in changes:
            writer.add_add_space_prefix(changes["prefix"])
        if "bos" in changes:
            writer.add_add_bos_token(changes["bos"])

    return add


@pytest.mark.parametrize("scores", [PIECES["scores"], [-1000.0] * len(PIECES["scores"])], ids=["scores", "one-score"])
def test_sentencepiece_vocabularies_tokenize_as_sentencepiece_does(scores: list[float], tmp_path: Path) -> None:
    tokenizer = load(write_vocabulary(tmp_path / "v.gguf", sentencepiece(scores=scores)))
    for text, ids, decoded in zip(PIECES["texts"], PIECES["ids"], PIECES["decoded"], strict=True):
        assert tokenizer.encode(text) == [1, *ids], text
        assert tokenizer.decode(ids) == decoded
    assert tokenizer.encode("a<tool>")[-1] == PIECES["pieces"].index("<tool>")
    assert len(tokenizer.byte_ids) == 256


def test_sentencepiece_vocabularies_tokenize_as_a_tokenizer_json_of_llama(tmp_path: Path) -> None:
    """Special tokens within a text, after which Llama 2's tokenizer.json begins a word anew."""
    ids = {piece: id for id, piece in enumerate(PIECES["pieces"])}
    merges = sorted(
        (
            (-PIECES["scores"][id], -cut, piece[:cut], piece[cut:])
            for piece, id in ids.items()
            for cut in range(1, len(piece))
            if piece[:cut] in ids and piece[cut:] in ids and PIECES["types"][id] == 1
        ),
    )
    inner = Inner(models.BPE(ids, [pair[2:] for pair in merges], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    inner.add_special_tokens([AddedToken(token, normalized=False) for token in ("<unk>", "<s>", "</s>")])
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = load(write_vocabulary(tmp_path / "v.gguf", sentencepiece(bos=False)))
    for text in ("the harbour</s>the harbour", "<s> the<s>steps every", *PIECES["texts"]):
        assert tokenizer.encode(text) == inner.encode(text).ids, text
        assert tokenizer.decode(inner.encode(text).ids) == inner.decode(inner.encode(text).ids)


def test_prefix_and_bos_are_as_the_file_says(tmp_path: Path) -> None:
    plain = load(write_vocabulary(tmp_path / "a.gguf", sentencepiece()))
    bare = load(write_vocabulary(tmp_path / "b.gguf", sentencepiece(prefix=False, bos=False)))
    assert plain.encode("the steps") == [1, *bare.encode(" the steps")]
    assert bare.decode(bare.encode(" the steps")) == " the steps"
    added = load(write_vocabulary(tmp_path / "c.gguf", real_vocabulary("gpt-2"), lambda w: w.add_add_bos_token(True)))
    assert added.encode("the")[0] == 1
    assert len(added.encode("the")) == 2


RUNS = [" " * length for length in range(2, 6)] + ["\t\t", "<table>"]


@pytest.fixture(scope="module")
def gemma_like(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Loads a tokenizer like that of Gemma's files: no space before the text, and tokens for runs of spaces."""

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list(PIECES["pieces"] + RUNS)
        writer.add_token_scores(PIECES["scores"] + [-1000.0] * len(RUNS))
        writer.add_token_types(PIECES["types"] + [4] * len(RUNS))
        writer.add_unk_token_id(0)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_add_space_prefix(False)

    return load(write_vocabulary(tmp_path_factory.mktemp("gemma") / "v.gguf", add))


def by_definition(text: str) -> list[int]:
    """llama.cpp's rule: user-defined tokens first, the longest before others; then the best neighbours, one by one."""
    own = {token: len(PIECES["pieces"]) + index for index, token in enumerate(RUNS)}
    ids = {piece: id for id, piece in enumerate(PIECES["pieces"]) if PIECES["types"][id] == 1}
    for token in sorted(own, key=len, reverse=True):
        if token in text:
            before, after = text.split(token, 1)
            return [*by_definition(before), own[token], *by_definition(after)]
    parts = list(text.replace(" ", "▁"))
    while True:
        pairs = [(PIECES["scores"][ids[a + b]], -at) for at, (a, b) in enumerate(pairwise(parts)) if a + b in ids]
        if not pairs:
            break
        at = -max(pairs)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    found = []
    for part in parts:
        bytes_of = [PIECES["pieces"].index(f"<0x{byte:02X}>") for byte in part.encode()]
        found += [ids[part]] if part in ids else bytes_of
    return found


@given(st.text(alphabet="the stp\n\t  <>abl,é🙂", max_size=40))
@example("the" + " " * 23 + "steps\n\n\t\t\t <table>  x<table >🙂 ")
def test_gemmas_tokens_are_those_of_the_definition(gemma_like: Tokenizer, text: str) -> None:
    assert gemma_like.encode(text) == [1, *by_definition(text)]
    assert gemma_like.decode(gemma_like.encode(text)) == text


def test_without_a_vocabulary_there_is_no_tokenizer(tmp_path: Path) -> None:
    assert Tokenizer.load(write_vocabulary(tmp_path / "a.gguf")) is None
    assert Tokenizer.load(write_vocabulary(tmp_path / "b.gguf", lambda w: w.add_tokenizer_model("none"))) is None


def test_unused_tokens_are_no_part_of_the_vocabulary(tmp_path: Path) -> None:
    types = [5 if index == len(PIECES["types"]) - 1 else kind for index, kind in enumerate(PIECES["types"])]
    tokenizer = load(write_vocabulary(tmp_path / "v.gguf", sentencepiece(types=types)))
    assert PIECES["pieces"][-1] not in tokenizer.vocab
    assert len(tokenizer) == len(types) - 1


def bpe(**changes: Any) -> Writing:
    """A vocabulary of five tokens, with `changes` of its metadata; None leaves a key out."""
    keys: dict[str, Any] = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": ["a", "b", "ab", "<s>", "</s>"],
        "token_type": [1, 1, 1, 3, 3],
        "merges": ["a b"],
        "eos_token_id": 4,
    }

    def add(writer: gguf.GGUFWriter) -> None:
        for key, value in {**keys, **changes}.items():
            name = f"tokenizer.ggml.{key}"
            if isinstance(value, str):
                writer.add_string(name, value)
            elif isinstance(value, bool):
                writer.add_bool(name, value)
            elif isinstance(value, int):
                writer.add_uint32(name, value)
            elif value is not None:
                writer.add_array(name, value)

    return add


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "bert"}, ("model is 'bert'", "only 'gpt2' and 'llama'")),
        ({"pre": "falcon"}, ("pre is 'falcon'", "smollm", "qwen2")),
        ({"pre": None}, ("pre is None", "llama-bpe")),
        ({"tokens": None}, ("tokens is None",)),
        ({"tokens": ["a", "b", "ab", "a", "</s>"]}, ("0 and 3 are both 'a'",)),
        ({"token_type": None}, ("token_type is None",)),
        ({"token_type": [1, 1]}, ("token_type", "5 elements")),
        ({"merges": None}, ("merges is None",)),
        ({"merges": ["ab"]}, ("merges", "'ab'")),
        ({"merges": ["b a"]}, ("merges", "'b a'")),
        ({"eos_token_id": 5}, ("eos_token_id is 5", "before 5")),
        ({"add_bos_token": "yes"}, ("add_bos_token is 'yes'", "true or false")),
        ({"add_bos_token": True}, ("bos_token_id is None", "begins every prompt")),
        ({"pre": "llama-bpe"}, ("bos_token_id is None", "begins every prompt")),
        ({"add_eos_token": True, "eos_token_id": None}, ("eos_token_id is None", "ends every prompt")),
        ({"model": "llama", "scores": None}, ("scores is None",)),
        ({"model": "llama", "scores": [0.5]}, ("scores", "5 elements")),
    ],
)
def test_a_vocabulary_that_is_not_read_is_refused_by_key(
    changes: dict[str, Any], words: tuple[str, ...], tmp_path: Path
) -> None:
    path = write_vocabulary(tmp_path / "v.gguf", bpe(**changes))
    with pytest.raises(CheckpointError) as caught:
        Tokenizer.load(path)
    message = str(caught.value)
    assert "\n" not in message
    for word in (str(path), "tokenizer.ggml.", *words):
        assert word in message


def test_a_chat_template_that_is_no_text(tmp_path: Path) -> None:
    path = write_vocabulary(tmp_path / "v.gguf", bpe(), lambda writer: writer.add_uint32("tokenizer.chat_template", 3))
    with pytest.raises(CheckpointError, match=r"tokenizer\.chat_template is no text"):
        Tokenizer.load(path)
