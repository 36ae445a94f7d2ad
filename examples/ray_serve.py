"""Several replicas of `smcjax serve` behind one address, placed and watched by Ray Serve.

    PYTHONPATH=examples uv run --extra serve --extra ray serve run ray_serve:build replicas=2 arguments="-N 8 -K 4"

`arguments` are those of `smcjax serve`, the others the fields of `Options`. Ray Serve (`ray[serve]`) places the
replicas, on a cluster as on one machine, and restarts them; this file says how a request finds its replica:

    affinity    Requests whose prompts begin alike go to one replica, whose prefix cache then has their pages: Ray's
                consistent hashing, by the hash of a prompt's first `affinity_tokens` tokens, or four times as many
                characters. Shorter prompts go by all they have.
    load        A replica takes `most` requests at a time; further ones go on to the next in the order of the hash.
    failure     A request whose replica fails before its answer has begun is asked again, of a replica that lives. The
                seed is the same, given or chosen here, and a seed's text does not depend on the replica: so neither
                does the answer. A stream that breaks off ends in an error event and `[DONE]`.
"""

import asyncio
import hashlib
import itertools
import json
import re
import secrets
import shlex
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import httpx
import pydantic
import ray
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle

ANSWERS = {"/v1/completions", "/v1/chat/completions"}
PATIENCE = 30  # seconds for which a request looks for a replica that answers
PAUSE = 0.3  # seconds before the next try
CHARACTERS = 4  # of a token, about
ERROR = {"message": "no replica answered; ask again.", "type": "server_error", "param": None, "code": None}
app = FastAPI(openapi_url=None)


class Answer(NamedTuple):
    """The beginning of a reply; pieces of its body follow."""

    status: int
    headers: dict[str, str]


@serve.deployment
class Replica:
    """One `smcjax serve` on this node, at a port that nobody else is told."""

    def __init__(self, arguments: list[str]) -> None:
        command = [sys.executable, "-m", "smcjax", "serve", "--port", "0", *arguments]
        self._server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert self._server.stderr is not None
        said = []
        for line in self._server.stderr:
            said.append(line)
            if found := re.search(r"serving .* at (http://\S+)/v1", line):
                break
        else:
            raise RuntimeError("smcjax serve did not start: " + "".join(said[-5:]))
        threading.Thread(target=sys.stderr.writelines, args=(self._server.stderr,), daemon=True).start()
        self._client = httpx.AsyncClient(base_url=found[1], timeout=None)
        self._name = serve.get_replica_context().replica_id.unique_id

    def __del__(self) -> None:
        self._server.terminate()

    def check_health(self) -> None:
        """Raises RuntimeError where the server has ended, so that Ray starts another replica."""
        if (code := self._server.poll()) is not None:
            raise RuntimeError(f"smcjax serve ended with {code}")

    async def ask(self, method: str, path: str, body: bytes, headers: dict[str, str]) -> AsyncIterator[Any]:
        """Yields an `Answer`, then the pieces of its body."""
        async with self._client.stream(method, path, content=body, headers=headers) as reply:
            headers = {"content-type": reply.headers.get("content-type", "application/json")}
            yield Answer(reply.status_code, headers | {"x-replica": f"{self._name} {self._server.pid}"})
            async for piece in reply.aiter_raw():
                yield piece


async def _rest(first: bytes, pieces: AsyncIterator[bytes], streams: bool) -> AsyncIterator[bytes]:
    """The body of a reply. A stream whose replica fails says so; another body breaks off, which a client notices."""
    yield first
    try:
        async for piece in pieces:
            yield piece
    except (ray.exceptions.RayError, httpx.HTTPError):
        if not streams:
            raise
        yield f"data: {json.dumps({'error': ERROR})}\n\ndata: [DONE]\n\n".encode()


