"""A file of requests: answered in order like each alone; a bad line is named before anything is loaded."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from smcjax import LLM, SMC, SamplingParams
from smcjax.smc import history
from tests.checkpoints import Pair
from tests.cli.conftest import Command

SMALL = ["-N", "3", "-K", "2", "--max-tokens", "6"]
LINES = [
    {"prompt": "hello", "seed": 4, "id": "first"},
    {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "seed": 5},
    {"prompt": "né", "temperature": 1.1, "stop": ["q"]},
]


def jsonl(*lines: object) -> str:
    return "".join(json.dumps(line) + "\n" for line in lines)


def test_results_are_those_of_each_alone_in_order(
    smcjax: Command, models: list[str], pair: Pair, tmp_path: Path
) -> None:
    asked, answered = tmp_path / "x.jsonl", tmp_path / "y.jsonl"
    asked.write_text("\n" + jsonl(*LINES))  # an empty line counts, and asks nothing
    files = ["--input-file", str(asked), "--output-file", str(answered)]
    result = smcjax("generate", *files, *models, *SMALL, "--seed", "9", "--max-num-seqs", "1")
    assert (result.code, result.out) == (0, "")
    assert "\r" not in result.err
    assert "3 requests" in result.err
    results = [json.loads(line) for line in answered.read_text().splitlines()]
    assert [one["id"] for one in results] == ["first", 3, 4]
    usual = {"max_tokens": 6, "temperature": 0.7}
    with LLM(
        pair.target, draft_model=pair.draft, decoding=SMC(3, 2), max_model_len=48, page_size=4, max_num_seqs=1, seed=9
    ) as llm:
        prompts: list[Any] = ["hello", llm.chat_prompt([{"role": "user", "content": "hi"}]), "né"]
        params = [{**usual, "seed": 4}, {**usual, "max_tokens": 3, "seed": 5}, {"temperature": 1.1, "stop": ["q"]}]
        alone = llm.generate(prompts, [SamplingParams(**{**usual, **one}) for one in params], use_tqdm=False)
    for one, output in zip(results, alone, strict=True):
        assert one["text"] == output.outputs[0].text
        assert one["finish_reason"] == output.outputs[0].finish_reason
        assert one["generated_tokens"] == output.metrics.generated_tokens
        assert one["prompt_tokens"] == len(output.prompt_token_ids)
        assert output.smc is not None
        assert one["log_evidence"] == pytest.approx(output.smc.log_evidence)
        assert one.get("warning") == output.smc.warning
    assert len({one["text"] for one in results}) > 1  # so that another order would show


def test_results_go_to_standard_output(smcjax: Command, models: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    text = jsonl(LINES[0]).encode("utf-8-sig")  # a byte-order mark is no part of a line
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text), encoding="utf-8"))
    monkeypatch.setattr(history, "ALARM", -1.0)  # so that whatever is answered comes with a warning
    result = smcjax("generate", "--input-file", "-", *models, *SMALL, "--quiet")
    assert (result.code, result.err) == (0, "")
    told = json.loads(result.out)
    assert told["id"] == "first"
    assert told["warning"].startswith("the evidence fell 3 nats below 0.5 a token after 1 of ")


BAD = [
    ("{", "it is no JSON ("),
    ("[1]", "it must be an object, got [1]."),
    ("{}", "it must have one of prompt and messages"),
    (json.dumps({"prompt": "a", "messages": []}), "it must have one of prompt and messages"),
    (json.dumps({"prompt": ""}), "prompt must be valid Unicode of at least one character, got ''."),
    ('{"prompt": "\\ud800"}', "prompt must be valid Unicode"),
    (json.dumps({"messages": ["hi"]}), "messages must be objects with role and content, got 'hi'."),
    (json.dumps({"prompt": "a", "max_token": 3}), "it has the unknown field 'max_token'; did you mean max_tokens?"),
    (json.dumps({"prompt": "a", "best_of": 3}), "it has the unknown field 'best_of', and prompt, messages, id, max"),
    (json.dumps({"prompt": "a", "max_tokens": 0}), "max_tokens must be a whole number of at least 1"),
    (json.dumps({"prompt": "a", "temperature": "hot"}), "temperature must be 0 (greedy)"),
    (
        json.dumps({"prompt": "a", "top_k": 3, "control": 0.1}),
        "top_k is 3, and draft",
    ),  # which SMC does not decode
    ('{"prompt": "a", "temperature": NaN}', "it holds NaN, which is no JSON"),
    (json.dumps({"prompt": "a", "id": [1]}), "id must be text or a whole number, got [1]."),
]


@pytest.mark.parametrize(("line", "reason"), BAD, ids=[line[:40] for line, _ in BAD])
def test_a_bad_line_is_named_before_anything_is_loaded(
    smcjax: Command, tmp_path: Path, line: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*args: object, **options: object) -> None:
        raise AssertionError("loaded")

    monkeypatch.setattr(LLM, "__init__", load)
    path = tmp_path / "x.jsonl"
    path.write_text(jsonl({"prompt": "fine"}) + line + "\n")
    result = smcjax("generate", "--input-file", str(path))
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith(f"smcjax: error: --input-file {path} line 2: {reason}")
    assert len(result.err.splitlines()) == 1


def test_a_prompt_that_is_too_long_is_named_by_its_line(smcjax: Command, models: list[str], tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(jsonl({"prompt": "fine"}, {"prompt": "x" * 60}))
    result = smcjax("generate", "--input-file", str(path), "--output-file", str(tmp_path / "y"), *models, *SMALL)
    assert result.code == 2
    assert f"--input-file {path} line 2: the prompt has 60 tokens" in result.err
    assert not (tmp_path / "y").exists()


def test_a_file_without_requests(smcjax: Command, tmp_path: Path) -> None:
    (tmp_path / "x").write_text("\n \n")
    assert "holds no request; write one a line." in smcjax("generate", "--input-file", str(tmp_path / "x")).err
    (tmp_path / "x").write_bytes(b"\xff")
    assert (
        "must be utf-8 text, got byte 0 of another kind." in smcjax("generate", "--input-file", str(tmp_path / "x")).err
    )
