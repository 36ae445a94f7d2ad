"""chat remembers what was said, takes its words of command, and survives what it cannot answer."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from smcjax import LLM
from tests.checkpoints import Pair
from tests.cli.conftest import Command, Result

Chat = Callable[..., Result]


@pytest.fixture
def chat(smcjax: Command, monkeypatch: pytest.MonkeyPatch, models: list[str]) -> Chat:
    """Runs a conversation whose lines come from a pipe."""

    def run(text: bytes, *options: str) -> Result:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text), encoding="utf-8"))
        return smcjax("chat", *models, "-N", "3", "-K", "2", "--max-tokens", "3", *options)

    return run


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[str, str]]]:
    """The conversations that the template is asked for, as they grow."""
    conversations: list[list[tuple[str, str]]] = []
    prompt = LLM.chat_prompt

    def heard(self: LLM, messages: list[dict[str, str]], *args: Any) -> Any:
        conversations.append([(message["role"], message["content"]) for message in messages])
        return prompt(self, messages, *args)

    monkeypatch.setattr(LLM, "chat_prompt", heard)
    return conversations


def test_every_line_is_answered_with_what_went_before(chat: Chat, asked: list[list[tuple[str, str]]]) -> None:
    result = chat("\ufeffhi\n\nyes\n".encode())  # a byte-order mark says nothing, and neither does an empty line
    assert result.code == 0
    lines = result.out.splitlines()
    assert len(lines) == 2
    assert result.err.count("tokens (") == 2
    said = [("user", "hi"), ("assistant", lines[0]), ("user", "yes")]
    assert asked == [said[:1], said]


def test_words_of_command(chat: Chat, asked: list[list[tuple[str, str]]]) -> None:
    result = chat(b"hi\n/reset\nyes\n/help\n/rest\n/etc/hosts is long\n/exit\nnever read\n")
    assert result.code == 0
    first, second, third = asked
    assert (first, second) == ([("user", "hi")], [("user", "yes")])  # nothing is left behind /reset
    assert third[-1] == ("user", "/etc/hosts is long")  # no word of command, though it begins like one
    assert len(third) == 3
    assert "smcjax: error: /rest is no command; /help lists them.\n" in result.err
    assert "/reset  forget what was said" in result.err
    assert "/reset" not in result.out


def test_quiet_leaves_answers_and_errors(chat: Chat) -> None:
    result = chat(b"hi\n/reset\n" + b"x" * 60 + b"\n", "--quiet")
    assert (result.code, len(result.out.splitlines())) == (0, 1)
    (line,) = result.err.splitlines()
    assert line.startswith("smcjax: error: the prompt has ")
    assert line.endswith("--max-model-len is 48; shorten the prompt or raise --max-model-len.")


def test_a_line_that_is_too_long_is_forgotten(chat: Chat, asked: list[list[tuple[str, str]]]) -> None:
    result = chat(b"x" * 60 + b"\nhi\n")
    assert result.code == 0
    assert len(result.out.splitlines()) == 1
    assert asked[-1] == [("user", "hi")]


def test_bytes_that_are_no_text_are_refused(chat: Chat) -> None:
    result = chat(b"caf\xe9\n")
    assert (result.code, result.out) == (2, "")
    assert "smcjax: error: the input must be utf-8 text, got byte 3" in result.err


def test_a_template_is_needed(smcjax: Command, monkeypatch: pytest.MonkeyPatch, pair: Pair, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / name).symlink_to(Path(pair.target) / name)
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n"))
    result = smcjax("chat", "--model", str(tmp_path), "--decoding", "autoregressive", "--max-model-len", "48")
    assert (result.code, result.out) == (2, "")
    assert "chat template" in result.err
