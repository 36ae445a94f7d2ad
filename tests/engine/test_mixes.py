"""Random combinations of decoder, requests and engine, held to what must hold of each by itself.

A mix is a batch of requests, drawn at random with their options. It runs on an engine of a random decoder, and

    alone = in the mix = in the mix again (its prompts cached) = streamed = on an engine of other options

for tokens, text, end and population; log-probabilities are those of a dense forward of the target; every page comes
back. Options that a decoder refuses are drawn anew, and the refusal must be one sentence. The mixes of a day are the
same in every run; `SMCJAX_MIXES=12345 pytest tests/engine/test_mixes.py` runs those of another seed.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest

from smcjax import LLM, SMC, Autoregressive, Rejection, RequestOutput, SamplingParams, TextPotential, smc
from smcjax.decoders import Decoding
from smcjax.model import logits
from tests.checkpoints import EOS, Pair
from tests.engine.conftest import MAX_MODEL_LEN
from tests.engine.test_seeds import fingerprint

SEED = int(os.environ.get("SMCJAX_MIXES") or datetime.datetime.now(datetime.UTC).strftime("%Y%m%d"))

# Options by name: the default first, which two draws of three take, so that pairs of others meet often and survive.
SMC_OPTIONS: dict[str, list[Any]] = {
    "draft_temperature": [None, 0.8, 1.3],
    "power": [1.0, 0.7, 1.5],
    "ess_threshold": [0.5, 0.0, 1.0],
    "resampling": list(smc.SCHEMES),
    "select": ["sample", "best"],
    "bonus": [True, False],
    "defer_bonus": [True, False],
    "control": [0.0, 0.1, 1.0],
    "early_end": [False, True],
    "pipelined": [False, True],
}
REJECTION_OPTIONS: dict[str, list[Any]] = {
    "n_candidates": [1, 3],
    "draft_temperature": [None, 0.8, 1.3],
    "tree": [None, (2, 1), (3, 2, 1), (-1, 0, 0, 1)],
    "siblings": ["sampled", "top"],
    "order": ["bfs", "dfs", "position"],
}
ENGINE_OPTIONS: dict[str, list[Any]] = {
    "max_num_seqs": [1, 2, 4],
    "page_size": [1, 8, 16],
    "enable_prefix_caching": [False, True],
    "admission": ["optimistic", "worst_case"],
}
# What a request may ask for without another program, and what takes one: an engine meets two kinds of the latter.
PLAIN: dict[str, list[Any]] = {
    "temperature": [1.0, 0.0, 0.6, 1.8],
    "min_tokens": [0, 3],
    "stop": [None, "e", ["ab", "q"]],
    "stop_token_ids": [None, [70, 71]],
    "ignore_eos": [False, True],
    "trace": [False, True],
}
EXTRAS: dict[str, dict[str, list[Any]]] = {
    "truncation": {"top_k": [5, 40], "top_p": [0.5, 0.9]},
    "adjustments": {
        "presence_penalty": [0.7],
        "frequency_penalty": [-0.4],
        "repetition_penalty": [1.3],
        "logit_bias": [{65: 4.0, 70: -9.0}],
    },
    "forms": {
        "response_format": [{"type": "regex", "regex": "[a-f]{2,9}"}, {"type": "choice", "choice": ["ab", "abc", "q"]}]
    },
    "logprobs": {"logprobs": [0, 3]},
    "prompt_logprobs": {"prompt_logprobs": [0, 2]},
    "control": {"control": [0.2, 1.0]},
    "potentials": {
        "potentials": [
            [TextPotential(lambda prompt, texts: [0.4 * text.count("e") for text in texts], ask=2)],
            [TextPotential(lambda prompt, texts: [-0.1 * len(text) for text in texts])],
            [smc.TokenPotential(((66, 1.0), (70, -1.0)))],
        ]
    },
}
STEMS = ["", "ab" * 9, "the quick brown fox ", "x"]

_logits = jax.jit(logits, static_argnums=0)


def draw(rng: random.Random, options: dict[str, list[Any]], changed: float = 1 / 3) -> dict[str, Any]:
    """A value for each option: the first, or with this probability one of the others."""
    return {name: rng.choice(values[1:]) if rng.random() < changed else values[0] for name, values in options.items()}


def accepted(make: Callable[[], Any]) -> Any:
    """What is made, or None where it is refused: by a ValueError of one sentence."""
    try:
        return make()
    except ValueError as error:
        refusal = str(error)
    assert refusal.endswith("."), refusal
    assert "\n" not in refusal, refusal
    return None


def draw_decoder(rng: random.Random, kind: str) -> Decoding | None:
    """A decoder of random options that its constructor takes; None: each request has the one that it needs."""
    while True:
        if kind == "unnamed":
            return None
        if kind == "autoregressive":
            return Autoregressive()
        if kind == "smc":
            options = draw(rng, SMC_OPTIONS) | {"n_particles": rng.choice([1, 2, 4]), "gamma": rng.choice([1, 2, 3])}
            made = accepted(functools.partial(SMC, **options))
        else:
            options = draw(rng, REJECTION_OPTIONS)
            options |= {} if options["tree"] else {"gamma": rng.choice([1, 2, 3])}
            made = accepted(functools.partial(Rejection, **options))
        if made is not None:
            return made


def draw_request(rng: random.Random, llm: LLM, extras: list[str]) -> tuple[Any, SamplingParams]:
    """A prompt and options that the LLM takes, those of `extras` among them now and then."""
    while True:
        options = draw(rng, PLAIN, changed=1 / 4)
        for extra in extras:
            if rng.random() < 0.5:
                name = rng.choice(list(EXTRAS[extra]))
                options[name] = rng.choice(EXTRAS[extra][name])
        options |= {"seed": rng.randrange(2**32), "max_tokens": rng.randrange(1, 22)}
        prompt = rng.choice(STEMS) + "".join(rng.choices("abcdefgh", k=rng.randrange(1, 6)))
        params = accepted(functools.partial(SamplingParams, **options))
        if params is not None and accepted(functools.partial(llm.request, prompt, params)) is not None:
            return prompt, params


def run(llm: LLM, requests: list[tuple[Any, SamplingParams]]) -> list[RequestOutput]:
    """Answers the requests side by side; every page comes back."""
    outputs = llm.generate([prompt for prompt, _ in requests], [params for _, params in requests], use_tqdm=False)
    metrics = llm.metrics()
    assert metrics["kv_pages_free"] == metrics["kv_pages_total"]  # those that the prefix cache keeps are free too
    assert all(output.outputs[0].finish_reason in ("stop", "length") for output in outputs), outputs
    return outputs


def streamed(llm: LLM, prompt: Any, params: SamplingParams) -> RequestOutput:
    """The output of a stream, whose chunks joined are its answer."""
    chunks = list(llm.generate_stream(prompt, params))
    output = chunks[-1].output
    assert output is not None
    assert "".join(chunk.text for chunk in chunks) == output.outputs[0].text
    assert [token for chunk in chunks for token in chunk.token_ids] == output.outputs[0].token_ids
    return output


def target_logprobs(llm: LLM, output: RequestOutput, params: SamplingParams) -> np.ndarray:
    """log p [T, V] of the answer's places, by a dense forward and plain numpy, at temperature 1 where it is greedy."""
    start, answer = len(output.prompt_token_ids), output.outputs[0].token_ids
    tokens = output.prompt_token_ids + answer
    padded = np.zeros((1, MAX_MODEL_LEN), np.int32)
    padded[0, : len(tokens)] = tokens
    dense = np.asarray(_logits(llm.models.target, llm.models.target_params, padded)[0], np.float64)
    rows = []
    for place in range(len(answer)):
        row, before = dense[start - 1 + place].copy(), answer[:place]
        for token, bias in (params.logit_bias or {}).items():
            row[token] += bias
        seen = sorted({*output.prompt_token_ids, *before})
        row[seen] = np.where(
            row[seen] > 0, row[seen] / params.repetition_penalty, row[seen] * params.repetition_penalty
        )
        for token in set(before):
            row[token] -= params.frequency_penalty * before.count(token) + params.presence_penalty
        if place < params.min_tokens:
            row[[*([] if params.ignore_eos else [EOS]), *(params.stop_token_ids or [])]] = -np.inf
        row /= params.temperature or 1.0
        if params.top_k > 0:
            row[row < np.sort(row)[-params.top_k]] = -np.inf
        row -= np.logaddexp.reduce(row)
        if params.top_p < 1:
            order = np.argsort(-row)
            kept = np.cumsum(np.exp(row[order])) - np.exp(row[order]) < params.top_p
            row[row < row[order][kept].min()] = -np.inf
            row -= np.logaddexp.reduce(row)
        rows.append(row)
    return np.array(rows)


