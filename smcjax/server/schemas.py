"""Requests as clients write them: OpenAI's fields, vLLM's further ones, and `smc`. An unknown field is refused.

Fields that this server cannot honour yet are here too, so that the refusal names them (`smcjax.server.sampling`).
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

MOST_CHOICES = 128  # of a request, over all its prompts
Number = Annotated[float, Field(allow_inf_nan=False)]


class _Fields(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


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


class Ask(_Fields):
    """The fields that both kinds of requests have."""

    model: str | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    seed: int | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
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
    prompt_logprobs: int | None = None
    response_format: dict[str, Any] | None = None
    # The same in vLLM's words, of which a request may have one.
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    # Refused but for the values that ask for nothing, which sglang-router puts into every request.
    no_stop_trim: bool | None = None
    skip_special_tokens: bool | None = None
    return_hidden_states: bool | None = None
    continue_final_message: bool | None = None
    # No text of a model is told apart as reasoning.
    separate_reasoning: bool | None = None
    stream_reasoning: bool | None = None
    # Refused but for the values that ask for nothing.
    min_p: Number | None = None

    @property
    def choices(self) -> int:
        """How many answers each prompt is to have."""
        return self.n or 1


class CompletionAsk(Ask):
    """A request to /v1/completions."""

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool = False
    suffix: str | None = None
    best_of: int | None = None

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

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    functions: list[Any] | None = None
    function_call: Any = None
    parallel_tool_calls: bool | None = None
    modalities: list[str] | None = None
    audio: Any = None
    store: bool | None = None

    def conversation(self) -> list[dict[str, Any]]:
        """The messages without what is null; a content that is becomes empty."""
        return [
            {name: "" if value is None else value for name, value in message.items() if value or name == "content"}
            for message in self.messages
        ]
