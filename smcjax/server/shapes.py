"""How the replies of a route look; `completions` and `chat` hold one each."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

from smcjax.engine.results.outputs import RequestOutput, StreamChunk
from smcjax.server.logprobs import Scored, by_id
from smcjax.server.schemas import ChatAsk, CompletionAsk
from smcjax.server.tokens import TokenTexts


@dataclasses.dataclass
class Emitted:
    """One choice of a reply, and how much of it a stream has emitted.

    Attributes:
        index: its place in the reply.
        texts: looks tokens up.
        prompt_token_ids: of its prompt.
        ends: tokens that end an answer, and are no content of it.
        echo: the prompt's text where the request wants it in front of the answer's, else None.
        prompt_logprobs: whether the request asks for these by that name.
        first: whether nothing has been emitted yet.
        length: characters emitted, the prompt's included.
        tokens_end: where the text of the next token begins, by the texts of the tokens before it.
    """

    index: int
    texts: TokenTexts
    prompt_token_ids: list[int]
    ends: frozenset[int] = frozenset()
    echo: str | None = None
    prompt_logprobs: bool = False
    first: bool = True
    length: int = 0
    tokens_end: int = 0

    def __post_init__(self) -> None:
        self.tokens_end = len(self.echo or "")

    def prompt_field(self, prompt: Sequence[Scored] | None) -> dict[str, Any]:
        """{"prompt_logprobs": …} of a choice whose request asks for these by that name, else {}."""
        return {"prompt_logprobs": by_id(prompt, self.texts)} if self.prompt_logprobs and prompt is not None else {}


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
    def choice(self, emitted: Emitted, output: RequestOutput) -> dict[str, Any]:
        """The entry of `choices` that is a whole answer."""

    @abc.abstractmethod
    def pieces(self, emitted: Emitted, chunk: StreamChunk) -> list[dict[str, Any]]:
        """The entries of `choices` that a chunk becomes, one a streamed reply; at least one. Moves `emitted` on."""
