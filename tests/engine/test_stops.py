"""Answers end at tokens, at text and at EOS, whoever names it; a stop that cannot have an effect is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from smcjax import LLM, Autoregressive, SamplingParams
from tests.checkpoints import EOS, TOKENIZER_SIZE, Pair, write_model, write_tokenizer
from tests.engine.conftest import smc_llm

TURN = TOKENIZER_SIZE  # the id of <|im_end|>


def special(text: str) -> dict[str, Any]:
    """An added token as tokenizer_config.json has it."""
    rules = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False)
    return {"content": text, "special": True, **rules}


def write_chat_model(directory: Path, **changes: Any) -> str:
    """A model whose config names `</s>` and whose tokenizer ends turns with <|im_end|>, as chat models have it."""
    path = write_model(directory, 264, 1, **changes)
    write_tokenizer(directory, eos_token="<|im_end|>", added_tokens_decoder={str(TURN): special("<|im_end|>")})
    return path


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    path = write_chat_model(tmp_path_factory.mktemp("chat"))
    with LLM(path, decoding=Autoregressive(), max_model_len=48, max_num_seqs=2, page_size=4) as llm:
        yield llm


def stop_ids(llm: LLM, **params: Any) -> tuple[int, ...]:
    return llm.request("ab", SamplingParams(**params)).stop_ids


def test_eos_of_config_and_tokenizer(chat: LLM, tmp_path: Path) -> None:
    """Either ends an answer; `ignore_eos` ignores both, and what the request itself names stays."""
    assert stop_ids(chat) == (EOS, TURN)
    assert stop_ids(chat, stop_token_ids=[5]) == (EOS, TURN, 5)
    assert stop_ids(chat, ignore_eos=True) == ()
    assert stop_ids(chat, ignore_eos=True, stop_token_ids=[5], stop="<|im_end|>") == (5, TURN)
    path = write_chat_model(tmp_path, eos_token_ids=(TURN, 3))
    with LLM(path, decoding=Autoregressive(), max_model_len=48) as same:
        assert stop_ids(same) == (TURN, 3)


def test_a_turn_ends_at_the_tokenizers_eos(chat: LLM) -> None:
    """An answer ends at the tokenizer's token for the end of a turn, and runs on behind it when EOS is ignored."""
    for seed in range(200):
        on = chat.generate(
            "ab", SamplingParams(seed=seed, temperature=9, ignore_eos=True, max_tokens=40), use_tqdm=False
        )
        tokens = on[0].outputs[0].token_ids
        if TURN in tokens[:-1] and EOS not in tokens[: tokens.index(TURN)]:
            break
    ended = chat.generate("ab", SamplingParams(seed=seed, temperature=9, max_tokens=40), use_tqdm=False)[0].outputs[0]
    assert ended.token_ids == tokens[: tokens.index(TURN) + 1]
    assert ended.finish_reason == "stop"


@pytest.mark.parametrize("stop", ["<s>", ["<s>"], ["x", "<s>"]])
def test_a_special_token_is_its_id(llm: LLM, stop: Any) -> None:
    request = llm.request("ab", SamplingParams(stop=stop))
    assert request.stop_ids == (EOS, 256)
    assert request.params.stop_strings == tuple(text for text in stop if text == "x")


def test_a_special_token_is_exact_at_any_power(pair: Pair) -> None:
    with smc_llm(pair, {"power": 2.0}) as powered:
        assert stop_ids(powered, stop="<s>") == (EOS, 256)
        with pytest.raises(ValueError, match="stop strings change the law at power 2"):
            powered.request("ab", SamplingParams(stop=["<s>", "x"]))


@pytest.mark.parametrize("stop", ["<s>\n", ["a", "b</s>"], "<s></s>"])
def test_text_around_a_special_token_is_refused(llm: LLM, stop: Any) -> None:
    with pytest.raises(
        ValueError, match=r"^stop holds '.*', and '</?s>' in it is a special token, which never .* itself"
    ):
        llm.request("ab", SamplingParams(stop=stop))


def test_a_special_token_that_the_model_lacks(tmp_path: Path) -> None:
    path = write_model(tmp_path, 264, 1)
    write_tokenizer(tmp_path, added_tokens_decoder={str(TURN + i): special(f"<{i}>") for i in range(7)})
    with LLM(path, decoding=Autoregressive(), max_model_len=48) as small:
        assert stop_ids(small, stop="<5>") == (EOS, 263)
        with pytest.raises(
            ValueError, match=r"stop holds '<6>', the token 264, and ids of this model are 0 to 263; leave"
        ):
            small.request("ab", SamplingParams(stop="<6>"))
