"""A twist for a potential Φ, trained on the target's own answers: `smcjax.smc.heads` has what it is for.

Let R = Φ(x)/Φ(x_1:t) be what an answer x has yet to gain behind its beginning x_1:t. The loss of f = log ψ(x_1:t) is

    f + R·e^−f,

whose mean over answers of the target is least at ψ = E[R | x_1:t], the optimal twist beside Φ (Zhao et al. 2024, arXiv
2404.17546; FUDGE regresses so for Φ ≤ 1: Yang & Klein 2021, arXiv 2104.05218). It is gamma regression with a log link
(McCullagh & Nelder 1989): a factor of R moves f by its log and weighs no beginning more than another, so neither long
answers nor those that Φ hardly values go under.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from smcjax.checks import short
from smcjax.decoders.parts import Potential, hidden_size_of
from smcjax.decoders.text_potential import TextPotential
from smcjax.engine.results.outputs import RequestOutput
from smcjax.engine.run.settings import own_settings
from smcjax.files import write_atomically
from smcjax.model.files.checkpoint import load_checkpoint, resolve_model_path
from smcjax.model.files.hub import bundled_model
from smcjax.model.params import Params
from smcjax.smc import potential as of_tokens
from smcjax.smc.heads import Twist, TwistParams
from smcjax.tuning.answers import Answers, Asked, Batch, Batches, Sampling, answers_of, sample_outputs
from smcjax.tuning.laws import Laws, TargetStates, log_ratio_of
from smcjax.tuning.run import LINES, MARKS
from smcjax.tuning.train import Schedule, minimise

STEEPEST = 10.0  # log R − f, beyond which the loss goes on as a line, so that steps are finite


@dataclasses.dataclass(frozen=True)
class TwistReport:
    """One training."""

    held_out: list[list[float]]  # [step, mean loss of a beginning of answers to prompts held out]; 0: a constant's
    kept: int  # the step of the least of these, whose weights were written
    loss: list[list[float]]  # [step, mean loss a token since the last entry]
    settings: dict[str, Any]
    tokens: int  # of answers trained on
    seconds: float  # of training
    device: str


def require_trainable(potential: TextPotential | Potential) -> None:
    """Raises ValueError for potentials whose beginnings have values that a twist would only add to."""
    if isinstance(potential, TextPotential) and potential.ask is not None:
        raise ValueError(
            f"the potential {potential.name} values beginnings of answers itself, at {potential.ask!r}, in whose place "
            "a twist is trained; use it with ask=None."
        )
    if not isinstance(potential, TextPotential) and hidden_size_of(potential) is not None:
        raise ValueError(f"the potential {short(potential)} reads hidden states, as a twist does; give one of tokens.")


@own_settings()
def tune_twist(
    model: str | None,
    draft_model: str | None,
    potential: TextPotential | Potential,
    prompts: Sequence[Asked],
    held_out: Sequence[Asked],
    output: Path,
    *,
    sampling: Sampling,
    schedule: Schedule,
    samples: int = 8,
    units: int = 32,
    batch_tokens: int = 4096,
    on_line: Callable[[str], None] = lambda _: None,
) -> TwistReport:
    """Trains a twist of so many hidden `units` on so many `samples` a prompt, and writes it to the file `output`.

    Without `model` the pair is the bundled one, and without `draft_model` a model answers alone. Raises ValueError for
    potentials that are refused (`require_trainable`), fail, or forbid every answer.
    """
    require_trainable(potential)
    kinds = (prompts, held_out)
    found = sample_outputs(sampling, kinds, samples=samples, on_line=on_line, model=model, draft_model=draft_model)
    config, params = load_checkpoint(bundled_model("target") if model is None else resolve_model_path(model))
    laws = Laws(config, config, config.vocab_size, sampling.temperature)
    data, apart = (Gains.of(laws, params, potential, outputs, batch_tokens) for outputs in found)
    begin = initial(data, config.vocab_size, units, schedule.seed)
    on_line(f"{data.answers.answer.sum():,} tokens in {len(data.answers):,} answers, {len(apart.answers)} held out")

    began = time.perf_counter()
    course: list[list[float]] = []
    losses: list[jax.Array] = []
    best: tuple[float, int, TwistParams] = (apart.mean_loss(begin), 0, begin)
    marks: list[list[float]] = [[0, best[0]]]

    def on_step(step: int, own: jax.Array, params: TwistParams, state: Any) -> None:
        nonlocal best
        losses.append(own)
        if step % max(1, schedule.steps // LINES) == 0 or step == schedule.steps:
            course.append([step, float(np.mean(jax.device_get(losses)))])
            losses.clear()
        if step % max(1, schedule.steps // MARKS) == 0 or step == schedule.steps:
            mean = apart.mean_loss(params)
            marks.append([step, mean])
            on_line(f"step {step:5d} of {schedule.steps}: loss {course[-1][1]:.4f}, held out {mean:.4f}")
            if mean < best[0]:
                best = (mean, step, jax.tree.map(np.asarray, params))

    def scaled(params: TwistParams, given: Given) -> tuple[jax.Array, jax.Array]:
        total, count = loss(params, given)
        # Not by the batch's own number of tokens, so that a token weighs the same in a short batch.
        return total / data.batches.tokens_per_batch, total / jnp.maximum(count, 1.0)

    minimise(scaled, begin, data.batches, data.given, schedule, on_step=on_step)
    settings = {"model": model, "draft_model": draft_model, "potential": short(potential), "samples": samples}
    settings |= {"units": units, "batch_tokens": batch_tokens, **dataclasses.asdict(sampling)}
    report = TwistReport(
        held_out=marks,
        kept=best[1],
        loss=course,
        settings={**settings, **dataclasses.asdict(schedule), "seed": sampling.seed},
        tokens=int(data.answers.answer.sum()),
        seconds=time.perf_counter() - began,
        device=jax.devices()[0].device_kind,
    )
    write_atomically(output, Twist(best[2]).content(dataclasses.asdict(report)))
    return report


class Given(NamedTuple):
    """A batch as `loss` reads it."""

    hidden: Float[Array | np.ndarray, "B A E"]
    newest: Int[Array | np.ndarray, "B A"]
    log_gain: Float[Array | np.ndarray, "B A"]  # log R
    counted: Bool[Array | np.ndarray, "B A"]


def loss(params: TwistParams, given: Given) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """The sum of f + R·e^−f over a batch's beginnings, and their number."""
    value = params(jnp.asarray(given.hidden, jnp.float32), jnp.asarray(given.newest))
    missed = jnp.asarray(given.log_gain) - value
    near = jnp.minimum(missed, STEEPEST)
    terms = value + jnp.exp(near) * (1 + jnp.where(missed > STEEPEST, missed - near, 0.0))
    return jnp.sum(jnp.where(given.counted, terms, 0.0)), jnp.sum(given.counted, dtype=jnp.float32)


