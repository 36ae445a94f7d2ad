"""SMC says after which cycle the evidence had fallen faster than a rate allows, by Page's rule on its reports."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from smcjax.decoders import ALARM, SMC, WARNING_RATE
from smcjax.smc import ConstantPotential, RejectionControl
from smcjax.smc.decoder import SMCDecoder
from smcjax.smc.history import alarmed_after
from tests.helpers import tiny_pair

PROMPT, N = 5, 3


def reports(seed: int, spread: float = 1.0) -> list[Any]:
    """Made-up cycles of N particles: weights that fall, rows that grow unequally, some resamplings, one dead row."""
    rng = np.random.default_rng(seed)
    log_weight, length, found = np.zeros(N), np.full(N, PROMPT + 1), []
    for _ in range(12):
        log_weight = log_weight + spread * rng.normal(-1.0, 1.0, N)
        if rng.random() < 0.2:
            log_weight[rng.integers(N)] = -np.inf
        weighed, resampled = length + rng.integers(0, 5, N), bool(rng.random() < 0.4)
        ancestors = rng.choice(np.flatnonzero(np.isfinite(log_weight)), N) if resampled else np.arange(N)
        length = weighed[ancestors]
        found.append(
            SimpleNamespace(
                log_weight=log_weight.astype(np.float32),
                weighed=weighed.astype(np.int32),
                length=length.astype(np.int32),
                ancestors=ancestors.astype(np.int32),
                resampled=np.bool_(resampled),
                control=np.float32(0),
                ess=np.float32(1),
            )
        )
        if resampled:
            log_weight = np.zeros(N)
    return found


def by_hand(infos: list[Any], rate: float, *, forgets: bool = True, weighs: bool = True) -> int | None:
    """Page's rule in plain Python; without `forgets` resamplings are missed, without `weighs` all rows count alike."""
    before, begun, excess = [1.0] * N, [PROMPT + 1] * N, 0.0
    for cycle, info in enumerate(infos, 1):
        after = [math.exp(x) for x in info.log_weight]
        share = [w / sum(before) if weighs else 1 / N for w in before]
        tokens = sum(s * (int(end) - begin) for s, end, begin in zip(share, info.weighed, begun, strict=True))
        excess = max(0.0, excess + math.log(sum(before) / sum(after)) - rate * tokens)
        if excess > ALARM:
            return cycle
        before = [1.0] * N if info.resampled and forgets else after
        begun = [int(x) for x in info.length]
    return None


RUNS = [reports(seed, spread) for seed in range(40) for spread in (0.4, 1.0)]


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_it_is_pages_rule(rate: float) -> None:
    """Control: resamplings left out, or tokens of rows that weigh little counted like others', is another rule."""
    found = [alarmed_after(run, PROMPT, rate) for run in RUNS]
    assert found == [by_hand(run, rate) for run in RUNS]
    assert 5 < sum(one is None for one in found) < 75
    for mistake in ("forgets", "weighs"):
        assert found != [by_hand(run, rate, **{mistake: False}) for run in RUNS]


@pytest.mark.parametrize("broken", [-np.inf, np.nan])
def test_a_group_that_fails_has_no_warning_beside_its_error(broken: float) -> None:
    run = reports(1, 0.0)
    run[-1].log_weight = np.full(N, broken, np.float32)
    assert alarmed_after(run, PROMPT, 0.5) is None
    assert alarmed_after([], PROMPT, 0.5) is None


def report(run: list[Any], how: dict[str, Any], *, constrained: bool = False, control: float | None = None) -> Any:
    pair = tiny_pair()
    decoder = SMCDecoder(SMC(N, 4, **how), pair.target, pair.draft, 64)
    return decoder.report(run, PROMPT, 1, constrained=constrained, control=control)


def test_what_is_said_and_when_nothing_is() -> None:
    """Evidence falls by itself at other powers, under potentials and under a form."""
    fallen = next(run for run in RUNS if alarmed_after(run, PROMPT, WARNING_RATE))
    cycle = alarmed_after(fallen, PROMPT, WARNING_RATE)
    told = report(fallen, {"control": 0.0})
    assert told.warning.startswith(f"the evidence fell 3 nats below 0.5 a token after {cycle} of 12 cycles: the draft ")
    assert told.warning.endswith("; a control above 0 rejects such drafts")
    assert told.control == 0.0
    assert report(fallen, {}).warning.endswith("; a control above 0.1 rejects more of them")
    assert report(fallen, {}).control == 0.1
    assert report(fallen, {}, control=0.2).warning.endswith("; a control above 0.2 rejects more of them")
    assert report(fallen, {}, constrained=True).warning is None
    assert report(fallen, {"power": 2.0}).warning is None
    assert report(fallen, {"potentials": (ConstantPotential(),)}).warning is None
    own = report(fallen, {"control": RejectionControl(0.2)})
    assert own.warning.endswith("; a rule that rejects more such drafts, or more particles, follow it closer")
    assert own.control is None
    calm = next(run for run in RUNS if not alarmed_after(run, PROMPT, WARNING_RATE))
    assert report(calm, {}).warning is None
