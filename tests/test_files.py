"""Files of the wrong kind, too large, or that are no strict JSON: one predicate each, without waiting."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from smcjax import files
from smcjax.files import Unreadable, is_name_in_directory, read_bytes, read_json, shortened, write_atomically
from tests.limits import within


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


KINDS: dict[str, Callable[[Path], None]] = {
    "a FIFO": os.mkfifo,
    "a socket": make_socket,
    "a directory": Path.mkdir,
    "a device": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_only_regular_files_are_opened(tmp_path: Path, kind: str) -> None:
    KINDS[kind](tmp_path / "x")
    (tmp_path / "link").symlink_to(tmp_path / "x")
    for name in ("x", "link"):
        with within(5), pytest.raises(Unreadable, match=f"it is {kind}, not a regular file"):
            read_bytes(tmp_path / name, 100)


@pytest.mark.parametrize("kind", ["a FIFO", "a device"])
def test_a_file_that_was_exchanged_after_the_look_does_not_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    KINDS[kind](tmp_path / "x")
    monkeypatch.setattr(files, "require_file", lambda path, limit: None)
    with within(5), pytest.raises(Unreadable, match=f"it is {kind}"):
        read_bytes(tmp_path / "x", 100)


def test_no_more_than_the_limit(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"abc")
    assert read_bytes(tmp_path / "x", 3) == b"abc"
    with pytest.raises(Unreadable, match="it has 3 bytes, and such files are read up to 2"):
        read_bytes(tmp_path / "x", 2)
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(1 << 40)
    with within(5), pytest.raises(Unreadable, match="1,099,511,627,776 bytes"):
        read_bytes(tmp_path / "sparse", 100)
    assert Path("/proc/self/maps").stat().st_size == 0  # a file that does not say how much it holds
    with pytest.raises(Unreadable, match="read up to 100"):
        read_bytes("/proc/self/maps", 100)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("nothing", "does not exist"),
        ("x" * 300, "File name too long"),
        ("a\0b", "no file can have that name"),
        ("\ud800", "no file can have that name"),
    ],
)
def test_names_of_nothing(tmp_path: Path, name: str, reason: str) -> None:
    with pytest.raises(Unreadable, match=reason) as caught:
        read_bytes(tmp_path / name, 100)
    assert caught.value.mend


JSON: list[tuple[bytes, str]] = [
    (b"", "Expecting value"),
    (b'{"a": 1', "cut short"),
    (b'{"a": 1} {}', "Extra data"),
    (b"\xef\xbb\xbf{}", "byte-order mark"),
    ("{}".encode("utf-16"), "byte 0 is not UTF-8"),
    ('{"é": 1}'.encode("latin-1"), "byte 2 is not UTF-8"),
    (b'{"a": NaN}', "NaN is no JSON number"),
    (b'{"a": -Infinity}', "-Infinity is no JSON number"),
    (b"1" * 101, "an integer of 101 digits"),
    (b"1" * 5000, "an integer of 5000 digits"),
    (b"1." + b"1" * 5000, "a number of 5002 characters"),
    (b"[" * 100_000, "nested too deeply"),
    (b'{"a":' * 100_000, "nested too deeply"),
    (b'{"a": 1, "a": 2}', "the key 'a' stands there twice"),
    (b'{"a": {"b": 1, "b": [1]}}', "the key 'b' stands there twice"),
]


@pytest.mark.parametrize(("content", "reason"), JSON, ids=[reason for _, reason in JSON])
def test_strict_json(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "x").write_bytes(content)
    with within(5), pytest.raises(Unreadable, match=reason) as caught:
        read_json(tmp_path / "x", 1 << 20)
    assert str(caught.value).startswith("is not valid JSON (")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 200


def test_json_that_is_read(tmp_path: Path) -> None:
    value = {"a": [1, -(2**63), int(1e30), 2.5, 1e300, None, True, "é\n🙂"], "b": {}}
    (tmp_path / "x").write_text(json.dumps(value))
    assert read_json(tmp_path / "x", 1000) == value
    (tmp_path / "x").write_text('{"a": [1], "a": [1]}')  # twice, but the same
    assert read_json(tmp_path / "x", 1000) == {"a": [1]}


def test_names_that_stay_in_the_directory() -> None:
    for name in ("model-00001-of-00002.safetensors", "é.safetensors", "x" * 243 + ".safetensors"):
        assert is_name_in_directory(name, ".safetensors")
    for wrong in (
        *("", ".", "..", ".safetensors/", "/etc/x.safetensors", "../x.safetensors", "a/x.safetensors"),
        *("a\0.safetensors", "a\n.safetensors", "a\\b.safetensors", "\ud800.safetensors", "x" * 244 + ".safetensors"),
        *("x.bin", None, 3, ["x.safetensors"], True),
    ):
        assert not is_name_in_directory(wrong, ".safetensors"), wrong


def test_shortened() -> None:
    assert shortened("a\n b", 10) == "a b"
    assert shortened("a" * 100, 10) == "a" * 9 + "…"
    assert shortened("é\x1b[31m\ud800🙂") == "é\\x1b[31m\\ud800🙂"


@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("at", ["write", "rename"])
@pytest.mark.parametrize("before", [None, b"before"])
def test_a_failed_write_leaves_everything_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: BaseException, at: str, before: bytes | None
) -> None:
    path = tmp_path / "file"
    if before is not None:
        path.write_bytes(before)

    def fail(*args: object) -> None:
        raise failure

    def write_half(place: Path, data: bytes) -> None:
        place.touch()
        with place.open("wb") as file:
            file.write(data[: len(data) // 2])
        raise failure

    expected = ValueError if isinstance(failure, OSError) else KeyboardInterrupt
    with monkeypatch.context() as patched:
        if at == "write":
            patched.setattr(Path, "write_bytes", write_half)
        else:
            patched.setattr(os, "replace", fail)
        with pytest.raises(expected) as caught:
            write_atomically(path, b"after")
    assert expected is KeyboardInterrupt or "cannot be written (No space left on device)" in str(caught.value)
    assert {entry.name: entry.read_bytes() for entry in tmp_path.iterdir()} == ({"file": before} if before else {})


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "directory").mkdir()
    for name, reason in [
        ("directory", "is not a regular file"),
        ("missing/file", "cannot be written (No such file or directory)"),
        ("file/inner", "cannot be written (Not a directory)"),
        ("x" * 300, "cannot be written (File name too long)"),
    ]:
        with pytest.raises(ValueError, match="name a file") as caught:
            write_atomically(tmp_path / name, b"data")
        assert str(caught.value).startswith(f"{tmp_path / name} {reason}")
    with pytest.raises(ValueError, match=r"^/dev/null is not a regular file"):
        write_atomically("/dev/null", b"data")
    assert sorted(os.listdir(tmp_path)) == ["directory", "file"]


def test_the_longest_name_can_be_written(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 255)
    write_atomically(path, b"data")
    assert path.read_bytes() == b"data"


def test_links_are_followed(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("target")
    for data in (b"new", b"newer"):
        write_atomically(tmp_path / "link", data)
        assert (tmp_path / "link").is_symlink()
        assert (tmp_path / "target").read_bytes() == data
