"""`smcjax serve` as a process: one sentence where it cannot begin; a first signal drains it, a second ends it."""

from __future__ import annotations

import gc
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from smcjax.cli.commands.serve import KEY_VARIABLE, keys_of
from smcjax.cli.main import main, make_parser
from smcjax.server import process as process_module
from smcjax.server.process import LAST_STEPS, keep_what_is_loaded
from smcjax.server.state import Settings
from tests.checkpoints import Pair, write_pair

ASK: dict[str, Any] = {"prompt": "ab", "max_tokens": 1000, "ignore_eos": True, "stream": True}
# Steps that take a while, so that signals come in the middle of an answer.
SLOW = """
import os, sys, time
from smcjax.cli import process
from smcjax.engine.engine import Engine
step = Engine.step
def slow(engine, *args):
    time.sleep(float(os.environ["STEP_SECONDS"]))
    return step(engine, *args)
Engine.step = slow
sys.argv = ["smcjax", *sys.argv[1:]]
sys.exit(process.main())
"""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return write_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture
def process(pair: Pair, request: pytest.FixtureRequest) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server of the target alone, by further options where a test has some, and its URL."""
    options = ["--model", pair.target, "--decoding", "autoregressive", "--port", "0", "--max-model-len", "1024"]
    more, seconds = getattr(request, "param", ([], 0.01))
    options += more
    command = [sys.executable, "-c", SLOW, "serve", *options, "--page-size", "4", "--max-num-seqs", "1"]
    settings = {**os.environ, "NPROC": "2", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "STEP_SECONDS": str(seconds)}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=settings) as process:
        assert process.stderr is not None
        found = None
        while found is None:
            line = process.stderr.readline()
            assert line, "it ended"
            found = re.search(r"serving target, target:autoregressive at (http://127\.0\.0\.1:\d+)/v1", line)
        yield process, found.group(1)
        process.kill()


@pytest.mark.slow
def test_signals(process: tuple[subprocess.Popen[str], str]) -> None:
    server, url = process
    with httpx.stream("POST", f"{url}/v1/completions", json=ASK, timeout=120) as stream:
        lines = stream.iter_lines()
        while not next(lines).startswith("data"):
            pass
        server.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        assert server.poll() is None
        assert httpx.get(f"{url}/health").status_code == 503
        assert next(lines) is not None
        server.send_signal(signal.SIGTERM)
        with pytest.raises(httpx.RemoteProtocolError):
            list(lines)
    assert server.wait(10) == 128 + signal.SIGTERM


@pytest.mark.slow
def test_one_signal_ends_it_in_order(process: tuple[subprocess.Popen[str], str]) -> None:
    server, url = process
    with httpx.stream("POST", f"{url}/v1/completions", json={**ASK, "max_tokens": 60}, timeout=120) as stream:
        lines = stream.iter_lines()
        while not next(lines).startswith("data"):
            pass
        server.send_signal(signal.SIGINT)
        assert [line for line in lines if line][-1] == "data: [DONE]"
    assert server.wait(10) == 0
    assert server.stderr is not None
    first, *_, last = server.stderr.read().strip().split("\n")
    assert first == f"smcjax: open {url} in a browser"
    assert last == "smcjax: draining, for 30 s at most; a second signal ends at once"


@pytest.mark.slow
@pytest.mark.parametrize("process", [(["--drain-seconds", "1"], 600)], indirect=True)
def test_a_drain_has_a_deadline(process: tuple[subprocess.Popen[str], str]) -> None:
    """Neither a request, nor a step or a compilation that takes minutes; `test_bounds.py` has a reader that stalls."""
    server, url = process
    host, port = url.removeprefix("http://").split(":")
    body = json.dumps({**ASK, "n": 20, "logprobs": 20}).encode()
    with socket.create_connection((host, int(port)), timeout=60) as stalled:
        head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
        stalled.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        time.sleep(3)  # and the request has come, on a busy machine too
        server.send_signal(signal.SIGTERM)
        began = time.monotonic()
        assert server.wait(30) == 0
        assert time.monotonic() - began < 1 + LAST_STEPS + 5
    assert server.stderr is not None
    said = server.stderr.read()
    assert "smcjax: 1 requests were cut after 1 s" in said
    assert "smcjax: what still ran on the device or in threads was cut" in said


def test_by_default_it_ends_within_35_seconds() -> None:
    """By the deadlines that the tests above hold it to."""
    assert make_parser().parse_args(["serve"]).drain_seconds == Settings().drain_seconds
    assert Settings().drain_seconds + LAST_STEPS < 35


def refused(capfd: pytest.CaptureFixture[str], *options: str) -> tuple[int, str]:
    """The exit code and the last line of stderr."""
    capfd.readouterr()
    try:
        code = main(["serve", *options])
    except SystemExit as ended:
        code = int(ended.code or 0)
    return code, capfd.readouterr().err.strip().split("\n")[-1]


def test_the_target_stands_first_or_behind_its_option(capfd: pytest.CaptureFixture[str]) -> None:
    code, said = refused(capfd, "/no/model", "--draft-model", "/no/draft")
    mend = "pass a model directory, a GGUF file or a hub id"
    assert (code, said) == (1, f"smcjax: error: --model /no/model does not exist; {mend}.")
    code, said = refused(capfd, "/no/model", "--model", "/no/other", "--draft-model", "/no/draft")
    assert (code, "leave one of them out" in said) == (2, True)


def test_a_missing_extra_is_said_before_anything_loads(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "smcjax.server.process")
    monkeypatch.delattr("smcjax.server.process")
    code, said = refused(capfd)
    assert code == 1
    assert said.startswith(
        "smcjax: error: smcjax serve needs uvicorn, which is not installed; run 'uv run --extra serve "
    )


def test_collections_leave_out_what_is_loaded() -> None:
    gc.unfreeze()  # what `conftest.py` leaves out already
    try:
        assert len(gc.get_objects()) > 20_000
        keep_what_is_loaded()
        assert gc.get_freeze_count() > 10_000
        assert not gc.get_objects()[10_000:], "what is left to go through"
    finally:
        gc.unfreeze()


def test_serving_begins_with_that(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models are loaded by then, and no request has come."""
    happened: list[str] = []

    async def close() -> None:
        happened.append("close")

    monkeypatch.setattr(process_module, "keep_what_is_loaded", lambda: happened.append("keep"))
    monkeypatch.setattr(process_module.Server, "__init__", lambda *_: None)
    monkeypatch.setattr(process_module.Server, "run", lambda *_, **__: happened.append("run"))
    served: Any = SimpleNamespace(models=SimpleNamespace(names=["a"], close=close), close=lambda: None)
    wakeup = signal.set_wakeup_fd(-1)
    try:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            process_module.serve(served, listening)
    finally:
        signal.set_wakeup_fd(wakeup)
    assert happened == ["keep", "run", "close"]


