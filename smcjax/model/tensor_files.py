"""The tensors of a model's files, read when they are asked for; matrices in int8 with their scales."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import safetensors

from smcjax.errors import CheckpointError
from smcjax.files import Unreadable, require_file, shortened
from smcjax.model.hf_int8 import SCALE

_DTYPES = ("F64", "F32", "F16", "BF16")  # in safetensors' spelling
_INT8 = "I8"
COMPANIONS = {  # files beside the weights that say what those do not, and what that is
    "adapter_config.json": "an adapter, which is not applied; merge it into the weights",
    **dict.fromkeys(
        ("hf_quant_config.json", "quantize_config.json", "quant_config.json"),
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

    def dtype(self, name: str) -> str:
        dtype: str = self.handle.get_slice(name).get_dtype()
        return dtype

    def rows(self, name: str) -> Any:
        """A lazy view of one tensor: `rows(name)[begin:end]` reads those rows."""
        self.require(name, *_DTYPES)
        return self.handle.get_slice(name)

    def int8_rows(self, name: str) -> Any:
        """A lazy view of one tensor of int8."""
        self.require(name, _INT8)
        return self.handle.get_slice(name)

    def require(self, name: str, *dtypes: str) -> None:
        if self.dtype(name) not in dtypes:
            raise CheckpointError(
                f"tensor {shortened(repr(name))} in {self.path} has dtype {self.dtype(name)}, but only "
                f"{', '.join(dtypes)} are read there; use a checkpoint that is not quantised in such a way"
            )


@dataclasses.dataclass(frozen=True)
class _Product:
    """A lazy view of a tensor of int8, its rows multiplied out in float32 by their scales."""

    values: Any
    scale: np.ndarray  # Float32[out]

    def get_shape(self) -> list[int]:
        shape: list[int] = self.values.get_shape()
        return shape

    def __getitem__(self, rows: slice) -> np.ndarray:
        wide: np.ndarray = self.values[rows].astype(np.float32) * self.scale[rows, None]
        return wide


@dataclasses.dataclass(frozen=True)
class Source:
    """All tensors of a model by name, in one file or in several, and the scales of those that are int8."""

    tensors: Mapping[str, Tensors]
    scales: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)  # Float32[out]

    def rows(self, name: str) -> Any:
        """A lazy view of one tensor in a float dtype: `rows(name)[begin:end]` reads those rows."""
        return (
            _Product(self.int8_rows(name), self.scales[name]) if name in self.scales else self.tensors[name].rows(name)
        )

    def int8_rows(self, name: str) -> Any:
        file = self.tensors[name]
        assert isinstance(file, TensorFile)
        return file.int8_rows(name)


def refuse_companions(directory: Path) -> None:
    """Refuses a directory whose weights alone are not the model, by the files that say so."""
    for name, what in COMPANIONS.items():
        if (directory / name).exists():
            raise CheckpointError(f"{directory} holds {name}, which stands for {what}, or remove that file")


def with_scales(directory: Path, tensors: dict[str, TensorFile], int8: bool) -> Source:
    """The tensors of a directory without the scales of those in int8, which are read and checked.

    `int8`: the config says that there are such.
    """
    stored = [name for name, file in tensors.items() if file.dtype(name) == _INT8]
    if stored and not int8:
        raise CheckpointError(
            f"tensor {shortened(repr(stored[0]))} in {tensors[stored[0]].path} has dtype {_INT8} and config.json has "
            "no quantization_config that says how it is quantised; use the config.json that belongs to the weights"
        )
    if int8 and not stored:
        raise CheckpointError(
            f"{directory / 'config.json'} has a quantization_config for int8 and the .safetensors files beside it have "
            f"no tensor of dtype {_INT8}; use the config.json that belongs to them"
        )
    scales = {name: _read_scale(tensors, name) for name in stored}
    beside = {name + SCALE for name in scales}
    return Source({name: file for name, file in tensors.items() if name not in beside}, scales)


def _read_scale(tensors: Mapping[str, TensorFile], name: str) -> np.ndarray:
    """The scales Float32[out] of a matrix in int8: one for each row, positive and finite."""
    file, shape, scale_name = tensors[name], tensors[name].shapes[name], name + SCALE
    if len(shape) != 2:
        raise CheckpointError(
            f"tensor {shortened(repr(name))} in {file.path} has dtype {_INT8} and the shape {shortened(list(shape))}, "
            "but only matrices are read in int8; convert the model again"
        )
    if scale_name not in tensors:
        raise CheckpointError(
            f"tensor {shortened(repr(name))} in {file.path} has dtype {_INT8} and its scales, "
            f"{shortened(repr(scale_name))}, are missing; fetch or convert the model again"
        )
    scale_file = tensors[scale_name]
    if scale_file.shapes[scale_name] != (shape[0], 1):
        raise CheckpointError(
            f"tensor {shortened(repr(scale_name))} in {scale_file.path} is "
            f"{shortened(list(scale_file.shapes[scale_name]))} instead of {[shape[0], 1]}, a scale for each row of the "
            "matrix; convert the model again"
        )
    with np.errstate(over="ignore"):  # from float64, to what is refused below
        scale: np.ndarray = scale_file.rows(scale_name)[:].astype(np.float32)[:, 0]
    wrong = np.flatnonzero(~(np.isfinite(scale) & (scale > 0)))
    if wrong.size:
        raise CheckpointError(
            f"tensor {shortened(repr(scale_name))} in {scale_file.path} has {scale[wrong[0]]} for row {wrong[0]}, but "
            "a scale is a positive number; fetch or convert the model again"
        )
    return scale
