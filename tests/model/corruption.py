"""Model directories corrupted at random: bytes flipped, files cut short, values of JSON replaced by extreme ones."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from smcjax.model import load_checkpoint, save_checkpoint
from tests.checkpoints import write_model, write_shards

EXTREME: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 3, 255, 256, 257, 258, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63, 2**64, 10**12),
    *(-(2**31), 10**19, 10**99, 10**400, 0.0, -0.0, 0.5, 1e-300, 1e300, -1.5, float("nan"), float("inf")),
    *("", "x", "\0", "\ud800", "a\nb", "🙂", "x" * 5000, "../x", "/etc/passwd", "<s>", "[", "(a+)+$", "{{ x"),
    *([], {}, [[]], [None], {"": {}}, [1] * 2000, {"a": 1}, ["x", "y"], {"type": "Sequence"}, {"Regex": "(a|a)*$"}),
    *("ByteLevel", "BPE", "Unigram", "WordPiece", "Split", "Replace", "Precompiled", "llama3", "float16", "auto"),
]


def write_bases(root: Path) -> list[Path]:
    """Four models: one file; shards; one with a tokenizer of every kind of rule; one in int8."""
    bases = []
    for index in range(3):
        directory = root / f"base{index}"
        write_model(directory, 272, 1)
        bases.append(directory)
    write_shards(bases[1])
    (bases[1] / "model.safetensors").unlink()

    path = bases[2] / "tokenizer.json"
    spec = json.loads(path.read_text())
    spec["normalizer"] = {
        "type": "Sequence",
        "normalizers": [
            {"type": "NFC"},
            {"type": "Prepend", "prepend": "_"},
            {"type": "Replace", "pattern": {"Regex": " +"}, "content": "_"},
            {"type": "Strip", "strip_left": False, "strip_right": True},
        ],
    }
    pattern = {"Regex": r"'s|\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"}
    spec["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False},
            {"type": "Digits", "individual_digits": True},
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        ],
    }
    spec["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [256], "tokens": ["<s>"]}},
    }
    spec["decoder"] = {
        "type": "Sequence",
        "decoders": [
            {"type": "Replace", "pattern": {"String": "_"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ],
    }
    spec["truncation"] = {"direction": "Right", "max_length": 512, "strategy": "LongestFirst", "stride": 0}
    fixed = {"pad_to_multiple_of": 2, "pad_id": 0, "pad_type_id": 0, "pad_token": "!"}
    spec["padding"] = {"strategy": "BatchLongest", "direction": "Right", **fixed}
    spec["model"]["vocab"] |= {"<s>": 256, "</s>": 257, "th": 258}
    spec["model"]["merges"] = [["t", "h"]]
    path.write_text(json.dumps(spec))
    (bases[2] / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    (bases[2] / "special_tokens_map.json").write_text(json.dumps({"bos_token": {"content": "<s>", "lstrip": False}}))
    (bases[2] / "added_tokens.json").write_text(json.dumps({"</s>": 257}))

    bases.append(Path(shutil.copytree(bases[0], root / "base3")))
    save_checkpoint(*load_checkpoint(bases[0], "float32"), bases[3], quantization="int8")
    return bases


def corrupt(directory: Path, rng: random.Random) -> str:
    """Changes one to six things of a model directory; says what."""
    return "; ".join(_once(directory, rng) for _ in range(rng.choice((1, 1, 1, 1, 2, 3, 6))))


def _once(directory: Path, rng: random.Random) -> str:
    names = sorted(path.name for path in directory.iterdir())
    name = rng.choice(names)
    path = directory / name
    if path.suffix == ".json" and rng.random() < 0.75:
        try:
            value = json.loads(path.read_text())
        except ValueError:  # the second change of this file
            value = {}
        what = _replace(value, rng)
        path.write_bytes(json.dumps(value).encode("utf-8", "surrogatepass"))
        return f"{name}: {what}"
    data = bytearray(path.read_bytes())
    if name.endswith(".safetensors") and rng.random() < 0.5:
        return f"{name}: {_header(path, data, rng)}"
    reach = min(len(data), 4096) if name.endswith(".safetensors") else len(data)
    kind = rng.choice(("flip", "cut", "insert", "delete", "repeat"))
    at = rng.randrange(reach + 1)
    if kind == "flip":
        for _ in range(rng.choice((1, 1, 4, 64))):
            if data:
                data[rng.randrange(max(reach, 1))] ^= 1 << rng.randrange(8)
    elif kind == "cut":
        del data[at:]
    elif kind == "insert":
        data[at:at] = rng.randbytes(rng.choice((1, 8, 1000)))
    elif kind == "delete":
        del data[at : at + rng.choice((1, 8, 1000))]
    else:
        data[at:at] = data[at : at + 100] * rng.choice((1, 100))
    path.write_bytes(data)
    return f"{name}: {kind} at {at}"


def _header(path: Path, data: bytearray, rng: random.Random) -> str:
    size = int.from_bytes(data[:8], "little")
    try:
        header = json.loads(data[8 : 8 + size])
    except ValueError:
        header = {}
    what = _replace(header, rng)
    encoded = json.dumps(header).encode("utf-8", "surrogatepass")
    length = len(encoded) if rng.random() < 0.9 else rng.choice((0, 1, 2**32, 2**63, 2**64 - 1))
    path.write_bytes(length.to_bytes(8, "little") + encoded + data[8 + size :])
    return f"header {what}"


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from _places(inner, (*path, key))


def _replace(value: Any, rng: random.Random) -> str:
    """Changes one place, be it a value, a key or an entry; shallow places are likelier."""
    places = list(_places(value))
    if not places:
        return "nothing"
    rules = [place for place in places if "vocab" not in place]  # of which there are few among many tokens
    shallow = [place for place in rules if len(place) <= 2]
    chance = rng.random()
    place = rng.choice((shallow if chance < 0.3 else rules if chance < 0.9 else places) or places)
    parent = value
    for key in place[:-1]:
        parent = parent[key]
    kind = rng.choice(("set", "set", "set", "set", "delete", "rename", "twin"))
    new = rng.choice(EXTREME)
    if kind == "set":
        parent[place[-1]] = new
    elif kind == "delete":
        del parent[place[-1]]
    elif kind == "rename" and isinstance(parent, dict):
        parent[str(new)[:50]] = parent.pop(place[-1])
    else:  # the value of another place
        source = value
        for key in rng.choice(places):
            source = source[key]
        parent[place[-1]] = json.loads(json.dumps(source))
    return f"{kind} {'.'.join(map(str, place))[:60]} = {str(new)[:40]!r}"
