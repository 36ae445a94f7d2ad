"""Conversations as text, by the template that a model brings along: a program of a stranger, so it runs on a leash.

It is rendered by Jinja's sandbox in a process of its own (`smcjax.tokenizer.chat_template_child`), with a limit of
processor time, of memory and of text. Nothing in this process could end a template that multiplies large numbers. The
other one is started with the first conversation, in a tenth of a second, and stays; one rendering takes less than a
millisecond.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from smcjax.checks import is_unicode, short

SECONDS = 2.0  # of processor time
BYTES = 1 << 30  # of address space
CHARACTERS = 1 << 24  # of text
PATIENCE = 60.0  # seconds by the clock, on a machine that is busy with other things
CHILD = Path(__file__).with_name("chat_template_child.py")


def plain_messages(messages: Any) -> list[dict[str, Any]]:
    """Messages as mappings of strings to strings, the parts of a content joined.

    `tool_calls` of an assistant are mappings, as templates expect them, with their arguments as data; such a message
    needs no content.

    Raises ValueError (which message, the value seen, the mend) for anything that is no such conversation.
    """
    if not isinstance(messages, list | tuple) or not all(isinstance(message, Mapping) for message in messages):
        raise ValueError(
            f"messages is {short(messages)}, but must be a list such as [{{'role': 'user', 'content': 'Hi'}}]; wrap it"
        )
    if not messages:
        raise ValueError("messages is empty; pass at least one message")
    return [_plain_message(f"messages[{index}]", message) for index, message in enumerate(messages)]


def _plain_message(where: str, message: Mapping[Any, Any]) -> dict[str, Any]:
    if message.get("tool_calls"):
        others = {name: value for name, value in message.items() if name != "tool_calls"}
        plain = _plain_message(where, {"content": "", **others})
        return {**plain, "tool_calls": _plain_calls(f"{where}['tool_calls']", message["tool_calls"])}
    for name in ("role", "content"):
        if name not in message:
            raise ValueError(f"{where} is {short(dict(message))} and has no {name!r}; add it")
    plain = {}
    for name, value in message.items():
        if name == "content" and isinstance(value, list | tuple):
            value = "".join([_text_of(f"{where}['content'][{index}]", part) for index, part in enumerate(value)])
        for text in (name, value):
            if not isinstance(text, str):
                what = f"{where}[{name!r}]" if text is value else f"a key of {where}"
                parts = ", or a list of {'type': 'text', 'text': …} parts" if name == "content" else ""
                raise ValueError(f"{what} is {short(text)} and must be a string{parts}; convert it, or leave it out")
            if not is_unicode(text):
                raise ValueError(f"{where}[{short(name)}] must be valid Unicode, got {short(text)}; decode it anew")
        plain[str(name)] = str(value)
    return plain


def _plain_calls(where: str, calls: Any) -> list[dict[str, Any]]:
    """Calls of functions in OpenAI's form. Raises ValueError for anything else."""
    plain = []
    for call in calls if isinstance(calls, list | tuple) else [calls]:
        function = call.get("function") if isinstance(call, Mapping) else None
        texts = function and [call.get("id", ""), function.get("name"), function.get("arguments")]
        if not isinstance(texts, list) or not all(isinstance(text, str) and is_unicode(text) for text in texts):
            raise ValueError(
                f"{where} holds {short(call)} and must hold {{'id': …, 'type': 'function', 'function': {{'name': …, "
                "'arguments': …}}, all of them strings; mend it"
            )
        name, arguments = texts[1:]
        try:
            data = json.loads(arguments)
        except (ValueError, RecursionError):  # a model may have written no JSON: it is shown as it is
            data = arguments
        plain.append({"id": texts[0], "type": "function", "function": {"name": name, "arguments": data}})
    return plain


def _text_of(where: str, part: Any) -> str:
    """The text of a part of a content."""
    if not isinstance(part, Mapping) or not isinstance(part.get("type"), str):
        raise ValueError(f"{where} is {short(part)} and must be {{'type': 'text', 'text': …}}; convert it")
    if part["type"] != "text":
        raise ValueError(f"{where} is of type {short(part['type'])}, and this model reads 'text' only; leave it out")
    if not isinstance(part.get("text"), str):
        raise ValueError(f"{where} has the text {short(part.get('text'))}, which must be a string; convert it")
    return part["text"]


class Renderer:
    """The process that renders, one conversation at a time. Threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def render(self, template: str, variables: Mapping[str, Any]) -> str:
        """The template's text. Raises ValueError, saying why in one sentence, where there is none within the limits."""
        line = json.dumps({"template": template, "variables": variables}).encode() + b"\n"
        with self._lock:
            reply = self._ask(line)
        if "error" in reply:
            raise ValueError(
                f"the chat template rejects these messages ({reply['error']}); change them to what it expects"
            )
        if "long" in reply:
            raise ValueError(
                f"the chat template makes more than {CHARACTERS} characters of these messages; shorten them, or mend it"
            )
        if not is_unicode(reply["text"]):
            raise ValueError("the chat template makes text of these messages that is no valid Unicode; mend it")
        return reply["text"]

    def close(self) -> None:
        """Ends the process, if there is one."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()

    def forget(self) -> None:
        """In a fork of this process: the other one keeps the renderer."""
        process, self._process, self._lock = self._process, None, threading.Lock()
        if process is not None:
            process.returncode = 0  # not ours to wait for
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    os.close(pipe.fileno())

    def _ask(self, line: bytes) -> dict[str, Any]:
        """The reply to a request. A process that was ended from outside is replaced."""
        for fresh in (self._process is None, True):
            try:
                process = self._started()
                reply = _exchange(process, line)
                ended = None if reply is not None else process.wait(PATIENCE)
            except (TimeoutError, subprocess.TimeoutExpired):
                reply, ended = None, -signal.SIGPROF
            except BaseException:  # what it says from now on would answer this question, not the next
                self.close()
                raise
            if reply is not None:
                return reply
            self.close()
            if ended == -signal.SIGPROF:
                raise ValueError(
                    f"the chat template takes longer than {SECONDS:g} s for these messages; shorten them, or mend it"
                )
            if fresh:
                break
        raise ValueError("the chat template brings down the process that renders it; mend it, or use generate")

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(CHILD)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                start_new_session=True,  # an interruption from the keyboard is not for it
            )
            setup = {"path": sys.path, "seconds": SECONDS, "bytes": BYTES, "characters": CHARACTERS}
            if _exchange(self._process, json.dumps(setup).encode() + b"\n") != "ready":
                raise RuntimeError(f"{sys.executable} cannot run {CHILD.name}, which renders chats; reinstall jinja2")
        return self._process


def _exchange(process: subprocess.Popen[bytes], line: bytes) -> Any:
    """Returns the process's answer to a line, None where it has ended. Raises TimeoutError."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        rest = memoryview(line)
        while rest:
            rest = rest[process.stdin.write(rest) or 0 :]
    except BrokenPipeError:
        return None
    deadline, said = time.monotonic() + PATIENCE, bytearray()
    ready = select.poll()
    ready.register(process.stdout, select.POLLIN | select.POLLHUP)
    while not said.endswith(b"\n"):
        if not ready.poll(max(0.0, deadline - time.monotonic()) * 1e3):
            raise TimeoutError
        piece = os.read(process.stdout.fileno(), 1 << 20)
        if not piece:
            return None
        said += piece
    return json.loads(said)


RENDERER = Renderer()
atexit.register(RENDERER.close)
os.register_at_fork(after_in_child=RENDERER.forget)
