"""Directories of sequence classifiers and reward models: `score.weight` on the last hidden state, no language head.

transformers names such a class `LlamaForSequenceClassification`, or likewise for another family; one label makes it a
reward model.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
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
from smcjax.model.files.tensor_files import Source, refuse_companions
from smcjax.model.params import Params, param_shapes

_CLASS, _SCORE = "ForSequenceClassification", "score.weight"


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
    of_score = tensors.pop(_SCORE)
    stored = tuple(of_score.shapes[_SCORE])
    if len(stored) != 2 or not stored[0] or stored[1] != read.config.hidden_size:
        raise CheckpointError(
            f"{path}: {_SCORE} is {list(stored)} instead of [labels, {read.config.hidden_size}]; use the config.json "
            "that belongs to the weights"
        )
    shapes = param_shapes(read.config, kept)
    stacks, tree = jax.tree.flatten(tensor_names(read.config, family.names, family.norm_offset))
    account_for_names(path, stacks, jax.tree.leaves(shapes), {}, tensors)
    source = Source(tensors)
    leaves = [
        jax.block_until_ready(jax.device_put(read_stack(source, stack.parts, shape, stack.offset)))
        for stack, shape in zip(stacks, jax.tree.leaves(shapes), strict=True)
    ]
    score = read_stack(Source({_SCORE: of_score}), [(_SCORE, stored[0])], jax.ShapeDtypeStruct(stored, kept))
    return read.config, jax.tree.unflatten(tree, leaves), jnp.asarray(score)
