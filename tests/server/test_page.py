"""The page's files: sent under a policy that lets them load each other alone, and nothing else of the machine."""

from __future__ import annotations

import re

import httpx
import pytest

from smcjax.server.app import PAGE
from tests.server.conftest import Running

FILES = sorted(path.name for path in PAGE.iterdir())
TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}


@pytest.mark.parametrize("name", FILES)
def test_files_are_sent_under_the_policy(http: httpx.Client, name: str) -> None:
    response = http.get(f"/page/{name}")
    assert response.status_code == 200
    assert response.content == (PAGE / name).read_bytes()
    assert response.headers["content-type"].split(";")[0] == TYPES[name.rsplit(".")[-1]]
    policy = response.headers["content-security-policy"]
    assert policy.split("; ")[0] == "default-src 'self'"
    assert "unsafe" not in policy
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["cache-control"] == "no-cache"


def test_the_page_is_at_the_root(http: httpx.Client) -> None:
    assert http.get("/").content == (PAGE / "index.html").read_bytes()
    assert (
        http.get("/").headers["content-security-policy"]
        == http.get("/page/index.html").headers["content-security-policy"]
    )
    assert http.head("/").status_code == 200


@pytest.mark.parametrize(
    "path",
    ["../app.py", "..%2fapp.py", "%2e%2e/app.py", "..%5capp.py", "....//app.py", "/etc/passwd", "%2fetc%2fpasswd", "."],
)
def test_nothing_beside_them_is(server: Running, path: str) -> None:
    """Asked for byte by byte, since httpx would resolve the dots itself."""
    with server.http() as http:
        for asked, status in ((path, 404), ("index.html", 200)):  # the second one is a control
            url = httpx.URL(server.url).copy_with(raw_path=f"/page/{asked}".encode())
            assert http.get(url).status_code == status


def outside(name: str, text: str) -> list[str]:
    """What a file of the page would load from elsewhere, or run though the policy forbids it."""
    found = re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s\"']*", re.sub(r"^\s*//.*$", "", text, flags=re.M))
    found = [one for one in found if "www.w3.org" not in one]  # the name of SVG's namespace
    found += re.findall(r"\b(?:innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval|new Function)\b", text)
    if name.endswith(".html"):
        found += re.findall(r"<script(?![^>]*\bsrc=)[^>]*>|<style|\s(?:on\w+|style)=", text)
    return found


def test_files_need_nothing_else() -> None:
    for name in FILES:
        assert not outside(name, (PAGE / name).read_text()), name


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.js", "import x from 'https://example.org/x.js'"),
        ("a.css", "@import url(//example.org/font.css)"),
        ("a.js", "one.innerHTML = text"),
        ("a.html", "<script>run()</script>"),
        ("a.html", '<p onclick="run()">'),
        ("a.html", '<p style="color: red">'),
    ],
)
def test_what_they_may_not_have_is_found(name: str, text: str) -> None:
    assert outside(name, text)


def test_what_the_page_names_is_there() -> None:
    """Files by their paths, and elements of index.html by their ids."""
    html = (PAGE / "index.html").read_text()
    for name in FILES:
        text = (PAGE / name).read_text()
        for path in re.findall(r"[\"'](?:/page|\.)/([\w.]+)[\"']", text):
            assert path in FILES, f"{name} names {path}"
        for element in re.findall(r"\bat\(\"([\w-]+)\"\)", text):
            assert f'id="{element}"' in html, f"{name} names #{element}"
