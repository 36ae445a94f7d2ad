"""The state that the routes of one server share."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from smcjax.server.metrics import Metrics
from smcjax.server.models import Models, VirtualModel
from smcjax.server.replies.events import Records
from smcjax.server.replies.tokens import TokenTexts
from smcjax.server.requests.forms import Forms

LARGE_BODY = 1 << 16  # bytes; what grows with larger ones is done for one of them at a time
MAX_BODY_BYTES = 64 << 20  # bytes of all bodies whose requests are under way


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """The limits of a server, and who may ask."""

    keys: tuple[str, ...] = ()  # those that open it; without any, everybody may ask
    # Names of it beside those of this machine's loopback; with any, or without keys, no others are answered to.
    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()  # of pages in browsers that may ask; "*" is any
    max_body: int = 8 << 20  # bytes of a request
    body_seconds: float = 30.0  # within which it must have come
    ping_seconds: float = 15.0  # after which a stream that has nothing to say says so
    drain_seconds: float = 30.0  # that answers have to end after the signal to stop
    potentials: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # those that requests may ask for, by name


class Served:
    """The models, what they have been doing, and whether they go on."""

    def __init__(self, models: Models, settings: Settings) -> None:
        self.models, self.settings = models, settings
        self.records = Records()
        self.forms = Forms()
        self.metrics = Metrics(models)
        self.draining = False  # no further requests are taken
        self.in_flight = 0  # HTTP requests that are being answered
        self.held_bytes = 0  # of their bodies
        self._small, self._large = ThreadPoolExecutor(4, "requests"), ThreadPoolExecutor(1, "large requests")
        self._token_texts: dict[str, TokenTexts] = {}

    @property
    def stopping(self) -> bool:
        """True where errors of the engine are those of its end."""
        return self.draining or self.models.closed

    async def beside[**P, T](self, size: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Does what grows with a body of `size` bytes beside the event loop, which answers others meanwhile."""
        threads = self._large if size > LARGE_BODY else self._small
        return await asyncio.get_running_loop().run_in_executor(threads, functools.partial(work, *args, **kwargs))

    def close(self) -> None:
        """Gives up what waits for a thread."""
        self.forms.close()
        for threads in (self._small, self._large):
            threads.shutdown(wait=False, cancel_futures=True)

    def token_texts(self, model: VirtualModel) -> TokenTexts:
        """The texts of the model's tokens."""
        if model.name not in self._token_texts:
            self._token_texts[model.name] = TokenTexts(model.llm.llm.tokenizer)
        return self._token_texts[model.name]
