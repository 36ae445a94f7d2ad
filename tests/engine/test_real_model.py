"""A pretrained chat model from its own file through `LLM`: goldens of torch, and laws between ways to ask."""

from __future__ import annotations

import json
import math
import runpy
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest

from smcjax import LLM, SMC, Judge, RequestOutput, SamplingParams
from smcjax.auto import Routed
from tests.gguf_files import DATA

pytestmark = pytest.mark.slow
EXAMPLES = Path(__file__).parents[2] / "examples"
GOLDEN = np.load(DATA / "goldens.npz")
CHATS = json.loads((DATA / "tokens.json").read_text())["chats"]
DROPPED = (3, 12)  # two of thirty layers: a draft whose tokens are accepted three times in four
PROMPTS = [{"prompt_token_ids": GOLDEN[f"prompt{number}"].tolist()} for number in range(3)]
GREEDY = [GOLDEN[f"greedy{number}"].tolist() for number in range(3)]


def greedy(max_tokens: int, **changes: bool) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0, **changes)


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """SMC, and rejection beside it for requests at temperature 0. The draft has the target's own arrays."""
    decoding = Routed(SMC(n_particles=2, gamma=2))
    with LLM("smollm2", draft_drop_layers=DROPPED, decoding=decoding, max_num_seqs=4, max_model_len=256) as llm:
        models = llm.models
        assert (models.target.num_layers, models.draft.num_layers) == (30, 28)
        held = {id(leaf) for leaf in jax.tree.leaves(models.target_params)}
        assert {id(leaf) for leaf in jax.tree.leaves(models.draft_params)} < held
        yield llm


def test_greedy_tokens_are_those_of_torch(llm: LLM) -> None:
    """And about three in four of the first drafts are accepted: of a draft that is the target's double all would be."""
    outputs = llm.generate(PROMPTS, greedy(32, ignore_eos=True), use_tqdm=False)
    assert tokens_of(outputs) == [tokens[:32] for tokens in GREEDY]
    metrics = [output.metrics for output in outputs]
    accepted = sum(metric.accepted_at[0] for metric in metrics)
    assert 0.6 < accepted / sum(metric.cycles for metric in metrics) < 0.92


def test_populations_weigh_as_their_control_says(llm: LLM) -> None:
    """At control 1 all weights are 1; at 0.1 they differ, and evidence stays near 1 with so near a draft."""
    asked = [SamplingParams(max_tokens=12, seed=5, control=control) for control in (1.0, 0.1)]
    populations = [output.smc for output in llm.generate([PROMPTS[0]] * 2, asked, use_tqdm=False)]
    evidences = [population.log_evidence for population in populations if population is not None]
    assert evidences[0] == 0.0
    assert math.isfinite(evidences[1])
    assert 0.0 < abs(evidences[1]) < 3.0


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
    chunks = list(llm.generate_stream(PROMPTS[0], greedy(12, ignore_eos=True)))
    assert "".join(chunk.text for chunk in chunks) == llm.tokenizer.decode(GREEDY[0][:12])
    assert [token for chunk in chunks for token in chunk.token_ids] == GREEDY[0][:12]
    assert len(chunks) >= 4  # of three tokens at most
