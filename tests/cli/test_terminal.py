"""A terminal: answers appear as they become certain, lines are edited, and Ctrl-C ends an answer or a line.

The model behind the commands is a fake that says piece after piece, so that every moment can be met.
"""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

FAKE = """
import dataclasses, sys, time, types
from typing import Any

@dataclasses.dataclass
class Chunk:
    text: str
    output: Any = None

class Chunks:
    def __init__(self, prompt):
        self.prompt = prompt
        self.pieces = iter(["\\n\\n", "to ", prompt, ":\\n", "first ", "second", "\\n", None])
    def __iter__(self):
        return self
    def __next__(self):
        piece = next(self.pieces)
        if piece is not None:
            {delay}
            return Chunk(piece)
        metrics = types.SimpleNamespace(
            generated_tokens=3, tokens_per_second=1.0, cycles=1, mean_accepted_length=None, mean_ess=1.0, resamples=0
        )
        answer = types.SimpleNamespace(finish_reason="stop")
        smc = types.SimpleNamespace(particles=[1], log_evidence={evidence}, control=0.0)
        return Chunk("", types.SimpleNamespace(error=None, decoding="smc", metrics=metrics, outputs=[answer], smc=smc))
    def close(self):
        pass

class LLM:
    tokenizer = types.SimpleNamespace(has_chat_template=True)
    def __init__(self, *args, **options):
        pass
    def __enter__(self):
        return self
    def __exit__(self, *_):
        pass
    def chat_prompt(self, messages):
        return " + ".join(message["content"] for message in messages)
    def generate_stream(self, prompt, params):
        return Chunks(prompt)

sys.modules["smcjax.engine.llm"] = types.SimpleNamespace(LLM=LLM)
from smcjax.cli import process
sys.argv = ["smcjax", *sys.argv[1:]]
sys.exit(process.main())
"""
SLOW = "time.sleep(2 if piece == 'second' else 0)"
# Each says on the terminal when it has begun, so that a test may interrupt it and nothing before it.
INTERRUPTED = """if piece == 'second' and self.prompt == 'one':
                print('(making)', file=sys.stderr, flush=True)
                from smcjax.cli import interrupts
                interrupts._State.stopped.wait(60)"""
STUCK = """if piece == 'first ':
                print('(stuck)', file=sys.stderr, flush=True)
                import hashlib
                hashlib.pbkdf2_hmac('sha256', b'', b'', 2**31 - 1)"""


class Terminal:
    """A command in a terminal of its own."""

    def __init__(self, *argv: str, delay: str = SLOW, evidence: float = 0.0, out: int | None = None) -> None:
        self._ours, theirs = pty.openpty()
        script = FAKE.format(delay=delay, evidence=evidence)
        self.process = subprocess.Popen(
            ["env", "--default-signal=INT", "TERM=dumb", sys.executable, "-c", script, *argv],
            stdin=theirs,
            stdout=theirs if out is None else out,
            stderr=theirs,
            start_new_session=True,
        )
        os.close(theirs)
        self.shown = ""

    def until(self, text: str) -> str:
        """Reads on until `text` is shown, and returns what is shown since the last time."""
        deadline = time.monotonic() + 60
        while text not in self.shown and time.monotonic() < deadline:
            if not select.select([self._ours], [], [], 1)[0]:
                continue
            try:
                self.shown += os.read(self._ours, 1024).decode()
            except OSError:  # it has ended
                break
        before, found, self.shown = self.shown.partition(text)
        assert found, f"{text!r} never came, but {before!r}"
        return before

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def end(self) -> int:
        code = self.process.wait(timeout=30)
        return code

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)


@pytest.fixture
def terminal() -> Iterator[Callable[..., Terminal]]:
    opened: list[Terminal] = []

    def make(*argv: str, **options: object) -> Terminal:
        opened.append(Terminal(*argv, **options))
        return opened[-1]

    yield make
    for one in opened:
        one.close()


def test_ctrl_c_ends_an_answer_and_a_line_and_not_the_chat(terminal: Callable[..., Terminal]) -> None:
    chat = terminal("chat", delay=INTERRUPTED)
    chat.until("> ")
    chat.type("one\n")
    assert "second" not in chat.until("(making)")
    chat.interrupt()
    assert "second" in chat.until("(interrupted)")  # the piece that was being made, and not what comes behind it
    chat.until("> ")
    chat.type("half a li")
    time.sleep(0.3)
    chat.interrupt()
    chat.until("/exit or Ctrl-D")
    chat.until("> ")
    chat.type("two\x01really \n")  # Ctrl-A: to the beginning of the line
    chat.until("to one + to one:")  # the conversation is kept, with as much of the answer as was there
    assert "half" not in chat.until("really two:")
    chat.until("log evidence")
    chat.until("> ")
    chat.type("\x04")
    assert chat.end() == 0


def test_a_second_ctrl_c_ends_what_does_not_return_to_python(terminal: Callable[..., Terminal]) -> None:
    chat = terminal("chat", delay=STUCK)
    chat.until("> ")
    chat.type("one\n")
    chat.until("(stuck)")
    chat.interrupt()
    time.sleep(0.3)
    assert chat.process.poll() is None  # the first one waits for the end of the cycle
    chat.interrupt()
    chat.until("smcjax: interrupted")
    assert chat.end() == 130


def test_generate_shows_a_terminal_what_is_certain(terminal: Callable[..., Terminal]) -> None:
    generate = terminal("generate", "hi", evidence=-30.0)
    begin = generate.until("first ")
    assert begin == "to hi:\r\n"  # the terminal's own \r
    assert generate.process.poll() is None
    generate.until("second\r\n[smc · 3 tokens")
    generate.until("warning: this prompt does not look like a word problem")
    assert generate.end() == 0
    generate = terminal("generate", "hi", "--quiet", delay="pass", evidence=-30.0)
    generate.until("first second\r\n")
    assert generate.end() == 0
    with pytest.raises(AssertionError, match="never came, but ''"):  # no figures, no warning
        generate.until("log evidence")


def piped(*argv: str, text: str, delay: str = "pass") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", FAKE.format(delay=delay, evidence=-30.0), *argv]
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=60, check=False)


def test_a_pipe_gets_the_whole_text() -> None:
    done = piped("generate", text="hi\n")  # where input is piped, it is the prompt
    assert (done.returncode, done.stdout) == (0, "to hi:\nfirst second\n")
    assert "warning" in done.stderr
    done = piped("generate", text="", delay="1 / 0 if piece == 'second' else 0")
    assert (done.returncode, done.stdout) == (2, "")
    assert "comes from standard input, and that is empty" in done.stderr
    done = piped("generate", "hi", text="", delay="1 / 0 if piece == 'second' else 0")
    assert (done.returncode, done.stdout) == (1, "")  # nothing, rather than half an answer


def test_the_doubt_is_said_once() -> None:
    done = piped("chat", text="hi\nyes\n")
    assert done.stderr.count("does not look like a word problem") == 1
    for option in (["--model", "m", "--draft-model", "d"], ["--power", "2"], ["--quiet"]):
        assert "does not look like" not in piped("chat", *option, text="hi\n").stderr
