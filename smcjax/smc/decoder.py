"""SMC as the engine's decoder."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from smcjax.decoders import SMC
from smcjax.decoding.decoder import Decoder, Report, RowsAfter
from smcjax.smc import cycle, lifecycle
from smcjax.smc.state import Info, State


class SMCDecoder(Decoder[SMC, State, Info]):
    """Weighted particles, resampled when their weights become uneven."""

    begin = lifecycle.begin
    start = lifecycle.start
    step = cycle.step
    conclude = lifecycle.conclude

    def rows_after(self, info: Info) -> RowsAfter:
        """A particle is alive while its weight is above 0, and after a resampling in any case."""
        alive = np.full(len(info.length), bool(info.resampled)) | ~np.isneginf(info.log_weight)
        return RowsAfter(np.asarray(info.ancestors), alive, np.asarray(info.finished))

    def report(self, infos: Sequence[Info], prompt_length: int, kept: int) -> Report:
        """Resamplings, the mean ESS and, with `SMC(trace=True)`, the population's history."""
        return Report(
            resamples=sum(bool(info.resampled) for info in infos),
            mean_ess=float(np.mean([info.ess for info in infos])) if infos else None,
            trace=self._trace(infos, prompt_length) if self.decoding.trace else None,
        )

    def _trace(self, infos: Sequence[Info], prompt_length: int) -> dict[str, np.ndarray]:
        def stacked(name: str, dtype: type, *shape: int) -> np.ndarray:
            rows = [getattr(info, name) for info in infos]
            return np.stack(rows).astype(dtype) if rows else np.zeros((0, *shape), dtype)

        return {
            "ess": stacked("ess", np.float32),
            "resampled": stacked("resampled", np.bool_),
            "ancestors": stacked("ancestors", np.int32, self.rows),
            "log_weights": stacked("log_weight", np.float32, self.rows),
            "lengths": stacked("length", np.int32, self.rows) - prompt_length,
            "finished": stacked("finished", np.bool_, self.rows),
        }
