"""Whatever a client sends, it gets a status and {"error": {message, type, param, code}}: no trace, no other shape."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator
from http.client import HTTPConnection
from typing import Any

import httpx
import openai
import pytest

from smcjax.engine.engine import Engine
from smcjax.server.models import Models
from tests.server.conftest import Running, running

JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def strict(models: Models) -> Iterator[Running]:
    """A server of small bodies that come soon."""
    with running(models, max_body=6000, body_seconds=0.3) as server:
        yield server


def told(response: httpx.Response, status: int) -> dict[str, str | None]:
    """The error of a response in the server's shape."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    (name, error) = next(iter(response.json().items()))
    assert name == "error"
    assert error.keys() == {"message", "type", "param", "code"}
    assert "Traceback" not in response.text
    assert "/smcjax/" not in response.text
    return error


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "no JSON"),
        (b"{", "no JSON"),
        (b"\xff\xfe", "no JSON"),
        (b"[1]", "must be a JSON object"),
        (b"null", "must be a JSON object"),
        (b'{"prompt": "a", "temperature": NaN}', "NaN is no number"),
        (b'{"prompt": "a", "temperature": -Infinity}', "is no number"),
        (b'{"prompt": "a", "temperature": 1e999}', "beyond all floats"),
        (b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}", "no JSON"),
        (b'{"prompt": "a", "temperature": 1' + b"0" * 400 + b"}", "temperature"),
        (b'{"prompt": "\\ud800"}', "not Unicode"),
        (b'{"\\udfff": "a"}', "not Unicode"),
        (b'{"prompt": ' + b"[" * 900 + b"]" * 900 + b"}", "nests deeper"),
        (b'{"prompt": "a", "seed": "1"}', "seed must be"),
        (b'{"max_tokens": 5}', "prompt is missing"),
    ],
)
def test_bodies_that_are_none(strict: Running, body: bytes, says: str) -> None:
    with strict.http() as http:
        assert says in str(told(http.post("/v1/completions", content=body, headers=JSON), 400)["message"])
        assert http.get("/health").status_code == 200


@pytest.mark.parametrize("kind", ["", "text/plain", "application/x-www-form-urlencoded"])
def test_content_types(http: httpx.Client, kind: str) -> None:
    response = http.post("/v1/completions", content=b'{"prompt": "a"}', headers={"content-type": kind})
    assert "content-type" in str(told(response, 400)["message"])
    good = {"content-type": "application/json; charset=utf-8"}
    assert http.post("/v1/completions", content=b'{"prompt": "a"}', headers=good).status_code == 200  # a control


def test_bodies_that_are_too_large(strict: Running) -> None:
    large = b'{"prompt": "' + b"a" * 7000 + b'"}'
    with strict.http() as http:
        assert told(http.post("/v1/completions", content=large, headers=JSON), 413)["code"] == "too_large"
        pieces = (large[at : at + 100] for at in range(0, len(large), 100))  # chunked: its length is not declared
        assert told(http.post("/v1/completions", content=pieces, headers=JSON), 413)["code"] == "too_large"


def test_a_client_that_sends_all_of_a_large_body_reads_why_it_is_refused(strict: Running) -> None:
    """Python's own gives up where a connection is closed before it has sent all; afterwards it can be used again."""
    with contextlib.closing(HTTPConnection(strict.url.removeprefix("http://"), timeout=20)) as client:
        for _ in range(3):
            client.request("POST", "/v1/completions", b" " * (16 << 20), JSON)
            answer = client.getresponse()
            assert (answer.status, json.loads(answer.read())["error"]["code"]) == (413, "too_large")


def test_a_slow_body_is_closed(strict: Running) -> None:
    host, port = strict.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as slow:
        slow.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\n"
            b"content-type: application/json\r\ncontent-length: 99\r\n\r\n{"
        )
        answer = b""
        while piece := slow.recv(4096):  # until the server closes
            answer += piece
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b'"error"' in answer


def test_paths_and_methods(http: httpx.Client) -> None:
    told(http.get("/v1/nothing"), 404)
    told(http.get("/page/../../app.py"), 404)
    told(http.get("/page/nothing.js"), 404)
    told(http.get("/v1/completions"), 405)
    told(http.delete("/v1/models"), 405)
    told(http.post("/health"), 405)
    assert told(http.get("/v1/models/nobody"), 404)["code"] == "model_not_found"
    assert told(http.get("/v1/smc/requests/nobody/events"), 404)["code"] == "events_not_found"


def test_an_unknown_model(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="model 'other' does not exist here; use one of pair"):
        client.completions.create(model="other", prompt="a")


@pytest.mark.parametrize("path", ["/health", "/version", "/metrics", "/v1/models", "/v1/models/pair", "/"])
def test_head(http: httpx.Client, path: str) -> None:
    head, get = http.head(path), http.get(path)
    assert head.status_code == get.status_code == 200
    assert head.content == b""
    assert head.headers["content-type"] == get.headers["content-type"]


def test_a_connection_serves_again(server: Running) -> None:
    """After an answer, and after a refusal."""
    with server.http() as http:
        ports = set()
        for body in ({"prompt": "a"}, {"prompt": 5}, {"prompt": "a"}):
            response = http.post("/v1/completions", json=body)
            ports.add(response.extensions["network_stream"].get_extra_info("client_addr")[1])
        assert len(ports) == 1


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("abc-1.2_3:4", "abc-1.2_3:4"),
        ("a b\tc", "abc"),
        ("<script>", "script"),
        ("é" * 3, None),
        ("x" * 500, "x" * 128),
    ],
)
def test_request_ids_are_echoed(http: httpx.Client, given: str, kept: str | None) -> None:
    response = http.get("/version", headers={"x-request-id": given.encode()})
    found = response.headers["x-request-id"]
    assert found == kept if kept is not None else len(found) == 32


def test_an_error_of_the_engine(
    server: Running, client: openai.OpenAI, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client learns that it happened, not where; a stream ends by [DONE] all the same; the next request works."""
    fields: dict[str, Any] = {"model": "pair", "prompt": "ab", "seed": 1}
    before = client.completions.create(**fields).choices[0].text
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "_collect", lambda *_: (_ for _ in ()).throw(RuntimeError("secret")))
        error = told(http.post("/v1/completions", json={"prompt": "ab"}), 500)
        assert error["code"] == "internal_error"
        assert "secret" not in str(error["message"])
        streamed = http.post("/v1/completions", json={"prompt": "ab", "stream": True})
        assert streamed.status_code == 200
        assert "secret" not in streamed.text
        assert streamed.text.count("[DONE]") == 1
        assert streamed.text.rstrip().endswith("data: [DONE]")
        assert '"internal_error"' in streamed.text
        with pytest.raises(openai.APIError, match="failed to answer"):
            list(client.completions.create(**fields, stream=True))
    assert client.completions.create(**fields).choices[0].text == before
