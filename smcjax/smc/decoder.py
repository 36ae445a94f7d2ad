"""SMC as the engine's decoder: one cycle of whichever kind its options ask for, and many in one program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from smcjax.decoders import ALARM, SMC, WARNING_RATE
from smcjax.decoding.decoder import Decoder, Report, RowsAfter
from smcjax.decoding.groups import PairParams
from smcjax.smc import cycle, lifecycle, pipelined
from smcjax.smc.history import History, alarmed_after, trace_of
from smcjax.smc.state import Info, SMCProgram, State


def step(program: SMCProgram, params: PairParams, state: State) -> tuple[State, Info]:
    """Advances every live particle by one cycle: `smcjax.smc.cycle.step`, or `smcjax.smc.pipelined.step`."""
    return (pipelined.step if program.decoding.pipelined else cycle.step)(program, params, state)


def run(program: SMCProgram, params: PairParams, state: State, num_cycles: int) -> tuple[State, Info]:
    """Runs `num_cycles` cycles in one program; Info gets a leading [num_cycles] axis. Ended groups stay frozen."""
    return jax.lax.scan(lambda state, _: step(program, params, state), state, length=num_cycles)


class SMCDecoder(Decoder[SMC, State, Info]):
    """Weighted particles, resampled when their weights become uneven."""

    begin = lifecycle.begin
    start = lifecycle.start
    step = step
    conclude = lifecycle.conclude

    def rows_after(self, info: Info) -> RowsAfter:
        """A particle is alive while its weight is above 0, and after a resampling in any case."""
        alive = np.full(len(info.length), bool(info.resampled)) | ~np.isneginf(info.log_weight)
        return RowsAfter(np.asarray(info.ancestors), alive, np.asarray(info.finished))

    def history(self, prompt_length: int) -> History:
        """A follower of one group's cycles."""
        return History(prompt_length)

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

        A warning says that evidence fell by more than `WARNING_RATE` a token, but for other powers than 1, potentials
        and answers of a given form, whose evidence falls by itself.
        """
        smc = self.decoding
        control = smc.rejection_control if control is None else control
        falls_by_itself = smc.power != 1.0 or constrained or bool(smc.potentials)
        return Report(
            control=control,
            warning=None if falls_by_itself else self._warning(infos, prompt_length, control),
            resamples=sum(bool(info.resampled) for info in infos),
            mean_ess=float(np.mean([info.ess for info in infos])) if infos else None,
            trace=self._trace(infos, prompt_length) if trace or smc.trace else None,
        )

    def _warning(self, infos: Sequence[Info], prompt_length: int, control: float | None) -> str | None:
        after = alarmed_after(infos, prompt_length, WARNING_RATE)
        if after is None:
            return None
        fallen = (
            f"the evidence fell {ALARM:g} nats below {WARNING_RATE:g} a token after {after} of {len(infos)} cycles: "
            "the draft misses what the target wants, and the answer may be unlike the target's; "
        )
        if self.decoding.pipelined:
            return f"{fallen}more particles follow it closer, and a control, without pipelined, rejects such drafts"
        if control is None:
            return f"{fallen}a rule that rejects more such drafts, or more particles, follow it closer"
        return f"{fallen}a control above {control:g} rejects {'more of them' if control else 'such drafts'}"

    def _trace(self, infos: Sequence[Info], prompt_length: int) -> dict[str, Any]:
        history = self.history(prompt_length)
        return trace_of([history.add(info) for info in infos], self.rows)
