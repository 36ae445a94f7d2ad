"""tokenizer.json files that make the library panic, hang or answer something else: one sentence, nothing on stderr."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from smcjax.engine.requests.requests import tokenize
from smcjax.errors import CheckpointError
from smcjax.tokenizer.files import Guarded, _without_panic_messages
from smcjax.tokenizer.tokenizer import Tokenizer
from tests.checkpoints import write_tokenizer
from tests.limits import within

Change = Callable[[dict[str, Any]], None]


def load(directory: Path) -> Tokenizer:
    tokenizer = Tokenizer.load(directory)
    assert tokenizer is not None
    return tokenizer


def split(pattern: str) -> Change:
    """A pre-tokenizer by this regular expression."""
    rule = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    rest = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return lambda spec: spec.update(pre_tokenizer={"type": "Sequence", "pretokenizers": [rule, rest]})


def replace(pattern: dict[str, str], content: str, times: int = 1) -> Change:
    rule = {"type": "Replace", "pattern": pattern, "content": content}
    return lambda spec: spec.update(normalizer={"type": "Sequence", "normalizers": [rule] * times})


def added(token: int, **changes: Any) -> Change:
    return lambda spec: spec["added_tokens"][token].update(changes)


def template(**special: Any) -> Change:
    single = [{"SpecialToken": {"id": "Q", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    return lambda spec: spec.update(
        post_processor={"type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": special}
    )


REFUSED: dict[str, tuple[Change, str]] = {
    "no regular expression": (split("("), "Oniguruma error"),
    "nested quantifiers": (split("(a+)+$"), "PanicException: Onig: Regex search error: retry-limit-in-match over"),
    "alternatives": (split("(a|aa)+$"), "retry-limit-in-match over"),
    "a normalizer that backtracks": (replace({"Regex": "(a|a)*$"}, "x"), "retry-limit-in-match over"),
    "a normalizer that matches nothing": (replace({"Regex": ""}, "xx"), "PanicException"),
    "a text that explodes": (replace({"String": "a"}, "a" * 1000, times=3), "can make a character 1000000000"),
    "no charsmap": (
        lambda spec: spec.update(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
        "PanicException: Precompiled",
    ),
    "an empty charsmap": (
        lambda spec: spec.update(normalizer={"type": "Precompiled", "precompiled_charsmap": "A" * 16}),
        "PanicException: index out of bounds",
    ),
    "a decoder that cuts too much": (
        lambda spec: spec.update(decoder={"type": "Strip", "content": "a", "start": 10**9, "stop": 10**9}),
        "PanicException: index out of bounds",
    ),
    "a template without its token": (template(), "PanicException: no entry found for key"),
    "an added id of 10^12": (added(0, id=10**12), "expected u32"),
    "a negative added id": (added(0, id=-1), "expected u32"),
    "an added id that is taken": (added(0, id=5), "added token '<s>' cannot have id 5"),
    "an added id beyond int32": (added(0, id=2**32 - 1), "added token '<s>' cannot have id 4294967295"),
    "two added tokens of one id": (added(1, id=256), "added token '</s>' cannot have id 256"),
    "an id beyond int32": (lambda spec: spec["model"]["vocab"].update(a=2**32 - 1), "an id is 4294967295"),
    "an id of 10^12": (lambda spec: spec["model"]["vocab"].update(a=10**12), "expected u32"),
    "a negative id": (lambda spec: spec["model"]["vocab"].update(a=-1), "expected u32"),
    "two tokens of one id": (lambda spec: spec["model"]["vocab"].update(a=5), "tokens '&' and 'a' share id 5"),
    "ids of 400 digits": (lambda spec: spec["model"]["vocab"].update(a=10**400), "an integer of 401 digits"),
    "merges of unknown tokens": (lambda spec: spec["model"].update(merges=[["a", "zz"]]), "out of vocabulary"),
    "no model": (lambda spec: spec.pop("model"), "Model"),
    "a list for a model": (lambda spec: spec.update(model=[]), "Model"),
    "added tokens that are none": (lambda spec: spec.update(added_tokens=[None, 3]), "tokenizer files in"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_refused_in_one_sentence(kind: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    change, reason = REFUSED[kind]
    write_tokenizer(tmp_path)
    spec = json.loads((tmp_path / "tokenizer.json").read_text())
    change(spec)
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    with within(10), pytest.raises(CheckpointError) as caught:
        Tokenizer.load(tmp_path)
    message = str(caught.value)
    assert reason in message
    assert str(tmp_path) in message
    assert "\n" not in message
    assert len(message) < 500
    assert capfd.readouterr() == ("", "")  # Rust reports a panic with its stack there


def test_a_panic_on_some_input_costs_that_request_only(tmp_path: Path) -> None:
    """A panic that no probe can foresee refuses the text that causes it; other texts go on."""
    write_tokenizer(tmp_path)
    path = tmp_path / "tokenizer.json"
    spec = json.loads(path.read_text())
    split("(q+)+$")(spec)
    path.write_text(json.dumps(spec))
    tokenizer = load(tmp_path)
    before = tokenizer.encode("plain text")
    for _ in range(2):
        with within(5), pytest.raises(ValueError, match="the tokenizer fails on this input") as caught:
            tokenize("q" * 64 + "!", tokenizer, 272, 1024)
        assert "\n" not in str(caught.value)
        assert tokenizer.encode("plain text") == before


def test_only_failures_of_the_library_are_put_into_a_sentence() -> None:
    def fails(error: BaseException) -> Callable[[], None]:
        def call() -> None:
            raise error

        return call

    for error in (KeyboardInterrupt(), KeyError("x"), SystemExit(3)):
        with pytest.raises(type(error)) as caught:
            Guarded(fails(error))()
        assert caught.value is error
    with pytest.raises(ValueError, match=r"the tokenizer fails on this input \(no reason\)"):
        Guarded(fails(Exception("no\nreason")))()


def test_what_others_write_to_stderr_meanwhile_arrives(capfd: pytest.CaptureFixture[str]) -> None:
    with _without_panic_messages():
        writer = threading.Thread(target=os.write, args=(2, b"a line\n"))
        writer.start()
        writer.join()

    def interrupted() -> None:
        with _without_panic_messages():
            os.write(2, b"another\n")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert capfd.readouterr().err == "a line\nanother\n"


def test_a_closed_stderr_is_no_obstacle(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    load = f"from smcjax.tokenizer.tokenizer import Tokenizer; print(len(Tokenizer.load({str(tmp_path)!r})))"
    program = f"import os; os.close(2); {load}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout == "258\n"
