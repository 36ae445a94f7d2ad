"""genlm-control's potentials in our engine, and its own sampler on the same model: both have the exact law.

Run by hand, as genlm-control brings PyTorch, several GB: in an environment of the group dev,
`uv pip install genlm-control==0.4.1`, then `pytest -n 0 --all tests/examples/test_genlm_potential.py`.
"""

from __future__ import annotations

import asyncio
import math
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import pre_tokenizers

from smcjax import LLM, SMC, SamplingParams, TextPotential
from smcjax.model import load_checkpoint, save_checkpoint
from smcjax.testing import battery
from tests.checkpoints import EOS, TOKENIZER_SIZE, biased_params, byte_config, write_tokenizer
from tests.smc.reference import language_model

control = pytest.importorskip("genlm.control", reason="needs genlm-control: uv pip install genlm-control==0.4.1")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
EXAMPLE = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "genlm_potential.py"))
text_potential: Callable[..., TextPotential] = EXAMPLE["text_potential"]
PROMPT, REGEX, REQUESTS = "ab", r"(ab|ba|c)(a|bb|b)?", 600
LANGUAGE = [begin + end for begin in ("ab", "ba", "c") for end in ("", "a", "b", "bb")]
LETTERS = {letter: sorted(pre_tokenizers.ByteLevel.alphabet()).index(letter) for letter in "abc"}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that says a, b, c and the end, and hardly anything else."""
    path = tmp_path_factory.mktemp("letters")
    bias = np.full(TOKENIZER_SIZE, -12.0)
    bias[[*LETTERS.values(), EOS]] = 1.0
    config = byte_config(TOKENIZER_SIZE)
    save_checkpoint(config, biased_params(config, 1, bias), path, dtype="float32")
    write_tokenizer(path)
    return str(path)


@pytest.fixture(scope="module")
def law(directory: str) -> dict[str, float]:
    """The model's probability of each text of the language, its end included, by the dense forward."""
    config, params = load_checkpoint(directory, "float32")
    after = language_model(config, params, 16)
    found = {}
    for text in LANGUAGE:
        tokens, total = [LETTERS[letter] for letter in PROMPT], 0.0
        for token in (*(LETTERS[letter] for letter in text), EOS):
            logits = after(tokens).astype(np.float64)
            total += logits[token] - np.log(np.exp(logits).sum())
            tokens.append(token)
        found[text] = math.exp(total)
    return found


@pytest.fixture(scope="module")
def llm(directory: str) -> Iterator[LLM]:
    decoding = SMC(n_particles=8, gamma=1, draft_temperature=1.2)
    with LLM(directory, draft_model=directory, decoding=decoding, max_model_len=32, max_num_seqs=32) as llm:
        yield llm


Sample = tuple[float, dict[str, float]]  # Ẑ, and the shares of texts


def of_ours(llm: LLM, potential: TextPotential) -> list[Sample]:
    params = [SamplingParams(max_tokens=8, seed=seed, potentials=[potential]) for seed in range(REQUESTS)]
    outputs = llm.generate([PROMPT] * REQUESTS, params, use_tqdm=False)
    return [
        (0.0, {}) if output.error else (math.exp(output.smc.log_evidence), {output.outputs[0].text: 1.0})
        for output in outputs
    ]


def of_theirs(directory: str, potential: Any) -> list[Sample]:
    """By genlm-control's example: AWRS and SMC, 60 times."""
    model = control.PromptedLLM.from_name(directory, backend="hf")
    model.set_prompt_from_str(PROMPT)
    sampler = control.AWRS(model, potential.coerce(model, f=b"".join))

    async def run() -> list[Sample]:
        found = []
        for _ in range(60):
            sequences = await sampler.smc(n_particles=10, ess_threshold=0.5, max_tokens=8)
            found.append((math.exp(sequences.log_ml), dict(sequences.decoded_posterior)))
        return found

    return asyncio.run(run())


def z_scores(samples: list[Sample], wanted: dict[str, float]) -> dict[str, float]:
    """How many standard errors the mean of Ẑ, and of Ẑ times the share of each likely text, is off."""
    of_all = {"Ẑ": ([z for z, _ in samples], sum(wanted.values()))}
    likely = {x: mass for x, mass in wanted.items() if mass > 0.1 * of_all["Ẑ"][1]}
    of_all |= {x: ([z * shares.get(x, 0.0) for z, shares in samples], mass) for x, mass in likely.items()}
    assert len(of_all) > 3
    return {
        name: (np.mean(found) - mass) / (np.std(found) / math.sqrt(len(found)) + 1e-9)
        for name, (found, mass) in of_all.items()
    }


def test_its_example_has_the_same_law_in_both(directory: str, llm: LLM, law: dict[str, float]) -> None:
    """Negative control: prefixes in place of whole answers let unfinished texts be answers."""
    fsa = control.BoolFSA.from_regex(REGEX)
    theirs, ours = z_scores(of_theirs(directory, fsa), law), z_scores(of_ours(llm, text_potential(fsa)), law)
    assert max(map(abs, theirs.values())) < 4, theirs
    assert max(map(abs, ours.values())) < 4, ours
    right = text_potential(fsa)
    wrong = z_scores(of_ours(llm, TextPotential(right.score, ask=1)), law)
    assert max(map(abs, wrong.values())) > 8, wrong


def test_weights_of_an_automaton_are_factors(llm: LLM, law: dict[str, float]) -> None:
    """A weighted automaton, to the power 0.5; what its empty prefix is worth cancels."""
    wfsa = control.WFSA.from_regex(REGEX)
    weights = asyncio.run(wfsa.batch_complete([list(text.encode()) for text in LANGUAGE]))
    assert np.std(weights) > 0.1
    wanted = {text: mass * math.exp(0.5 * w) for (text, mass), w in zip(law.items(), weights, strict=True)}
    found = z_scores(of_ours(llm, text_potential(wfsa, exponent=0.5)), wanted)
    assert max(map(abs, found.values())) < 4, found
    assert max(map(abs, z_scores(of_ours(llm, text_potential(wfsa)), wanted).values())) > 8, "negative control"


def test_it_passes_the_battery() -> None:
    texts = [*LANGUAGE, "x", "abx"]
    battery(text_potential(control.BoolFSA.from_regex(REGEX)), texts=texts)
    characters = control.BoolFSA.from_regex(REGEX, to_bytes=False)
    battery(text_potential(characters, symbols=list), texts=texts)


def test_the_example_answers_in_one_calculation(capsys: pytest.CaptureFixture[str]) -> None:
    EXAMPLE["main"]()
    out = capsys.readouterr().out
    assert out.count("=") == 1
    assert "#### 5" in out
    assert "share of about" in out
