"""Decoders of one law that take turns at advancing a batch: which one has the next cycle, as the load changes.

The `Switch` chooses by lanes, context and accepted drafts (`smcjax.planner`); cycles of any of them advance the same
state (`smcjax.engine.narrowing`). One decoder has a cycle of the whole batch. Host only.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from smcjax.decoders import Decoding
from smcjax.engine.running import Running
from smcjax.engine.scheduler import Schedule
from smcjax.planner import Switch


class Turns:
    """The decoders of an engine's cycles.

    Args:
        switch: chooses among strategies.
    """

    def __init__(self, switch: Switch) -> None:
        self._switch = switch

    @property
    def strategies(self) -> tuple[Decoding, ...]:
        """The decoders that take turns."""
        return self._switch.strategies

    @property
    def switches(self) -> int:
        """Changes from one to another so far."""
        return self._switch.switches

    @property
    def leaves_the_draft_behind(self) -> bool:
        """True where some have drafts and some none."""
        return len({one.drafts for one in self.strategies}) > 1

    def programs(self, own: Any) -> list[Any]:
        """The program of each."""
        return [_by(own, one) for one in self.strategies]

    def program(self, own: Any, schedule: Schedule, running: Mapping[str, Running]) -> Any:
        """The program of a round, whose cycle counts if it has one."""
        if not schedule.cycle:
            return _by(own, self._switch.present or self.strategies[0])
        lengths = {name: one.known_length for name, one in running.items() if one.group.started}
        context = statistics.fmean(lengths.values()) if lengths else 1.0
        return _by(own, self._switch.choose(schedule.size, context, lengths.keys()))

    def lacking(self, by: Decoding, own: Decoding, running: Mapping[int, Running]) -> dict[int, tuple[int, int]]:
        """The positions that the draft is to read before a cycle of `by`, by the lanes of the groups that run.

        Before a cycle without drafts nothing is: then it is noted from where on the draft will lack tokens. What has
        been enqueued and not reported makes a group by `own.tokens_per_cycle` longer a cycle, at most.
        """
        found = {}
        for lane, one in running.items():
            if not by.drafts:
                # The draft's next forward would begin with the token before the last.
                one.lacking = one.known_length - 2 if one.lacking is None else one.lacking
            elif one.lacking is not None:
                unread = one.group.cycles - 1 - len(one.infos)
                found[lane] = one.lacking, one.known_length - 1 + own.tokens_per_cycle * unread
                one.lacking = None
        return found

    def heard(self, by: Decoding, info: Any, groups: Sequence[tuple[int, Running]]) -> None:
        """Takes a cycle's report, as host arrays; `groups` are those that it is about, with their lanes."""
        self._switch.heard(
            by, {one.request.request_id: int(info.accepted[lane]) for lane, one in groups if info.ran[lane]}
        )


def _by(own: Any, strategy: Decoding) -> Any:
    return own if strategy == own.decoding else dataclasses.replace(own, by=strategy)
