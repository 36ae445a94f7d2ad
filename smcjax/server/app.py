"""The application: all routes of a server, and what stands around them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.middleware.cors import CORSMiddleware
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from smcjax import __version__
from smcjax.server.access import ID, Hosts, Keys, RequestIds
from smcjax.server.errors import add_handlers, json_response, unavailable
from smcjax.server.models import VirtualModel
from smcjax.server.openapi import EVENTS, PLAIN, add_document
from smcjax.server.replies.sse import EventStream
from smcjax.server.routes import answering
from smcjax.server.state import Served

PAGE = Path(__file__).with_name("page")
PAGE_HEADERS = {
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",  # asked for again each time, and sent again where it has changed
}


def make_app(served: Served) -> FastAPI:
    """The ASGI application of a server."""
    app = FastAPI(title="smcjax", version=__version__, docs_url=None, redoc_url=None)
    app.router.redirect_slashes = False
    add_handlers(app)
    for router in (answering(served), _of_models(served), _of_the_server(served)):
        app.include_router(router)
    _add_page(app)
    add_document(app)
    settings = served.settings  # what is added last stands outermost
    if settings.keys:
        app.add_middleware(Keys, keys=settings.keys)
    if settings.origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],  # OpenAI's client for pages sends some ten of its own
            expose_headers=[ID.decode()],
        )
    if settings.hosts or not settings.keys:
        app.add_middleware(Hosts, names=settings.hosts)
    app.add_middleware(RequestIds, served=served)
    return app


def _read[F: Callable[..., Any]](router: APIRouter, path: str, **options: Any) -> Callable[[F], F]:
    """Adds a function for GET, which the document names, and for HEAD."""

    def add(function: F) -> F:
        router.get(path, **options)(function)
        router.head(path, include_in_schema=False)(function)
        return function

    return add


def _of_models(served: Served) -> APIRouter:
    router = APIRouter()
    models, potentials = served.models, sorted(served.settings.potentials)

    def entry(name: str, model: VirtualModel) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": model.created,
            "owned_by": "smcjax",
            "root": model.name,
            "max_model_len": model.llm.llm.max_model_len,
            "smc": model.description() | ({"potentials": potentials} if model.decoding.weighted else {}),
        }

    @_read(router, "/v1/models")
    async def list_models() -> Response:
        """Lists the virtual models, the pair's own name first."""
        return json_response({"object": "list", "data": [entry(name, models.named(name)) for name in models.names]})

    @_read(router, "/v1/models/{name:path}")
    async def one_model(name: str) -> Response:
        """Describes one virtual model."""
        return json_response(entry(name, models.named(name)))

    @_read(router, "/v1/smc/requests/{name}/events", responses=EVENTS, response_class=Response)
    async def events(name: str) -> Response:
        """Replays the cycles of a request that asked for a trace, and follows it while it runs."""
        return EventStream(served.records.named(name).follow(), ping_seconds=served.settings.ping_seconds)

    return router


def _of_the_server(served: Served) -> APIRouter:
    router = APIRouter()

    @_read(router, "/health")
    async def health() -> Response:
        """Says whether the server takes requests."""
        if served.stopping:
            return unavailable("the server is shutting down.").response()
        return json_response({"status": "ok"})

    @_read(router, "/version")
    async def version() -> Response:
        """Says which smcjax this is."""
        return json_response({"version": __version__})

    @_read(router, "/metrics", responses=PLAIN, response_class=Response)
    async def metrics() -> Response:
        """Gives figures for Prometheus."""
        return Response(await served.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    return router


class _Page(StaticFiles):
    """Files of the page, under a policy that lets them load each other and nothing else."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        response.headers.update(PAGE_HEADERS)
        return response


def _add_page(app: FastAPI) -> None:
    page = _Page(directory=PAGE)

    @app.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    async def index(request: Request) -> Response:
        return await page.get_response("index.html", request.scope)

    app.mount("/page", page)
