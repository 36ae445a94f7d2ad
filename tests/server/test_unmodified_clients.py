"""Clients that know nothing of this server: LangChain's ChatOpenAI, LiteLLM, lm-eval's local-completions.

LangChain's is among the packages of the group `dev`. The others are large; tests of them run where they are brought:

    uv run --extra serve --with litellm --with 'lm-eval[api]' pytest -n 0 tests/server/test_unmodified_clients.py
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import json
from pathlib import Path
from typing import Any

import openai
import pytest

from smcjax import SamplingParams
from tests.checkpoints import Pair
from tests.server.conftest import EXACT_NAME, SMC_NAME, Running

# The warnings are theirs, and to import a client takes seconds; the official one is in every file beside.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]
SAID = "hi"
MESSAGES: Any = [{"role": "user", "content": SAID}]
LIMIT: dict[str, Any] = {"max_tokens": 12, "seed": 3, "temperature": 1.0}


def needs(name: str) -> pytest.MarkDecorator:
    """Skips a test where a client is not installed."""
    return pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"{name} is not installed")


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients fetch nothing."""
    for variable in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "LITELLM_LOCAL_MODEL_COST_MAP"):
        monkeypatch.setenv(variable, "1")


@pytest.fixture(scope="module")
def answer(server: Running) -> str:
    """The engine's own answer to `MESSAGES`."""
    params = SamplingParams(max_tokens=12, seed=3)
    return server.llm().chat(MESSAGES, params, use_tqdm=False)[0].outputs[0].text


def test_langchain(server: Running, answer: str) -> None:
    """Whole, streamed, asynchronously, several at once, and with log-probabilities."""
    from langchain_openai import ChatOpenAI  # here, as it takes seconds

    chat = ChatOpenAI(model=SMC_NAME, base_url=f"{server.url}/v1", api_key="none", max_retries=0, **LIMIT)
    reply = chat.invoke(SAID)
    assert reply.content == answer
    assert reply.response_metadata["model_name"] == SMC_NAME
    assert reply.usage_metadata["input_tokens"] == len("[user]hi[assistant]")
    chunks = list(chat.stream(SAID))
    assert len(chunks) > 1
    assert "".join(chunk.content for chunk in chunks) == answer
    assert asyncio.run(chat.ainvoke(SAID)).content == answer
    assert [one.content for one in chat.batch([SAID] * 3)] == [answer] * 3
    scored = chat.bind(logprobs=True, top_logprobs=2).invoke(SAID).response_metadata["logprobs"]["content"]
    assert all(len(one["top_logprobs"]) == 2 for one in scored)
    with pytest.raises(openai.BadRequestError, match="temperature"):
        chat.bind(temperature=-1).invoke(SAID)


def test_langchain_asks_for_a_form(server: Running) -> None:
    schema = {"title": "thing", "type": "object", "properties": {"b": {"enum": ["x", "y"]}}, "required": ["b"]}
    from langchain_openai import ChatOpenAI

    limit: dict[str, Any] = {"max_tokens": 24, "seed": 1}
    chat = ChatOpenAI(model=SMC_NAME, base_url=f"{server.url}/v1", api_key="none", **limit)
    assert chat.with_structured_output(schema, method="json_schema").invoke(SAID)["b"] in ("x", "y")


@needs("litellm")
def test_litellm(server: Running, answer: str) -> None:
    """Chats and completions, whole and streamed."""
    litellm = importlib.import_module("litellm")
    common: dict[str, Any] = {"api_base": f"{server.url}/v1", "api_key": "none", "num_retries": 0, **LIMIT}
    reply = litellm.completion(model=f"openai/{SMC_NAME}", messages=MESSAGES, **common)
    assert reply.choices[0].message.content == answer
    chunks = list(litellm.completion(model=f"openai/{SMC_NAME}", messages=MESSAGES, stream=True, **common))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == answer
    text = litellm.text_completion(model=f"text-completion-openai/{SMC_NAME}", prompt="ab", **common)
    wanted = server.llm().generate("ab", SamplingParams(max_tokens=12, seed=3), use_tqdm=False)[0].outputs[0]
    assert text.choices[0].text == wanted.text
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(model="openai/nobody", messages=MESSAGES, **common)


TASKS = {
    "said": {"output_type": "generate_until", "generation_kwargs": {"until": ["."], "max_gen_toks": 6}},
    "chosen": {"output_type": "multiple_choice", "doc_to_choice": ["ab", "zz", "a", "qqq"]},
}


def task(folder: Path, name: str) -> dict[str, Any]:
    """A task of lm-eval's with four documents, which lie in `folder`."""
    path = folder / "documents.jsonl"
    path.write_text("".join(json.dumps({"question": f"ab{one}", "answer": number}) + "\n"
                            for number, one in enumerate("abcd")))  # fmt: skip
    metric = "acc" if name == "chosen" else "exact_match"
    return {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(path)}},
        "test_split": "test",
        "doc_to_text": "{{question}}",
        "doc_to_target": "answer",
        "metric_list": [{"metric": metric, "aggregation": "mean", "higher_is_better": True}],
        **TASKS[name],
    }


@needs("lm_eval")
@pytest.mark.parametrize("name", TASKS)
def test_lm_eval(
    server: Running,
    pair_on_disk: Pair,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    """Answers until a stop, and log-likelihoods of choices by echo: those of the target's own law."""
    lm_eval = importlib.import_module("lm_eval")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    made = importlib.import_module("lm_eval.models.openai_completions").LocalCompletionsAPI(
        model=EXACT_NAME,
        base_url=f"{server.url}/v1/completions",
        tokenizer=pair_on_disk.target,
        tokenizer_backend="huggingface",
        num_concurrent=1,
        max_length=96,
    )
    results = lm_eval.simple_evaluate(model=made, tasks=[task(tmp_path, name)], bootstrap_iters=0)
    samples = results["samples"][name]
    assert len(samples) == 4
    for sample in samples:
        question = sample["doc"]["question"]
        if name == "said":
            params = SamplingParams(max_tokens=6, temperature=0, stop=["."])
            wanted = server.llm(EXACT_NAME).generate(question, params, use_tqdm=False)[0].outputs[0]
            assert sample["resps"] == [[wanted.text]]
        else:
            for choice, told in zip(TASKS[name]["doc_to_choice"], sample["filtered_resps"], strict=True):
                params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
                text = f"{question} {choice}"
                scores = server.llm(EXACT_NAME).generate(text, params, use_tqdm=False)[0].prompt_logprobs
                assert float(told[0]) == pytest.approx(sum(scores[len(question) :]), abs=1e-3)
