"""A draft is trained, written and read again; an interrupted training ends as one that was not."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest

from smcjax.model import drop_layers, load_checkpoint
from smcjax.tokenizer.tokenizer import Tokenizer
from smcjax.tuning import run
from smcjax.tuning.answers import Sampling
from smcjax.tuning.pair import Paths
from smcjax.tuning.run import Report, tune
from smcjax.tuning.train import Objective, Schedule
from tests.checkpoints import Pair, write_model, write_pair

pytest.importorskip("optax")

PROMPTS, HELD_OUT = [f"{number} and" for number in range(24)], ["one", "two", "three", "four"]
STEPS = 20


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return write_pair(tmp_path_factory.mktemp("pair"))


Tune = Callable[..., Report]


@pytest.fixture(scope="module")
def tuned(pair: Pair) -> Tune:
    def tune_into(
        output: Path, *, model: str = pair.target, dropped: list[int] | None = None, seed: int = 0, **how: object
    ) -> Report:
        paths = Paths.of(model, None if dropped else pair.draft, draft_drop_layers=dropped)
        sampling = Sampling(temperature=0.8, max_tokens=12, seed=seed, max_num_seqs=8, max_model_len=32)
        return tune(
            paths,
            PROMPTS,
            HELD_OUT,
            output,
            sampling=sampling,
            objective=Objective(gamma=3),
            schedule=Schedule(STEPS, 1e-2, seed),
            batch_tokens=256,
            **how,
        )

    return tune_into


@pytest.fixture(scope="module")
def whole(tuned: Tune, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Report]:
    output = tmp_path_factory.mktemp("whole") / "draft"
    return output, tuned(output)


def test_the_draft_comes_nearer(whole: tuple[Path, Report], pair: Pair) -> None:
    output, report = whole
    assert report.after.kl[0] < 0.8 * report.before.kl[0]
    assert report.after.token_divergence[0] < 0.8 * report.before.token_divergence[0]
    assert report.after.acceptance[0] > report.before.acceptance[0]
    assert report.loss[-1][1] < 0.8 * report.loss[0][1]
    assert [point["step"] for point in report.held_out] == list(range(2, STEPS + 1, 2))
    # What is written is the last step's weights, rounded to the dtype of the draft that was read.
    assert report.after.kl[0] == pytest.approx(report.held_out[-1]["kl"][0], rel=0.05)
    assert json.loads((output / "tuning" / "report.json").read_text()) == as_json(dataclasses.asdict(report))
    assert sorted(path.name for path in (output / "tuning").iterdir()) == ["report.json"]
    before, after = (json.loads((Path(place) / "config.json").read_text()) for place in (pair.draft, output))
    assert after["dtype"] == before["dtype"]
    assert load_checkpoint(output)[0] == load_checkpoint(pair.draft)[0]
    assert Tokenizer.load(output).vocab == Tokenizer.load(pair.draft).vocab


def as_json(values: object) -> object:
    return json.loads(json.dumps(values))


class Stopped(Exception):
    pass


@pytest.mark.slow
def test_an_interrupted_training_goes_on(
    whole: tuple[Path, Report], tuned: Tune, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit to the same draft. Controls: another seed ends elsewhere, other settings are refused."""
    output = tmp_path / "draft"
    lines: list[str] = []

    def stop(line: str) -> None:
        lines.append(line)
        if line.startswith("step    13"):  # behind the state of step 12
            raise Stopped

    with pytest.raises(Stopped):
        tuned(output, on_line=stop)
    assert not (output / "model.safetensors").exists()
    with pytest.raises(ValueError, match=r"seed is 1 and was 0 in the training that .*draft holds; give it as it was"):
        tuned(output, seed=1)
    monkeypatch.setattr(run, "sample_outputs", None)  # answers are not drawn again
    report = tuned(output, on_line=lines.append)
    assert any(line == "going on at step 12 of 20" for line in lines)
    assert (output / "model.safetensors").read_bytes() == (whole[0] / "model.safetensors").read_bytes()
    assert as_json(report.held_out) == as_json(whole[1].held_out)
    assert [step for step, _ in report.loss] == [step for step, _ in whole[1].loss]
    monkeypatch.undo()
    tuned(tmp_path / "other", seed=1)
    assert (tmp_path / "other" / "model.safetensors").read_bytes() != (output / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_a_draft_made_of_the_target(tuned: Tune, tmp_path: Path) -> None:
    """A draft can be made of a target of two layers, without its first."""
    target = write_model(tmp_path / "target", 272, 1, num_layers=2)
    report = tuned(tmp_path / "draft", model=target, dropped=[0])
    config, params = load_checkpoint(tmp_path / "draft")
    wanted, begun = drop_layers(*load_checkpoint(target), [0])
    assert config == wanted
    assert report.after.kl[0] < report.before.kl[0]
    assert max(float(abs(a - b).max()) for a, b in zip(*map(jax.tree.leaves, (params, begun)), strict=True)) > 1e-3


def test_files_of_another_kind(tuned: Tune, tmp_path: Path) -> None:
    (tmp_path / "tuning").mkdir()
    (tmp_path / "tuning" / "answers.safetensors").write_bytes(np.arange(9).tobytes())
    with pytest.raises(ValueError, match=r"answers\.safetensors cannot be gone on from .*; remove it to begin anew"):
        tuned(tmp_path)
