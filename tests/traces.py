"""Random histories of a population, as the engine would report them, with what the report alone does not tell."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from smcjax.engine.results.completion import normalized
from smcjax.engine.results.outputs import CompletionOutput, Particle, RequestMetrics, RequestOutput, SMCOutput, Trace
from smcjax.viz.trace_file import TraceFile

_KEPT = {field.name for field in dataclasses.fields(TraceFile)}  # of a trace, in its file


@dataclasses.dataclass(frozen=True)
class History:
    """A request's output and, node by node, whether the sequence had ended: [C+1, N]."""

    output: RequestOutput
    ended: np.ndarray

    @property
    def trace(self) -> TraceFile:
        """Returns the `TraceFile` that loading this output's file should give."""
        output, smc = self.output, self.output.smc
        assert smc is not None
        assert smc.trace is not None
        proposals = smc.trace.ancestors.size
        return TraceFile(
            prompt=output.prompt,
            n_particles=len(smc.particles),
            gamma=output.metrics.drafted // proposals if proposals else None,
            final_log_weights=smc.log_weights,
            log_evidence=smc.log_evidence,
            **{name: value for name, value in vars(smc.trace).items() if name in _KEPT},
        )


def random_ancestors(cycles: int, n: int, seed: int, moving: float = 0.6) -> tuple[np.ndarray, np.ndarray]:
    """[C] resampled and [C, N] ancestors."""
    rng = np.random.default_rng(seed)
    resampled = rng.random(cycles) < moving
    drawn = np.sort(rng.choice(n, (cycles, n), p=rng.dirichlet(np.ones(n))), axis=1)
    return resampled, np.where(resampled[:, None], drawn, np.arange(n)).astype(np.int32)


def history(
    cycles: int,
    n: int,
    *,
    seed: int = 0,
    gamma: int = 3,
    prompt: str | None = "a prompt",
    text: str | None = "text",
    impossible: float = 0.2,
) -> History:
    """Blocks of gamma + 1 tokens a cycle, shorter at rejections and ends; what has weight at the end has ended."""
    rng = np.random.default_rng(seed)
    resampled, ancestors = random_ancestors(cycles, n, seed)
    block = gamma + 1
    length, over = np.ones(n, np.int64), rng.random(n) < 0.1
    lengths, ended = np.zeros((cycles, n), np.int32), np.zeros((cycles + 1, n), bool)
    ended[0] = over
    for t, parents in enumerate(ancestors):
        length, over = length[parents], over[parents]
        ending = ~over & (rng.random(n) < 0.25)
        rejected = rng.random(n) < 0.2
        length = length + np.where(over, 0, np.where(ending | rejected, rng.integers(1, block + 1, n), block))
        over = over | ending
        lengths[t], ended[t + 1] = length, over

    def weights(*shape: int) -> np.ndarray:
        return np.where(rng.random(shape) < impossible, -np.inf, 3 * rng.standard_normal(shape)).astype(np.float32)

    final = weights(n)
    final[~over] = -np.inf
    smc = SMCOutput(
        log_evidence=-math.pi if np.isfinite(final).any() else -math.inf,
        particles=[
            Particle([1], float(log_weight), "stop", text or "", float(weight))
            for log_weight, weight in zip(final, normalized(final), strict=True)
        ],
        log_weights=final,
        selected=int(final.argmax()),
        control=0.0,
        trace=Trace(
            ess=rng.uniform(1, n, cycles).astype(np.float32),
            resampled=resampled,
            ancestors=ancestors,
            log_weights=weights(cycles, n),
            lengths=lengths,
            finished=ended[1:],
            texts=None if text is None else [f"{text} {j}" for j in range(n)],
            selected=int(final.argmax()),
        ),
    )
    metrics = RequestMetrics(cycles, int(resampled.sum()), 1, cycles * n * gamma, 0.1, None)
    answer = CompletionOutput(0, text or "", [1], "stop")
    return History(RequestOutput("r0", prompt, [1], [answer], True, metrics, smc), ended)
