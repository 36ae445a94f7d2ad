"""Hugging Face directories and GGUF files: found, checked against their configuration, and loaded."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from smcjax.device import on_cpu
from smcjax.errors import CheckpointError
from smcjax.files import MIB, Unreadable, is_name_in_directory, read_json, shortened
from smcjax.matmul import Quantized
from smcjax.model.config import ModelConfig
from smcjax.model.files.gguf import GGUF_NAMES, ends_by_name, read_gguf
from smcjax.model.files.hf_config import ReadConfig, read_config
from smcjax.model.files.hf_quantization import Packing, Storage
from smcjax.model.files.hub import (
    BUNDLED,
    INDEX_BYTES,
    PACKAGED,
    bundled_model,
    fetched_model,
    is_hub_id,
    packaged_model,
)
from smcjax.model.files.packed import is_unused_bias, with_packed
from smcjax.model.files.tensor_files import Source, TensorFile, Tensors, refuse_companions, with_scales
from smcjax.model.parallel import TensorParallel, layouts
from smcjax.model.params import Params, num_params, param_shapes
from smcjax.model.quantize import quantize_leaves, streamed
from smcjax.quantization import QUANTIZATIONS, Quantization, check_quantization, stored_order

logger = logging.getLogger("smcjax")

CONFIG_BYTES = 4 * MIB  # of a config.json at most; real ones have kilobytes
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_EMBED, _LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"
_ROWS = 4096  # read or compared at a time


@dataclasses.dataclass(frozen=True)
class Stack:
    """The tensors of a file that one array of `Params` stacks along its first axis, each with its rows.

    The array is what is stored plus `offset`.
    """

    parts: tuple[tuple[str, int], ...]
    offset: float = 0.0


def tensor_names(config: ModelConfig, names: Mapping[str, str], norm_offset: float = 0.0) -> Params:
    """A tree like `param_shapes(config)`, whose leaves say which tensors of a file make up each array.

    `names` are a family's (`smcjax.model.families`) or GGUF's; `norm_offset` is added to the stored norms.
    """
    q, kv, f = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim, config.intermediate_size

    def stack(path: Any, array: jax.ShapeDtypeStruct) -> Stack:
        layer, last = path[1].idx if len(path) > 1 else 0, path[-1]
        if isinstance(last, jax.tree_util.DictKey):  # of the kind of attention, under the place of its projections
            return Stack(((f"{names['attention'].format(layer)}.{last.key}", array.shape[0]),))
        field, suffix = last.name.removesuffix("_bias"), "bias" if last.name.endswith("_bias") else "weight"
        keys = config.layer(layer).attention.kv_pairs * kv
        fused = {"qkv": (("q", q), ("k", keys), ("v", keys)), "gate_up": (("gate", f), ("up", f))}
        parts = fused.get(field, ((field, array.shape[0]),))
        stored = tuple((f"{names[part].format(layer)}.{suffix}", rows) for part, rows in parts)
        return Stack(stored, norm_offset if field.endswith("_norm") else 0.0)

    found: Params = jax.tree_util.tree_map_with_path(stack, param_shapes(config, config.dtype))
    return found


def resolve_model_path(name: str | os.PathLike[str]) -> Path:
    """The directory or file that `name` means: itself, a bundled model (`hub.BUNDLED`), one of an extra
    (`hub.PACKAGED`), or a hub id's snapshot.

    A hub id ("org/name", "org/name:file.gguf", "org/name@revision") is downloaded unless it is in the local cache.
    """
    if not os.fspath(name):
        raise CheckpointError("the model path is empty; pass a model directory, a GGUF file or a hub id, as org/name")
    path = Path(os.path.expanduser(name))  # "~nosuchuser" stays as it is, and does not exist
    try:
        exists = path.exists()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}); check its permissions") from None
    if exists:
        return path
    if str(name) in BUNDLED:
        return bundled_model(BUNDLED[str(name)])
    if str(name) in PACKAGED:
        return packaged_model(str(name))
    if not is_hub_id(str(name)):
        raise CheckpointError(f"{path} does not exist; pass a model directory, a GGUF file or a hub id, as org/name")
    return fetched_model(str(name))


def load_config(directory: str | os.PathLike[str]) -> ModelConfig:
    """`ModelConfig` from config.json and generation_config.json, where there is one, or from a GGUF's metadata."""
    directory = resolve_model_path(directory)
    return _read_directory(directory).config if directory.is_dir() else read_gguf(directory)[0]


