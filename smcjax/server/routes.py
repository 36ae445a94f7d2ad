"""The routes that answer prompts and conversations."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from smcjax.server.begin import begin
from smcjax.server.openapi import JSON_OR_EVENTS, body_of
from smcjax.server.replies.shapes import ChatShapes, CompletionShapes, Shapes
from smcjax.server.replies.sse import EventStream, answered, with_end
from smcjax.server.requests.body import parse, read_body
from smcjax.server.state import Served


def answering(served: Served) -> APIRouter:
    """One route for each of the shapes."""
    router = APIRouter()
    for shapes in (CompletionShapes(), ChatShapes()):
        _add(router, served, shapes)
    return router


def _add(router: APIRouter, served: Served, shapes: Shapes) -> None:
    settings = served.settings

    @router.post(
        shapes.path,
        name=shapes.reply_object,
        openapi_extra=body_of(shapes.ask),
        responses=JSON_OR_EVENTS,
        response_class=Response,
    )
    async def answer(request: Request) -> Response:
        # The body is read here, so that whatever is wrong with it is said in the server's own shape.
        data = await read_body(request, limit=settings.max_body, seconds=settings.body_seconds)
        size = len(data)
        ask = await served.beside(size, lambda: shapes.ask.model_validate(parse(data)))
        del data

        async def reply() -> Response:
            answers = await begin(served, ask, shapes, size)
            if not ask.stream:
                return await answers.reply()
            return EventStream(
                with_end(answers.stream()), answers.close, ping_seconds=settings.ping_seconds, waiting=answers.waiting
            )

        return await answered(request, reply())
