"""GGUF files as files: shards of one model, and what a header may take of memory."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import chex
import numpy as np
import pytest

from smcjax.errors import CheckpointError
from smcjax.gguf_file import GGUFFile
from smcjax.model import load_checkpoint
from smcjax.model.files.checkpoint import load_config
from tests.gguf_files import write_gguf
from tests.limits import at_most_more
from tests.model.hf_oracle import make_config, random_weights

Pairs = dict[str, tuple[int, bytes]]  # of a key: the value's type and its bytes
U16, I32, STRING, ARRAY = 2, 5, 8, 9


def said(path: Path) -> str:
    """The sentence that refuses a file."""
    with pytest.raises(CheckpointError) as caught:
        GGUFFile.open(path)
    message = str(caught.value)
    assert message.isprintable()
    return message


@pytest.fixture(scope="module")
def model() -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """A config and the tensors of a model that is not tied, the head's last."""
    raw = make_config("llama", intermediate_size=64, tie_word_embeddings=False)
    weights = random_weights(raw)
    return raw, dict(sorted(weights.items(), key=lambda item: item[0] == "lm_head.weight"))


@pytest.fixture
def shards(model: tuple[dict[str, Any], dict[str, np.ndarray]], tmp_path: Path) -> list[Path]:
    """The model in shards of four tensors each."""
    first = write_gguf(tmp_path / "model.gguf", *model, tensors_a_shard=4)
    found = sorted(tmp_path.glob("model-*.gguf"))
    assert found[0] == first
    assert len(found) > 3
    return found


def test_any_shard_stands_for_the_whole_model(
    model: tuple[dict[str, Any], dict[str, np.ndarray]], shards: list[Path]
) -> None:
    """`output.weight` lies in a shard of its own; without that shard the model would pass for a tied one."""
    holds_head = [b"output.weight" in path.read_bytes().replace(b"attn_output.weight", b"") for path in shards]
    assert holds_head == [False] * (len(shards) - 1) + [True]
    whole = load_checkpoint(write_gguf(shards[0].with_name("whole.gguf"), *model), "float32")
    assert not whole[0].tie_embeddings
    for path in shards:
        config, params = load_checkpoint(path, "float32")
        assert config == whole[0]
        assert load_config(path).tie_embeddings is False
        chex.assert_trees_all_equal(params, whole[1])


def test_a_missing_shard_is_named(shards: list[Path]) -> None:
    for missing in shards:
        content = missing.read_bytes()
        missing.unlink()
        for path in set(shards) - {missing}:
            assert f"{missing} is missing" in said(path)
        missing.write_bytes(content)


def test_a_shard_of_another_name_is_refused(shards: list[Path]) -> None:
    renamed = shards[1].with_name("model.gguf")
    shutil.copy(shards[1], renamed)
    message = said(renamed)
    assert f"{renamed} is shard 2 of {len(shards)}" in message
    assert f"-00002-of-{len(shards):05}.gguf" in message


def test_shards_that_are_not_of_one_model_are_refused(
    model: tuple[dict[str, Any], dict[str, np.ndarray]], shards: list[Path]
) -> None:
    kept = shards[1].read_bytes()
    shutil.copy(shards[2], shards[1])  # its name says another number
    assert f"{shards[1]} is shard 3 of {len(shards)}" in said(shards[0])
    whole = write_gguf(shards[0].with_name("whole.gguf"), *model)
    shutil.copy(whole, shards[1])
    assert f"{shards[1]} is a whole model" in said(shards[0])
    shards[1].write_bytes(kept)
    content = shards[1].read_bytes()
    shards[1].write_bytes(content.replace(b"blk.", b"bl_.", 1))
    GGUFFile.open(shards[0])  # as many tensors as ever; which they are is the model's business
    first = shards[0].read_bytes()
    at = first.index(b"split.tensors.count") + len("split.tensors.count") + 4
    shards[0].write_bytes(first[:at] + struct.pack("<i", 99) + first[at + 4 :])
    assert "tensors instead of 99 (split.tensors.count)" in said(shards[0])
    twice = content.replace(b"blk.0", b"blk.1", 1)
    shards[0].write_bytes(first)
    shards[1].write_bytes(twice)
    assert f"is in {shards[1]} and in " in said(shards[0])