def stored_quantization(directory: str | os.PathLike[str]) -> str | None:
    """The name of the quantisation in which config.json says that matrices are stored; None of a GGUF file.

    Of float8 with a scale a block, and of packed numbers, it is None as well: such matrices are multiplied out.
    """
    directory = resolve_model_path(directory)
    stored = _read_directory(directory).storage if directory.is_dir() else None
    return stored.kind.name if isinstance(stored, Storage) and stored.stays else None


def _read_directory(directory: Path) -> ReadConfig:
    config = read_model_json(directory / "config.json")
    refuse_companions(directory, quantized=isinstance(config, Mapping) and bool(config.get("quantization_config")))
    generation = directory / "generation_config.json"
    generation_config = read_model_json(generation) if generation.exists() else None
    try:
        read = read_config(config, generation_config)
    except ValueError as error:
        raise CheckpointError(f"{directory}: {error}") from None
    require_plausible(directory, read.config, bytes_each=2 if read.storage is None else read.storage.bits / 8)
    return read


def require_plausible(directory: Path, config: ModelConfig, bytes_each: float) -> None:
    """Refuses a config of another order of size than the weights beside it, before anything is made of it.

    No dtype of the files has fewer bytes than `bytes_each`. What differs by less is named tensor by tensor when the
    files are opened.
    """
    stored = sum(path.stat().st_size for path in directory.glob("*.safetensors") if path.is_file())
    least = bytes_each * num_params(config)
    if 0 < 4 * stored < least:
        open_tensors(directory)  # a file cut short is the likelier mistake, and says so
        sizes = f"num_hidden_layers {config.num_layers}, num_attention_heads {config.num_heads}, "
        sizes += f"head_dim {config.head_dim}, hidden_size {config.hidden_size}, "
        sizes += f"intermediate_size {config.intermediate_size}, vocab_size {config.vocab_size}"
        raise CheckpointError(
            f"{directory / 'config.json'} calls for {least / bytes_each:.3g} weights ({sizes}) and the .safetensors "
            f"files beside it have {stored:,} bytes; use the config.json that belongs to them"
        )


def load_checkpoint(
    directory: str | os.PathLike[str],
    dtype: Any = None,
    quantization: str | None = None,
    parallel: TensorParallel | None = None,
) -> tuple[ModelConfig, Params]:
    """The model of a Hugging Face directory (or hub id) or of a GGUF file, weights on the default device.

    With `parallel` they are divided among its devices as they are read: none ever has more than its own pieces.

    `dtype` is that of every weight: "float32", "bfloat16" or the jnp dtype; None and "auto" mean bfloat16, on CPU
    float32. Files may hold float16, bfloat16, float32 or float64, in one file or in shards; a GGUF file may hold every
    type that the package gguf dequantises. Every tensor of the files and of the config is accounted for: none missing,
    left over or of another shape, else CheckpointError.

    Quantised matrices, of a directory (`smcjax.model.files.hf_quantization`) or a GGUF file, are multiplied out in
    float32 and cast. With a `quantization` all that `quantize_params` covers are `Quantized`, with the numbers and
    scales that are stored, or else rounded as soon as they are read: a device never has two that are not. Of those
    that a file keeps in fewer bits or in groups a log line says the format and what rounding them costs.

    Host memory beyond the files' page cache is one matrix at a time.
    """
    target = weights_dtype(dtype)
    check_quantization("quantization", quantization)
    path = resolve_model_path(directory)
    aliases: dict[str, str] = {}
    if path.is_dir():
        family, config, stored = _read_directory(path)
        tensors = open_tensors(path)
        source = (
            with_packed(path, tensors, stored) if isinstance(stored, Packing) else with_scales(path, tensors, stored)
        )
        config, aliases = _resolve_tying(config, source)
        named = family.names, family.norm_offset
    else:
        config, file = read_gguf(path)
        source, named = Source(dict.fromkeys(file.shapes, file)), (GGUF_NAMES, 0.0)
        for text, token in ends_by_name(file.file).items():
            logger.info("%s: %r (%d) ends an answer by its name, as in llama.cpp; no key says so.", path, text, token)
    config = dataclasses.replace(config, dtype=target.name)
    stacks = jax.tree.leaves(tensor_names(config, *named))
    shapes = param_shapes(config, target)
    kind = None if quantization is None else QUANTIZATIONS[quantization]
    covered = streamed(shapes)
    account_for_names(path, stacks, jax.tree.leaves(shapes), aliases, source.tensors)
    rounding = Rounding()
    layout_of = jax.tree.leaves(shapes if parallel is None else layouts(config, parallel.size, parallel.vocabulary))

    def leaves() -> Iterator[Any]:
        for stack, shape, packs, layout in zip(stacks, jax.tree.leaves(shapes), covered, layout_of, strict=True):
            parts = [(aliases.get(name, name), rows) for name, rows in stack.parts]
            leaf: Any
            if (
                kind is not None
                and packs
                and any(source.is_stored(name, kind) or source.narrow(name) for name, _ in parts)
            ):
                values, scale = _read_quantized(source, parts, shape, kind, rounding)
                dtype_name = jnp.dtype(shape.dtype).name
                if parallel is None:
                    leaf = Quantized(stored_order(values, kind), jnp.asarray(scale), dtype_name, kind.name)
                else:
                    leaf = parallel.place_quantized(values, scale, layout, dtype_name, kind)
            else:
                read = read_stack(source, parts, shape, stack.offset)
                leaf = jax.device_put(read) if parallel is None else parallel.place(read, layout)
            yield jax.block_until_ready(leaf)

    params = quantize_leaves(shapes, leaves(), kind)
    if rounding.formats:
        logger.warning(
            "%s: matrices in %s are rounded to eight bits (%s, a scale a row); the error's root mean square is %.2f%% "
            "of the weights'.",
            *(path, ", ".join(sorted(rounding.formats)), quantization, 100 * rounding.error),
        )
    return config, params


