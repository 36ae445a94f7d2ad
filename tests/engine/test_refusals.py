"""Bad input from Python: ValueError, one sentence with the argument, the value seen and the mend; nothing half-done."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import pytest

from smcjax import LLM, SMC, Auto, Autoregressive, Rejection, SamplingParams, SparseVerification
from smcjax.cli.options import ADMISSIONS, DTYPES, QUANTIZATIONS
from smcjax.decoders import SCHEMES, SELECTIONS, SIBLINGS
from smcjax.sparse.verification import MODES
from smcjax.trees import ORDERS
from tests.checkpoints import Pair
from tests.engine.conftest import MAX_MODEL_LEN, smc_llm

NAN, INF, HUGE = float("nan"), float("inf"), 10**310

WRONG: dict[str, list[Any]] = {
    "max_tokens": [0, -1, 1.0, 8.5, "8", True, NAN, INF, [8]],
    "min_tokens": [-1, 1.5, "8", None, True, NAN],
    "temperature": [-0.5, NAN, INF, -INF, 1e-4, 10**12, HUGE, "1", None, True],
    "top_p": [0, -0.1, 1.1, NAN, INF, HUGE, "1", None, True],
    "top_k": [-2, 0.5, "1", None, True, NAN],
    "stop": ["", ["a", ""], [1], 5, True, {"a": 1}, [["a"]]],
    "stop_token_ids": [[-1], [1.0], ["a"], [True], 5, "ab", {1}],
    "ignore_eos": [1, 0, "yes", None],
    "seed": [-1, 2**32, 10**12, 1.0, "8", True, NAN],
    "logprobs": [21, -1, 10**12, True, 1.0, "1", [1]],
    "prompt_logprobs": [21, -1, 10**12, True, 1.0, "1", [1]],
    "presence_penalty": [-2.1, 2.1, NAN, INF, "1", None, True],
    "frequency_penalty": [-2.1, 2.1, NAN, INF, "1", None, True],
    "repetition_penalty": [0, -1, 101, NAN, INF, "1", None, True],
    "logit_bias": [5, "a", [1], {1: NAN}, {1: 101}, {1: -101}, {-1: 1}, {"1": 1}, {1: "1"}, {True: 1}, {1: True}],
    "trace": [1, "yes", None],
    "control": [-0.1, 1.1, NAN, INF, HUGE, "1", True, [0.5]],
    "n": [1, 2, True, "8"],
}
WRONG_SMC: dict[str, list[Any]] = {
    "n_particles": [0, -1, 1025, 10**12, 8.0, "8", None, True, NAN],
    "gamma": [0, -1, 65, 10**12, 8.0, "8", None, True, NAN],
    "draft_temperature": [0, 0.009, -1, NAN, INF, 10**12, "8", True],
    "power": [0, -1, NAN, INF, 10**12, "8", None, True],
    "ess_threshold": [-0.1, 1.1, NAN, INF, 10**12, "8", None, True],
    "resampling": ["none", "", None, 5, ["systematic"]],
    "select": ["first", "", None, 5],
    "bonus": [1, "yes", None],
    "defer_bonus": [1, "yes"],
    "trace": [1, "yes", None],
    "control": [-0.1, 1.1, NAN, INF, 10**12, "1", None, True],
    "early_end": [1, "yes", None],
    "potentials": [5, "yes", None, (5,)],
}
IDLE_SMC: list[tuple[dict[str, Any], str]] = [  # options that others leave without an effect
    ({"pipelined": True, "bonus": False}, "pipelined is True, which leaves bonus False without an effect"),
    ({"pipelined": True, "defer_bonus": False}, "pipelined is True, which leaves defer_bonus False without an effect"),
    ({"bonus": False, "defer_bonus": True}, "bonus is False, which leaves defer_bonus True without an effect"),
    ({"bonus": False, "defer_bonus": False}, "bonus is False, which leaves defer_bonus False without an effect"),
    ({"n_particles": 1, "resampling": "residual"}, "n_particles is 1, which leaves resampling 'residual' without an"),
    ({"n_particles": 1, "select": "best"}, "n_particles is 1, which leaves select 'best' without an effect"),
    ({"n_particles": 1, "early_end": True}, "n_particles is 1, which leaves early_end True without an effect"),
    ({"ess_threshold": 0, "resampling": "residual"}, "ess_threshold is 0, which leaves resampling 'residual' without"),
]
WRONG_LLM: dict[str, list[Any]] = {
    "model": [5, True, ["a"]],
    "draft_model": [5, True, ["a"]],
    "decoding": [SMC, "smc", 8, Auto],
    "dtype": ["int8", "fp16", 5, True, "float64"],
    "max_model_len": [0, 1, -1, 10**12, 8.0, "8", True, NAN],
    "max_num_seqs": [0, -1, 4097, 10**12, 8.0, "8", None, True, NAN],
    "page_size": [0, -1, 129, 10**12, 8.0, "8", True, NAN],
    "num_pages": [0, 1, -1, 10**12, 10**8, 8.0, "8", True, NAN],
    "gpu_memory_utilization": [0, -0.1, 1.1, 85, NAN, INF, 10**12, "8", None, True],
    "tensor_parallel_size": [0, 2, -1, "8", None, True, NAN],
    "seed": [-1, 2**32, 10**12, 1.0, "8", None, True, NAN],
}


def cases(table: dict[str, list[Any]]) -> list[tuple[str, Any]]:
    return [(name, value) for name, values in table.items() for value in values]


def complaint(call: Callable[[], object]) -> str:
    """The message of the ValueError that `call` raises: one line, one sentence."""
    with pytest.raises(ValueError, match=r".") as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 400
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
    return message


def shown(value: object) -> str:
    return repr(value)[:60]


@pytest.mark.parametrize(("kind", "table"), [(SamplingParams, WRONG), (SMC, WRONG_SMC)])
def test_fields(kind: Any, table: dict[str, list[Any]]) -> None:
    for name, value in cases(table):
        message = complaint(lambda name=name, value=value: kind(**{name: value}))
        assert message.startswith(f"{name} ")
        assert shown(value) in message


@pytest.mark.parametrize(("options", "reason"), IDLE_SMC, ids=[str(options) for options, _ in IDLE_SMC])
def test_options_without_an_effect(options: dict[str, Any], reason: str) -> None:
    """Refused by name; each of the two goes by itself, and a copy without the cause takes neither for given."""
    assert complaint(lambda: SMC(**options)).startswith(reason)
    for name, value in options.items():
        alone = SMC(**{name: value})
        assert dataclasses.replace(alone, **{name: getattr(SMC(), name)}) == SMC()


def test_a_temperature_of_drafts_that_have_none(pair: Pair) -> None:
    for decoding in (Rejection(draft_temperature=0.5), SMC(control=1.0, draft_temperature=0.5)):
        message = complaint(lambda one=decoding: LLM(pair.target, draft_model="ngram", decoding=one))
        assert message == "draft_temperature is 0.5 and draft_model='ngram' has no draft; omit it."


def test_llm(pair: Pair) -> None:
    for name, value in cases(WRONG_LLM):
        fields = {"model": pair.target, "draft_model": pair.draft, "decoding": SMC(4, 3), name: value}
        message = complaint(lambda fields=fields: LLM(**fields))
        assert message.startswith(f"{name} ")
        assert shown(value) in message


def test_two_parameters_that_contradict_each_other(pair: Pair) -> None:
    assert complaint(lambda: SamplingParams(max_tokens=3, min_tokens=4)).startswith("min_tokens must not exceed")
    assert "draft_model is not" in complaint(lambda: LLM(pair.target, decoding=SMC()))
    assert "model is not" in complaint(lambda: LLM(draft_model=pair.draft))
    assert "1024 positions" in complaint(lambda: smc_llm(pair, max_model_len=1025))


def test_unknown_arguments_are_refused_by_name(pair: Pair, llm: LLM) -> None:
    calls: list[Callable[[], object]] = [
        lambda: SamplingParams(best_of=3),  # type: ignore[call-arg]
        lambda: SMC(best_of=3),  # type: ignore[call-arg]
        lambda: Autoregressive(best_of=3),  # type: ignore[call-arg]
        lambda: LLM(pair.target, best_of=3),  # type: ignore[call-arg]
        lambda: llm.generate("ab", best_of=3),  # type: ignore[call-arg]
        lambda: llm.chat([], best_of=3),  # type: ignore[call-arg]
    ]
    for call in calls:
        with pytest.raises(TypeError, match="best_of"):
            call()


def test_a_mistyped_argument_is_told_its_name(pair: Pair) -> None:
    kinds: dict[Callable[..., Any], tuple[str, str]] = {
        SamplingParams: ("max_token", "max_tokens"),
        SMC: ("num_particles", "n_particles"),
        Rejection: ("candidates", "n_candidates"),
        Autoregressive: ("sparsity", "sparse"),
        Auto: ("particles", "n_particles"),
        SparseVerification: ("groups", "group"),
        LLM: ("draftmodel", "draft_model"),
    }
    for kind, (wrong, right) in kinds.items():
        with pytest.raises(TypeError) as caught:
            kind(**{wrong: 1})
        assert str(caught.value) == f"{kind.__name__} has no argument {wrong}; did you mean {right}?"
    with pytest.raises(TypeError, match=r"^SMC has no argument best_of; it has n_particles, gamma, .*\.$"):
        SMC(best_of=3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"^SMC has no argument sekect; did you mean select\?$"):
        dataclasses.replace(SMC(), sekect="best")  # type: ignore[call-arg]


def test_choices_are_known_to_type_checkers() -> None:
    """As literals, which editors complete: the values that are taken, and no others."""
    choices = {
        SMC: {"resampling": SCHEMES, "select": SELECTIONS},
        Rejection: {"siblings": SIBLINGS, "order": ORDERS},
        SparseVerification: {"mode": MODES, "order": ORDERS},
        LLM.__init__: {
            "dtype": DTYPES,
            "quantization": (*QUANTIZATIONS, None),
            "draft_quantization": (*QUANTIZATIONS, None),
            "admission": ADMISSIONS,
            "implementation": ("auto", "triton", "xla"),
        },
    }
    for kind, fields in choices.items():
        hints = typing.get_type_hints(kind)
        for name, values in fields.items():
            kinds = [one for one in (hints[name], *typing.get_args(hints[name])) if typing.get_origin(one) is Literal]
            assert typing.get_args(kinds[0]) == tuple(value for value in values if value is not None), name
    assert "auto" in str(typing.get_type_hints(LLM.__init__)["decoding"])
    for name in ("dtype", "admission", "implementation", "quantization"):
        with pytest.raises(ValueError, match=name):
            LLM(**{name: "any"})


PROMPTS: list[tuple[Any, str]] = [
    ("", "empty"),
    ({"prompt_token_ids": []}, "no tokens"),
    ("a" * MAX_MODEL_LEN, f"has {MAX_MODEL_LEN} tokens and max_model_len is {MAX_MODEL_LEN}"),
    ({"prompt_token_ids": [1] * 5000}, "has 5000 tokens"),
    ({"prompt_token_ids": [1, 264]}, "holds 264; ids of this model are 0 to 263"),
    ({"prompt_token_ids": [1, 10**12]}, "holds 1000000000000"),
    ({"prompt_token_ids": [-1]}, "holds -1"),
    *(({"prompt_token_ids": ids}, "whole numbers") for ids in ([True], [1.0], [NAN], ["a"], [[1]], np.array([0.5]))),
    *(({"prompt_token_ids": ids}, "must be a list") for ids in ("abc", 5, None)),
    ({"prompt_token_ids": [float(i) for i in range(10**5)]}, "…"),
    ({"prompt": "a"}, "got ['prompt']"),
    ({"prompt_token_ids": [1], "prompt": "a"}, "got ['prompt', 'prompt_token_ids']"),
    ({}, "got []"),
    ("caf\udce9", "valid Unicode"),
]


def test_a_bad_prompt_names_its_index_and_nothing_runs(llm: LLM) -> None:
    before, counter = llm.metrics(), llm._preparer.count
    for prompt, reason in PROMPTS:
        prompts = ["ab", {"prompt_token_ids": [1]}, prompt, "c"]
        message = complaint(lambda prompts=prompts: llm.generate(prompts, use_tqdm=False))
        assert message.startswith("request 2: ")
        assert reason in message
    assert (llm.metrics(), llm._preparer.count) == (before, counter)


def test_prompts_and_parameters_of_another_kind(llm: LLM) -> None:
    for prompts in (5, None, b"abc", [1, 5, 9], ["a", 5], [["a"]], np.arange(40), ("a", None), {5}):
        assert complaint(lambda prompts=prompts: llm.generate(prompts)).startswith("prompts must be text")
    wrong: list[tuple[Any, str]] = [
        ([SamplingParams()], "has 1 entries for 2 prompts"),
        ([], "has 0 entries"),
        ({"max_tokens": 3}, "must be a SamplingParams"),
        ([SamplingParams(), None], "must be a SamplingParams"),
        (5, "must be a SamplingParams"),
    ]
    for params, reason in wrong:
        message = complaint(lambda params=params: llm.generate(["a", "b"], params))
        assert message.startswith("sampling_params ")
        assert reason in message


REFUSED_BY_SMC: list[tuple[dict[str, Any], str]] = [
    ({"temperature": 0}, "Autoregressive()"),
    ({"temperature": 0.009}, "temperature is 0.009 for the draft too, and below 0.01"),
    ({"top_k": 5}, "Autoregressive()"),
    ({"top_p": 0.9}, "Autoregressive()"),
    ({"stop_token_ids": [264]}, "stop_token_ids holds 264; ids of this model are 0 to 263"),
    ({"min_tokens": 47}, "min_tokens is 47 and only 46 tokens fit"),
    ({"min_tokens": 10**12}, "min_tokens is 1000000000000"),
]


def test_what_the_request_or_the_decoder_cannot_honour(llm: LLM) -> None:
    before = llm.metrics()
    for params, reason in REFUSED_BY_SMC:
        both = [SamplingParams(), SamplingParams(**params)]
        message = complaint(lambda both=both: llm.generate(["a", "ab"], both))
        assert message.startswith("request 1: ")
        assert reason in message
    assert llm.metrics() == before


def test_power_and_temperature_beyond_what_float32_weighs(pair: Pair) -> None:
    """`power` is the engine's and temperature the request's, so the request is refused; the bound itself is taken."""
    for power, temperature in ((500.0, 0.5), (1.0, 0.001), (1000.0, 1.0)):
        SMC(2, 2, power=power, draft_temperature=1.0).check(SamplingParams(temperature=temperature))
    with smc_llm(pair, {"power": 500.0}, max_num_seqs=1) as powered:
        before = powered.metrics()
        message = complaint(lambda: powered.generate(["a", "a"], [SamplingParams(), SamplingParams(temperature=0.4)]))
        assert message.startswith("request 1: power / temperature is 1250")
        assert powered.metrics() == before


MESSAGES: list[tuple[Any, str]] = [
    ([], "messages must be a list"),
    ("hi", "messages must be a list"),
    (None, "messages must be a list"),
    ([[]], "request 0: messages is empty"),
    ([[{"role": "user", "content": "a"}], "hi"], "request 1: messages is 'hi'"),
    ([[{"role": "user", "content": "a"}], [5]], "request 1: messages is [5]"),
    ([{"role": "user", "content": "a" * 100}], "request 0: the prompt has"),
]


def test_bad_messages(llm: LLM) -> None:
    for messages, reason in MESSAGES:
        assert complaint(lambda messages=messages: llm.chat(messages)).startswith(reason)


def test_numpy_numbers_are_numbers() -> None:
    params = SamplingParams(max_tokens=np.int64(8), temperature=np.float32(0.5), seed=np.uint32(3))
    assert params == SamplingParams(max_tokens=8, temperature=0.5, seed=3)
    assert SMC(n_particles=np.int32(4)) == SMC(n_particles=4)
    assert type(Rejection(gamma=np.int8(2)).gamma) is int
    with pytest.raises(ValueError, match=r"temperature must be .* got nan"):
        SamplingParams(temperature=np.float64("nan"))


def test_a_platform_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch, pair: Pair) -> None:
    def devices() -> None:
        raise AssertionError

    monkeypatch.setattr("jax.devices", devices)
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    with pytest.raises(RuntimeError, match=r"JAX_PLATFORMS is 'cuda' .* 'uv run --extra cuda13 smcjax …'"):
        smc_llm(pair)