def test_a_port_in_use(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        code, said = refused(capfd, "--port", port)
    assert code == 1
    assert said == f"smcjax: error: port {port} of 127.0.0.1 is in use; choose another by --port."


def test_what_is_refused_before_anything_is_loaded(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    empty = tmp_path / "keys"
    empty.write_text("# none\n\n")
    endless = "--api-key-file /dev/zero is longer than 1 MiB"
    for options, says in (
        (["--host", "0.0.0.0"], "--host is 0.0.0.0, which other machines can reach, and there is no key"),
        (["--api-key", "short"], "a key must have at least 8 characters"),
        (["--api-key-file", str(tmp_path / "no")], "cannot be read (No such file or directory)"),
        (["--api-key-file", str(empty)], "holds no key"),
        (["--api-key-file", "/dev/zero"], endless),
        (["--also", "Beam(n=3)"], "argument --also: must be smc, rejection, autoregressive, or one with options"),
        (["--also", "SMC(x=3)"], "argument --also: SMC has no argument x; it has n_particles, gamma,"),
        (["--also", "SMC(gamma=0)"], "argument --also: gamma must be a whole number from 1 to 64, got 0; see"),
        (["--port", "70000"], "must be a whole number from 0 to 65535"),
        (["--decoding", "autoregressive", "-N", "4"], "--n-particles is an option of"),
    ):
        code, said = refused(capfd, *options)
        assert code == 2
        assert says in said


def test_a_file_of_keys_may_begin_with_a_mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mark of byte order that editors write is no part of the first key."""
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    path = tmp_path / "keys"
    path.write_text("first-key-1\n# a remark\nsecond-key-2\n", encoding="utf-8-sig")
    assert keys_of(SimpleNamespace(api_key=[], api_key_file=str(path))) == ("first-key-1", "second-key-2")