def initial(data: Gains, vocab_size: int, units: int, seed: int) -> TwistParams:
    """Parameters whose f is the mean of log R, whatever a beginning is.

    Raises ValueError where no answer has a gain.
    """
    valued = data.log_gain[data.alive & np.isfinite(data.log_gain)]
    if not len(valued):
        raise ValueError(
            f"the potential forbids all of {len(data.answers)} answers of the target, or they have one token, and a "
            "twist learns from those that it values; sample more, or soften it."
        )
    batch = data.batches.epoch()[0]
    states = np.asarray(data.states.of(batch), np.float32)
    size = states.shape[-1]
    scale = 1 / (math.sqrt(size) * max(float(np.sqrt(np.mean(states[batch.counted] ** 2))), 1e-6))
    up = scale * np.random.default_rng(seed).normal(size=(size, units))
    arrays = up, np.zeros(units), np.zeros((vocab_size, units)), np.full(vocab_size, valued.mean())
    return TwistParams(*(array.astype(np.float32) for array in arrays))


@dataclasses.dataclass(frozen=True)
class Gains:
    """Answers of the target, and what each has yet to gain behind its beginnings."""

    answers: Answers
    batches: Batches
    states: TargetStates
    log_gain: Float[np.ndarray, "n A"]  # log R behind t + 1 tokens
    alive: Bool[np.ndarray, "n A"]  # beginnings of positive value that are not whole answers

    @classmethod
    def of(
        cls,
        laws: Laws,
        target_params: Params,
        potential: TextPotential | Potential,
        outputs: Sequence[RequestOutput],
        batch_tokens: int,
    ) -> Gains:
        """Values the answers by the potential."""
        answers = answers_of(outputs)
        batches = Batches(answers, batch_tokens)
        states = TargetStates(laws, target_params, batches)
        if isinstance(potential, TextPotential):
            whole, beginnings = of_texts(potential, outputs), np.zeros((len(answers), answers.longest))
        else:
            logprobs = answers_logprobs(laws, target_params, batches, states)
            whole, beginnings = of_rows(potential, answers, logprobs)
        alive = (np.arange(answers.longest) < answers.answer[:, None] - 1) & np.isfinite(beginnings)
        log_gain = whole[:, None] - np.where(alive, beginnings, 0.0)
        return cls(answers, batches, states, log_gain, alive)

    def given(self, batch: Batch) -> Given:
        """Returns a batch as `loss` reads it."""
        columns = batch.counted.shape[1]
        return Given(
            hidden=self.states.of(batch),
            newest=batch.answer,
            log_gain=self.log_gain[batch.rows, :columns].astype(np.float32),
            counted=batch.counted & self.alive[batch.rows, :columns],
        )

    def mean_loss(self, params: TwistParams) -> float:
        """The mean loss of a beginning."""
        found = np.array([_loss(params, self.given(batch)) for batch in self.batches.epoch()], np.float64)
        return float(found[:, 0].sum() / max(found[:, 1].sum(), 1.0))