@dataclasses.dataclass
class Rounding:
    """Sums what rounding to eight bits has cost so far, over matrices that a file keeps in another quantisation."""

    formats: set[str] = dataclasses.field(default_factory=set)
    squared_error: float = 0.0
    squared: float = 0.0

    @property
    def error(self) -> float:
        """The root mean square of the error, over that of the weights."""
        return math.sqrt(self.squared_error / self.squared) if self.squared else 0.0

    def add(self, name: str, squared_error: jax.Array, squared: jax.Array) -> None:
        """Counts some rows of a matrix in the format of that name: both arrays hold a sum of each row."""
        self.formats.add(name)
        self.squared_error += float(np.asarray(squared_error, np.float64).sum())
        self.squared += float(np.asarray(squared, np.float64).sum())


@functools.partial(jax.jit, static_argnames="kind")
def _rounded(rows: jax.Array, kind: Quantization) -> tuple[jax.Array, ...]:
    """Rows rounded, their scales, and of each row the squares of its error and of its weights, summed."""
    values, scale = kind.round(rows)
    wide = rows.astype(jnp.float32)
    error = values.astype(jnp.float32) * scale[:, None] - wide
    return values, scale, jnp.sum(error * error, axis=1), jnp.sum(wide * wide, axis=1)


def _chunks(parts: Iterable[tuple[str, int]]) -> Iterator[tuple[str, slice, slice]]:
    """Each tensor's name with some rows of it at a time, and where these lie among the rows of all."""
    start = 0
    for name, rows in parts:
        for begin in range(0, rows, _ROWS):
            end = min(begin + _ROWS, rows)
            yield name, slice(begin, end), slice(start + begin, start + end)
        start += rows


def read_stack(
    source: Source, parts: Iterable[tuple[str, int]], shape: jax.ShapeDtypeStruct, offset: float = 0.0
) -> np.ndarray:
    """The rows of all `parts`, one below the other, plus `offset`; cast to the dtype of `shape`.

    Raises CheckpointError for numbers that are not finite, and where there is no memory for the matrix.
    """
    parts = list(parts)
    try:
        buffer = np.empty(shape.shape, shape.dtype)
    except MemoryError as error:
        name = parts[0][0]
        raise CheckpointError(
            f"tensor {shortened(repr(name))} in {source.tensors[name].path} cannot be read ({error}); use a smaller "
            "model"
        ) from None
    for name, rows, place in _chunks(parts):
        stored = source.rows(name)[rows]
        buffer[place] = stored.astype(np.float32) + np.float32(offset) if offset else stored
        _require_finite(source, name, rows, buffer[place])
    return buffer


