"""generate, eval and bench do what they say: answers on stdout, everything else on stderr."""

from __future__ import annotations

import dataclasses
import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import pytest

from smcjax import LLM, SMC, Autoregressive, Rejection, SamplingParams
from smcjax.bench import cycle
from smcjax.bench.cycle import Case, CycleResult
from smcjax.bench.models import Models
from smcjax.viz.trace_file import load_trace
from tests.checkpoints import Pair
from tests.cli.conftest import Command

SMALL = ["-N", "3", "-K", "2"]


def rows_of(saved: str) -> list[dict[str, Any]]:
    """The rows of a record that a command saved."""
    rows: list[dict[str, Any]] = json.loads(Path(saved).read_text())["rows"]
    return rows


@pytest.mark.slow
def test_generate_prints_the_answer_alone_on_stdout(smcjax: Command, models: list[str], pair: Pair) -> None:
    result = smcjax("generate", "hello", *models, *SMALL, "--max-tokens", "9", "--seed", "4", "--temperature", "0.9")
    assert result.code == 0
    with LLM(
        pair.target, draft_model=pair.draft, decoding=SMC(3, 2), max_model_len=48, page_size=4, max_num_seqs=1
    ) as llm:
        output = llm.generate("hello", SamplingParams(max_tokens=9, seed=4, temperature=0.9), use_tqdm=False)[0]
    assert result.out == output.outputs[0].text.strip("\n") + "\n"
    assert f"{output.metrics.generated_tokens} tokens" in result.err
    assert "log evidence" in result.err
    assert "control 0.10" in result.err
    assert "Traceback" not in result.err


def test_generate_by_the_target_alone(smcjax: Command, models: list[str]) -> None:
    arguments = ["generate", "hello", *models, "--decoding", "autoregressive", "--max-tokens", "4"]
    greedy = [smcjax(*arguments, "--temperature", "0", "--seed", seed) for seed in "12"]
    assert greedy[0].code == 0
    assert greedy[0].out == greedy[1].out != "\n"
    assert "ESS" not in greedy[0].err


def test_where_no_decoder_is_named(smcjax: Command, models: list[str]) -> None:
    """The rule of `LLM` holds without a draft; the figures say who ran."""
    without_draft = [word for at, word in enumerate(models) if "--draft-model" not in models[max(at - 1, 0) : at + 1]]
    assert "[autoregressive · " in smcjax("generate", "hello", "--max-tokens", "4", *without_draft).err


STOP_IDS = ("--stop-token-ids", "7", "--stop-token-ids", "9")


@pytest.mark.parametrize("command", [["generate", "hello"], ["chat"], ["eval", "-n", "1"]])
def test_what_a_request_asks_for_is_passed_on(
    smcjax: Command, models: list[str], command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[SamplingParams] = []

    def answer(self: LLM, prompts: Any, params: Any, **kwargs: Any) -> Any:
        asked.append(params[0] if isinstance(params, list) else params)
        raise ValueError("enough")

    monkeypatch.setattr(LLM, "generate", answer)
    monkeypatch.setattr(LLM, "generate_stream", answer)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"hi\n"), encoding="utf-8"))
    options = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "max_tokens": 9, "min_tokens": 5}
    words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    smcjax(*command, *models, "--decoding", "autoregressive", *words, "--stop", "a", "--stop", "b", *STOP_IDS)
    (one,) = asked
    assert one == SamplingParams(**options, stop=["a", "b"], stop_token_ids=[7, 9], seed=one.seed)
    assert (one.seed is None) == (command == ["chat"])


@pytest.mark.parametrize("mark", ["\ufeff", ""])
def test_the_prompt_may_come_from_standard_input(
    smcjax: Command, models: list[str], monkeypatch: pytest.MonkeyPatch, mark: str
) -> None:
    asked: list[str] = []

    def answer(self: LLM, prompt: str, *args: Any, **kwargs: Any) -> Any:
        asked.append(prompt)
        raise RuntimeError("enough")

    monkeypatch.setattr(LLM, "generate_stream", answer)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(f"{mark}né\nhé\n".encode()), encoding="utf-8"))
    assert smcjax("generate", "-", *models, *SMALL).err.endswith("smcjax: error: enough\n")
    assert asked == ["né\nhé"]


