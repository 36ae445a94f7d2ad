"""`smcjax tune-twist`: from a potential and prompts to a file that requests take, and what it refuses before work."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from smcjax import SamplingParams, TextPotential, smc
from tests.checkpoints import Pair
from tests.cli.conftest import Command

pytest.importorskip("optax")


def vowels(prompt: str, texts: list[str]) -> list[float]:
    return [float(sum(letter in "aeiou" for letter in text)) for text in texts]


OWN = TextPotential(vowels, ask=2)
PLACE = f"{__name__}:vowels"


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": f"{number} and"}) for number in range(8)))
    return str(path)


@pytest.mark.slow
def test_from_a_potential_to_a_request(smcjax: Command, pair: Pair, prompts: str, tmp_path: Path) -> None:
    output = tmp_path / "made" / "twist.safetensors"
    short = ("--max-tokens", "8", "--max-model-len", "32", "--steps", "4", "--samples", "3", "--units", "4", "--json")
    arguments = ("--model", pair.target, "--draft", pair.draft, "--prompts", prompts, "-o", str(output))
    result = smcjax("tune-twist", "--potential", PLACE, *arguments, *short)
    assert result.code == 0, result.err
    assert "step     4 of 4: loss" in result.err
    assert "21 answers, 3 held out" in result.err
    report = json.loads(result.out.splitlines()[-1])
    assert report["settings"]["samples"] == 3
    assert report["kept"] in {step for step, _ in report["held_out"]}
    twist = smc.Twist.load(output)
    assert SamplingParams(potentials=[TextPotential(vowels), twist]).potentials == (TextPotential(vowels), twist)
    again = smcjax("tune-twist", "--potential", PLACE, *arguments, *short)
    assert again.code == 2
    assert "exists, and nothing is written over; name another file" in again.err


def test_what_cannot_be_trained(smcjax: Command, prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(potential: str, *arguments: str) -> str:
        output = tmp_path / "twist.safetensors"
        result = smcjax("tune-twist", "--potential", potential, "--prompts", prompts, "-o", str(output), *arguments)
        assert result.code in (1, 2)
        assert result.err.count("\n") == 1, result.err
        assert not output.exists()
        return result.err

    assert "--potential must be MODULE:OBJECT, got 'vowels'" in refused("vowels")
    assert "cannot be imported: No module named 'nosuch'" in refused("nosuch:vowels")
    for neither in (f"{__name__}:PLACE", "smcjax.smc:ConstantPotential"):  # text, and the class of a potential
        assert "it must be a potential or a function" in refused(neither)
    assert "values beginnings of answers itself, at 2" in refused(f"{__name__}:OWN")
    assert "--draft-model is set and --model is not" in refused(PLACE, "--draft-model", "words-draft")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "smcjax tune-twist needs optax, which is not installed" in refused(PLACE)
