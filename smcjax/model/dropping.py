"""A draft made of its target: the same decoder without some of its layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from smcjax.model.config import ModelConfig
from smcjax.model.params import Params


def drop_layers(config: ModelConfig, params: Params, layers: Sequence[int]) -> tuple[ModelConfig, Params]:
    """The decoder without those layers, counted from 0. The arrays are those of `params`, which stays as it is.

    Raises ValueError for a layer that is not there, is named twice, or would be the last one left.
    """
    config = dropped_config(config, layers)
    kept = tuple(layer for index, layer in enumerate(params.layers) if index not in layers)
    return config, dataclasses.replace(params, layers=kept)


def dropped_config(config: ModelConfig, layers: Sequence[int]) -> ModelConfig:
    """The configuration that `drop_layers` returns."""
    for layer in layers:
        if not 0 <= layer < config.num_layers:
            raise ValueError(
                f"layers to drop are {list(layers)}, but the model's end at {config.num_layers - 1}; leave {layer} out"
            )
    if len(set(layers)) < len(layers):
        raise ValueError(f"layers to drop are {list(layers)}, with one named twice; name each once")
    if len(layers) == config.num_layers:
        raise ValueError(f"layers to drop are {list(layers)}, which are all that the model has; keep at least one")
    return config.with_layers(config.layer(index) for index in range(config.num_layers) if index not in layers)
