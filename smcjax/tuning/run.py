"""From prompts to a tuned draft: answers, training, figures before and after, files.

A directory is written that any loader of Hugging Face models reads, and in its folder `tuning/` a report with the loss
curve, as JSON and as a picture. While training lasts that folder also holds the target's answers and, from time to
time, the state of training, from which an interrupted run goes on.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from smcjax.engine.run.settings import own_settings
from smcjax.files import write_atomically
from smcjax.model.params import Params
from smcjax.tuning.answers import Answers, Asked, Batches, Sampling, answers_of, sample_outputs
from smcjax.tuning.laws import TargetStates
from smcjax.tuning.measure import Figures, measure
from smcjax.tuning.pair import Paths, load_pair, write_draft
from smcjax.tuning.state import leaves_by_number, read_arrays, require_same, tree_like, write_arrays
from smcjax.tuning.train import Objective, Schedule, train

MARKS = 10  # figures on held-out answers and states, in a training
LINES = 20  # of progress


@dataclasses.dataclass(frozen=True)
class Report:
    """The figures of one training; `Figures` are of held-out answers."""

    before: Figures  # of the draft as it was
    after: Figures  # of it as it is in the files written
    loss: list[list[float]]  # [step, mean loss a token since the last entry]
    held_out: list[dict[str, Any]]  # {"step": …, and the fields of `Figures`}, in the course of training
    settings: dict[str, Any]
    tokens: int  # of answers trained on
    seconds: float  # of training
    device: str


@own_settings()
def tune(
    paths: Paths,
    prompts: Sequence[Asked],
    held_out: Sequence[Asked],
    output: Path,
    *,
    sampling: Sampling,
    objective: Objective,
    schedule: Schedule,
    batch_tokens: int = 4096,
    on_line: Callable[[str], None] = lambda _: None,
) -> Report:
    """Trains the draft and writes it. Goes on from what `output` holds of an interrupted run with the same settings.

    `on_line` hears of progress. Raises ValueError for settings other than the interrupted run's.
    """
    folder = output / "tuning"
    folder.mkdir(parents=True, exist_ok=True)
    asked = {"model": str(paths.target), "draft_model": str(paths.draft), "draft_drop_layers": list(paths.dropped)}
    digest = hashlib.sha256(json.dumps([*prompts, *held_out]).encode()).hexdigest()
    drawn = {**asked, "prompts": digest, **dataclasses.asdict(sampling)}
    answers, apart = _answers(folder / "answers.safetensors", paths, prompts, held_out, sampling, drawn, on_line)
    settings = {**drawn, **dataclasses.asdict(objective), "batch_tokens": batch_tokens}
    settings |= {**dataclasses.asdict(schedule), "seed": sampling.seed}

    pair = load_pair(paths, sampling.temperature)
    batches, unseen = Batches(answers, batch_tokens), Batches(apart, batch_tokens)
    on_line(f"{answers.answer.sum():,} tokens in {len(answers):,} answers to train on, {len(apart)} held out")
    states = TargetStates(pair.laws, pair.target_params, batches)
    unseen_states = TargetStates(pair.laws, pair.target_params, unseen)

    def figures(draft_params: Params) -> Figures:
        return measure(pair.laws, pair.target_params, draft_params, unseen, unseen_states, objective.gamma)

    before = figures(pair.draft_params)
    on_line(f"as it was: {described(before)}")
    course = _Course(folder / "state.safetensors", settings, schedule, figures, on_line)
    begin, params = course.begun(pair.draft_params)
    params = train(
        pair.laws,
        pair.target_params,
        params,
        batches,
        states,
        objective,
        schedule,
        begin=begin,
        on_step=course,
    )
    write_draft(paths, pair.laws.draft, params, pair.dtype, output)
    written = load_pair(dataclasses.replace(paths, draft=output, dropped=()), sampling.temperature)
    report = Report(
        before=before,
        after=figures(written.draft_params),
        loss=course.loss,
        held_out=course.held_out,
        settings=settings,
        tokens=int(answers.answer.sum()),
        seconds=course.seconds,
        device=jax.devices()[0].device_kind,
    )
    write_atomically(folder / "report.json", (json.dumps(dataclasses.asdict(report), indent=1) + "\n").encode())
    for name in ("answers", "state"):
        (folder / f"{name}.safetensors").unlink(missing_ok=True)
    return report


def described(figures: Figures) -> str:
    """One line."""
    return (
        f"held out: χ² of a block {figures.weight_variance[0]:.3g}, D₂ {figures.token_divergence[0]:.3g} and KL "
        f"{figures.kl[0]:.3g} nats a token, accepted {figures.acceptance[0]:.4f}"
    )


def _answers(
    path: Path,
    paths: Paths,
    prompts: Sequence[Asked],
    held_out: Sequence[Asked],
    sampling: Sampling,
    drawn: dict[str, Any],
    on_line: Callable[[str], None],
) -> tuple[Answers, Answers]:
    """The target's answers to both kinds of prompts, drawn now or by the run that was interrupted."""
    kinds = ("train", "held_out")
    if (kept := read_arrays(path)) is not None:
        arrays, facts = kept
        require_same(path, facts, drawn)
        on_line(f"answers of the target as {path} has them")
        train, apart = (
            Answers(*(arrays[f"{kind}/{one.name}"] for one in dataclasses.fields(Answers))) for kind in kinds
        )
        return train, apart
    outputs = sample_outputs(
        sampling,
        (prompts, held_out),
        on_line=on_line,
        model=str(paths.target),
        draft_model=str(paths.draft),
        draft_drop_layers=list(paths.dropped) or None,
    )
    found = [answers_of(one) for one in outputs]
    arrays = {
        f"{kind}/{name}": array for kind, one in zip(kinds, found, strict=True) for name, array in vars(one).items()
    }
    write_arrays(path, arrays, drawn)
    return found[0], found[1]


