"""Requests as clients write them: OpenAI's fields, vLLM's further ones, and `smc`.

A field that is null is not given. A field of other servers is taken with the values that ask for what is done here in
any case (`smcjax.server.requests.defaults`), and an unknown one is refused.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from smcjax.server.requests.defaults import CHAT, COMMON, COMPLETION, Defaults, given

MAX_CHOICES = 128  # of a request, over all its prompts
Number = Annotated[float, Field(allow_inf_nan=False)]
# The first wrong item of a list is told; an error for each of millions would take seconds and gigabytes.
Texts = Annotated[list[str], Field(fail_fast=True)]
Tokens = Annotated[list[int], Field(fail_fast=True)]


class _Fields(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    defaults: ClassVar[Defaults] = {}

    @model_validator(mode="before")
    @classmethod
    def _given(cls, fields: Any) -> Any:
        """Leaves out what asks for nothing: null, and `defaults`. Raises APIError for what only other servers do."""
        return given(fields, cls.defaults) if isinstance(fields, dict) else fields


class StreamOptions(_Fields):
    """Asks for more in a stream than the answer."""

    include_usage: bool = False  # one more chunk at the end, with no choices
    continuous_usage_stats: bool = False  # the usage so far in every chunk
    include_obfuscation: bool | None = None  # not done here: chunks are as long as their text


class SMCAsk(_Fields):
    """Asks for the population behind an answer."""

    particles: bool = True  # all particles with text, tokens and weights
    trace: bool = False  # the history, as `smcjax viz` reads it; its events stay at /v1/smc/requests/{id}/events
    events: bool = False  # in streams, each cycle as it ends
    control: Annotated[Number, Field(ge=0, le=1)] | None = None  # of this request, in place of the decoder's
    potentials: list[str] | None = None  # by the names that the operator gave them (serve --potential)


class Ask(_Fields):
    """The fields that both kinds of requests have."""

    defaults: ClassVar[Defaults] = COMMON

    model: str | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    seed: int | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: str | Texts | None = None
    stop_token_ids: Tokens | None = None
    ignore_eos: bool = False
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    smc: SMCAsk | None = None
    # Without an effect on the answer.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    repetition_penalty: Number | None = None
    logit_bias: dict[str, Number] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: dict[str, Any] | None = None
    # The same in vLLM's words, of which a request may have one.
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Texts | None = None
    guided_grammar: str | None = None

    @property
    def choices(self) -> int:
        """How many answers each prompt is to have."""
        return self.n or 1


class CompletionAsk(Ask):
    """A request to /v1/completions."""

    defaults: ClassVar[Defaults] = COMMON | COMPLETION

    prompt: str | Texts | Tokens | Annotated[list[Tokens], Field(fail_fast=True)]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool = False

    def prompts(self) -> list[str | dict[str, list[int]]]:
        """The prompts, as `AsyncLLM.generate` takes them. Raises ValueError where there are none."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if not prompt:
            raise ValueError("prompt is empty; give text, token ids, or a list of these.")
        if isinstance(prompt[0], int):
            return [{"prompt_token_ids": prompt}]
        return [one if isinstance(one, str) else {"prompt_token_ids": one} for one in prompt]


class ChatAsk(Ask):
    """A request to /v1/chat/completions."""

    defaults: ClassVar[Defaults] = COMMON | CHAT

    messages: Annotated[list[dict[str, Any]], Field(fail_fast=True)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def conversation(self) -> list[dict[str, Any]]:
        """The messages without what is null; a content that is becomes empty."""
        return [
            {name: "" if value is None else value for name, value in message.items() if value or name == "content"}
            for message in self.messages
        ]