def _require_finite(source: Source, name: str, rows: slice, values: np.ndarray) -> None:
    """Refuses weights that are no numbers: a forward pass would make NaN of every logit, without a word.

    Of bfloat16 by the bits of the exponent, since NumPy's own test takes as long as all the rest of loading.
    """
    if values.itemsize == 2:
        finite = np.bitwise_and(values.view(np.uint16), 0x7F80).max() < 0x7F80
    else:
        finite = np.isfinite(values).all()
    if not finite:
        wrong = ~np.isfinite(values)
        row = int(np.argwhere(wrong)[0][0])
        raise CheckpointError(
            f"tensor {shortened(repr(name))} in {source.tensors[name].path} has {values[wrong][0]} in row "
            f"{rows.start + row} (as {values.dtype}), and a weight is a finite number; fetch or convert the model again"
        )


def _read_quantized(
    source: Source,
    parts: Iterable[tuple[str, int]],
    shape: jax.ShapeDtypeStruct,
    kind: Quantization,
    rounding: Rounding,
) -> tuple[np.ndarray, np.ndarray]:
    """The numbers and scales of tensors in eight bits; those of another dtype are rounded, row by row as ever.

    `rounding` counts those in another quantisation, which are rounded from float32.
    """
    values, scale = np.empty(shape.shape, jnp.dtype(kind.dtype)), np.empty(shape.shape[0], np.float32)
    for name, rows, place in _chunks(parts):
        if source.is_stored(name, kind):
            of_rows = source.scales[name][:, 0]  # one of all rows, or one each
            values[place], scale[place] = source.stored_rows(name)[rows], of_rows[rows] if len(of_rows) > 1 else of_rows
            _require_finite(source, name, rows, values[place].astype(np.float32))
        else:
            narrow = source.narrow(name)
            stored = source.rows(name)[rows].astype(shape.dtype if narrow is None else np.float32)
            _require_finite(source, name, rows, stored)
            values[place], scale[place], *squares = _rounded(stored, kind)
            if narrow is not None:
                rounding.add(narrow, *squares)
    return values, scale


def weights_dtype(dtype: Any) -> np.dtype:
    """The dtype that weights are kept in when `dtype` is asked for: "auto" and None depend on the platform."""
    if dtype is None or (isinstance(dtype, str) and dtype == "auto"):
        dtype = jnp.float32 if on_cpu() else jnp.bfloat16
    try:
        resolved = jnp.dtype(dtype)
    except TypeError:
        resolved = None
    if resolved not in (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)):
        raise ValueError(f"dtype is {dtype!r}, but weights are float32 or bfloat16; pass one of them or 'auto'")
    return resolved


def read_model_json(path: Path, limit: int = CONFIG_BYTES) -> Any:
    """A parsed JSON file of a model directory; CheckpointError where it cannot be read."""
    try:
        return read_json(path, limit)
    except Unreadable as error:
        raise CheckpointError(f"{path} {error}; {error.mend}") from None


def open_tensors(directory: Path) -> dict[str, TensorFile]:
    """Every tensor name of the directory, with the file that holds it.

    model.safetensors comes before an index, as in transformers; but the two must agree where both are there.
    """
    single, index = directory / _WEIGHTS, directory / _INDEX
    if not single.exists():
        if index.exists():
            return _open_shards(directory)
        if any(directory.glob("pytorch_model*.bin*")):
            raise CheckpointError(
                f"{directory} holds pickled weights (pytorch_model.bin) only; convert them to safetensors, "
                "for example with save_pretrained of transformers"
            )
        raise CheckpointError(f"{directory} has neither {_WEIGHTS} nor {_INDEX}; fetch the weights")

    file = TensorFile.open(single)
    tensors = dict.fromkeys(file.shapes, file)
    if index.exists() and set(_weight_map(index).values()) != {_WEIGHTS}:
        shards = _open_shards(directory)
        if {name: shard.shapes[name] for name, shard in shards.items()} != file.shapes:
            raise CheckpointError(
                f"{directory} holds two models, {_WEIGHTS} and the files that {_INDEX} names, whose tensors differ; "
                "remove the one that is not meant"
            )
        logger.warning("%s is read and the files that %s names are not: one file goes before many.", single, _INDEX)
    return tensors