_loss = jax.jit(loss)


def of_texts(potential: TextPotential, outputs: Sequence[RequestOutput]) -> Float[np.ndarray, " n"]:
    """log Φ of the answers' texts, each prompt's asked at once. Raises ValueError with the potential's name."""
    found = np.zeros(len(outputs))
    rows: dict[str, list[int]] = {}
    for row, one in enumerate(outputs):
        assert one.prompt is not None
        rows.setdefault(one.prompt, []).append(row)
    for prompt, own in rows.items():
        try:
            found[own] = potential.values(prompt, [outputs[row].outputs[0].text for row in own], whole=True)
        except ValueError as error:
            raise ValueError(f"the potential {potential.name} failed: {error}.") from None
    return found


def of_rows(
    potential: Potential, answers: Answers, logprobs: Float[np.ndarray, "n T"]
) -> tuple[Float[np.ndarray, " n"], Float[np.ndarray, "n A"]]:
    """log Φ of the answers, and of their beginnings of 1, 2, … tokens."""

    @jax.jit
    def value(end: jax.Array, finished: jax.Array) -> jax.Array:
        tokens, begin = jnp.asarray(answers.tokens), jnp.asarray(answers.prompt)
        return potential.log_value(of_tokens.Answers(tokens, begin, end, finished, jnp.asarray(logprobs)))

    ends = answers.prompt + answers.answer
    whole = np.asarray(value(ends, np.ones(len(answers), bool)), np.float64)
    lengths = range(1, answers.longest + 1)
    unfinished = np.zeros(len(answers), bool)
    beginnings = [value(np.minimum(answers.prompt + length, ends), unfinished) for length in lengths]
    return whole, np.stack(beginnings, axis=1).astype(np.float64)


def answers_logprobs(
    laws: Laws, target_params: Params, batches: Batches, states: TargetStates
) -> Float[np.ndarray, "n T"]:
    """log p of the answers' tokens, in their columns."""
    answers = batches.answers
    found = np.zeros(answers.tokens.shape, np.float32)

    @jax.jit
    def of(params: Params, states: jax.Array, answer: jax.Array) -> jax.Array:
        log_p = laws.log_p(params, states)
        return log_ratio_of(log_p, jnp.zeros_like(log_p), answer)

    for batch in batches.epoch():
        made = np.asarray(of(target_params, states.of(batch), batch.answer))
        for row, own, counted in zip(batch.rows, made, batch.counted, strict=True):
            length, begin = int(counted.sum()), int(answers.prompt[row])
            found[row, begin : begin + length] = own[:length]
    return found
