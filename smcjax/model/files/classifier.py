"""Directories of sequence classifiers and reward models: `score.weight` on the last hidden state, no language head.

transformers names such a class `LlamaForSequenceClassification`, or likewise for another family; one label makes it a
reward model. TRL's models have a value head, `v_head.summary`, beside their language head.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from smcjax.errors import CheckpointError
from smcjax.files import shortened
from smcjax.model.config import ModelConfig
from smcjax.model.families import families
from smcjax.model.files.checkpoint import (
    account_for_names,
    open_tensors,
    read_model_json,
    read_stack,
    require_plausible,
    resolve_model_path,
    tensor_names,
    weights_dtype,
)
from smcjax.model.files.hf_config import read_config
from smcjax.model.files.tensor_files import Source, TensorFile, refuse_companions
from smcjax.model.params import Params, param_shapes

_CLASS, _SCORE = "ForSequenceClassification", "score.weight"
_VALUE = "v_head.summary.weight"  # of TRL


def is_classifier(directory: str | os.PathLike[str]) -> bool:
    """True for a directory whose config.json names a sequence classifier or reward model."""
    path = resolve_model_path(directory) / "config.json"
    values = read_model_json(path) if path.is_file() else None
    named = values.get("architectures") if isinstance(values, Mapping) else None
    return isinstance(named, list) and len(named) == 1 and str(named[0]).endswith(_CLASS)


def load_classifier(
    directory: str | os.PathLike[str], dtype: Any = None
) -> tuple[ModelConfig, Params, Float[Array, "labels E"]]:
    """The decoder of a classifier's directory and its head, weights on the default device in `dtype`.

    The head multiplies the normalised hidden state of a text's last token. `dtype` is that of `load_checkpoint`.
    Raises CheckpointError for a directory that cannot be used, or whose tensors are not those of its config.
    """
    path, kept = resolve_model_path(directory), weights_dtype(dtype)
    refuse_companions(path)
    values = read_model_json(path / "config.json")
    family = next((one for one in families() if one.model_type == values.get("model_type")), None)
    if family is None:
        known = ", ".join(one.model_type for one in families())
        raise CheckpointError(
            f"{path}: model_type is {shortened(repr(values.get('model_type')))} in the model's config, but classifiers "
            f"of these types alone are read: {known}"
        )
    # What a tied language head would add to the config is nothing, as a classifier has none.
    decoder = {**values, "architectures": [family.architecture], "tie_word_embeddings": True}
    try:
        read = read_config(decoder)
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from None
    if read.storage is not None:
        raise CheckpointError(f"{path} is quantised, and classifiers are read in floating point only; convert it")
    require_plausible(path, read.config, bytes_each=2)
    tensors = dict(open_tensors(path))
    if _SCORE not in tensors:
        raise CheckpointError(f"{path} has no tensor {_SCORE!r}, a classifier's head; fetch the weights again")
    score = _read_weight(path, {_SCORE: tensors.pop(_SCORE)}, _SCORE, kept, width=read.config.hidden_size)
    shapes = param_shapes(read.config, kept)
    stacks, tree = jax.tree.flatten(tensor_names(read.config, family.names, family.norm_offset))
    account_for_names(path, stacks, jax.tree.leaves(shapes), {}, tensors)
    source = Source(tensors)
    leaves = [
        jax.block_until_ready(jax.device_put(read_stack(source, stack.parts, shape, stack.offset)))
        for stack, shape in zip(stacks, jax.tree.leaves(shapes), strict=True)
    ]
    return read.config, jax.tree.unflatten(tree, leaves), jnp.asarray(score)


def load_head(directory: str | os.PathLike[str]) -> tuple[Float[np.ndarray, "labels E"], Float[np.ndarray, " labels"]]:
    """The weight and bias, float32, of a directory's classifier's head or of TRL's value head; the rest is not read.

    Raises CheckpointError for a directory without such a head, or whose numbers cannot be used.
    """
    path = resolve_model_path(directory)
    refuse_companions(path)
    tensors = open_tensors(path)
    name = next((one for one in (_SCORE, _VALUE) if one in tensors), None)
    if name is None:
        raise CheckpointError(
            f"{path} has neither {_SCORE!r}, a classifier's head, nor {_VALUE!r}, a value head of TRL; name a model "
            "that has one"
        )
    weight = _read_weight(path, tensors, name, np.float32)
    bias, labels = name.replace("weight", "bias"), len(weight)
    if bias not in tensors:
        return weight, np.zeros(labels, np.float32)
    stored = tensors[bias].shapes[bias]
    if stored != (labels,):
        raise CheckpointError(f"{path}: {bias} is {list(stored)} instead of [{labels}]; fetch the weights again")
    return weight, read_stack(Source(tensors), [(bias, labels)], jax.ShapeDtypeStruct(stored, np.float32))


def _read_weight(
    path: Path, tensors: Mapping[str, TensorFile], name: str, dtype: Any, *, width: int | None = None
) -> Float[np.ndarray, "labels E"]:
    """A head's weight. Raises CheckpointError for another shape than [labels, `width`], where that is known."""
    stored = tensors[name].shapes[name]
    if len(stored) != 2 or 0 in stored or width not in (None, stored[1]):
        raise CheckpointError(
            f"{path}: {name} is {list(stored)} instead of [labels, {width or 'E'}]; use a config.json and weights that "
            "belong together"
        )
    return read_stack(Source(tensors), [(name, stored[0])], jax.ShapeDtypeStruct(stored, dtype))