def _weight_map(path: Path) -> dict[str, str]:
    """The file name of every tensor, by an index."""
    index = read_model_json(path, INDEX_BYTES)
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path} has no weight_map from tensor to file; fetch it again")
    for shard in weight_map.values():
        if not is_name_in_directory(shard, ".safetensors"):
            raise CheckpointError(
                f"{path} names {shortened(repr(shard))}, which is no safetensors file beside it; fetch it again"
            )
    return weight_map


def _open_shards(directory: Path) -> dict[str, TensorFile]:
    """Every tensor name of the index, with the shard that holds it."""
    weight_map = _weight_map(directory / _INDEX)
    shards = {}
    for shard in sorted(set(weight_map.values())):
        if not (directory / shard).exists():
            raise CheckpointError(f"{directory / shard} is missing, but {_INDEX} names it; fetch that shard")
        shards[shard] = TensorFile.open(directory / shard)
    listed: dict[str, set[str]] = {}
    for name, shard in weight_map.items():
        listed.setdefault(shard, set()).add(name)
    for shard, file in shards.items():
        if listed[shard] != file.shapes.keys():
            raise CheckpointError(
                f"{file.path} and {_INDEX} disagree about {_some(sorted(listed[shard] ^ file.shapes.keys()))}; "
                "fetch both again"
            )
    return {name: shards[shard] for name, shard in weight_map.items()}


def _resolve_tying(config: ModelConfig, source: Source) -> tuple[ModelConfig, dict[str, str]]:
    """Decides, as transformers 5 does, if embedding and head are tied; returns that config, and other names to read.

    Of two equal tensors the embedding is used; two different ones are not tied, whatever the config says; the head
    alone serves as both.
    """
    if not config.tie_embeddings or _LM_HEAD not in source.tensors:
        return config, {}
    if _EMBED not in source.tensors:
        return config, {_EMBED: _LM_HEAD}
    embed, head = source.rows(_EMBED), source.rows(_LM_HEAD)
    if embed.get_shape() == head.get_shape() == [config.vocab_size, config.hidden_size] and all(
        np.array_equal(embed[begin:end], head[begin:end])
        for begin, end in ((row, min(row + _ROWS, config.vocab_size)) for row in range(0, config.vocab_size, _ROWS))
    ):
        return config, {}
    logger.warning(
        "%s: %s and %s differ and tie_word_embeddings is true; each is used as it is, as in transformers.",
        source.tensors[_LM_HEAD].path.parent,
        _EMBED,
        _LM_HEAD,
    )
    return dataclasses.replace(config, tie_embeddings=False), {}


def account_for_names(
    path: Path,
    stacks: Iterable[Stack],
    shapes: Iterable[jax.ShapeDtypeStruct],
    aliases: dict[str, str],
    tensors: Mapping[str, Tensors],
) -> None:
    """Compare what the config calls for with what the files hold, before a byte of weights is read."""
    wanted = {
        aliases.get(name, name): (rows, *shape.shape[1:])
        for stack, shape in zip(stacks, shapes, strict=True)
        for name, rows in stack.parts
    }
    missing = sorted(wanted.keys() - tensors.keys())
    # Old Llama files carry the rotary frequencies; a tied head that equals the embedding needs no second copy.
    unexpected = sorted(
        name
        for name in tensors.keys() - wanted.keys()
        if not name.endswith("rotary_emb.inv_freq") and name not in (_EMBED, _LM_HEAD)
        if not is_unused_bias(name, tensors)
    )
    reshaped = [
        f"{name} is {shortened(list(tensors[name].shapes[name]))} instead of {list(shape)}"
        for name, shape in wanted.items()
        if name in tensors and tensors[name].shapes[name] != shape
    ]
    problems = [
        f"{label} {_some(names)}"
        for label, names in (("missing", missing), ("unexpected", unexpected), ("of another shape", reshaped))
        if names
    ]
    if problems:
        raise CheckpointError(
            f"the weights in {path} are not those of its {'config.json' if path.is_dir() else 'metadata'}: "
            f"{'; '.join(problems)}; "
            + ("use the config.json that belongs to them" if path.is_dir() else "convert the model again")
        )


def _some(names: list[str]) -> str:
    """The first three names and the count of all."""
    shown = ", ".join(shortened(name) for name in names[:3])
    return shown if len(names) <= 3 else f"{shown}, … ({len(names)} in all)"
