"""From names to models: the target, the draft, their tokenizer, one vocabulary."""

from __future__ import annotations

import dataclasses
import os
from importlib import resources
from pathlib import Path

from smcjax.engine.memory import require_room_for_weights, weight_bytes
from smcjax.engine.settings import own_settings
from smcjax.model.checkpoint import load_checkpoint, load_config, resolve_model_path, weights_dtype
from smcjax.model.config import ModelConfig
from smcjax.model.folding import fold_for_kernels
from smcjax.model.params import Params
from smcjax.model.quantize import quantize_params
from smcjax.model.vocabulary import common_vocabulary, trim_vocabulary
from smcjax.tokenizer import Tokenizer

BUNDLED = ("target", "draft")


@dataclasses.dataclass(frozen=True)
class Models:
    """What `LLM` runs on. Draft fields are None where the decoder needs none."""

    tokenizer: Tokenizer | None
    target: ModelConfig
    target_params: Params
    draft: ModelConfig | None = None
    draft_params: Params | None = None

    @property
    def max_position_embeddings(self) -> int:
        """The longest sequence that every model was made for."""
        lengths = [config.max_position_embeddings for config in (self.target, self.draft) if config is not None]
        return min(lengths)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """From the target's configs; where they name none, the tokenizer's. Ids that no logit stands for are none."""
        ids = self.target.eos_token_ids
        if not ids and self.tokenizer is not None and self.tokenizer.eos_token_id is not None:
            ids = (self.tokenizer.eos_token_id,)
        return tuple(token for token in ids if token < self.target.vocab_size)


def bundled_model(name: str) -> Path:
    """Directory of a model of the bundled pair: "target" or "draft"."""
    return Path(str(resources.files("smcjax.bundled") / name))


def _path(name: str | os.PathLike[str] | None, bundled: str) -> Path:
    return bundled_model(bundled) if name is None else resolve_model_path(name)


def _require_room(paths: dict[str, Path], dtype: str) -> None:
    """Raises ValueError where the weights exceed the device, before a byte of them is read."""
    kept = weights_dtype(dtype).name
    weights = {name: weight_bytes(dataclasses.replace(load_config(path), dtype=kept)) for name, path in paths.items()}
    halve = "use dtype='bfloat16', or smaller models" if kept == "float32" else "use smaller models"
    require_room_for_weights(weights, halve)


@own_settings()
def prepared(params: Params, quantization: str | None, implementation: str) -> Params:
    """Weights as the engine keeps them: quantised where asked, folded for kernels. Frees what it replaces."""
    params = params if quantization is None else quantize_params(params, consume=True)
    return fold_for_kernels(params, implementation)


@own_settings()
def load_models(
    model: str | os.PathLike[str] | None, draft_model: str | os.PathLike[str] | None, *, needs_draft: bool, dtype: str
) -> Models:
    """Loads what the decoder needs; None names the bundled pair.

    Padded vocabularies are cut to the ids that both models share. Raises ValueError for a pair that is only half
    given or whose vocabularies differ, CheckpointError for a directory that cannot be used.
    """
    if needs_draft and (model is None) != (draft_model is None):
        missing, given = ("draft_model", "model") if draft_model is None else ("model", "draft_model")
        alone = "" if given == "draft_model" else ", or decode by the target alone (Autoregressive)"
        raise ValueError(f"{given} is set and {missing} is not; pass both, or neither for the bundled pair{alone}.")
    path = _path(model, "target")
    tokenizer = Tokenizer.load(path)
    if not needs_draft:
        _require_room({"model": path}, dtype)
        target, target_params = load_checkpoint(path, dtype)
        return Models(tokenizer, target, target_params)

    draft_path = _path(draft_model, "draft")
    draft_tokenizer = Tokenizer.load(draft_path)
    _require_room({"model": path, "draft_model": draft_path}, dtype)
    target, target_params = load_checkpoint(path, dtype)
    draft, draft_params = load_checkpoint(draft_path, dtype)
    size = common_vocabulary(target, draft, tokenizer, draft_tokenizer)
    target, target_params = trim_vocabulary(target, target_params, size)
    draft, draft_params = trim_vocabulary(draft, draft_params, size)
    return Models(tokenizer, target, target_params, draft, draft_params)
