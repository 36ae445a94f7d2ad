"""`Rejection` through `LLM`: its law, greedy runs, any company, few pages, streams, and its own counts."""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from smcjax import LLM, SMC, Rejection, RequestOutput, SamplingParams
from smcjax.engine.schedule.page_budget import Footprint
from smcjax.model import save_checkpoint
from tests import exact
from tests.checkpoints import Pair
from tests.engine.conftest import MAX_MODEL_LEN, lend, llm_arguments
from tests.engine.test_engine import drain, prompt, sound
from tests.helpers import Ask, tiny_pair
from tests.smc.reference import language_model

GAMMA, PAGE_SIZE = 3, 4
COUNT = 8
DECODINGS = [Rejection(gamma=GAMMA, n_candidates=2), Rejection(tree=(2, 1, 1))]


def rejecting(pair: Pair, decoding: Rejection, **changes: Any) -> LLM:
    return LLM(**llm_arguments(pair, decoding=decoding, page_size=PAGE_SIZE, **changes))


@pytest.fixture(scope="module", params=DECODINGS, ids=["two candidates", "tree"])
def llm(pair: Pair, request: pytest.FixtureRequest) -> Iterator[LLM]:
    """Requests are admitted by use into memory for two of the largest; the first decoder is the session's."""
    request.getfixturevalue("rejecting")
    with rejecting(pair, request.param, admission="optimistic") as llm:
        yield lend(llm, 2 * Footprint.of(request.param, PAGE_SIZE).worst_case(1, MAX_MODEL_LEN))


def params(number: int) -> SamplingParams:
    return SamplingParams(
        seed=number,
        max_tokens=6 + number * 5 % 17,
        temperature=(0.0, 0.7, 1.3)[number % 3],
        ignore_eos=number % 2 == 0,
    )


@pytest.mark.slow
def test_the_law_of_answers(tmp_path: Path) -> None:
    """χ² of 2,048 seeded requests against every answer's exact probability; the control is a law half as warm again."""
    vocabulary, ask, samples = 4, Ask((1, 2), max_tokens=3), 2048
    models, seen = tiny_pair(vocabulary), collections.Counter[tuple[int, ...]]()
    for name, config, weights in (
        ("target", models.target, models.params.target),
        ("draft", models.draft, models.params.draft),
    ):
        save_checkpoint(config, weights, tmp_path / name, dtype="float32")
    with LLM(
        str(tmp_path / "target"),
        draft_model=str(tmp_path / "draft"),
        decoding=Rejection(gamma=2, n_candidates=2),
        max_model_len=16,
        max_num_seqs=64,
        page_size=4,
        dtype="float32",
    ) as llm:
        each = [SamplingParams(seed=seed, max_tokens=ask.max_tokens, ignore_eos=True) for seed in range(samples)]
        for output in llm.generate([{"prompt_token_ids": list(ask.prompt)}] * samples, each, use_tqdm=False):
            seen[tuple(output.outputs[0].token_ids)] += 1
    after = language_model(models.target, models.params.target, 16)

    def chi_square(temperature: float) -> tuple[float, int]:
        warm = dataclasses.replace(ask, temperature=temperature)
        return exact.chi_square(seen, exact.outcomes(after, warm, 16))

    value, bins = chi_square(1.0)
    assert bins > 8
    assert value < bins + 4.5 * np.sqrt(2 * bins) + 5, (value, bins)
    value, bins = chi_square(1.5)
    assert value > bins + 15 * np.sqrt(2 * bins), "control"


@pytest.mark.slow
def test_the_same_tokens_in_any_company(llm: LLM) -> None:
    """Alone, together, arriving one by one, read late, streamed, with few pages: pages sound after every step."""
    alone = [llm.generate(prompt(i), params(i), use_tqdm=False)[0].outputs[0] for i in range(COUNT)]
    assert len({tuple(one.token_ids) for one in alone}) > 1
    order = [3, 0, 7, 5, 1, 2, 6, 4]
    together = llm.generate([prompt(i) for i in order], [params(i) for i in order], use_tqdm=False)
    assert [output.outputs[0] for output in together] == [alone[i] for i in order]
    engine, lag = llm.engine, llm.engine._lag
    try:
        for engine._lag in (0, 1):
            asked, outputs = {}, {}
            todo = list(order)
            while todo or engine.busy:
                if todo:
                    number = todo.pop()
                    request = llm.request(prompt(number), params(number))
                    engine.add_request(request, stream=True)
                    asked[request.request_id] = number
                outputs |= {output.request_id: output for output in engine.step()}
                sound(engine)
            for name, number in asked.items():
                assert outputs[name].outputs[0] == alone[number]
                chunks = engine.chunks(name)
                assert [token for chunk in chunks for token in chunk.token_ids] == alone[number].token_ids
                assert len(chunks) > 2, "what is accepted is certain at once"
    finally:
        engine._lag = lag
    assert llm.metrics()["kv_pages_free"] == engine._scheduler._pages


