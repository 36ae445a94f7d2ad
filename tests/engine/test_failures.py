"""NaN ends its own request alone, an interruption leaves the LLM usable, and a closed LLM refuses further use."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest

from smcjax import LLM, SMC, Autoregressive, SamplingParams
from smcjax.engine.run.programs import Programs
from smcjax.model import load_checkpoint, save_checkpoint
from smcjax.model.files import checkpoint
from tests.checkpoints import Pair, write_tokenizer
from tests.engine.conftest import MAX_MODEL_LEN, smc_llm

POISON = 5  # an id whose embedding is NaN
PARAMS = SamplingParams(seed=3, max_tokens=20)


@pytest.fixture(scope="module")
def poisoned(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The target with one embedding NaN. Its own output hardly ever holds that token, but a prompt can."""
    directory = tmp_path_factory.mktemp("poisoned") / "target"
    config, params = load_checkpoint(pair.target, dtype="float32")
    broken = dataclasses.replace(params, embed=params.embed.at[POISON].set(np.nan))
    save_checkpoint(config, broken, directory, dtype="float32")
    write_tokenizer(directory)
    return str(directory)


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights load though they are NaN, for numbers that a healthy model's arithmetic might give."""
    monkeypatch.setattr(checkpoint, "_require_finite", lambda *_: None)


@pytest.mark.parametrize("decoder", ["smc", "autoregressive"])
@pytest.mark.slow
@pytest.mark.usefixtures("unchecked")
def test_nan_ends_its_own_request_alone(poisoned: str, pair: Pair, decoder: str, llm: LLM, plain: LLM) -> None:
    healthy = llm if decoder == "smc" else plain
    decoding = SMC(4, 3, trace=True, control=0) if decoder == "smc" else Autoregressive()
    fields = {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": 4 if decoder == "smc" else 2, "page_size": 4}
    good = {"prompt_token_ids": [70, 71, 72]}
    bad = {"prompt_token_ids": [70, POISON, 72]}
    expected = healthy.generate(good, PARAMS, use_tqdm=False)[0].outputs
    with LLM(poisoned, draft_model=pair.draft, decoding=decoding, **fields) as sick:
        for prompts in ([good, bad, good, bad], [bad, good, good], [good, good, good]):  # the last reuses their pages
            outputs = sick.generate(prompts, PARAMS, use_tqdm=False)
            for prompt, output in zip(prompts, outputs, strict=True):
                assert output.finished
                if prompt is good:
                    assert output.outputs == expected
                    assert output.error is None
                else:
                    assert output.outputs[0].finish_reason == "error"
                    assert output.outputs[0].token_ids == []
                    assert output.error is not None
                    assert "NaN" in output.error
                    assert ("particle" in output.error) == (decoder == "smc")
        assert sick.metrics()["kv_pages_free"] == sick.metrics()["kv_pages_total"]
        with_logprobs = sick.generate(bad, SamplingParams(logprobs=0), use_tqdm=False)[0]
        assert with_logprobs.outputs[0].finish_reason == "error"


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked")
def test_a_stream_that_fails_ends_with_what_it_said(pair: Pair, plain: LLM, tmp_path: Path) -> None:
    """The target gives NaN once it has said a certain token: what was streamed before is the output's, and no more."""
    prompt = {"prompt_token_ids": [70, 71, 72]}
    healthy = plain.generate(prompt, PARAMS, use_tqdm=False)[0].outputs[0].token_ids
    at = next(i for i, token in enumerate(healthy[:-1]) if i >= 2 and token not in [70, 71, 72, *healthy[:i]])
    config, params = load_checkpoint(pair.target, dtype="float32")
    broken = dataclasses.replace(params, embed=params.embed.at[healthy[at]].set(np.nan))
    save_checkpoint(config, broken, tmp_path, dtype="float32")
    write_tokenizer(tmp_path)
    fields = {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": 2, "page_size": 4}
    with LLM(str(tmp_path), decoding=Autoregressive(), **fields) as sick:
        chunks = list(sick.generate_stream(prompt, PARAMS))
    output = chunks[-1].output
    assert output is not None
    assert output.error is not None
    assert output.outputs[0].finish_reason == "error"
    assert output.outputs[0].token_ids == [token for chunk in chunks for token in chunk.token_ids] == healthy[: at + 1]
    assert output.outputs[0].text == "".join(chunk.text for chunk in chunks)
    assert output.metrics.generated_tokens == at + 1


@pytest.mark.parametrize("where", ["join", "prefill", "step", "leave", "observe"])
def test_an_interruption_leaves_the_llm_usable(llm: LLM, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = llm.generate(["ab", "c", "d"], PARAMS, use_tqdm=False)
    before, memory = llm.metrics(), llm.engine.runner.memory
    original = Programs.__getitem__

    def get(self: Programs, key: tuple[object, ...]) -> object:
        if key[-1] != where:
            return original(self, key)

        def interrupted(*arguments: object) -> None:
            original(self, key)(*arguments)  # half-way: the arguments are donated already when it strikes
            raise KeyboardInterrupt

        return interrupted

    with monkeypatch.context() as patch:
        if where == "observe":
            patch.setattr(jax, "device_get", lambda x: (_ for _ in ()).throw(KeyboardInterrupt))
        else:
            patch.setattr(Programs, "__getitem__", get)
        with pytest.raises(KeyboardInterrupt) as caught:
            llm.generate(["ab", "c", "d"], PARAMS, use_tqdm=False)
    # Even while the traceback refers to the old arrays, their memory has been given back.
    kv = (memory.target, memory.draft)
    held = [path for path, leaf in jax.tree_util.tree_leaves_with_path(kv) if not leaf.is_deleted()]
    assert held == [], caught
    assert llm.metrics()["kv_pages_free"] == before["kv_pages_total"]
    assert llm.metrics()["requests"] == before["requests"]
    again = llm.generate(["ab", "c", "d"], PARAMS, use_tqdm=False)
    assert [output.outputs for output in again] == [output.outputs for output in expected]
    assert llm.metrics()["kv_pages_free"] == before["kv_pages_total"]
    assert llm.metrics()["compilations"] == before["compilations"]


HELLO = [{"role": "user", "content": "hello"}]


def test_close_frees_the_device_and_refuses_further_use(pair: Pair) -> None:
    held = {id(array) for array in jax.live_arrays()}
    with smc_llm(pair) as short_lived:
        short_lived.generate("ab", SamplingParams(max_tokens=1), use_tqdm=False)
        assert sum(id(array) not in held for array in jax.live_arrays()) > 10
    assert [array.shape for array in jax.live_arrays() if id(array) not in held and array.nbytes > 64] == []
    for use in (short_lived.metrics, lambda: short_lived.generate("ab"), lambda: short_lived.chat(HELLO)):
        with pytest.raises(ValueError, match=r"closed; make a new one\.$"):
            use()
    short_lived.close()
