"""The page's files: sent under a policy that lets them load each other alone, and nothing else of the machine."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

import httpx
import numpy as np
import pytest

from smcjax.server.app import PAGE
from smcjax.viz.picture import ANSWER, FAMILY
from tests.server.conftest import Running

FILES = sorted(path.name for path in PAGE.iterdir())
CONES = [[0.41222, 0.53633, 0.05145], [0.21190, 0.68070, 0.10740], [0.08830, 0.28172, 0.62998]]
OPPONENTS = [[0.21045, 0.79362, -0.00407], [1.97800, -2.42859, 0.45059], [0.02590, 0.78277, -0.80868]]
TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}


def test_files_are_sent_under_the_policy(http: httpx.Client) -> None:
    """The page itself at the root as well."""
    for path, name in [("/", "index.html"), *((f"/page/{name}", name) for name in FILES)]:
        response = http.get(path)
        assert response.status_code == http.head(path).status_code == 200
        assert response.content == (PAGE / name).read_bytes()
        assert response.headers["content-type"].split(";")[0] == TYPES[name.rsplit(".")[-1]]
        policy = response.headers["content-security-policy"]
        assert policy.split("; ")[0] == "default-src 'self'"
        assert "unsafe" not in policy
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["cache-control"] == "no-cache"


def test_nothing_beside_them_is(server: Running, http: httpx.Client) -> None:
    """Asked for byte by byte, since httpx would resolve the dots itself."""
    outside = [
        "../app.py",
        "..%2fapp.py",
        "%2e%2e/app.py",
        "..%5capp.py",
        "....//app.py",
        "/etc/passwd",
        "%2fetc%2fpasswd",
    ]
    for asked, status in [*((path, 404) for path in [*outside, "."]), ("index.html", 200)]:  # the last one is a control
        url = httpx.URL(server.url).copy_with(raw_path=f"/page/{asked}".encode())
        assert http.get(url).status_code == status, asked


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


def themes(text: str) -> list[list[str]]:
    """The colours of the families, and that of the answer, in light and in dark."""
    pairs = re.findall(r"--(?:family-\d+|answer): light-dark\((#\w{6}), (#\w{6})\);", text)
    return [list(colours) for colours in zip(*pairs, strict=True)]


def nearest(colours: Sequence[str]) -> float:
    """The least distance of two colours in OKLab, where 0.02 can just be told apart side by side."""
    rgb = np.array([[int(colour[i : i + 2], 16) for i in (1, 3, 5)] for colour in colours]) / 255
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    lab = np.cbrt(linear @ np.array(CONES).T) @ np.array(OPPONENTS).T
    return min(float(np.linalg.norm(one - other)) for one, other in itertools.combinations(lab, 2))


def test_families_can_be_told_apart() -> None:
    """In each theme of the page, and in the picture of `smcjax viz`."""
    found = themes((PAGE / "colours.css").read_text())
    assert [len(colours) for colours in found] == [13, 13]
    for colours in [*found, [*FAMILY, ANSWER]]:
        assert nearest(colours) > 0.08
    assert nearest(["#b8568f", "#c2408c"]) < 0.08  # a control
