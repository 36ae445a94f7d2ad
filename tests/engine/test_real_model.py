"""A pretrained chat model from its own file through `LLM`: goldens of torch, and laws between ways to ask."""

from __future__ import annotations

import json
import runpy
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from smcjax import LLM, Autoregressive, Judge, RequestOutput, SamplingParams
from tests.gguf_files import DATA

pytestmark = pytest.mark.slow
EXAMPLES = Path(__file__).parents[2] / "examples"
GOLDEN = np.load(DATA / "goldens.npz")
CHATS = json.loads((DATA / "tokens.json").read_text())["chats"]
PROMPTS = [{"prompt_token_ids": GOLDEN[f"prompt{number}"].tolist()} for number in range(3)]
GREEDY = [GOLDEN[f"greedy{number}"].tolist() for number in range(3)]


def greedy(max_tokens: int, **changes: bool) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0, **changes)


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("smollm2", decoding=Autoregressive(), max_num_seqs=4, max_model_len=256) as llm:
        yield llm


def test_greedy_tokens_are_those_of_torch(llm: LLM) -> None:
    outputs = llm.generate(PROMPTS, greedy(64, ignore_eos=True), use_tqdm=False)
    assert tokens_of(outputs) == GREEDY


def test_chat_is_that_of_torch_by_the_models_own_template(llm: LLM) -> None:
    outputs = llm.chat(CHATS + CHATS, greedy(64), use_tqdm=False)
    assert tokens_of(outputs) == [GOLDEN[f"answer{number}"].tolist() for number in (0, 1)] * 2
    assert [output.outputs[0].finish_reason for output in outputs] == ["stop"] * 4
    assert outputs[0].outputs[0].text == "The capital of France is Paris."


def test_a_judge_tells_praise_from_blame(llm: LLM) -> None:
    judge = Judge(llm, runpy.run_path(str(EXAMPLES / "style.py"))["ASK"], verdicts=(" good", " bad"))
    praise, blame = judge("The film was", [" wonderful, and I loved it.", " terrible, and I hated it."])
    assert praise > blame + 1


def test_a_stream_is_the_whole(llm: LLM) -> None:
    params = SamplingParams(max_tokens=24, temperature=0.8, seed=3)
    prompt = "Once upon a time, in a café by the sea,"
    whole = llm.generate(prompt, params, use_tqdm=False)[0].outputs[0]
    chunks = list(llm.generate_stream(prompt, params))
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert [token for chunk in chunks for token in chunk.token_ids] == list(whole.token_ids)
    assert len(chunks) > 8
