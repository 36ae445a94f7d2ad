"""The state that the routes of one server share."""

from __future__ import annotations

import dataclasses

from smcjax.server.events import Records
from smcjax.server.forms import Forms
from smcjax.server.metrics import Metrics
from smcjax.server.models import Models, VirtualModel
from smcjax.server.tokens import TokenTexts


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """The limits of a server, and who may ask.

    Attributes:
        keys: those that open it; without any, everybody may ask.
        origins: of pages in browsers that may ask; "*" is any.
        max_body: bytes of a request.
        body_seconds: within which it must have come.
        ping_seconds: after which a stream that has nothing to say says so.
    """

    keys: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    max_body: int = 8 << 20
    body_seconds: float = 30.0
    ping_seconds: float = 15.0


class Served:
    """The models, what they have been doing, and whether they go on."""

    def __init__(self, models: Models, settings: Settings) -> None:
        self.models, self.settings = models, settings
        self.records = Records()
        self.forms = Forms()
        self.metrics = Metrics(models)
        self.draining = False  # no further requests are taken
        self.in_flight = 0  # HTTP requests that are being answered
        self._token_texts: dict[str, TokenTexts] = {}

    @property
    def stopping(self) -> bool:
        """True where errors of the engine are those of its end."""
        return self.draining or self.models.closed

    def token_texts(self, model: VirtualModel) -> TokenTexts:
        """The texts of the model's tokens."""
        if model.name not in self._token_texts:
            self._token_texts[model.name] = TokenTexts(model.llm.llm.tokenizer)
        return self._token_texts[model.name]
