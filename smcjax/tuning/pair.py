"""The pair whose draft is trained: what can be, loading it, and writing the draft as a directory of its own."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from smcjax.decoding.drafts.ngram import NGRAM
from smcjax.model.config import ModelConfig
from smcjax.model.dropping import drop_layers, dropped_config
from smcjax.model.files.checkpoint import load_checkpoint, load_config, resolve_model_path, stored_quantization
from smcjax.model.files.eagle_files import is_eagle
from smcjax.model.files.export import save_checkpoint, written_config
from smcjax.model.files.hub import TOKENIZER_FILES, bundled_model
from smcjax.model.params import Params
from smcjax.model.vocabulary import common_vocabulary
from smcjax.tokenizer.tokenizer import Tokenizer
from smcjax.tuning.laws import Laws

WRITTEN = ("bfloat16", "float32", "float16")


@dataclasses.dataclass(frozen=True)
class Paths:
    """Where target and draft lie, and the layers that the draft is to do without."""

    target: Path
    draft: Path
    dropped: tuple[int, ...] = ()

    @classmethod
    def of(
        cls,
        model: str | None,
        draft_model: str | None,
        draft_drop_layers: Sequence[int] | None = None,
    ) -> Paths:
        """The models that arguments of `LLM` name, None for both the bundled pair.

        Raises ValueError for half a pair, a draft that cannot be trained (one without weights, an EAGLE-3 head, weights
        stored in int8, layers whose queries select blocks), and layers to drop that it has not.
        """
        if draft_model == NGRAM:
            raise ValueError("draft_model is 'ngram', which has no weights to train; name a model.")
        if draft_model is None and draft_drop_layers is not None:
            draft_model = model
        if (model is None) != (draft_model is None) and not (model is None and draft_drop_layers is not None):
            given, missing = ("model", "draft_model") if draft_model is None else ("draft_model", "model")
            raise ValueError(f"{given} is set and {missing} is not; give both, or neither for the bundled pair.")
        target = bundled_model("target") if model is None else resolve_model_path(model)
        dropped = tuple(draft_drop_layers or ())
        if draft_model is None:
            draft = bundled_model("target" if dropped else "draft")
        else:
            draft = resolve_model_path(draft_model)
        if is_eagle(draft):
            raise ValueError(
                f"draft_model {draft} is an EAGLE-3 head, which drafts by the target's states and is trained on them "
                "(scripts/training/train_eagle.py); name a model that drafts by itself."
            )
        try:
            config = dropped_config(load_config(draft), dropped)
        except ValueError as error:
            raise ValueError(f"draft_drop_layers: {error}.") from None
        if config.selecting:
            raise ValueError(
                f"draft_model {draft} has Native Sparse Attention, whose choice of blocks has no gradient here; name a "
                "model with dense attention."
            )
        if stored := stored_quantization(draft):
            raise ValueError(
                f"draft_model {draft} holds its matrices in {stored}, which cannot be trained; name the model that "
                "they were rounded from."
            )
        try:
            written_config(config)
        except ValueError as error:
            raise ValueError(f"draft_model {draft} could not be written: {error}.") from None
        return cls(target, draft, dropped)


@dataclasses.dataclass(frozen=True)
class LoadedPair:
    """Target and draft as they are trained with, and the dtype that the draft is written in."""

    laws: Laws
    target_params: Params
    draft_params: Params  # float32, with the padding of its vocabulary
    dtype: str


def load_pair(paths: Paths, temperature: float) -> LoadedPair:
    """Loads both. Raises ValueError where their tokenizers differ, CheckpointError for files that are not read."""
    stored = load_config(paths.draft).dtype
    target, target_params = load_checkpoint(paths.target)
    draft, draft_params = drop_layers(*load_checkpoint(paths.draft, "float32"), paths.dropped)
    tokenizers = [Tokenizer.load(path) for path in (paths.target, paths.draft)]
    laws = Laws(target, draft, common_vocabulary(target, draft, *tokenizers), temperature)
    return LoadedPair(laws, target_params, draft_params, stored if stored in WRITTEN else "bfloat16")


def write_draft(
    paths: Paths, config: ModelConfig, params: Params, dtype: str, directory: str | os.PathLike[str]
) -> None:
    """Writes the draft as a Hugging Face directory, in `dtype`, with the files of its tokenizer."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    if paths.draft.is_dir():
        for name in TOKENIZER_FILES:
            if (paths.draft / name).is_file():
                shutil.copyfile(paths.draft / name, directory / name)
    elif (tokenizer := Tokenizer.load(paths.draft)) is not None:
        tokenizer.save(directory)
    save_checkpoint(config, params, directory, dtype)