@pytest.mark.slow
def test_greedy_runs_are_the_targets_own(llm: LLM, plain: LLM) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=25, ignore_eos=True)
    prompts = [prompt(i) for i in range(6)]
    mine, theirs = (one.generate(prompts, greedy, use_tqdm=False) for one in (llm, plain))
    assert [output.outputs[0].token_ids for output in mine] == [output.outputs[0].token_ids for output in theirs]


@pytest.mark.slow
@pytest.mark.parametrize("decoding", DECODINGS, ids=str)
def test_what_is_accepted_is_what_is_kept(pair: Pair, decoding: Rejection) -> None:
    """A target that is its own draft accepts everything: the answer is x₀, K drafts, one of the target's, K drafts …

    That is so wherever the cap, a stop token, a stop string or an abort cuts it.
    """

    def check(output: RequestOutput) -> None:
        metrics, length = output.metrics, len(output.outputs[0].token_ids)
        drafts = [(number - 1) % (GAMMA + 1) for number in range(1, length) if number % (GAMMA + 1)]  # their positions
        assert metrics.generated_tokens == length
        assert metrics.accepted == len(drafts)
        assert metrics.accepted_at == tuple(drafts.count(position) for position in range(GAMMA))
        assert metrics.drafted == metrics.cycles * decoding.drafts_per_cycle

    with rejecting(pair, decoding, draft_model=pair.target) as llm:
        caps = [SamplingParams(seed=cap, max_tokens=cap, ignore_eos=True) for cap in range(1, 14)]
        whole = llm.generate([prompt(1)] * len(caps), caps, use_tqdm=False)
        for output in whole:
            check(output)
        longest = whole[-1].outputs[0]
        for token in longest.token_ids:
            check(llm.generate(prompt(1), dataclasses.replace(caps[-1], stop_token_ids=[token]), use_tqdm=False)[0])
        for stop in {longest.text[at : at + 2] for at in range(1, len(longest.text) - 2)}:
            check(llm.generate(prompt(1), dataclasses.replace(caps[-1], stop=stop), use_tqdm=False)[0])
        engine, lag = llm.engine, llm.engine._lag
        try:
            for engine._lag in (0, 2):
                for steps in range(1, 6):
                    request = llm.request(prompt(1), SamplingParams(seed=1, max_tokens=30, ignore_eos=True))
                    engine.add_request(request)
                    for _ in range(steps):
                        engine.step()
                    engine.abort(request.request_id)
                    output = drain(engine)[request.request_id]
                    assert output.outputs[0].finish_reason == "abort"
                    check(output)
        finally:
            engine._lag = lag


@pytest.mark.slow
def test_the_others_are_the_targets(llm: LLM) -> None:
    """Over seeds, on a pair that disagrees: accepted < tokens ≤ accepted + cycles + 1, equal where nothing is cut."""
    each = [SamplingParams(seed=seed, max_tokens=3 + seed % 9, ignore_eos=seed % 2 == 0) for seed in range(60)]
    seen = set()
    for output in llm.generate([prompt(seed % 5) for seed in range(60)], each, use_tqdm=False):
        metrics = output.metrics
        assert metrics.accepted is not None
        by_target = metrics.generated_tokens - metrics.accepted
        assert 0 < by_target <= metrics.cycles + 1
        assert by_target >= metrics.cycles  # the last cycle alone may be cut before its last token
        assert metrics.accepted == sum(metrics.accepted_at) <= metrics.cycles * GAMMA
        assert list(metrics.accepted_at) == sorted(metrics.accepted_at, reverse=True)
        seen.add(metrics.cycles + 1 - by_target)
    assert seen == {0, 1}


def test_ngram_drafts_need_no_model_and_change_no_greedy_token(pair: Pair, plain: LLM) -> None:
    """`draft_model="ngram"`: greedy answers are the target's own, by fewer cycles than tokens where text repeats."""
    prompts: list[Any] = [{"prompt_token_ids": [5, 6, 7, 8] * 4}, "abab"]
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    expected = [o.outputs[0].token_ids for o in plain.generate(prompts, params, use_tqdm=False)]
    with rejecting(pair, Rejection(gamma=4), draft_model="ngram", max_num_seqs=2) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert llm.models.draft is None
    assert [o.outputs[0].token_ids for o in outputs] == expected
    assert outputs[0].metrics.accepted is not None
    assert sum(o.metrics.cycles for o in outputs) < sum(len(tokens) for tokens in expected)
    assert sum(o.metrics.accepted or 0 for o in outputs) > 0


@pytest.mark.parametrize(
    ("decoding", "changes", "message"),
    [
        (Rejection(tree=(2, 1)), {}, "draft_model is 'ngram', which proposes one continuation, and decoding asks for"),
        (SMC(2, 2), {}, "draft_model is 'ngram', whose drafts leave the target's other tokens no probability"),
        (Rejection(2), {"draft_drop_layers": (0,)}, "draft_drop_layers is (0,) and draft_model='ngram' has no draft"),
        (Rejection(2), {"draft_quantization": "int8"}, "draft_quantization is 'int8' and draft_model='ngram' has no"),
    ],
)
def test_ngram_drafts_refuse_what_is_of_models(pair: Pair, decoding: Any, changes: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        LLM(pair.target, draft_model="ngram", decoding=decoding, **changes)
