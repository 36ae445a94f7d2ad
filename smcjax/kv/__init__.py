"""The paged, reference-counted KV cache: ownership (`pages`) and storage (`cache`)."""

from smcjax.kv.cache import CacheSpec, KVCache, LayerCache, PageArray
from smcjax.kv.pages import (
    TRASH,
    PagePool,
    Room,
    allocate,
    drop,
    fan_out,
    fork,
    keep,
    keep_until,
    make_room,
    page_of,
    pages_for,
    pages_touched,
    rebind,
    release,
    truncate_pages,
)
from smcjax.pallas import Copies

__all__ = [
    "TRASH",
    "CacheSpec",
    "Copies",
    "KVCache",
    "LayerCache",
    "PageArray",
    "PagePool",
    "Room",
    "allocate",
    "drop",
    "fan_out",
    "fork",
    "keep",
    "keep_until",
    "make_room",
    "page_of",
    "pages_for",
    "pages_touched",
    "rebind",
    "release",
    "truncate_pages",
]