def prepared(body: bytes, affinity_tokens: int) -> tuple[str, bytes]:
    """The key by which a request finds its replica, and the request with a seed.

    What is not a JSON object keeps its form, for a replica to refuse it.
    """
    try:
        ask = json.loads(body)
    except ValueError:
        return "", body
    if not isinstance(ask, dict):
        return "", body
    if ask.get("seed") is None:
        ask["seed"] = secrets.randbits(31)
    return affinity_of(ask, affinity_tokens), json.dumps(ask).encode()


def affinity_of(ask: dict[str, Any], tokens: int) -> str:
    """A hash of the model and of what the first prompt begins with; "" where there is no prompt."""
    prompt = ask.get("prompt", ask.get("messages"))
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if not prompt or not isinstance(prompt, str | list):
        return ""
    first = prompt[:tokens] if isinstance(prompt, list) and isinstance(prompt[0], int) else _text(prompt)
    beginning = first[: tokens * CHARACTERS] if isinstance(first, str) else first
    return hashlib.sha256(json.dumps([ask.get("model"), beginning]).encode()).hexdigest()


def _text(prompt: Any) -> str:
    """A prompt, or the messages of a chat, as one text."""
    return prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True)


@serve.deployment
@serve.ingress(app)
class Front:
    """The address that clients know."""

    def __init__(self, replicas: DeploymentHandle, affinity_tokens: int) -> None:
        self._replicas, self._affinity_tokens = replicas, affinity_tokens

    @app.api_route("/{path:path}", methods=["GET", "POST"])
    async def forward(self, request: Request) -> Response:
        """Answers as a replica does."""
        path, body = request.url.path, await request.body()
        key, sent = "", body
        if path in ANSWERS:
            key, sent = prepared(body, self._affinity_tokens)
        headers = {name: request.headers[name] for name in ("authorization", "content-type") if name in request.headers}
        until = asyncio.get_running_loop().time() + PATIENCE
        for number in itertools.count():
            # The next one to try is most likely another: Ray takes some seconds to notice that one has failed.
            place = f"{key}{number or ''}" if key else secrets.token_hex(8)
            replicas = self._replicas.options(stream=True, session_id=place)
            pieces = aiter(replicas.ask.remote(request.method, path, sent, headers))
            try:
                answer: Answer = await anext(pieces)
                first = await anext(pieces, b"")
            except (ray.exceptions.RayError, httpx.HTTPError):
                if asyncio.get_running_loop().time() > until:
                    break
                await asyncio.sleep(PAUSE)
                continue
            streams = "event-stream" in answer.headers["content-type"]
            return StreamingResponse(_rest(first, pieces, streams), answer.status, answer.headers)
        return Response(json.dumps({"error": ERROR}), 503, {"retry-after": "1"}, "application/json")


class Options(pydantic.BaseModel):
    """Arguments of `build`.

    Attributes:
        replicas: how many there are.
        arguments: of `smcjax serve`, each the same for all replicas.
        most: requests that a replica takes at a time.
        affinity_tokens: tokens of a prompt that choose its replica: those of a page or a few.
        gpus: of a replica.
        cpus: of a replica, as Ray counts them.
    """

    replicas: int = 2
    arguments: str = ""
    most: int = 64
    affinity_tokens: int = 64
    gpus: float = 0
    cpus: float = 1


def build(options: Options) -> serve.Application:
    """The application, for `serve run` and `ray.serve.run`."""
    router = RequestRouterConfig(
        request_router_class="ray.serve.experimental.consistent_hash_router.ConsistentHashRouter",
        request_router_kwargs={"num_fallback_replicas": max(0, options.replicas - 1)},
    )
    replica = Replica.options(
        num_replicas=options.replicas,
        max_ongoing_requests=options.most,
        request_router_config=router,
        health_check_period_s=2,
        ray_actor_options={"num_gpus": options.gpus, "num_cpus": options.cpus},
    ).bind(shlex.split(options.arguments))
    front = Front.options(ray_actor_options={"num_cpus": 0}, max_ongoing_requests=1 << 16)
    return front.bind(replica, options.affinity_tokens)
