"""The reading of a batch's next cycle: how queries read a sparse target's selected blocks, as the load changes.

Readings are decoders that give the same tokens (`smcjax.planner.laws.same_tokens`), so their cycles differ in time
alone, and acceptance is no question. A cycle is read by the reading that a profile predicts to be fastest for the
batch's slots and mean context, if it is faster than the present one by a margin and some cycles have passed since the
last change; otherwise by the present one.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from smcjax.decoders import Decoding
from smcjax.planner.laws import same_tokens
from smcjax.planner.prediction import Place, Planner

MARGIN = 0.05  # by which a cycle must be shorter, as a share of the new one's time
DWELL = 4  # cycles between two changes at least


def readings(
    planner: Planner, decoding: Decoding, places: Collection[Place], among: Collection[Decoding]
) -> tuple[Decoding, ...]:
    """The decoder, and those of `among` with the same tokens that are worth programs of their own.

    Each of these has the shortest cycles at one of the places, shorter by `MARGIN` than the decoder's.
    """
    alike, kept = [one for one in among if same_tokens(one, decoding)], [decoding]
    for place in places:
        times = {one: planner.cycle_ms(one, *place) for one in alike}
        best = min(alike, key=times.__getitem__)
        if times[decoding] > (1 + MARGIN) * times[best] and best not in kept:
            kept.append(best)
    return tuple(kept)


class Switch:
    """Chooses the reading of each cycle of one batch, of decoders of the planner's profile that give the same tokens.

    Raises ValueError for decoders whose tokens may differ.
    """

    def __init__(self, planner: Planner, readings: Sequence[Decoding]) -> None:
        for one in readings[1:]:
            if not same_tokens(one, readings[0]):
                raise ValueError(f"readings must give the same tokens, got {readings[0]} and {one}.")
        self.readings = tuple(readings)
        self._planner = planner
        self._present: Decoding | None = None  # of the last cycle
        self._since = 0  # cycles since the last change

    def choose(self, slots: int, context: float) -> Decoding:
        """The reading of the next cycle, of a batch of so many slots and requests of `context` tokens in the mean."""
        times = {one: self._planner.cycle_ms(one, slots, context) for one in self.readings}
        best = min(self.readings, key=times.__getitem__)
        if self._present is None:
            self._present = best
        elif self._since >= DWELL and times[self._present] > (1 + MARGIN) * times[best]:
            self._present, self._since = best, 0
        self._since += 1
        return self._present
