"""Tokenizers built here with the tokenizers library, read through `smcjax.tokenizer.tokenizer`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from smcjax.errors import CheckpointError
from smcjax.tokenizer.tokenizer import Tokenizer

PLAIN_CHAT = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
BOS_CHAT = "{{ bos_token }}" + PLAIN_CHAT
STRICT_CHAT = (
    "{% if messages[0]['role'] != 'user' %}{{ raise_exception('the first message must be the user’s') }}{% endif %}"
    + PLAIN_CHAT
)


def write_tokenizer(directory: Path, *, adds_bos: bool = True, **config: Any) -> Path:
    """A byte-level BPE tokenizer; `<s>` is 0, `</s>` is 1."""
    directory.mkdir(exist_ok=True)
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(["hello world, hello there 2024 [user] [assistant]"] * 3, trainer)
    if adds_bos:
        inner.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 0)]
        )
    inner.save(str(directory / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", **config}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


def load(directory: Path) -> Tokenizer:
    tokenizer = Tokenizer.load(directory)
    assert tokenizer is not None
    return tokenizer


def test_a_directory_without_tokenizer_has_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert Tokenizer.load(tmp_path) is None


def test_encode_and_decode(tmp_path: Path) -> None:
    tokenizer = load(write_tokenizer(tmp_path))
    text = "hello  there , naïve wörld ."  # spaces that a clean-up would remove
    ids = tokenizer.encode(text)
    assert ids[0] == 0 == tokenizer.bos_token_id
    assert 0 not in ids[1:]
    assert all(type(token) is int for token in ids)
    assert tokenizer.decode([*ids, 1]) == text
    assert tokenizer.decode(np.array(ids, np.int32)) == text
    assert tokenizer.decode([]) == ""
    assert tokenizer.decode([*ids, 5000]) == text  # an id from the padding of the embedding
    assert tokenizer.eos_token_id == 1
    assert tokenizer.vocab["<s>"] == 0
    assert len(tokenizer) == len(tokenizer.vocab) == max(tokenizer.vocab.values()) + 1


def test_one_bos_where_the_rule_adds_it_and_none_elsewhere(tmp_path: Path) -> None:
    adding = load(write_tokenizer(tmp_path / "adds"))
    silent = load(write_tokenizer(tmp_path / "silent", adds_bos=False))
    bare = silent.encode("hello")
    assert 0 not in bare
    assert adding.encode("hello") == [0, *bare]
    assert adding.encode("<s>hello") == [0, *bare]
    assert silent.encode("<s>hello") == [0, *bare]
    assert adding.encode("<s><s>hello") == [0, 0, *bare]  # the user's own two
    assert adding.encode("") == [0]
    assert silent.encode("") == []


@pytest.mark.parametrize("changes", [{}, {"tokenizer_class": "LlamaTokenizer"}, {"tokenizer_class": "Qwen2Tokenizer"}])
def test_tokenizer_json_rules_whatever_class_the_config_names(tmp_path: Path, changes: dict[str, str]) -> None:
    directory = write_tokenizer(tmp_path, **changes)
    (directory / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}))
    inner = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    text = "hello wörld 2024"  # digits, of which each is a word to the rule of Qwen2
    assert load(directory).encode(text) == inner.encode(text).ids


def test_a_tokenizer_of_other_files(tmp_path: Path) -> None:
    """vocab.json and merges.txt, of which AutoTokenizer makes what the config names."""
    directory = write_tokenizer(tmp_path, tokenizer_class="Qwen2Tokenizer")
    inner = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    inner.model.save(str(directory))
    (directory / "tokenizer.json").unlink()
    (directory / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    tokenizer = load(directory)
    text = "hello wörld"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert ids == inner.encode(text, add_special_tokens=False).ids
    assert tokenizer.eos_token_id == 1


def test_added_tokens_of_the_config(tmp_path: Path) -> None:
    added = {
        "400": {
            "content": "<|end|>",
            "special": True,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "single_word": False,
        }
    }
    tokenizer = load(write_tokenizer(tmp_path, added_tokens_decoder=added, eos_token="<|end|>"))
    end = tokenizer.vocab["<|end|>"]
    assert tokenizer.eos_token_id == end
    assert tokenizer.encode("hello<|end|>")[-1] == end
    assert tokenizer.decode(tokenizer.encode("hello<|end|>")) == "hello"


@pytest.mark.parametrize(("template", "begins_with_bos"), [(PLAIN_CHAT, False), (BOS_CHAT, True)])
@pytest.mark.parametrize("as_file", [False, True])
def test_chat(tmp_path: Path, template: str, begins_with_bos: bool, as_file: bool) -> None:
    directory = write_tokenizer(tmp_path, **({} if as_file else {"chat_template": template}))
    if as_file:
        (directory / "chat_template.jinja").write_text(template)
    tokenizer = load(directory)
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}])
    assert type(ids) is list
    assert (ids[0] == 0) == begins_with_bos
    assert ids.count(0) == int(begins_with_bos)
    assert tokenizer.decode(ids) == "[user]hello[assistant]"
    assert ids.count(1) == 1


def test_chat_errors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no chat template; use generate"):
        load(write_tokenizer(tmp_path / "none")).apply_chat_template([{"role": "user", "content": "hi"}])
    strict = load(write_tokenizer(tmp_path / "strict", chat_template=STRICT_CHAT))
    with pytest.raises(ValueError, match="the first message must be the user’s"):
        strict.apply_chat_template([{"role": "system", "content": "hi"}])
    with pytest.raises(ValueError, match="messages is empty"):
        strict.apply_chat_template([])
    for wrong in ("hi", {"role": "user", "content": "hi"}, ["hi"]):
        with pytest.raises(ValueError, match=r"messages is .*hi"):
            strict.apply_chat_template(wrong)


@pytest.mark.parametrize("content", [b"", b"{", b'{"version": "1.0"}', b"\xff\xfe", b"[]"])
def test_corrupt_files(tmp_path: Path, content: bytes) -> None:
    (write_tokenizer(tmp_path) / "tokenizer.json").write_bytes(content)
    with pytest.raises(CheckpointError, match="tokenizer files in") as caught:
        Tokenizer.load(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_corrupt_tokenizer_config(tmp_path: Path) -> None:
    (write_tokenizer(tmp_path) / "tokenizer_config.json").write_text("{")
    with pytest.raises(CheckpointError, match="tokenizer files in"):
        Tokenizer.load(tmp_path)


def test_a_config_without_vocabulary(tmp_path: Path) -> None:
    (write_tokenizer(tmp_path) / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"no vocabulary; fetch tokenizer\.json"):
        Tokenizer.load(tmp_path)


def test_nothing_is_printed_and_nothing_is_imported_before_it_is_needed(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, tokenizer_class="LlamaTokenizer", model_max_length=4)
    program = (
        "import sys; from smcjax.tokenizer.tokenizer import Tokenizer; assert 'transformers' not in sys.modules; "
        f"Tokenizer.load({str(tmp_path)!r}).encode('hello ' * 100); import transformers; "
        "assert transformers.logging.get_verbosity() == transformers.logging.WARNING"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
