"""`generate` takes prompts in every form and returns answers with their ends, text and log probabilities."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest

from smcjax import LLM, RequestOutput, SamplingParams
from smcjax.model import logits
from tests.checkpoints import EOS, Pair
from tests.engine.conftest import MAX_MODEL_LEN, smc_llm

_logits = jax.jit(logits, static_argnums=0)


def generate(llm: LLM, prompts: object, params: object = None) -> list[RequestOutput]:
    return llm.generate(prompts, params, use_tqdm=False)


def tokens(output: RequestOutput) -> list[int]:
    return output.outputs[0].token_ids


def encode(llm: LLM, text: str) -> list[int]:
    assert llm.tokenizer is not None
    return llm.tokenizer.encode(text)


def seed_where(llm: LLM, wanted: str, params: dict[str, object]) -> tuple[RequestOutput, int]:
    """The first request among many seeds whose answer ends for the wanted reason."""
    for seed in range(40):
        output = generate(llm, "ab", SamplingParams(seed=seed, **params))[0]
        if output.outputs[0].finish_reason == wanted:
            return output, seed
    raise AssertionError(f"no seed ends with {wanted}")


def test_what_completion_shows(llm: LLM) -> None:
    """What a user has a use for; what engines and servers share has an underscore."""
    assert [name for name in dir(llm) if not name.startswith("_")] == [
        *("batch_cycles", "chat", "chat_prompt", "close", "decoding", "engine", "generate"),
        *("generate_stream", "has_prepared", "max_model_len", "max_num_seqs", "metrics", "models", "num_pages"),
        *("page_size", "prepare", "request", "tokenizer", "warm_up"),
    ]


def test_reprs_are_a_line(llm: LLM, pair: Pair) -> None:
    """A notebook shows them whenever a cell ends with one."""
    [output] = llm.generate("ab", SamplingParams(max_tokens=30, seed=1, ignore_eos=True), use_tqdm=False)
    assert repr(output).startswith(f"RequestOutput(request_id={output.request_id!r}, decoding='smc', text=")
    assert repr(output).endswith("finish_reason='length', 30 tokens)")
    assert len(repr(output)) < 200
    assert repr(llm) == f"LLM({pair.target!r}, SMC, N=4, K=3, {MAX_MODEL_LEN} tokens, {llm.num_pages} KV pages)"


@pytest.mark.slow
def test_prompts_in_every_form(llm: LLM) -> None:
    params = SamplingParams(max_tokens=6, seed=3)
    ids = encode(llm, "hello")
    one = generate(llm, "hello", params)
    as_ids = generate(llm, {"prompt_token_ids": ids}, params)
    mixed = generate(llm, ["hello", {"prompt_token_ids": tuple(ids)}, {"prompt_token_ids": np.array(ids)}], params)
    assert len(one) == len(as_ids) == 1
    assert {tuple(tokens(output)) for output in [*one, *as_ids, *mixed]} == {tuple(tokens(one[0]))}
    assert (one[0].prompt, as_ids[0].prompt, mixed[0].prompt, mixed[1].prompt) == ("hello", None, "hello", None)
    assert all(output.prompt_token_ids == ids for output in [*one, *as_ids, *mixed])
    assert generate(llm, []) == []


def test_results_come_in_the_order_of_prompts_with_their_own_parameters(llm: LLM) -> None:
    prompts = [chr(ord("a") + i) * (1 + i % 5) for i in range(11)]  # more than one batch
    params = [SamplingParams(max_tokens=1 + i % 4, seed=i, ignore_eos=True) for i in range(11)]
    outputs = generate(llm, prompts, params)
    assert [output.prompt for output in outputs] == prompts
    assert [len(tokens(output)) for output in outputs] == [1 + i % 4 for i in range(11)]
    numbers = [int(output.request_id) for output in outputs]
    assert numbers == list(range(numbers[0], numbers[0] + 11))
    assert all(output.finished and output.error is None for output in outputs)


def test_eos_is_in_the_tokens_and_not_in_the_text(llm: LLM) -> None:
    output, _ = seed_where(llm, "stop", {"max_tokens": 30})
    answer = output.outputs[0]
    assert answer.token_ids[-1] == EOS
    assert EOS not in answer.token_ids[:-1]
    assert llm.tokenizer is not None
    assert answer.text == llm.tokenizer.decode(answer.token_ids[:-1])
    assert "</s>" not in answer.text


def test_eos_on_the_last_allowed_token_is_a_stop(llm: LLM) -> None:
    full, seed = seed_where(llm, "stop", {"max_tokens": 30})
    count = len(tokens(full))
    again = generate(llm, "ab", SamplingParams(seed=seed, max_tokens=count))[0].outputs[0]
    # The other rows may end elsewhere now and change the draw, but a row of this length that ends in EOS is a stop.
    rows = generate(llm, ["ab"] * 24, [SamplingParams(seed=s, max_tokens=2) for s in range(24)])
    at_cap = [p for o in [*rows] for p in o.smc.particles if len(p.token_ids) == 2]
    assert {p.finish_reason for p in at_cap if p.token_ids[-1] == EOS} == {"stop"}
    assert {p.finish_reason for p in at_cap if p.token_ids[-1] != EOS} == {"length"}
    assert again.finish_reason == ("stop" if again.token_ids[-1] == EOS else "length")


def test_ignore_eos_makes_eos_an_ordinary_token(llm: LLM) -> None:
    outputs = generate(llm, ["ab"] * 8, [SamplingParams(seed=s, max_tokens=30, ignore_eos=True) for s in range(8)])
    assert [output.outputs[0].finish_reason for output in outputs] == ["length"] * 8
    assert all(len(tokens(output)) == 30 for output in outputs)
    assert any(EOS in tokens(output) for output in outputs)


def test_min_tokens(llm: LLM, plain: LLM) -> None:
    early = generate(llm, ["ab"] * 16, [SamplingParams(seed=s, max_tokens=20) for s in range(16)])
    assert any(len(tokens(output)) <= 6 for output in early)  # else the minimum below would show nothing
    for engine in (llm, plain):
        params = [SamplingParams(seed=s, max_tokens=20, min_tokens=7) for s in range(16)]
        outputs = generate(engine, ["ab"] * 16, params)
        assert all(EOS not in tokens(output)[:7] for output in outputs)
        assert min(len(tokens(output)) for output in outputs) > 7
        assert any(output.outputs[0].finish_reason == "stop" for output in outputs)


def test_stop_token_ids(llm: LLM) -> None:
    stops = encode(llm, "abcdefgh")
    params = [SamplingParams(seed=s, max_tokens=20, stop_token_ids=stops, ignore_eos=s % 2 == 1) for s in range(8)]
    for output, one in zip(generate(llm, ["xy"] * 8, params), params, strict=True):
        answer = output.outputs[0]
        ends = {*stops} if one.ignore_eos else {*stops, EOS}
        if answer.finish_reason == "stop":
            assert answer.token_ids[-1] in ends
            assert len(answer.text) == len(answer.token_ids) - 1 - answer.token_ids.count(EOS) * one.ignore_eos
        assert not ends & set(answer.token_ids[:-1])
    assert sum(o.outputs[0].finish_reason == "stop" for o in generate(llm, ["xy"] * 8, params)) >= 4


def test_limits_at_their_ends(llm: LLM) -> None:
    def ends(prompt: list[int], max_tokens: int | None) -> tuple[int, str]:
        params = SamplingParams(seed=1, max_tokens=max_tokens, ignore_eos=True)
        output = generate(llm, {"prompt_token_ids": prompt}, params)[0]
        assert all(len(p.token_ids) == len(tokens(output)) for p in output.smc.particles)
        return len(tokens(output)), output.outputs[0].finish_reason

    assert ends([97], 1) == (1, "length")
    assert ends([97], 9) == (9, "length")
    assert ends([97], None) == (MAX_MODEL_LEN - 1, "length")
    assert ends([97], 10**12) == (MAX_MODEL_LEN - 1, "length")
    assert ends([97] * (MAX_MODEL_LEN - 1), None) == (1, "length")
    assert ends([97] * (MAX_MODEL_LEN - 1), 5) == (1, "length")


@pytest.mark.slow
def test_one_particle_one_draft_token_one_token_pages(pair: Pair) -> None:
    with smc_llm(pair, {"n_particles": 1, "gamma": 1}, page_size=1, max_num_seqs=1) as single:
        outputs = generate(single, ["a", "hello"], SamplingParams(seed=2, max_tokens=9))
        for output in outputs:
            assert output.smc is not None
            assert len(output.smc.particles) == 1
            assert output.smc.trace is not None
            assert not output.smc.trace.resampled.any()
            assert output.smc.log_evidence == pytest.approx(float(output.smc.log_weights[0]), abs=1e-6)
        assert single.metrics()["kv_pages_free"] == single.metrics()["kv_pages_total"]


def test_chat_goes_through_the_template(llm: LLM) -> None:
    params = SamplingParams(seed=4, max_tokens=6)
    conversation = [{"role": "user", "content": "hi"}]
    single = llm.chat(conversation, params, use_tqdm=False)
    several = llm.chat([conversation, conversation], params, use_tqdm=False)
    direct = generate(llm, "[user]hi[assistant]", params)
    assert single[0].prompt_token_ids == direct[0].prompt_token_ids
    assert [tokens(output) for output in [*single, *several]] == [tokens(direct[0])] * 3


def test_progress_goes_to_stderr(llm: LLM, capfd: pytest.CaptureFixture[str]) -> None:
    llm.generate("ab", SamplingParams(max_tokens=1, seed=0))
    out, err = capfd.readouterr()
    assert out == ""
    assert "1/1" in err
    generate(llm, "ab", SamplingParams(max_tokens=1, seed=0))
    assert capfd.readouterr() == ("", "")


def test_threads_share_an_llm(llm: LLM) -> None:
    """Each gets the answers that it would get alone, in its own order; one of them streams."""
    params = [SamplingParams(max_tokens=4 + i, seed=i, ignore_eos=True) for i in range(4)]
    alone = [generate(llm, ["ab", "cde"], one) for one in params]

    def answer(i: int) -> list[list[int]]:
        if i == 3:
            return [
                [t for chunk in llm.generate_stream(text, params[i]) for t in chunk.token_ids] for text in ("ab", "cde")
            ]
        return [tokens(output) for output in generate(llm, ["ab", "cde"], params[i])]

    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(answer, range(4)))
    assert got == [[tokens(output) for output in outputs] for outputs in alone]
