"""`smcjax tune-draft`: from a file of prompts to a draft that SMC takes, and what it refuses before any work."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from smcjax.model import load_checkpoint, save_checkpoint
from tests.checkpoints import Pair
from tests.cli.conftest import Command

pytest.importorskip("optax")

EAGLE = Path(__file__).parents[2] / "data" / "eagle3"


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    path = tmp_path / "prompts.jsonl"
    lines: list[dict[str, Any]] = [{"prompt": f"{number} and"} for number in range(15)]
    path.write_text("\n".join(map(json.dumps, [*lines, {"messages": [{"role": "user", "content": "hi"}]}])))
    return str(path)


@pytest.mark.slow
def test_from_prompts_to_a_draft(smcjax: Command, pair: Pair, prompts: str, tmp_path: Path) -> None:
    output = tmp_path / "made" / "draft"
    short = ("--max-tokens", "8", "--max-model-len", "32", "--steps", "4", "--batch-tokens", "256", "-K", "2", "--json")
    arguments = ("--model", pair.target, "--draft", pair.draft, "--prompts", prompts, "-o", str(output))
    result = smcjax("tune-draft", *arguments, *short)
    assert result.code == 0, result.err
    assert "step     4 of 4: loss" in result.err
    assert "14 answers to train on, 2 held out" in result.err
    report = json.loads(result.out.splitlines()[-1])
    assert report["settings"]["gamma"] == 2
    assert report["before"]["kl"][0] > 0
    assert f"{report['after']['kl'][0]:.4g} (" in next(line for line in result.out.splitlines() if "KL" in line)
    assert (output / "tuning" / "curve.svg").read_text().startswith("<?xml")
    assert load_checkpoint(output)[0] == load_checkpoint(pair.draft)[0]
    again = smcjax("tune-draft", *arguments, *short)
    assert again.code == 2
    assert "is not empty, and a model is never written over; name another directory" in again.err


def refused(smcjax: Command, output: Path, *arguments: str) -> str:
    result = smcjax("tune-draft", "-o", str(output), *arguments)
    assert result.code in (1, 2)
    assert result.err.count("\n") == 1, result.err
    return result.err


def test_drafts_that_cannot_be_trained(smcjax: Command, pair: Pair, prompts: str, tmp_path: Path) -> None:
    output, given = tmp_path / "out", ("--prompts", prompts, "--model", pair.target)
    save_checkpoint(*load_checkpoint(pair.draft), tmp_path / "int8", quantization="int8")
    for draft, sentence in {
        "ngram": "--draft-model is 'ngram', which has no weights to train; name a model",
        str(EAGLE): "is an EAGLE-3 head, which drafts by the target's states",
        str(tmp_path / "int8"): "holds its matrices in int8, which cannot be trained",
        "recall": "has Native Sparse Attention, whose choice of blocks has no gradient here",
    }.items():
        assert sentence in refused(smcjax, output, *given, "--draft-model", draft)
    error = refused(smcjax, output, *given, "--draft-drop-layers", "0")
    assert "--draft-drop-layers: layers to drop are [0], which are all that the model has" in error
    assert "--draft-model is not; give both" in refused(smcjax, output, *given)
    assert not output.exists()


def test_files_that_do_not_fit(smcjax: Command, prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output, one = tmp_path / "out", tmp_path / "one.jsonl"
    assert "--prompts nosuch cannot be read" in refused(smcjax, output, "--prompts", "nosuch")
    one.write_text('{"prompt": "a"}\n')
    assert "holds one prompt, and one has to be held out" in refused(smcjax, output, "--prompts", str(one))
    one.write_text("a\n")
    assert f"--prompts {one} line 1: it is no JSON" in refused(smcjax, output, "--prompts", str(one))
    assert "--context is an option of --prompts recall" in refused(
        smcjax, output, "--prompts", "words", "--context", "99"
    )
    assert "--output must be a directory, got the file" in refused(smcjax, one, "--prompts", prompts)
    (output / "tuning").mkdir(parents=True)
    (output / "tuning" / "state.safetensors").write_bytes(b"")
    assert "holds a training that was interrupted; add --resume" in refused(smcjax, output, "--prompts", prompts)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    error = refused(smcjax, tmp_path / "new", "--prompts", prompts)
    assert "smcjax tune-draft needs optax, which is not installed; run 'uv run --extra train smcjax" in error
