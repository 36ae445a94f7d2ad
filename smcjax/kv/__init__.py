"""The paged, reference-counted KV cache: ownership (`pages`), storage (`cache`), reading (`attention`)."""

from smcjax.kv.attention import attention, paged_attention
from smcjax.kv.cache import KVCache
from smcjax.kv.pages import TRASH, PagePool, Room, allocate, make_room, page_of, pages_for, rebind, release

__all__ = [
    "TRASH",
    "KVCache",
    "PagePool",
    "Room",
    "allocate",
    "attention",
    "make_room",
    "page_of",
    "paged_attention",
    "pages_for",
    "rebind",
    "release",
]
