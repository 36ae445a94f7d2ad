"""Tokenizer files of a model directory: checked, then loaded by transformers without running anything of theirs.

Refused are files that are no regular files or too large, settings that ask for code or for files elsewhere, and
tokenizers that fail on a short probe, be it by a panic of the Rust library, which is no Exception.
"""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from smcjax.errors import CheckpointError
from smcjax.files import MIB, Unreadable, read_json, require_file, shortened

# What transformers may open of a directory, and how large that may be: several times what any model has.
_LIMITS = {
    "config.json": 4 * MIB,
    "tokenizer_config.json": 8 * MIB,
    "special_tokens_map.json": 4 * MIB,
    "added_tokens.json": 4 * MIB,
    "chat_template.jinja": MIB,
    "tokenizer.json": 128 * MIB,
}
_OTHER_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".bpe", ".tiktoken")  # of vocabularies beside tokenizer.json
_TEMPLATES = "additional_chat_templates"
_MAX_ID = (1 << 31) - 1  # ids are int32
_MAX_GROWTH = 1000  # of a text by normalisation
_PROBE = "Hello, wörld! 你好 🙂 \t\r\n\n  don't 2024 \x00<s>" + "aA1 -." * 4 + "a" * 64 + "!"
_PROBE_SECONDS = 2.0
_stderr = threading.Lock()  # which is one for all threads


