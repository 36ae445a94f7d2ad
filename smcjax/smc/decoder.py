"""SMC as the engine's decoder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from smcjax.decoders import ALARM, SMC, USUAL_RATE
from smcjax.decoding.decoder import Decoder, Report, RowsAfter
from smcjax.smc import lifecycle, steps
from smcjax.smc.history import History, alarmed_after, trace_of
from smcjax.smc.state import Info, State


class SMCDecoder(Decoder[SMC, State, Info]):
    """Weighted particles, resampled when their weights become uneven."""

    begin = lifecycle.begin
    start = lifecycle.start
    step = steps.step
    conclude = lifecycle.conclude

    def rows_after(self, info: Info) -> RowsAfter:
        """A particle is alive while its weight is above 0, and after a resampling in any case."""
        alive = np.full(len(info.length), bool(info.resampled)) | ~np.isneginf(info.log_weight)
        ancestors = np.asarray(info.ancestors)
        own = np.arange(len(ancestors), dtype=np.int32)
        return RowsAfter(
            ancestors, alive, np.asarray(info.finished), ancestors if self.decoding.branching is None else own
        )

    def history(self, prompt_length: int) -> History:
        """A follower of one group's cycles."""
        return History(prompt_length, branched=self.decoding.branching is not None)

    def report(
        self,
        infos: Sequence[Info],
        prompt_length: int,
        kept: int,
        *,
        control: float | None = None,
        trace: bool = False,
        constrained: bool = False,
    ) -> Report:
        """Resamplings, the mean ESS, the control and, with `trace` or `SMC(trace=True)`, the population's history.

        Where nobody watches, a warning says that evidence fell by more than `USUAL_RATE` a token, but for other powers
        than 1 and answers of a given form, whose evidence falls by itself.
        """
        smc = self.decoding
        control = smc.control if control is None else control
        controls = [info.control for info in infos]  # each of the cycle after it
        raised = int(np.sum(np.array(controls, np.float32) > np.float32(control)))
        warning = self._raised(len(infos), raised, control) if raised else None
        if smc.watchdog is None and smc.power == 1.0 and not constrained:
            warning = self._unwatched(infos, prompt_length, control)
        return Report(
            control=smc.raised_control if raised else control,
            raised_cycles=max(raised - 1, 0),  # the last of these did not run
            warning=warning,
            resamples=sum(bool(info.resampled) for info in infos),
            mean_ess=float(np.mean([info.ess for info in infos])) if infos else None,
            trace=self._trace(infos, prompt_length) if trace or self.decoding.trace else None,
        )

    def _unwatched(self, infos: Sequence[Info], prompt_length: int, control: float) -> str | None:
        lam = self.decoding.branching
        cycle = alarmed_after(infos, prompt_length, USUAL_RATE, branched=lam is not None)
        if cycle is None:
            return None
        fallen = (
            f"the evidence fell {ALARM:g} nats below {USUAL_RATE:g} a token after {cycle} of {len(infos)} cycles: the "
            "draft misses what the target wants, and the answer may be unlike the target's; "
        )
        if lam is not None:
            mend = "more particles follow" if lam == 1 else f"branching below {lam:g}, or more particles, follow"
            return f"{fallen}{mend} it closer"
        if self.decoding.pipelined:
            return f"{fallen}more particles follow it closer, and a control, without pipelined, rejects such drafts"
        return f"{fallen}a control above {control:g} rejects such drafts, and a watchdog raises it where it must"

    def _raised(self, cycles: int, raised: int, control: float) -> str:
        smc = self.decoding
        return (
            f"the evidence fell {ALARM:g} nats below {smc.watchdog:g} a token after {cycles - raised + 1} of {cycles} "
            f"cycles: the draft misses what the target wants, and control was raised from {control:g} to "
            f"{smc.raised_control:.2f} for the other {raised - 1}"
        )

    def _trace(self, infos: Sequence[Info], prompt_length: int) -> dict[str, Any]:
        history = self.history(prompt_length)
        return trace_of([history.add(info) for info in infos], self.rows)
