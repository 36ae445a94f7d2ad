"""`smcjax bench serve` against a real server: every request is answered and counted, and failures are told."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest

from smcjax.bench import client
from smcjax.bench.client import ClientLoad
from smcjax.cli.main import main
from smcjax.tasks.questions import Question
from tests.server.conftest import EXACT_NAME, Running


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets the prompts: the tiny models have no room for word problems."""

    def given(*prompts: str) -> None:
        monkeypatch.setattr(client, "questions", lambda *_: [Question(prompt, lambda _: [True]) for prompt in prompts])

    return given


def bench(server: Running, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, dict[str, Any], str]:
    with tempfile.TemporaryDirectory() as directory:
        saved = Path(directory) / "load.json"
        code = main(["bench", "serve", "--base-url", server.url, "--max-tokens", "9", "--save", str(saved), *options])
        (row,) = json.loads(saved.read_text())["rows"]
    return code, row, capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--request-rate", "50"), ("--max-concurrency", "1")])
def test_figures(server: Running, ask: Any, capsys: pytest.CaptureFixture[str], options: tuple[str, ...]) -> None:
    ask("ab", "abc", "abcd", "a", "b")
    code, result, err = bench(server, capsys, "-n", "5", "--model", EXACT_NAME, *options)
    assert (code, err) == (0, "")
    assert (result["model"], result["completed"], result["failed"]) == (EXACT_NAME, 5, 0)
    assert result["total_input_tokens"] == 11
    assert 5 <= result["total_output_tokens"] <= 45
    assert result["output_throughput"] == pytest.approx(result["total_output_tokens"] / result["duration"])
    assert 0 < result["median_ttft_ms"] <= result["median_e2el_ms"] <= result["p99_e2el_ms"]
    if "--max-concurrency" in options:  # one after the other
        assert 5 * result["mean_e2el_ms"] / 1e3 <= result["duration"]


def test_failures_are_counted_and_told(server: Running, ask: Any, capsys: pytest.CaptureFixture[str]) -> None:
    ask("ab", "a" * 200, "abc")
    code, result, err = bench(server, capsys, "-n", "3")
    assert code == 0
    assert (result["completed"], result["failed"]) == (2, 1)
    assert "1 of 3 requests failed; the first: 400: the prompt has 200 tokens" in err
    ask("a" * 200)
    code, result, _ = bench(server, capsys, "-n", "1")
    assert (code, result["completed"], result["median_ttft_ms"]) == (1, 0, None)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--base-url", "http://127.0.0.1:9"], "no server answers at http://127.0.0.1:9"),
        (["--base-url", "nowhere"], "no server answers at nowhere"),
        (["--model", "other"], "the server has no model other; use one of pair"),
    ],
)
def test_what_is_not_there(server: Running, capsys: pytest.CaptureFixture[str], options: list[str], says: str) -> None:
    where = [] if "--base-url" in options else ["--base-url", server.url]
    assert main(["bench", "serve", *where, *options]) == 1
    err = capsys.readouterr().err
    assert says in err
    assert err.count("\n") == 1


def test_urls() -> None:
    assert {ClientLoad(url).url for url in ("http://a", "http://a/", "http://a/v1", "http://a/v1/")} == {"http://a/v1"}
