"""Decoders of the Llama family: configuration, weights, forward pass, checkpoints."""

from smcjax.model.config import LayerSpec, ModelConfig, Rope, RopeScaling
from smcjax.model.decoder import forward, logits, unembed
from smcjax.model.dropping import drop_layers
from smcjax.model.files.checkpoint import load_checkpoint
from smcjax.model.files.export import save_checkpoint
from smcjax.model.files.hf_config import config_from_hf
from smcjax.model.params import LayerParams, Params, init_params

__all__ = [
    "LayerParams",
    "LayerSpec",
    "ModelConfig",
    "Params",
    "Rope",
    "RopeScaling",
    "config_from_hf",
    "drop_layers",
    "forward",
    "init_params",
    "load_checkpoint",
    "logits",
    "save_checkpoint",
    "unembed",
]
