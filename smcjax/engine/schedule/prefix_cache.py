"""The index of prompt prefixes whose KV pages later requests may use. Plain Python, on the host.

    key of page i  = digest of (key of page i − 1, the page's tokens)      so equal keys mean equal prefixes
    cache slot     = where the device keeps the number of the physical page (`smcjax.kv.keep`)

Only full pages are cached, as no row writes to them any more. A page that running groups use is *held*. Pages that no
group holds are evicted when memory is needed: the least recently used first, and the end of a prefix before its start,
since a lookup goes from the start.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence

import numpy as np


class PrefixCache:
    """The index of cached pages, of `page_size` tokens each. `cache_slots` bounds their number; 0: none is cached."""

    def __init__(self, cache_slots: int, page_size: int) -> None:
        self.page_size, self._capacity = page_size, cache_slots
        self.queries = 0  # prompt tokens of the requests that were admitted
        self.hits = 0  # those of them whose KV was there
        self.clear()

    def clear(self) -> None:
        """Forgets all pages; the counters go on."""
        self._slots: dict[bytes, int] = {}
        self._holders: dict[bytes, int] = {}
        self._unused: dict[bytes, None] = {}  # held by no group, in the order in which they are to go
        self._vacant = list(range(self._capacity))[::-1]

    def __len__(self) -> int:
        """Pages that are cached."""
        return len(self._slots)

    @property
    def unused(self) -> int:
        """Pages that are cached and held by no group."""
        return len(self._unused)

    def keys(self, token_ids: Sequence[int]) -> list[bytes]:
        """A key for each full page of a prompt; none if the cache has no slots."""
        keys: list[bytes] = []
        key = b""
        if not self._capacity:
            return keys
        for end in range(self.page_size, len(token_ids) + 1, self.page_size):
            page = np.asarray(token_ids[end - self.page_size : end], np.int64)
            key = hashlib.sha256(key + page.tobytes()).digest()
            keys.append(key)
        return keys

    def match(self, keys: Sequence[bytes]) -> list[bytes]:
        """The longest cached prefix of `keys`."""
        for index, key in enumerate(keys):
            if key not in self._slots:
                return list(keys[:index])
        return list(keys)

    def hold(self, keys: Sequence[bytes]) -> list[int]:
        """Marks cached pages as held by one more group; returns their cache slots."""
        for key in keys:
            self._unused.pop(key, None)
            self._holders[key] += 1
        return [self._slots[key] for key in keys]

    def release(self, keys: Sequence[bytes]) -> None:
        """Marks cached pages as held by one group less."""
        for key in reversed(keys):
            self._holders[key] -= 1
            if not self._holders[key]:
                self._unused[key] = None

    def insert(self, key: bytes) -> int | None:
        """Adds a page that a group has made and holds; returns its cache slot, or None if the key is cached already."""
        if key in self._slots:
            return None
        self._slots[key], self._holders[key] = self._vacant.pop(), 1
        return self._slots[key]

    def evict(self, count: int) -> list[int]:
        """Removes the first `count` unused pages in order of eviction; returns their cache slots."""
        slots = []
        for key in list(itertools.islice(self._unused, count)):
            del self._unused[key], self._holders[key]
            slots.append(self._slots.pop(key))
        self._vacant += slots
        return slots