def check_logprobs(llm: LLM, output: RequestOutput, params: SamplingParams) -> None:
    """Reported log-probabilities are the dense forward's; under a grammar mask they are finite at least."""
    answer = output.outputs[0]
    if params.logprobs is None:
        assert answer.logprobs is None
        return
    assert answer.logprobs is not None
    assert len(answer.logprobs) == len(answer.token_ids)
    assert np.isfinite(answer.logprobs).all()
    if params.response_format is not None:
        return
    expected = target_logprobs(llm, output, params)
    own = expected[np.arange(len(expected)), answer.token_ids]
    np.testing.assert_allclose(answer.logprobs, own, atol=2e-4)
    for row, likeliest in zip(expected, answer.top_logprobs or [], strict=params.logprobs > 0):
        largest = np.sort(row)[::-1][: len(likeliest)]
        np.testing.assert_allclose([one.logprob for one in likeliest], largest, atol=2e-4)
        np.testing.assert_allclose([row[one.token_id] for one in likeliest], largest, atol=2e-4)


def most_pages(llm: LLM) -> int:
    """Pages that the largest request may need."""
    return max(llm._footprint.worst_case(length, MAX_MODEL_LEN) for length in range(1, MAX_MODEL_LEN))


@contextlib.contextmanager
def engines(pair: Pair, rng: random.Random, decoding: Decoding | None) -> Iterator[tuple[LLM, LLM, dict[str, Any]]]:
    """An engine of the decoder, another of other options, and these."""
    draft: Any = None if isinstance(decoding, Autoregressive) else pair.draft
    chain = isinstance(decoding, Rejection) and decoding.tree is None and decoding.draft_temperature is None
    if chain and rng.random() < 0.3:
        draft = "ngram"
    make = functools.partial(LLM, pair.target, draft_model=draft, decoding=decoding, max_model_len=MAX_MODEL_LEN)
    options = draw(rng, ENGINE_OPTIONS, changed=1 / 2)
    with make(max_num_seqs=3, page_size=4) as one:
        if rng.random() < 0.5:  # memory for the largest request and little more
            options["num_pages"] = 2 + one._footprint.worst_case(1, MAX_MODEL_LEN) * 4 // options["page_size"] * 5 // 4
        other = accepted(functools.partial(make, **options))
        while other is None or other.num_pages <= most_pages(other):
            if other is not None:
                other.close()
            options["num_pages"] *= 2
            other = accepted(functools.partial(make, **options))
        with other:
            yield one, other, options


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["smc", ("rejection", "autoregressive", "unnamed")[SEED % 3]])
def test_random_mixes(pair: Pair, kind: str) -> None:
    rng = random.Random(f"{SEED} {kind}")
    decoding = draw_decoder(rng, kind)
    extras = rng.sample(sorted(EXTRAS), 2)
    if kind == "smc" and "potentials" not in extras:
        extras[0] = "potentials"  # which SMC alone takes
    with engines(pair, rng, decoding) as (one, other, options):
        print(f"SMCJAX_MIXES={SEED}: {decoding!r}, {extras}, {options}")  # pytest shows it where the test fails
        for _ in range(2):
            requests = [draw_request(rng, one, extras) for _ in range(rng.randrange(2, 6))]
            outputs = run(one, requests)
            expected = [fingerprint(output) for output in outputs]
            assert [fingerprint(output) for output in run(one, requests)] == expected, "again"
            assert [fingerprint(output) for output in run(other, requests[::-1])][::-1] == expected, "another engine"
            index = rng.randrange(len(requests))
            assert fingerprint(run(one, [requests[index]])[0]) == expected[index], "alone"
            assert fingerprint(streamed(one, *requests[index])) == expected[index], "streamed"
            for output, (_, params) in zip(outputs, requests, strict=True):
                check_logprobs(one, output, params)


@pytest.mark.slow
def test_the_laws_can_fail(plain: LLM) -> None:
    """Negative control: another seed, another temperature's log-probabilities, are found."""
    params, others = (SamplingParams(seed=seed, max_tokens=9, logprobs=2) for seed in (1, 2))
    first, second = run(plain, [("ab", params), ("ab", others)])
    assert fingerprint(first) != fingerprint(second)
    check_logprobs(plain, first, params)
    with pytest.raises(AssertionError):
        check_logprobs(plain, first, SamplingParams(seed=1, temperature=1.1, logprobs=2))
