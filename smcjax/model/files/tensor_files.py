"""The tensors of a model's files, read when they are asked for; quantised matrices with their scales."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import ml_dtypes
import numpy as np
import safetensors

from smcjax.errors import CheckpointError
from smcjax.files import Unreadable, require_file, shortened
from smcjax.model.files.hf_quantization import Storage, is_of_activations
from smcjax.quantization import FLOAT8, QUANTIZATIONS, Quantization

DTYPES = ("F64", "F32", "F16", "BF16")  # in safetensors' spelling
_STORED = tuple(one.stored for one in QUANTIZATIONS.values())
_COPIES = ("quantize_config.json", "quant_config.json")  # of config.json's quantization_config, by those who make one
COMPANIONS = {  # files beside the weights that say what those do not, and what that is
    "adapter_config.json": "an adapter, which is not applied; merge it into the weights",
    **dict.fromkeys(
        ("hf_quant_config.json", *_COPIES),
        "quantised numbers that are not read; use the original model",
    ),
}


class Tensors(Protocol):
    """One open file: names and shapes are known, rows of tensors are read when asked for."""

    @property
    def path(self) -> Path: ...
    @property
    def shapes(self) -> dict[str, tuple[int, ...]]: ...
    def rows(self, name: str) -> Any: ...
    def narrow(self, name: str) -> str | None:
        """Names what a matrix is stored in, if it is narrower than float dtypes and no `Quantization`; else None."""


@dataclasses.dataclass(frozen=True)
class TensorFile:
    """One open .safetensors file: names and shapes are known, tensors are read when asked for."""

    path: Path
    handle: Any
    shapes: dict[str, tuple[int, ...]]

    @classmethod
    def open(cls, path: Path) -> TensorFile:
        try:
            require_file(path)
            handle = safetensors.safe_open(path, framework="numpy")
            shapes = {name: tuple(handle.get_slice(name).get_shape()) for name in handle.keys()}  # noqa: SIM118
        except Unreadable as error:
            raise CheckpointError(f"{path} {error}; {error.mend}") from None
        except (OSError, MemoryError) as error:  # MemoryError: the address space is too small for the file
            raise CheckpointError(f"{path} cannot be read ({error}); check that file and its permissions") from None
        except safetensors.SafetensorError as error:
            raise CheckpointError(
                f"{path} is not a complete safetensors file ({shortened(error, 200)}); download or convert it again"
            ) from None
        return cls(path, handle, shapes)

    def narrow(self, name: str) -> None:
        """None: numbers of float dtypes are read here, and of eight bits by their `Storage`."""

    def dtype(self, name: str) -> str:
        dtype: str = self.handle.get_slice(name).get_dtype()
        return dtype

    def rows(self, name: str) -> Any:
        """A lazy view of one tensor: `rows(name)[begin:end]` reads those rows."""
        self.require(name, *DTYPES)
        return self.handle.get_slice(name)

    def stored_rows(self, name: str) -> Any:
        """A lazy view of the numbers of one quantised matrix, of int8 or float8."""
        self.require(name, *_STORED)
        return self._float8(name) if self.dtype(name) == FLOAT8.stored else self.handle.get_slice(name)

    def _float8(self, name: str) -> np.ndarray:
        """The tensor mapped from the file, since safetensors asks NumPy for a dtype that it has not."""
        stored = np.memmap(self.path, np.uint8, "r", self._places[name], self.shapes[name])
        return stored.view(ml_dtypes.float8_e4m3fn)

    @functools.cached_property
    def _places(self) -> dict[str, int]:
        """The byte of the file at which each tensor begins, read once: a matrix is read some rows at a time."""
        with open(self.path, "rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size))
        return {name: 8 + size + header[name]["data_offsets"][0] for name in self.shapes}

    def require(self, name: str, *dtypes: str) -> None:
        if self.dtype(name) not in dtypes:
            raise CheckpointError(
                f"tensor {shortened(repr(name))} in {self.path} has dtype {self.dtype(name)}, but only "
                f"{', '.join(dtypes)} are read there; use a checkpoint that is not quantised in such a way"
            )


@dataclasses.dataclass(frozen=True)
class _Product:
    """A lazy view of a quantised matrix, multiplied out in float32 by the scales of its blocks."""

    values: Any
    scale: np.ndarray  # Float32[⌈out/rows⌉, ⌈in/columns⌉]
    shape: tuple[int, ...]
    block: tuple[int | None, int | None]

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def __getitem__(self, rows: slice) -> np.ndarray:
        high, wide = self.block
        of_rows = self.scale[np.arange(*rows.indices(self.shape[0])) // (high or self.shape[0])]
        if wide is not None:
            of_rows = np.repeat(of_rows, wide, axis=1)[:, : self.shape[1]]
        product: np.ndarray = self.values[rows].astype(np.float32) * of_rows
        return product


@dataclasses.dataclass(frozen=True)
class Source:
    """All tensors of a model by name, in one file or in several, and the scales of those that are quantised."""

    tensors: Mapping[str, Tensors]
    scales: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)  # Float32[⌈out/rows⌉, ⌈in/columns⌉]
    storage: Storage | None = None  # of the matrices that have scales

    def narrow(self, name: str) -> str | None:
        """Names what a matrix is stored in, as `Tensors` do."""
        return self.tensors[name].narrow(name)

    def rows(self, name: str) -> Any:
        """A lazy view of one tensor in a float dtype: `rows(name)[begin:end]` reads those rows."""
        if name not in self.scales:
            return self.tensors[name].rows(name)
        assert self.storage is not None
        shape = self.tensors[name].shapes[name]
        return _Product(self.stored_rows(name), self.scales[name], shape, self.storage.block)

    def is_stored(self, name: str, kind: Quantization) -> bool:
        """True for a matrix that is stored in this quantisation."""
        return name in self.scales and self.storage is not None and self.storage.kind == kind and self.storage.stays

    def stored_rows(self, name: str) -> Any:
        """A lazy view of the stored numbers of a quantised matrix."""
        file = self.tensors[name]
        assert isinstance(file, TensorFile)
        return file.stored_rows(name)


def refuse_companions(directory: Path, *, quantized: bool = False) -> None:
    """Refuses a directory whose weights alone are not the model, by the files that say so.

    `quantized`: config.json says how matrices are quantised, which a copy in such a file does not change.
    """
    for name, what in COMPANIONS.items():
        if (directory / name).exists() and not (quantized and name in _COPIES):
            raise CheckpointError(f"{directory} holds {name}, which stands for {what}, or remove that file")


def with_scales(directory: Path, tensors: dict[str, TensorFile], storage: Storage | None) -> Source:
    """The tensors of a directory without the scales of quantised matrices, which are read and checked.

    `storage` is how the config says that those are stored. Scales of activations are left out.
    """
    dtypes = {name: file.dtype(name) for name, file in tensors.items()}
    stored = [name for name, dtype in dtypes.items() if dtype in _STORED]
    if stored and storage is None:
        raise CheckpointError(
            f"tensor {shortened(repr(stored[0]))} in {tensors[stored[0]].path} has dtype {dtypes[stored[0]]} and "
            "config.json has no quantization_config that says how it is quantised; use the config.json that belongs to "
            "the weights"
        )
    if storage is None:
        return Source(tensors)
    if storage.kind.stored not in dtypes.values():
        raise CheckpointError(
            f"{directory / 'config.json'} has a quantization_config for {storage.kind.name} and the .safetensors files "
            f"beside it have no tensor of dtype {storage.kind.stored}; use the config.json that belongs to them"
        )
    of_weights = {name: file for name, file in tensors.items() if not is_of_activations(name)}
    scales = {name: _read_scales(tensors, name, storage) for name in stored if name in of_weights}
    beside = {name + storage.suffix for name in scales}
    return Source({name: file for name, file in of_weights.items() if name not in beside}, scales, storage)


def _read_scales(tensors: Mapping[str, TensorFile], name: str, storage: Storage) -> np.ndarray:
    """The scales Float32[⌈out/rows⌉, ⌈in/columns⌉] of a quantised matrix: positive and finite."""
    file, shape, scale_name = tensors[name], tensors[name].shapes[name], name + storage.suffix
    file.require(name, storage.kind.stored)
    if len(shape) != 2:
        raise CheckpointError(
            f"tensor {shortened(repr(name))} in {file.path} has dtype {storage.kind.stored} and the shape "
            f"{shortened(list(shape))}, but only matrices are read so; convert the model again"
        )
    if scale_name not in tensors:
        raise CheckpointError(
            f"tensor {shortened(repr(name))} in {file.path} has dtype {storage.kind.stored} and its scales, "
            f"{shortened(repr(scale_name))}, are missing; fetch or convert the model again"
        )
    scale_file, wanted = tensors[scale_name], storage.scales_shape(shape)
    found = scale_file.shapes[scale_name]
    if found != wanted and not (wanted == (1, 1) and found in ((), (1,))):
        raise CheckpointError(
            f"tensor {shortened(repr(scale_name))} in {scale_file.path} is {shortened(list(found))} instead of "
            f"{list(wanted)}, as the config's blocks of the matrix are; convert the model again"
        )
    stored = scale_file.rows(scale_name)
    with np.errstate(over="ignore"):  # from float64, to what is refused below
        scale = np.asarray(stored[:] if found else scale_file.handle.get_tensor(scale_name), np.float32).reshape(wanted)
    wrong = np.argwhere(~(np.isfinite(scale) & (scale > 0)))
    if wrong.size:
        row, column = wrong[0]
        raise CheckpointError(
            f"tensor {shortened(repr(scale_name))} in {scale_file.path} has {scale[row, column]} for row {row}, but a "
            "scale is a positive number; fetch or convert the model again"
        )
    return scale
