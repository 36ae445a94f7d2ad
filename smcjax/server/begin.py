"""From a request to answers that are under way: parameters, the decoder, the form, the prompt's tokens, the engine."""

from __future__ import annotations

from typing import Any

from smcjax.engine.async_llm import ChunkStream
from smcjax.engine.requests.requests import Prompt
from smcjax.engine.requests.sampling_params import SamplingParams
from smcjax.server.answers import Answers
from smcjax.server.errors import APIError, is_overlong, refusal, unavailable
from smcjax.server.models import VirtualModel
from smcjax.server.replies.shapes import Shapes
from smcjax.server.requests.sampling import by_own_field, sampling_params, seeds_of
from smcjax.server.requests.schemas import MAX_CHOICES, Ask, ChatAsk, CompletionAsk
from smcjax.server.state import Served


async def begin(served: Served, ask: CompletionAsk | ChatAsk, shapes: Shapes, size: int) -> Answers:
    """Starts all answers of a request, or none. Raises APIError where it cannot run now or ever.

    What grows with the request's body, of `size` bytes, is done in threads, so that no other request waits for it.
    """
    if served.draining:
        raise unavailable("the server is shutting down and takes no further requests; ask another one.")
    asked = served.models.named(ask.model)
    known = frozenset(type(ask).model_fields)
    streams: list[ChunkStream] = []
    try:
        params = await served.beside(size, sampling_params, ask, served.settings.potentials)
        model, routed = served.models.answering(asked, params)
        await served.forms.prepare(model.llm.llm, params)
        made: Any = _to_prompts if isinstance(ask, CompletionAsk) else _to_conversation
        streams, echoes = await served.beside(size, made, model, ask, params)
        await served.beside(0, served.token_texts, model)  # which are made with a model's first request
        for stream in streams:
            stream.start(beside=streams[0])
        return Answers(served, ask, shapes, model, routed, streams, echoes)
    except Exception as error:
        for stream in streams:
            await stream.aclose()
        if isinstance(error, RuntimeError) and served.stopping:
            raise unavailable(str(error)) from None
        raise refusal(by_own_field(error, ask), known) from error


Begun = tuple[list[ChunkStream], list[str | None]]  # choices, and what each has before its answer


def _to_prompts(model: VirtualModel, ask: CompletionAsk, params: SamplingParams) -> Begun:
    prompts = ask.prompts()
    if len(prompts) * ask.choices > MAX_CHOICES:
        raise ValueError(
            f"prompt asks for {len(prompts)} times {ask.choices} answers and {MAX_CHOICES} are the most of a request; "
            "send several."
        )
    streams: list[ChunkStream] = []
    echoes: list[str | None] = []
    for index, prompt in enumerate(prompts):
        try:
            streams += _answers_to(model, prompt, params, ask)
        except ValueError as error:
            if len(prompts) == 1:
                raise
            raise APIError(400, f"prompt {index}: {error}", param="prompt") from None
        echoes += [_text_of(streams[-1], model) if ask.echo else None] * ask.choices
    return streams, echoes


def _to_conversation(model: VirtualModel, ask: ChatAsk, params: SamplingParams) -> Begun:
    try:
        prompt = model.llm.llm.chat_prompt(ask.conversation(), ask.chat_template_kwargs)
    except ValueError as error:
        if is_overlong(str(error)):
            raise
        raise APIError(400, str(error), param="messages") from None
    return _answers_to(model, prompt, params, ask), [None] * ask.choices


def _answers_to(model: VirtualModel, prompt: Prompt, params: SamplingParams, ask: Ask) -> list[ChunkStream]:
    return model.llm.choices(prompt, params, seeds_of(ask), trace=ask.smc is not None)


def _text_of(stream: ChunkStream, model: VirtualModel) -> str:
    """The prompt's own text, or the tokenizer's of its tokens."""
    tokenizer, request = model.llm.llm.tokenizer, stream.request
    if request.prompt is not None or tokenizer is None:
        return request.prompt or ""
    return tokenizer.decode(request.token_ids)
