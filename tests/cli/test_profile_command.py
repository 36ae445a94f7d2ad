"""`smcjax profile` and what reads its file: one command writes it, `--profile` decodes by it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from smcjax.bench.profile import Profiler
from smcjax.planner import Profile
from tests.checkpoints import Pair
from tests.cli.conftest import Command

MODELS = ("--page-size", "4")
SMALL = ("--requests", "1", "--contexts", "8", "--cycles", "2", "--windows", "1", "-n", "2")
SMALL += ("--decoding", "Rejection(gamma=2)")


@pytest.mark.slow
def test_a_profile_is_written_and_read(smcjax: Command, pair: Pair, tmp_path: Path) -> None:
    path, models = str(tmp_path / "p.json"), ("--model", pair.target, "--draft-model", pair.draft, *MODELS)
    result = smcjax("profile", *models, *SMALL, "-o", path, "--max-tokens", "8", "--clock", "cpu")
    assert result.code == 0, result.err
    made = Profile.load(path)
    assert [str(one.decoding) for one in made.strategies] == ["target alone", "rejection, K=2"]
    assert (made.settings["prompts"], made.settings["clock"]) == (2, "cpu")
    assert "| rejection, K=2 |" in result.out
    assert "Best over the loads: " in result.out
    assert result.err.count("ms a cycle") == 2
    again = smcjax("generate", "hello", *models, "--decoding", "auto", "--profile", path, "--max-tokens", "4")
    assert again.code == 0, again.err
    value = json.loads(Path(path).read_text())
    value["device"] = "a GPU"
    Path(path).write_text(json.dumps(value))
    refused = smcjax("generate", "hello", *models, "--decoding", "auto", "--profile", path)
    assert refused.code == 2
    assert "--profile is of a GPU and this device is cpu" in refused.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--requests", "3", "8"), "--requests must be powers of two, but for the largest"),
        (("-o", "/nowhere/p.json"), "--output must lie in a directory that can be written to"),
        (("--temperature", "0", "--decoding", "SMC()"), "temperature is 0"),
        (("--budget", "0"), "must be a number above 0"),
        (("--task", "recall", "--contexts", "128", "2048"), "--contexts must be at least 256, the shortest document"),
        (("--draft-model", "x"), "--draft-model is given and --model is not"),
        (("--contexts", "500"), "lower --contexts, lower --windows, lower --cycles, or lower gamma."),
    ],
)
def test_refusals(smcjax: Command, arguments: tuple[str, ...], said: str) -> None:
    result = smcjax("profile", *arguments)
    assert result.code == 2
    assert said in result.err


def test_the_bundled_pair_has_room_for_the_usual_profile(
    smcjax: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command without options comes as far as its measurements. Negative control: twice as many cycles do not."""
    monkeypatch.delattr(Profiler, "measure")
    path = str(tmp_path / "p.json")
    assert "has no attribute 'measure'" in smcjax("profile", "-o", path).err
    assert "while they are timed" in smcjax("profile", "-o", path, "--cycles", "20").err


def test_a_profile_is_for_auto(smcjax: Command) -> None:
    result = smcjax("generate", "hello", "--profile", "p.json")
    assert result.code == 2
    assert "--profile is an option of --decoding auto, got --decoding smc; leave it out." in result.err
