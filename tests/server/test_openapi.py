"""The OpenAPI document: its references resolve, and nothing that it allows makes the server fail."""

from __future__ import annotations

import re
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error

from tests.server.conftest import Running


def test_references_resolve(http: httpx.Client) -> None:
    response = http.get("/openapi.json")
    found: dict[str, Any] = response.json()
    names = set(re.findall(r'"#/components/schemas/(\w+)"', response.text))
    assert names == {"CompletionAsk", "ChatAsk", "StreamOptions", "SMCAsk", "Error"}
    assert names <= found["components"]["schemas"].keys()
    assert "$defs" not in response.text
    responses = found["paths"]["/v1/completions"]["post"]["responses"]
    assert responses.keys() == {"200", "4XX", "5XX"}
    assert responses["200"]["content"].keys() == {"application/json", "text/event-stream"}


@pytest.mark.slow
def test_nothing_makes_the_server_fail(server: Running) -> None:
    """Bodies of all kinds, right and wrong: whatever comes, no 5xx, and no reply without an end."""
    document = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    paths = set()
    for found in document.get_all_operations():
        operation = found.ok()
        paths.add(operation.path)

        @settings(max_examples=6, suppress_health_check=list(HealthCheck))
        @given(case=operation.as_strategy())
        def check(case: Any) -> None:
            case.validate_response(case.call(timeout=120), checks=[not_a_server_error])

        check()
    assert {"/v1/completions", "/v1/chat/completions", "/v1/models/{name}"} <= paths