class Guarded:
    """A tokenizer of transformers, of which every method raises ValueError where the Rust library fails or panics."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with _one_sentence():
            return self._inner(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "_inner":  # not there yet, as in a copy that is being made
            raise AttributeError(name)
        value = getattr(self._inner, name)
        if not callable(value):
            return value

        def guarded(*args: Any, **kwargs: Any) -> Any:
            with _one_sentence():
                return value(*args, **kwargs)

        return guarded


@contextlib.contextmanager
def _one_sentence() -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        # tokenizers raises bare Exception; pyo3 makes a panic a BaseException of a class that cannot be imported.
        if type(error) is Exception or is_panic(error):
            raise ValueError(f"the tokenizer fails on this input ({shortened(error, 120)}); change it") from None
        raise


def is_panic(error: BaseException) -> bool:
    """True where the Rust library panicked, as for a regular expression that backtracks without end."""
    return type(error).__name__ == "PanicException" and type(error).__module__ == "pyo3_runtime"


def load_tokenizer(directory: Path) -> tuple[Any, dict[str, int]]:
    """transformers' tokenizer of the directory, `Guarded`, and its vocabulary from token to id.

    A tokenizer.json is taken as it stands, by PreTrainedTokenizerFast, whatever class or code the settings beside it
    name: nothing of that is needed. Without one the choice is AutoTokenizer's, and settings that name code are refused.
    Raises CheckpointError.
    """
    import transformers

    fast = (directory / "tokenizer.json").exists()
    added = _check_files(directory, fast)
    try:
        with _without_panic_messages():
            kind: Any = transformers.PreTrainedTokenizerFast if fast else transformers.AutoTokenizer
            inner = kind.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
            vocab: dict[str, int] = inner.get_vocab()
            _check_vocab(vocab, added)
            _probe(inner)
    except BaseException as error:  # tokenizers raises bare Exception or panics, transformers whatever it came across
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        reason = f"{type(error).__name__}: {shortened(error, 200)}"
        raise CheckpointError(
            f"the tokenizer files in {directory} cannot be read ({reason}); fetch them again, with tokenizer.json "
            "among them"
        ) from None
    return Guarded(inner), vocab


def _check_files(directory: Path, fast: bool) -> list[Any]:
    """The added tokens of tokenizer.json, once kind, size and settings of all files are found in order.

    Until then transformers opens none of them.
    """
    limits = {directory / name: limit for name, limit in _LIMITS.items()}
    limits |= dict.fromkeys((directory / _TEMPLATES).glob("*.jinja"), MIB)
    if not fast:
        limits |= {
            path: _LIMITS.get(path.name, 128 * MIB) for path in directory.iterdir() if path.suffix in _OTHER_SUFFIXES
        }
    settings: dict[str, Any] = {}
    for path, limit in limits.items():
        if not path.exists():
            continue
        try:
            require_file(path, limit)
            if path.suffix == ".json" and path.name in _LIMITS:
                settings[path.name] = read_json(path, limit)
        except Unreadable as error:
            raise CheckpointError(f"the tokenizer files in {directory}: {path.name} {error}; {error.mend}") from None
    for name, values in settings.items():
        if not isinstance(values, dict):
            raise CheckpointError(f"the tokenizer files in {directory}: {name} must be a JSON object; fetch it again")
    for name in ("tokenizer_config.json", "config.json"):
        values = settings.get(name, {})
        code = values.get("auto_map")
        asks = "AutoTokenizer" in code if isinstance(code, dict) else bool(code)
        if asks and not fast:
            raise CheckpointError(
                f"{directory / name} asks for a tokenizer by code of its own (auto_map is {shortened(repr(code))}), "
                "and nothing of a model directory is run; add the tokenizer.json of that model"
            )
        for key in ("gguf_file", "fast_tokenizer_files"):
            if values.get(key):
                raise CheckpointError(
                    f"{directory / name} asks for another file ({key} is {shortened(repr(values[key]))}); "
                    "remove that key, and put tokenizer.json there"
                )
    rules = settings.get("tokenizer.json", {})
    growth = max(_growth(rules.get(part)) for part in ("normalizer", "pre_tokenizer", "decoder"))
    if growth > _MAX_GROWTH:
        raise CheckpointError(
            f"{directory / 'tokenizer.json'} can make a character {growth} by its Replace rules, where at most "
            f"{_MAX_GROWTH} are taken; fetch it again"
        )
    added = rules.get("added_tokens")
    return added if isinstance(added, list) else []


def _growth(rules: Any) -> int:
    """How many characters nested rules can make of one, by what they put in its place."""
    if isinstance(rules, list):
        return math.prod(_growth(rule) for rule in rules)
    if not isinstance(rules, dict):
        return 1
    content = rules.get("content") if rules.get("type") == "Replace" else None
    own = max(len(content), 1) if isinstance(content, str) else 1
    return own * math.prod(_growth(value) for value in rules.values() if isinstance(value, list | dict))


def _check_vocab(vocab: dict[str, int], added: list[Any]) -> None:
    """Refuses ids that two tokens share, that are no int32, or that the library had to change; it would go on."""
    for token in added:
        if isinstance(token, dict) and vocab.get(content := str(token.get("content"))) != token.get("id"):
            raise ValueError(
                f"added token {shortened(repr(content), 40)} cannot have id {shortened(token.get('id'), 20)}, which is "
                "taken or leaves a gap"
            )
    largest = max(vocab.values(), default=0)
    if largest > _MAX_ID:
        raise ValueError(f"an id is {largest}, beyond {_MAX_ID}")
    if len(set(vocab.values())) < len(vocab):
        tokens: dict[int, str] = {}
        for token, id in sorted(vocab.items()):
            if id in tokens:
                raise ValueError(
                    f"tokens {shortened(repr(tokens[id]), 40)} and {shortened(repr(token), 40)} share id {id}"
                )
            tokens[id] = token


def _probe(inner: Any) -> None:
    """Encodes and decodes a short text. Raises whatever that does, and ValueError where it takes long.

    The library gives up a match after ten million steps, by a panic, so that even a hostile pattern ends.
    """
    begin = time.monotonic()
    ids = inner(_PROBE)["input_ids"]
    if len(ids) > 16 * len(_PROBE) or any(id > _MAX_ID for id in ids):
        raise ValueError(f"{len(_PROBE)} characters become {len(ids)} tokens up to {max(ids)}")
    inner.decode(ids[:1])
    inner.decode(ids)
    seconds = time.monotonic() - begin
    if seconds > _PROBE_SECONDS:
        raise ValueError(f"{len(_PROBE)} characters take {seconds:.1f} s")


@contextlib.contextmanager
def _without_panic_messages() -> Iterator[None]:
    """Holds back what is written to stderr, which is where Rust reports a panic with its stack, and drops that report.

    Whatever else came in that time is passed on, but not after a panic.
    """
    panicked = False
    with _stderr, contextlib.ExitStack() as stack:
        try:
            held = stack.enter_context(tempfile.TemporaryFile())
            stderr = os.dup(2)
        except OSError:  # no place to hold it, or stderr is closed
            yield
            return
        try:
            os.dup2(held.fileno(), 2)
            yield
        except BaseException as error:
            panicked = is_panic(error)
            raise
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            held.seek(0)
            with contextlib.suppress(OSError):  # its reader has gone
                while not panicked and (part := held.read(MIB)):
                    os.write(2, part)