def header(pairs: Pairs, tensors: int = 0) -> bytes:
    """The header of a file with those metadata."""
    content = b"GGUF" + struct.pack("<IQQ", 3, tensors, len(pairs))
    for name, (kind, value) in pairs.items():
        content += struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", kind) + value
    return content


@pytest.mark.parametrize(
    ("pairs", "words"),
    [
        ({"split.count": (U16, struct.pack("<H", 70))}, "split.no"),
        ({"split.no": (U16, struct.pack("<H", 1)), "split.count": (STRING, struct.pack("<Q", 1) + b"x")}, "split."),
        ({"split.no": (U16, struct.pack("<H", 5)), "split.count": (U16, struct.pack("<H", 2))}, "split.no"),
    ],
)
def test_split_keys_that_cannot_be(pairs: Pairs, words: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(header(pairs))
    assert words in said(path)


def test_a_whole_file_may_say_so(tmp_path: Path) -> None:
    """llama.cpp writes a split.count of 0 into what it has put together."""
    path = tmp_path / "m.gguf"
    path.write_bytes(header({"split.count": (U16, struct.pack("<H", 0))}))
    assert GGUFFile.open(path).tensors == {}


def test_without_the_package_only_a_gguf_file_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("no model")
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert "is a file and not a GGUF one" in said(path)
    path.write_bytes(header({}))
    assert "needs gguf, which is not installed" in said(path)


def test_a_tensor_of_a_terabyte_is_named(model: tuple[dict[str, Any], dict[str, np.ndarray]], tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", *model)
    content = path.read_bytes()
    at = content.index(b"token_embd.weight") + len("token_embd.weight") + 4
    path.write_bytes(content[:at] + struct.pack("<QQ", 1 << 14, 1 << 24) + content[at + 16 :])
    os.truncate(path, (1 << 40) + len(content))
    file = GGUFFile.open(path)
    with at_most_more(1024), pytest.raises(CheckpointError) as caught:
        file.read("token_embd.weight", slice(0, 1))
    assert f"tensor 'token_embd.weight' in {path} cannot be read (Cannot allocate memory)" in str(caught.value)


MORE = 1 << 30  # bytes that opening any file may take, as smcjax.gguf_file says
OPEN = """
import re, sys
from pathlib import Path
import gguf, numpy
from smcjax.errors import CheckpointError
from smcjax.gguf_file import GGUFFile

def peak():
    return 1024 * int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])

before = peak()
try:
    GGUFFile.open(Path(sys.argv[1]))
except CheckpointError as error:
    print(error)
print(peak() - before)
"""


def array(kind: int, count: int) -> bytes:
    """An array's bytes up to its elements."""
    return struct.pack("<IQ", kind, count)


def greedy_headers() -> dict[str, tuple[bytes, bytes, int]]:
    """By name: how a header begins, what then is repeated, and how often."""
    string = struct.pack("<Q", 2)
    half = 1 << 27
    return {
        "bytes": (header({"a": (ARRAY, array(0, half - 100))}), b"\0" * 4096, half // 4096),
        "numbers": (header({"a": (ARRAY, array(12, 1 << 22))}), struct.pack("<d", 1.5), 1 << 22),
        "strings": (header({"a": (ARRAY, array(STRING, 1 << 22))}), string + b"ab", 1 << 22),
        "a wide string": (
            header({"a": (STRING, struct.pack("<Q", half - 200) + "🙂".encode())}),
            b"a" * 1024,
            half >> 10,
        ),
        "pairs": (header({})[:16] + struct.pack("<Q", 1 << 22), b"\0" * 4096, 1 << 14),
        "tensors": (header({}, tensors=1 << 21), b"\0" * 4096, 1 << 14),
    }


@pytest.mark.parametrize("name", greedy_headers())
def test_no_header_takes_more_memory_than_is_said(name: str, tmp_path: Path) -> None:
    begin, repeated, times = greedy_headers()[name]
    path = tmp_path / "m.gguf"
    with open(path, "wb") as file:
        file.write(begin)
        for _ in range(0, times, 1 << 12):
            file.write(repeated * min(1 << 12, times))
    done = subprocess.run(
        [sys.executable, "-c", OPEN, str(path)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) < MORE, done.stdout
