"""Keys, pages of other origins, and addresses that others can reach."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import openai
import pytest

from smcjax.server.access import is_loopback
from smcjax.server.models import Models
from smcjax.server.process import check_address
from tests.server.conftest import Running, running

KEYS = ("first-key-1", "schlüssel-2")
ORIGIN = "https://app.example"


@pytest.fixture(scope="module")
def locked(models: Models) -> Iterator[Running]:
    with running(models, keys=KEYS, origins=(ORIGIN,)) as server:
        yield server


@pytest.mark.parametrize("key", KEYS)
def test_each_key_opens(locked: Running, key: str) -> None:
    with locked.http(authorization=b"Bearer " + key.encode()) as http:
        assert http.get("/v1/models").status_code == 200
        assert http.post("/v1/completions", json={"prompt": "a"}).status_code == 200


def test_nothing_else_does(locked: Running) -> None:
    headers = [None, "", "Bearer", "Bearer wrong", "Basic first-key-1", "first-key-1", "Bearer \xff\xfe"]
    asked = [(header, "/v1/models") for header in headers]
    asked += [(None, path) for path in ("/metrics", "/version", "/v1/smc/requests/x/events", "/nothing")]
    for header, path in asked:
        with locked.http() as http:
            response = http.get(path, headers={} if header is None else {"authorization": header.encode("latin-1")})
        assert response.status_code == 401
        assert response.json()["error"]["code"] == "invalid_api_key"
        assert response.headers["www-authenticate"] == "Bearer"


def test_the_client_is_told(locked: Running) -> None:
    with pytest.raises(openai.AuthenticationError):
        locked.client("wrong").models.list()
    assert locked.client(KEYS[0]).models.list().data[0].id == "pair"


def test_page_and_health_are_public(locked: Running) -> None:
    with locked.http() as http:
        assert http.get("/health").json() == {"status": "ok"}
        page = http.get("/")
        assert page.status_code == 200
        assert "smcjax" in page.text
        assert "default-src 'self'" in page.headers["content-security-policy"]
        assert http.get("/page/index.html").text == page.text
        assert http.get("/pages").status_code == 401


def preflight(http: httpx.Client, origin: str) -> httpx.Response:
    headers = "authorization,content-type,x-stainless-lang"  # some of those that OpenAI's client for pages sends
    asked = {"access-control-request-method": "POST", "access-control-request-headers": headers}
    return http.options("/v1/completions", headers={"origin": origin, **asked})


def test_origins(locked: Running, http: httpx.Client) -> None:
    """None may ask unless it is named; a preflight needs no key, and a refusal can be read."""
    assert "access-control-allow-origin" not in preflight(http, ORIGIN).headers
    assert "access-control-allow-origin" not in http.get("/v1/models", headers={"origin": ORIGIN}).headers
    with locked.http() as with_cors:
        allowed = preflight(with_cors, ORIGIN)
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-origin"] == ORIGIN
        assert "x-stainless-lang" in allowed.headers["access-control-allow-headers"]
        assert "access-control-allow-origin" not in preflight(with_cors, "https://other.example").headers
        refused = with_cors.get("/v1/models", headers={"origin": ORIGIN})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == ORIGIN


def test_addresses_that_others_can_reach_need_a_key() -> None:
    for host in ("127.0.0.1", "127.8.0.1", "::1", "localhost"):
        assert is_loopback(host)
        check_address(host, ())
    for host in ("0.0.0.0", "::", "10.0.0.1", "example.org", "127.0.0.1.example.org"):
        with pytest.raises(ValueError, match="which other machines can reach, and there is no key"):
            check_address(host, ())
        check_address(host, KEYS)


def test_own_names(models: Models) -> None:
    with running(models, hosts=("box.example",)) as server:
        for host in ("127.0.0.1", "localhost:80", "LOCALHOST", "[::1]:8000", "box.example", "Box.example:1"):
            with server.http(host=host) as http:
                assert http.get("/v1/models").status_code == 200


def test_other_names_are_those_of_pages_elsewhere(http: httpx.Client) -> None:
    """Which give themselves this machine's address: their requests look like the server's own."""
    hosts = ("evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil", "10.0.0.1", "")
    asked = [("GET", "/v1/models", host) for host in hosts]
    asked += [("GET", "/", hosts[0]), ("GET", "/health", hosts[0]), ("POST", "/v1/completions", hosts[0])]
    for method, path, host in asked:
        refused = http.request(method, path, headers={"host": host, "origin": f"http://{host}"}, json={"prompt": "a"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "host_not_allowed")


def test_any_name_where_there_are_keys(locked: Running) -> None:
    """Unless some are given."""
    with locked.http(host="box.example", authorization=f"Bearer {KEYS[0]}") as http:
        assert http.get("/v1/models").status_code == 200
    with (
        running(locked.served.models, keys=KEYS, hosts=("other.example",)) as server,
        server.http(host="box.example", authorization=f"Bearer {KEYS[0]}") as http,
    ):
        assert http.get("/v1/models").status_code == 403
