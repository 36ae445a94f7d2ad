"""GGUF, llama.cpp's model file: its header, checked against the file's size as it is read, and its tensors.

Layout, all little-endian: "GGUF", version u32, number of tensors u64, number of metadata pairs u64; the pairs (name,
type u32, value); each tensor's name, dimensions, type and offset; then, aligned, the tensors' bytes. No count is
believed before the bytes that it asks for are known to be there, and none that no model has: a header takes less than
1 GiB of memory, whatever it says.

A model may be split: each shard is such a file of its own, named as `shard_names` says, and says which of how many it
is; the first has the metadata.
"""

from __future__ import annotations

import dataclasses
import math
import mmap
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from smcjax.errors import CheckpointError, extra_missing
from smcjax.files import Unreadable, require_file, shortened

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_HEADER = 1 << 27  # bytes; a vocabulary of 256,000 tokens takes 20 MB
_MAX_ELEMENTS = 1 << 22  # of all arrays; a vocabulary of 256,000 tokens and its merges take 1,300,000
_MAX_NAMED = 1 << 16  # tensors, and likewise metadata; a model of 126 layers has 1,137 tensors
_MAX_DIMENSIONS = 4
_ALIGNMENT = "general.alignment"
_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_NUMBER, _COUNT, _TENSORS = "split.no", "split.count", "split.tensors.count"


@dataclasses.dataclass(frozen=True)
class GGUFTensor:
    """Where one tensor lies, how it is stored, and its shape, outermost dimension first."""

    path: Path
    kind: Any  # gguf.GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int  # in the file, bytes
    row_bytes: int


@dataclasses.dataclass(frozen=True)
class GGUFFile:
    """One GGUF model: metadata and tensors by name. Values are read when asked for.

    `path` is the file that holds the metadata, of a split model the first shard.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]

    @classmethod
    def open(cls, path: Path) -> GGUFFile:
        """Reads the headers alone, of all shards where `path` is one. Raises CheckpointError for what cannot be used.

        A split model is complete or refused: a tensor that lies in no shard would be taken for one that the model does
        without.
        """
        names = shard_names(path.name)
        shards = []
        for name in names:
            shard = path.with_name(name)
            if name != path.name and not shard.exists():
                raise CheckpointError(f"{shard} is missing, and the model is split into {len(names)} files; fetch it")
            shards.append(_opened(shard))
            _check_place(shards[-1], len(shards), len(names))
        return shards[0] if len(shards) == 1 else _joined(shards)

    def read(self, name: str, rows: Any = slice(None)) -> np.ndarray:
        """Float32 values of those rows (an index along the first axis) of one tensor, dequantised."""
        from gguf import quants

        tensor = self.tensors[name]
        vector = len(tensor.shape) == 1
        shape = (1, tensor.row_bytes) if vector else (*tensor.shape[:-1], tensor.row_bytes)
        try:
            stored = np.memmap(tensor.path, np.uint8, "r", tensor.offset, shape)
        except OSError as error:
            raise CheckpointError(
                f"tensor {shortened(repr(name))} in {tensor.path} cannot be read ({error.strerror}); check that file, "
                "and the memory that a process may take"
            ) from None
        with np.errstate(all="ignore"):  # infinities are the file's own
            values = quants.dequantize(np.ascontiguousarray(stored if vector else stored[rows]), tensor.kind)
        return values[0][rows] if vector else values


def shard_names(name: str) -> list[str]:
    """The names of all files of the model that the file `name` belongs to, itself among them, as llama.cpp gives them.

    The second of three is "model-00002-of-00003.gguf". A name of another form is that of a whole model.
    """
    found = _SHARD.fullmatch(name)
    if found is None or not 1 <= int(found[2]) <= int(found[3]):
        return [name]
    return [f"{found[1]}-{number:05}-of-{found[3]}.gguf" for number in range(1, int(found[3]) + 1)]


def _check_place(file: GGUFFile, number: int, count: int) -> None:
    """Refuses a file that says of itself to be another shard than its name does."""
    own_number, own_count = file.metadata.get(_NUMBER), file.metadata.get(_COUNT)
    if own_count in (None, 0, 1):  # 0 in a file that llama.cpp has put together
        if count > 1:
            raise CheckpointError(
                f"{file.path} is a whole model ({_COUNT} is {own_count}) with the name of shard {number} of {count}; "
                "rename it, or fetch that shard"
            )
        return
    if not isinstance(own_number, int) or not isinstance(own_count, int) or not 0 <= own_number < own_count:
        raise CheckpointError(
            f"{file.path} says that it is shard {shortened(repr(own_number))} ({_NUMBER}, from 0) of "
            f"{shortened(repr(own_count))} ({_COUNT}), which cannot be; fetch or convert it again"
        )
    if (own_number + 1, own_count) != (number, count):
        raise CheckpointError(
            f"{file.path} is shard {own_number + 1} of {own_count} of a split model, whose name ends in "
            f"-{own_number + 1:05}-of-{own_count:05}.gguf; name it so, beside the other shards"
        )


def _joined(shards: list[GGUFFile]) -> GGUFFile:
    """The model of all shards: the first one's metadata, and the tensors of each."""
    first = shards[0]
    tensors: dict[str, GGUFTensor] = {}
    for shard in shards:
        for name, tensor in shard.tensors.items():
            if name in tensors:
                raise CheckpointError(
                    f"tensor {shortened(repr(name))} is in {tensors[name].path} and in {shard.path}; fetch both again"
                )
            tensors[name] = tensor
    total = first.metadata.get(_TENSORS)
    if total != len(tensors):
        raise CheckpointError(
            f"{first.path} and the other shards of that model have {len(tensors)} tensors instead of "
            f"{shortened(repr(total))} ({_TENSORS}); fetch all of them again"
        )
    return dataclasses.replace(first, tensors=tensors)


