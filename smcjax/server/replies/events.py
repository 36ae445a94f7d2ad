"""The events of requests that asked for a trace, kept for who comes later: replayed, and followed while they run."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator
from typing import Any

from smcjax.server.errors import APIError, dumps

MAX_RECORDS = 256
MAX_BYTES = 64 << 20  # of all records; the oldest that have ended go first


class Record:
    """The events of one request, of all its choices."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.bytes = 0
        self.ended = False
        self._news = asyncio.Event()

    def add(self, event: dict[str, Any]) -> None:
        """Adds an event, which all followers read."""
        text = dumps(event)
        self.events.append(text)
        self.bytes += len(text)
        self._told()

    def end(self) -> None:
        """No more events come."""
        self.ended = True
        self._told()

    def _told(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def follow(self) -> AsyncGenerator[str]:
        """All events from the first one on, and those to come until the end."""
        emitted = 0
        while True:
            news = self._news
            while emitted < len(self.events):
                emitted += 1
                yield self.events[emitted - 1]
            if self.ended:
                return
            await news.wait()


class Records:
    """Records by the id of their reply."""

    def __init__(self, most: int = MAX_RECORDS, most_bytes: int = MAX_BYTES) -> None:
        self._most, self._most_bytes = most, most_bytes
        self._records: OrderedDict[str, Record] = OrderedDict()

    def open(self, name: str) -> Record:
        """A new record; old ones make room."""
        record = self._records[name] = Record()
        for old in [name for name, one in self._records.items() if one.ended]:
            if len(self._records) <= self._most and self._bytes() <= self._most_bytes:
                break
            del self._records[old]
        return record

    def named(self, name: str) -> Record:
        """The record of this reply. Raises APIError where there is none."""
        if name not in self._records:
            raise APIError(
                404,
                f"there are no events of {name[:80]!r}; they are kept for the last requests with smc.trace.",
                code="events_not_found",
            )
        return self._records[name]

    def _bytes(self) -> int:
        return sum(record.bytes for record in self._records.values())