class _Course:
    """Hears of every step: progress, the loss curve, figures on held-out answers, and the state to go on from."""

    def __init__(
        self,
        path: Path,
        settings: dict[str, Any],
        schedule: Schedule,
        figures: Callable[[Params], Figures],
        on_line: Callable[[str], None],
    ) -> None:
        self._path, self._settings, self._schedule = path, settings, schedule
        self._figures, self._on_line = figures, on_line
        self.loss: list[list[float]] = []
        self.held_out: list[dict[str, Any]] = []
        self._losses: list[jax.Array] = []
        self._before, self._began = 0.0, time.perf_counter()

    @property
    def seconds(self) -> float:
        """Wall time of training, with what held-out figures take."""
        return self._before + time.perf_counter() - self._began

    def begun(self, draft_params: Params) -> tuple[tuple[int, Any] | None, Params]:
        """How far an interrupted run was, as `train` takes it, and the weights to go on with."""
        if (kept := read_arrays(self._path)) is None:
            return None, draft_params
        arrays, facts = kept
        require_same(self._path, facts["settings"], self._settings)
        shapes = jax.eval_shape(lambda params: (params, self._schedule.optimizer().init(params)), draft_params)
        params, state = tree_like(shapes, arrays, self._path)
        self.loss, self.held_out, self._before = facts["loss"], facts["held_out"], facts["seconds"]
        self._on_line(f"going on at step {facts['step']} of {self._schedule.steps}")
        return (facts["step"], state), params

    def __call__(self, step: int, loss: jax.Array, params: Params, state: Any) -> None:
        steps = self._schedule.steps
        self._losses.append(loss)
        if step % max(1, steps // LINES) == 0 or step == steps:
            mean = float(np.mean(jax.device_get(self._losses)))
            self._losses.clear()
            self.loss.append([step, mean])
            self._on_line(f"step {step:5d} of {steps}: loss {mean:.4f} nats a token, {self.seconds:.0f} s")
        if step % max(1, steps // MARKS) == 0 or step == steps:
            found = self._figures(params)
            self.held_out.append({"step": step, **dataclasses.asdict(found)})
            self._on_line(f"step {step:5d} of {steps}: {described(found)}")
            facts = {"settings": self._settings, "step": step, "loss": self.loss, "held_out": self.held_out}
            arrays = leaves_by_number((params, state))
            write_arrays(self._path, arrays, {**facts, "seconds": self.seconds})