def _opened(path: Path) -> GGUFFile:
    """One file by itself, whose header alone is read."""
    try:
        size = require_file(path)
        with open(path, "rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise CheckpointError(
                    f"{path} is a file and not a GGUF one; pass a GGUF file, or the directory that holds config.json "
                    "and the weights"
                )
            library = _gguf_library(path)
            with mmap.mmap(file.fileno(), min(size, _MAX_HEADER), access=mmap.ACCESS_READ) as data:
                header = _Header(path, data, whole=size <= _MAX_HEADER)
                metadata, infos = header.read()
    except Unreadable as error:
        raise CheckpointError(f"{path} {error}; pass a GGUF file or a model directory") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}); check its permissions") from None
    alignment = metadata.get(_ALIGNMENT, 32)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise header.broken(f"its {_ALIGNMENT} is {alignment!r}, which is no power of two")
    start = -(-header.at // alignment) * alignment
    tensors = {name: _located(path, name, *info, start, size, library) for name, info in infos}
    if len(tensors) != len(infos):
        raise header.broken("it names a tensor twice")
    return GGUFFile(path, metadata, tensors)


def _gguf_library(path: Path) -> Any:
    """The package that knows the tensor types."""
    try:
        import gguf
    except ImportError:
        raise CheckpointError(extra_missing(f"{path}, a GGUF file,", "gguf", "gguf")) from None
    return gguf


def _located(
    path: Path, name: str, dimensions: tuple[int, ...], code: int, offset: int, start: int, size: int, library: Any
) -> GGUFTensor:
    """The tensor of a header's entry. Raises CheckpointError for one that cannot be read, before it is."""
    try:
        kind = library.GGMLQuantizationType(code)
        block, block_bytes = library.GGML_QUANT_SIZES[kind]
        library.quants.dequantize(np.zeros((1, block_bytes), np.uint8), kind)
    except (ValueError, KeyError, NotImplementedError):
        known = f"type {code}" if code not in {int(k) for k in library.GGMLQuantizationType} else f"type {kind.name}"
        raise CheckpointError(
            f"tensor {name!r} in {path} has {known}, which the installed gguf cannot dequantise; use another "
            "quantisation of this model, such as Q8_0 or Q4_K_M, or update gguf"
        ) from None
    shape = dimensions[::-1]
    row_bytes = shape[-1] // block * block_bytes
    if min(shape) < 1 or shape[-1] % block:
        raise CheckpointError(
            f"tensor {name!r} in {path} has shape {list(shape)}, which {kind.name} cannot have; download or convert "
            "the file again"
        )
    if start + offset + math.prod(shape[:-1]) * row_bytes > size:
        raise CheckpointError(
            f"{path} is not a complete GGUF file (tensor {name!r} ends beyond its {size} bytes); download it again"
        )
    return GGUFTensor(path, kind, shape, start + offset, row_bytes)


class _Header:
    """The bytes of a header and how far they have been read."""

    def __init__(self, path: Path, data: mmap.mmap, *, whole: bool) -> None:
        self._path, self._data, self._whole = path, data, whole
        self.at = 0
        self._elements = 0  # of the arrays so far

    def broken(self, reason: str) -> CheckpointError:
        return CheckpointError(f"{self._path} is not a valid GGUF file ({reason}); download or convert it again")

    def read(self) -> tuple[dict[str, Any], list[tuple[str, tuple[tuple[int, ...], int, int]]]]:
        """Metadata, and each tensor's name with its dimensions (innermost first), type and offset."""
        self.at = len(MAGIC)
        version = self._scalar("I")
        if version not in _VERSIONS:
            raise CheckpointError(
                f"{self._path} is a GGUF file of version {version}, and only little-endian ones of versions 2 and 3 "
                "are read; convert the model again"
            )
        num_tensors, num_pairs = self._scalar("Q"), self._scalar("Q")
        metadata: dict[str, Any] = {}
        for _ in self._times(num_pairs, 13, _MAX_NAMED):
            name = self._string()
            if name in metadata:
                raise self.broken(f"it has the key {name[:80]!r} twice")
            metadata[name] = self._value(self._scalar("I"))
        tensors = []
        for _ in self._times(num_tensors, 24, _MAX_NAMED):
            name = self._string()
            rank = self._scalar("I")
            if not 1 <= rank <= _MAX_DIMENSIONS:
                raise self.broken(f"tensor {name[:80]!r} has {rank} dimensions")
            dimensions = tuple(self._scalar("Q") for _ in range(rank))
            tensors.append((name, (dimensions, self._scalar("I"), self._scalar("Q"))))
        return metadata, tensors

    def _take(self, count: int) -> bytes:
        begin, self.at = self.at, self.at + count
        if self.at > len(self._data):
            if self._whole:
                raise self.broken("it ends in the middle of its header")
            raise self.broken(f"its header is longer than {_MAX_HEADER >> 20} MiB")
        return self._data[begin : self.at]

    def _times(self, count: int, least: int, most: int) -> Iterator[int]:
        """`count` entries, `most` at most, of at least `least` bytes each, all of which must be there."""
        if count * least > len(self._data) - self.at:
            raise self.broken(f"it announces {count} entries where {len(self._data) - self.at} bytes are left")
        if count > most:
            raise self.broken(f"it announces {count} entries where no model has more than {most}")
        return iter(range(count))

    def _scalar(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self._take(struct.calcsize(code)))[0]

    def _string(self) -> str:
        raw = self._take(self._scalar("Q"))
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise self.broken(f"the string at byte {self.at - len(raw)} is not UTF-8") from None

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind])
        if kind != _ARRAY:
            raise self.broken(f"a value has type {kind}")
        element, count = self._scalar("I"), self._scalar("Q")
        if element != _STRING and element not in _SCALARS:
            raise self.broken(f"an array has elements of type {element}")
        code = _SCALARS.get(element, "Q")  # a string begins with its length
        times = self._times(count, struct.calcsize(code), _MAX_ELEMENTS - self._elements)
        self._elements += count
        if element == _STRING:
            return [self._string() for _ in times]
        return list(struct.unpack(f"<{count}{code}", self._take(count * struct.calcsize(code))))
