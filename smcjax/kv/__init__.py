"""The paged, reference-counted KV cache: ownership (`pages`) and storage (`cache`)."""

from smcjax.kv.cache import KVCache
from smcjax.kv.pages import (
    TRASH,
    PagePool,
    Room,
    allocate,
    drop,
    fan_out,
    fork,
    keep,
    make_room,
    page_of,
    pages_for,
    rebind,
    release,
)
from smcjax.pallas import Copies

__all__ = [
    "TRASH",
    "Copies",
    "KVCache",
    "PagePool",
    "Room",
    "allocate",
    "drop",
    "fan_out",
    "fork",
    "keep",
    "make_room",
    "page_of",
    "pages_for",
    "rebind",
    "release",
]
