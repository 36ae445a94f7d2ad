"""Common vocabularies: padding is accepted, another tokenizer is not."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
import tokenizers
import transformers
from hf_oracle import make_config

from smcjax.model import ModelConfig, init_params, logits
from smcjax.model.files.hf_config import config_from_hf
from smcjax.model.vocabulary import common_vocabulary, trim_vocabulary
from smcjax.tokenizer.tokenizer import Tokenizer


def _config(vocab_size: int, **changes: Any) -> ModelConfig:
    return config_from_hf(make_config("llama", vocab_size=vocab_size, **changes))


def _tokenizer(size: int, **changes: int) -> Tokenizer:
    vocab = {**{f"t{index}": index for index in range(size)}, **changes}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, "t0"))
    return Tokenizer(transformers.PreTrainedTokenizerFast(tokenizer_object=inner), vocab)


@pytest.mark.parametrize("sizes", [(None, None), (None, 300), (300, None), (300, 300)])
@pytest.mark.parametrize(("target", "draft", "common"), [(384, 384, 384), (384, 500, 384), (512, 301, 301)])
def test_padding_is_accepted(sizes: tuple[int | None, int | None], target: int, draft: int, common: int) -> None:
    first, second = (None if size is None else _tokenizer(size) for size in sizes)
    assert common_vocabulary(_config(target), _config(draft), first, second) == common
    assert common_vocabulary(_config(draft), _config(target), second, first) == common


def test_published_paddings() -> None:
    assert common_vocabulary(_config(151936), _config(152064), None, None) == 151936


@pytest.mark.parametrize(("target", "draft"), [(512, 513), (32000, 128256), (384, 1024)])
def test_other_sizes_need_two_tokenizers(target: int, draft: int) -> None:
    for one in (None, _tokenizer(10)):
        with pytest.raises(ValueError, match=rf"draft_model has {draft} tokens and the target has {target}"):
            common_vocabulary(_config(target), _config(draft), one, None)
    assert common_vocabulary(_config(target), _config(draft), _tokenizer(10), _tokenizer(10)) == min(target, draft)


def test_different_tokenizers_are_refused() -> None:
    same = _config(384)
    with pytest.raises(ValueError, match="token 't7' has id 7 in the target and 300 in draft_model"):
        common_vocabulary(same, same, _tokenizer(20), _tokenizer(20, t7=300))
    with pytest.raises(ValueError, match="token 't20' has id None in the target and 20 in draft_model"):
        common_vocabulary(same, same, _tokenizer(20), _tokenizer(21))


def test_a_tokenizer_larger_than_a_model_is_refused() -> None:
    with pytest.raises(ValueError, match="needs 385 token ids, but the target has 390 and draft_model has 384"):
        common_vocabulary(_config(390), _config(384), _tokenizer(385), _tokenizer(385))
    with pytest.raises(ValueError, match="needs 400 token ids"):  # ids count, not tokens: there may be gaps
        common_vocabulary(_config(384), _config(384), _tokenizer(20, last=399), None)
    with pytest.raises(ValueError, match="needs 400 token ids"):
        common_vocabulary(_config(384), _config(384), None, _tokenizer(20, last=399))


@pytest.mark.parametrize("tied", [True, False])
def test_trimming_keeps_the_logits_of_the_ids_that_stay(tied: bool) -> None:
    config = _config(96, tie_word_embeddings=tied)
    params = init_params(config, jax.random.key(0))
    trimmed_config, trimmed = trim_vocabulary(config, params, 80)
    assert trimmed_config == dataclasses.replace(config, vocab_size=80)
    tokens = np.array([[1, 5, 79, 3]])
    np.testing.assert_allclose(
        logits(trimmed_config, trimmed, tokens), logits(config, params, tokens)[..., :80], atol=1e-6
    )
    assert trim_vocabulary(config, params, 96)[1] is params


def test_trimming_refuses_what_it_would_lose() -> None:
    config = _config(96, eos_token_id=90)
    params = init_params(config, jax.random.key(0))
    with pytest.raises(ValueError, match=r"vocab_size is 90, .*\[90, 1\]"):
        trim_vocabulary(config, params, 90)
    for wrong in (0, 97):
        with pytest.raises(ValueError, match=f"vocab_size is {wrong}"):
            trim_vocabulary(config, params, wrong)