@pytest.mark.parametrize("command", [["generate", "hello"], ["chat"], ["eval", "-n", "1"]])
def test_smc_refuses_to_cut_off_before_anything_is_loaded(
    smcjax: Command, models: list[str], command: list[str]
) -> None:
    result = smcjax(*command, *models, *SMALL, "--decoding", "smc", "--top-p", "0.9")
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("smcjax: error: --top-p is 0.9")
    assert "use --decoding rejection or autoregressive, which honour" in result.err


def test_generate_writes_a_trace(smcjax: Command, models: list[str], tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    result = smcjax("generate", "hello", *models, *SMALL, "--max-tokens", "9", "--trace", str(path))
    assert result.code == 0
    assert str(path) in result.err
    trace = load_trace(path)
    assert (trace.prompt, trace.n_particles, trace.gamma) == ("hello", 3, 2)
    assert trace.cycles >= 1
    assert trace.texts is not None
    assert trace.texts[trace.selected].strip("\n") == result.out.rstrip("\n")


@pytest.mark.slow
def test_eval_reports_accuracy_with_its_interval(smcjax: Command, pair: Pair, tmp_path: Path) -> None:
    saved = str(tmp_path / "eval.json")
    models = ["--model", pair.target, "--draft-model", pair.draft, "--max-model-len", "800"]
    result = smcjax("eval", *models, "-n", "2", *SMALL, "--max-tokens", "6", "--json", "--save", saved)
    assert result.code == 0
    report = rows_of(saved)[0]
    assert json.loads(result.out.splitlines()[-1]) == report
    assert {"accuracy", "ci_low", "ci_high", "n", "tokens_per_second", "tokens_per_cycle"} <= report.keys()
    assert (report["accuracy"], report["n"]) == (0, 2)
    assert report["ci_low"] == 0 < report["ci_high"] < 1
    assert report["tokens_per_second"] > 0
    assert report["tokens_per_cycle"] > 0
    assert "SMC, N=3, K=2" in result.out.splitlines()[0]
    assert "\r" not in result.err  # a progress bar is for a terminal


@pytest.mark.slow
def test_eval_asks_about_long_documents(smcjax: Command, tmp_path: Path) -> None:
    """The task brings its own pair: each of 16 lines counts, and nearly all are right."""
    saved = str(tmp_path / "eval.json")
    task = ["--task", "recall", "--context", "1100", "-n", "1", "--save", saved, "--temperature", "0"]
    result = smcjax("eval", *task, "--decoding", "autoregressive")
    assert result.code == 0
    report = rows_of(saved)[0]
    assert report["n"] == 16
    assert report["accuracy"] > 0.9
    assert "16 lines of answer, target alone" in result.out.splitlines()[0]


def test_eval_names_the_problem_that_does_not_fit(smcjax: Command, models: list[str]) -> None:
    result = smcjax("eval", *models, "-n", "1")  # these problems are longer than 48 bytes
    assert result.code == 2
    assert "request 0: the prompt has" in result.err


def test_bench_saves_on_request_only(smcjax: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    saved = str(tmp_path / "cycle.json")
    figures: dict[str, Any] = {field.name: 1.0 for field in dataclasses.fields(CycleResult)}
    figures |= {
        "device": "test",
        "decoding": "autoregressive",
        "described": "target alone",
        "gamma": 0,
        "ms_windows": [1.0, 2.0],
    }
    asked: list[tuple[Any, ...]] = []

    def bench(models: Models, cases: Sequence[Case], *, bandwidth: float | None) -> list[CycleResult]:
        asked.append((models, *cases, bandwidth))
        return [CycleResult(**figures)]

    monkeypatch.setattr(cycle, "run_cases", bench)
    on_gpu = jax.default_backend() == "gpu"
    shapes = ("llama-3.1-8b", "llama-3.2-1b") if on_gpu else ("tiny-target", "tiny-draft")
    arguments = ["bench", "cycle", "--decoding", "autoregressive", "--bandwidth", "5"]
    table = smcjax(*arguments)
    assert table.code == 0
    assert "target alone" in table.out
    assert "scratch" in table.out
    assert "{" not in table.out
    named = dict(zip(("target", "draft"), shapes, strict=True))
    assert smcjax(*arguments, "--save", saved).out == table.out
    assert rows_of(saved) == [{**named, **figures}]
    assert "that can be written to" in smcjax(*arguments, "--save", str(tmp_path / "no" / "x.json")).err
    assert asked[0] == asked[1]
    assert asked[0][1:] == (Case(Autoregressive()), 5e9)
    assert smcjax("bench", "cycle", "-N", "5", "-K", "6", "--draft-quantization", "int8").code == 0
    assert asked[2] == (Models(*shapes, None, "int8"), Case(SMC(5, 6, control=0)), None)
    assert smcjax("bench", "cycle", "--target-shape", "llama-3.1-8b", "--draft-shape", "llama-3.2-1b").code == 0
    assert asked[3][0] == Models("llama-3.1-8b", "llama-3.2-1b")
    written = {
        "SMC(gamma=1, defer_bonus=False)": SMC(5, 1, control=0, defer_bonus=False),
        "SMC(control=0.1, ess_threshold=1.0)": SMC(5, 8, control=0.1, ess_threshold=1.0),
        "rejection": Rejection(8, n_candidates=5),
        "Rejection(tree=(2, 1))": Rejection(tree=(2, 1)),
    }
    for text in written:
        assert smcjax("bench", "cycle", "-N", "5", "--decoding", text).code == 0
    assert [case.decoding for _, case, _ in asked[4:]] == [*written.values()]


def test_devices_that_do_not_fit(smcjax: Command) -> None:
    for arguments, message in (
        (("bench", "cycle", "--tensor-parallel-size", "512"), "--tensor-parallel-size is 512 and tiny-target has"),
        (("bench", "cycle", "--draft-tensor-parallel-size", "3"), "--draft-tensor-parallel-size must be 1 or"),
        (("bench", "cycle", "--compare", "--tensor-parallel-size", "2"), "--compare has no peer"),
        (("bench", "cycle", "--separate-draft", "--decoding", "SMC(defer_bonus=False)"), "smc without options, whose"),
        (("bench", "cycle", "--target-layers", "3"), "--target-layers must be 1 to 2"),
        (("generate", "a", "--tensor-parallel-size", "0"), "--tensor-parallel-size"),
        (("generate", "a", "--tensor-parallel-size", "1024"), "--tensor-parallel-size is 1024 and JAX has"),
    ):
        shapes = ["--target-shape", "tiny-target", "--draft-shape", "tiny-draft"] if arguments[0] == "bench" else []
        result = smcjax(*arguments, *shapes)
        assert result.code == 2
        assert message in result.err


def test_bench_table_prints_markdown(smcjax: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    saved = str(tmp_path / "table.json")
    figures: dict[str, Any] = {field.name: 1.0 for field in dataclasses.fields(CycleResult)}
    figures |= {"device": "test", "decoding": "smc", "private": 0, "quantization": None, "draft_quantization": "int8"}
    figures |= {"attention": "nsa", "target_layers": None}
    asked: list[Any] = []

    def run_cases(models: Models, cases: list[Case], **options: Any) -> list[CycleResult]:
        asked.append((models, cases))
        options["on_result"]("a case: 1 ms")
        return [CycleResult(**figures)] * len(cases)

    monkeypatch.setattr(cycle, "run_cases", run_cases)
    options = ["--draft-quantization", "int8", "--attention", "nsa"]
    result = smcjax("bench", "table", "--contexts", "32", "--requests", *options, "--save", saved)
    assert result.code == 0
    assert [case.context for case in asked[0][1]] == [32, 32, 32, 32]  # N, 2N, 2K, the target alone
    assert (asked[0][0].draft_quantization, asked[0][0].attention) == ("int8", "nsa")
    assert "a case: 1 ms" in result.err
    assert f"{asked[0][0].draft} (int8) → {asked[0][0].target} with nsa," in result.out
    lines = result.out.splitlines()
    assert sum(line.startswith("|") for line in lines) == 2 + 4
    assert len(rows_of(saved)) == 4
    assert smcjax("bench", "table", "--contexts", "0").code == 2
