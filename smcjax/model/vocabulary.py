"""One vocabulary for two models: draft and target share token ids, but may pad their embeddings differently."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax

from smcjax.model.config import ModelConfig
from smcjax.model.params import Params

if TYPE_CHECKING:
    from smcjax.tokenizer.tokenizer import Tokenizer

_PADDING = 512  # the largest multiple to which released checkpoints round their embeddings


def common_vocabulary(
    target_config: ModelConfig,
    draft_config: ModelConfig,
    target_tokenizer: Tokenizer | None,
    draft_tokenizer: Tokenizer | None,
) -> int:
    """The number of leading token ids that mean the same in both models.

    Two tokenizers must be equal as maps from token to id. Without both there are only the sizes to go by, which must
    be equal or round up to the same multiple of 512. Every id of a tokenizer must lie inside both models. Raises
    ValueError for a real mismatch.
    """
    target_size, draft_size = target_config.vocab_size, draft_config.vocab_size
    if target_tokenizer is not None and draft_tokenizer is not None:
        _require_equal(target_tokenizer.vocab, draft_tokenizer.vocab)
    elif -(-target_size // _PADDING) != -(-draft_size // _PADDING):
        raise ValueError(
            f"draft_model has {draft_size} tokens and the target has {target_size}, which is more than padding; "
            "use a draft model with the target's tokenizer"
        )
    size = min(target_size, draft_size)
    for tokenizer in (target_tokenizer, draft_tokenizer):
        needed = 0 if tokenizer is None else max(tokenizer.vocab.values(), default=-1) + 1
        if needed > size:
            raise ValueError(
                f"the tokenizer needs {needed} token ids, but the target has {target_size} and draft_model has "
                f"{draft_size}; use models that cover their tokenizer"
            )
    return size


def _require_equal(target: dict[str, int], draft: dict[str, int]) -> None:
    if target == draft:
        return
    token = min(
        (token for token in target.keys() | draft.keys() if target.get(token) != draft.get(token)),
        key=lambda token: (min(target.get(token, len(target)), draft.get(token, len(draft))), token),
    )
    raise ValueError(
        f"the tokenizers differ: token {token!r} has id {target.get(token)} in the target and {draft.get(token)} in "
        "draft_model; use a draft model with the target's tokenizer"
    )


def trim_vocabulary(config: ModelConfig, params: Params, vocab_size: int) -> tuple[ModelConfig, Params]:
    """Cuts a model to its first `vocab_size` token ids: drops the rows beyond from embedding and head."""
    config, whole = trimmed_config(config, vocab_size), config
    if config == whole:
        return config, params
    embed, lm_head = jax.tree.map(lambda rows: rows[:vocab_size], (params.embed, params.lm_head))  # packed ones too
    return config, dataclasses.replace(params, embed=embed, lm_head=lm_head)


def trimmed_config(config: ModelConfig, vocab_size: int) -> ModelConfig:
    """The configuration that `trim_vocabulary` returns. Raises ValueError where the model needs the ids beyond."""
    if vocab_size == config.vocab_size:
        return config
    if not 0 < vocab_size < config.vocab_size:
        raise ValueError(f"vocab_size is {vocab_size}, but must lie in 1…{config.vocab_size}, the model's own")
    ids = [*config.eos_token_ids, *([] if config.bos_token_id is None else [config.bos_token_id])]
    if any(token >= vocab_size for token in ids):
        raise ValueError(
            f"vocab_size is {vocab_size}, which cuts off the model's own BOS or EOS ids {ids}; "
            "use two models whose vocabularies hold them"
        )
    return dataclasses.replace(config, vocab_size=vocab_size)
