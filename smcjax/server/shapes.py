"""How the replies of a route look; `completions` and `chat` hold one each."""

from __future__ import annotations

import abc
from typing import Any, ClassVar

from smcjax.engine.outputs import RequestOutput, StreamChunk
from smcjax.server.schemas import ChatAsk, CompletionAsk
from smcjax.server.tokens import TokenTexts


class Shapes(abc.ABC):
    """The choices of one route's replies.

    Attributes:
        path: the route's.
        ask: its requests.
        prefix: of its replies' ids.
        reply_object, chunk_object: what whole replies and chunks call themselves.
    """

    path: ClassVar[str]
    ask: ClassVar[type[CompletionAsk | ChatAsk]]
    prefix: ClassVar[str]
    reply_object: ClassVar[str]
    chunk_object: ClassVar[str]

    @abc.abstractmethod
    def choice(self, index: int, output: RequestOutput, texts: TokenTexts) -> dict[str, Any]:
        """The entry of `choices` that is a whole answer."""

    @abc.abstractmethod
    def pieces(self, index: int, chunk: StreamChunk, texts: TokenTexts, *, first: bool) -> list[dict[str, Any]]:
        """The entries of `choices` that a chunk becomes, one a streamed reply; at least one."""
