"""Matrices of 2, 4 or 8 bits a number, packed into words or bytes, multiplied out some rows at a time.

    W[o, i] = scale[o, g] · (number[o, i] − zero[o, g]),   g the group of input i

| format | tensors behind a module's name |
|---|---|
| GPTQ | qweight [in ÷ n, out], qzeros [groups, out ÷ n], scales [groups, out], g_idx [in] |
| AWQ | qweight [in, out ÷ n], qzeros [groups, out ÷ n], scales [groups, out] |
| pack-quantized | weight_packed [out, in ÷ n], weight_zero_point [out ÷ n, groups], weight_scale [out, groups], … |

A word holds n = 32 / bits neighbours along the axis that is divided, the first in its lowest bits; AWQ's eight in the
order 0, 2, 4, 6, 1, 3, 5, 7. GPTQ stores zeros less one, but for its second version. Inputs are in groups of
neighbours, or as g_idx (weight_g_idx [in]) says. weight_shape is that of the matrix, which may end within a word.

Four-bit floats (e2m1) lie two in a byte, and have no zeros:

| format | tensors behind a module's name |
|---|---|
| nvfp4-pack-quantized | weight_packed [out, in ÷ 2], weight_scale [out, groups] in e4m3 ÷ weight_global_scale [1] |
| mxfp4-pack-quantized | weight_packed [out, in ÷ 2], weight_scale [out, groups], the exponent of 2 plus 127 |
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from jaxtyping import Float, Int, Shaped, UInt8

from smcjax.errors import CheckpointError
from smcjax.files import shortened
from smcjax.model.files.hf_quantization import Packing, is_of_activations
from smcjax.model.files.tensor_files import DTYPES, Source, TensorFile, Tensors
from smcjax.quantization import FLOAT8

_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)  # by its four bits
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # in a word, of each of eight neighbours


@dataclasses.dataclass(frozen=True)
class Layout:
    """Names of a format's tensors behind a module's, and along what they run.

    Attributes:
        transposed: tensors are [in, out], and [out, in] otherwise.
        by_output: words hold neighbours along the outputs, and otherwise along the inputs.
        places: where in a word each of its neighbours lies; empty: in order.
        word: bits of a word; of 8, the numbers are floats.
        scale_dtype: of scales, as safetensors names it; empty: any float.
        divisor: the tensor by whose one number all scales are divided; empty: none.
    """

    numbers: str
    zeros: str
    scales: str
    index: str
    shape: str = ""
    transposed: bool = True
    by_output: bool = False
    places: tuple[int, ...] = ()
    word: int = 32
    scale_dtype: str = ""
    divisor: str = ""


_FLOAT4 = Layout("weight_packed", "", "weight_scale", "", transposed=False, word=8)
LAYOUTS = {  # by `Packing.format`
    "GPTQ": Layout("qweight", "qzeros", "scales", "g_idx"),
    "AWQ": Layout("qweight", "qzeros", "scales", "g_idx", by_output=True, places=_AWQ_PLACES),
    "pack-quantized": Layout(
        *("weight_packed", "weight_zero_point", "weight_scale", "weight_g_idx", "weight_shape"), transposed=False
    ),
    "nvfp4-pack-quantized": dataclasses.replace(_FLOAT4, scale_dtype=FLOAT8.stored, divisor="weight_global_scale"),
    "mxfp4-pack-quantized": dataclasses.replace(_FLOAT4, scale_dtype="U8"),
}


@dataclasses.dataclass(frozen=True)
class PackedMatrix:
    """One matrix, as `Tensors` that have it alone and as a lazy view of it: `packed[begin:end]` multiplies rows out.

    Attributes:
        name: of the matrix, as a file that is not quantised has it.
        parts: the open file of each tensor, by the tensor's name behind the module's.
        group_of: Int[in], the group of each input.
    """

    name: str
    shape: tuple[int, int]
    packing: Packing
    parts: Mapping[str, TensorFile]
    group_of: np.ndarray

    @property
    def path(self) -> Path:
        """The file that has the numbers."""
        return self.parts[self._layout.numbers].path

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of the matrix, by its name."""
        return {self.name: self.shape}

    def rows(self, name: str) -> PackedMatrix:
        """The lazy view."""
        assert name == self.name
        return self

    def narrow(self, name: str) -> str:
        """Names the format that the matrix is stored in."""
        assert name == self.name
        return f"{self.packing.format} of {self.packing.bits} bits"

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def __getitem__(self, rows: slice) -> Float[np.ndarray, "rows in"]:
        begin, end, _ = rows.indices(self.shape[0])
        if self._layout.by_output:
            numbers = self._by_output(self._layout.numbers, begin, end)
        else:
            words = self._stored(self._layout.numbers, slice(begin, end))
            numbers = self._unpacked(words).reshape(end - begin, -1)[:, : self.shape[1]]
        values = _E2M1[numbers] if self._layout.word == 8 else numbers.astype(np.float32)
        if self.packing.zeros:
            zeros = self._by_output(self._layout.zeros, begin, end).astype(np.float32) + self.packing.zero_offset
            values -= zeros[:, self.group_of]
        elif self._layout.word != 8:
            values -= 1 << (self.packing.bits - 1)
        with np.errstate(all="ignore"):  # what is not finite is the file's own, and refused by name
            values *= self._scales(slice(begin, end))[:, self.group_of]
        return values

    def _scales(self, outputs: slice) -> Float[np.ndarray, "outputs groups"]:
        stored = self._stored(self._layout.scales, outputs)
        if stored.dtype == np.uint8:  # the exponent of 2, of which the largest is no number
            return np.where(stored == 255, np.float32(np.nan), np.exp2(stored.astype(np.float32) - 127))
        scales = stored.astype(np.float32)
        return scales / self._number(self._layout.divisor) if self._layout.divisor else scales

    def _number(self, part: str) -> np.float32:
        """The one number of a tensor."""
        tensor = self.parts[part].handle.get_tensor(self.name.removesuffix("weight") + part)
        return np.float32(tensor.reshape(-1)[0])

    @property
    def _layout(self) -> Layout:
        return LAYOUTS[self.packing.format]

    def _stored(self, part: str, outputs: slice) -> Shaped[np.ndarray, "outputs other"]:
        """Some of a tensor along its axis of outputs, or of words of outputs, which comes first."""
        file, name = self.parts[part], self.name.removesuffix("weight") + part
        stored = file.stored_rows(name) if file.dtype(name) == FLOAT8.stored else file.handle.get_slice(name)
        found: np.ndarray = stored[:, outputs].T if self._layout.transposed else stored[outputs]
        return found

    def _unpacked(self, words: Int[np.ndarray, "*shape"]) -> UInt8[np.ndarray, "*shape n"]:
        """The numbers of each word, in the order of neighbours."""
        bits, places = self.packing.bits, self._layout.places
        octets = np.ascontiguousarray(words, f"<u{self._layout.word // 8}")[..., None].view(np.uint8)
        shifts = np.arange(0, 8, bits, dtype=np.uint8)
        numbers = (octets[..., None] >> shifts) & np.uint8((1 << bits) - 1)
        numbers = numbers.reshape(*words.shape, self._layout.word // bits)
        return numbers[..., places] if places else numbers

    def _by_output(self, part: str, begin: int, end: int) -> UInt8[np.ndarray, "rows other"]:
        """Numbers of these outputs, of a tensor whose words hold neighbours along them."""
        each = self._layout.word // self.packing.bits
        first = begin // each
        words = self._stored(part, slice(first, -(-end // each)))
        numbers = np.moveaxis(self._unpacked(words), -1, 1).reshape(-1, words.shape[1])
        return numbers[begin - first * each : end - first * each]


def is_unused_bias(name: str, tensors: Mapping[str, Tensors]) -> bool:
    """True for the bias of a packed matrix that is zero throughout, which early writers gave to every one."""
    matrix = tensors.get(name.removesuffix("bias") + "weight")
    return name.endswith(".bias") and isinstance(matrix, PackedMatrix) and not np.any(tensors[name].rows(name)[:])


def with_packed(directory: Path, tensors: Mapping[str, TensorFile], packing: Packing) -> Source:
    """The tensors of a directory, with one `PackedMatrix` in place of the tensors of each that is packed.

    Raises CheckpointError where one of these is missing, of another shape or dtype, or says what cannot be.
    """
    layout = LAYOUTS[packing.format]
    modules = [name.removesuffix(layout.numbers) for name in tensors if name.endswith(f".{layout.numbers}")]
    if not modules:
        raise CheckpointError(
            f"{directory / 'config.json'} has a quantization_config for {packing.format} and the .safetensors files "
            f"beside it have no tensor NAME.{layout.numbers}; use the config.json that belongs to them"
        )
    found: dict[str, Tensors] = {name: file for name, file in tensors.items() if not is_of_activations(name)}
    for module in modules:
        matrix = _opened(tensors, module, packing, layout)
        for part in matrix.parts:
            del found[module + part]
        found[matrix.name] = matrix
    return Source(found)


def _opened(tensors: Mapping[str, TensorFile], module: str, packing: Packing, layout: Layout) -> PackedMatrix:
    each = layout.word // packing.bits

    def part(name: str, *dtypes: str) -> TensorFile:
        if module + name not in tensors:
            raise CheckpointError(
                f"tensor {shortened(repr(module + layout.numbers))} in {tensors[module + layout.numbers].path} is "
                f"packed ({packing.format}) and {shortened(repr(module + name))} is missing; fetch or convert the "
                "model again"
            )
        tensors[module + name].require(module + name, *dtypes)
        return tensors[module + name]

    def require_shape(name: str, *wanted: int) -> None:
        shape = parts[name].shapes[module + name]
        wanted = wanted[::-1] if layout.transposed else wanted
        if shape != wanted:
            raise CheckpointError(
                f"tensor {shortened(repr(module + name))} in {parts[name].path} is {shortened(list(shape))} instead "
                f"of {list(wanted)}, as the config's {packing.bits} bits and groups of {packing.group or 'all'} inputs "
                "call for; convert the model again, or use the config.json that belongs to it"
            )

    parts = {
        layout.numbers: part(layout.numbers, "U8" if layout.word == 8 else "I32"),
        layout.scales: part(layout.scales, *((layout.scale_dtype,) if layout.scale_dtype else DTYPES)),
    }
    if layout.divisor:
        parts[layout.divisor] = part(layout.divisor, "F32")
        if parts[layout.divisor].shapes[module + layout.divisor] not in ((), (1,)):
            require_shape(layout.divisor, 1)
    stored = parts[layout.numbers].shapes[module + layout.numbers]
    first, second = (stored if len(stored) == 2 else (0, 0))[:: -1 if layout.transposed else 1]
    outputs, inputs = (first * each, second) if layout.by_output else (first, second * each)
    if layout.shape:
        parts[layout.shape] = part(layout.shape, "I32", "I64")
        outputs, inputs = _stored_shape(parts[layout.shape], module + layout.shape)
    require_shape(layout.numbers, *((first, inputs) if layout.by_output else (outputs, -(-inputs // each))))
    groups = 1 if packing.group is None else -(-inputs // packing.group)
    require_shape(layout.scales, outputs, groups)
    if packing.zeros:
        parts[layout.zeros] = part(layout.zeros, "I32")
        require_shape(layout.zeros, -(-outputs // each), groups)
    group_of = np.arange(inputs) // (packing.group or inputs)
    if packing.permuted or (layout.index and module + layout.index in tensors):
        parts[layout.index] = part(layout.index, "I32", "I64")
        group_of = parts[layout.index].handle.get_tensor(module + layout.index)
        if group_of.shape != (inputs,) or group_of.min() < 0 or group_of.max() >= groups:
            raise CheckpointError(
                f"tensor {shortened(repr(module + layout.index))} in {parts[layout.index].path} is no list of "
                f"{inputs} numbers from 0 to {groups - 1}, the groups of all inputs; fetch or convert the model again"
            )
    return PackedMatrix(f"{module}weight", (outputs, inputs), packing, parts, group_of)


def _stored_shape(file: TensorFile, name: str) -> tuple[int, int]:
    shape = file.handle.get_tensor(name).tolist()
    if not isinstance(shape, list) or len(shape) != 2 or min(shape) < 1:
        raise CheckpointError(
            f"tensor {shortened(repr(name))} in {file.path} is {shortened(shape)}, which is the shape of no matrix; "
            "fetch or convert the model again"
        )
    return shape[0], shape[1]
