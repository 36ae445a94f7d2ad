"""Models that value texts: numbers against a float64 decoder, whatever is asked beside or before, and the law."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import string
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest

from smcjax import LLM, Autoregressive, CheckpointError, Judge, SamplingParams, TextPotential, smc
from smcjax.engine import judge as judging
from smcjax.testing import battery
from tests.checkpoints import EOS, Pair, write_tokenizer
from tests.engine.conftest import smc_llm
from tests.model.files.test_classifier import make_classifier, oracle_scores
from tests.model.hf_oracle import make_config, oracle_logits, random_weights, write_directory

TEXTS = ["", "a", "one two three", "17 + 4 = 21\n" * 5, "17 + 4 = 21\n" * 5 + "Yes.", "x" * 70]
SIZE = 272


def write_judge(directory: Path, config: dict[str, Any], weights: dict[str, np.ndarray]) -> str:
    write_directory(directory, config, weights)
    write_tokenizer(directory)
    return str(directory)


Made = tuple[str, dict[str, Any], dict[str, np.ndarray]]


@pytest.fixture(scope="module")
def reward(tmp_path_factory: pytest.TempPathFactory) -> Made:
    config, weights = make_classifier("llama", 1, vocab_size=SIZE)
    return write_judge(tmp_path_factory.mktemp("reward"), config, weights), config, weights


@pytest.fixture(scope="module")
def language(tmp_path_factory: pytest.TempPathFactory) -> Made:
    config = make_config("qwen3", vocab_size=SIZE)
    weights = random_weights(config)
    return write_judge(tmp_path_factory.mktemp("language"), config, weights), config, weights


@pytest.fixture
def float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Judges keep float32, on a GPU too, where they would round an oracle's weights to bfloat16."""
    for name in ("load_classifier", "load_checkpoint"):
        monkeypatch.setattr(judging, name, functools.partial(getattr(judging, name), dtype="float32"))


def log_softmax(logits: np.ndarray) -> np.ndarray:
    return (
        logits
        - np.log(np.exp(logits - logits.max(axis=-1, keepdims=True)).sum(axis=-1, keepdims=True))
        - (logits.max(axis=-1, keepdims=True))
    )


def log_probability(made: Made, judge: Judge, text: str, ending: str) -> float:
    """Sums log-probabilities of the ending's tokens behind the text's, in float64."""
    _, config, weights = made
    begin, whole = judge._tokenizer.encode(text), judge._tokenizer.encode(text + ending)
    assert whole[: len(begin)] == begin
    logs = log_softmax(oracle_logits(config, weights, whole))
    return float(sum(logs[at - 1, whole[at]] for at in range(len(begin), len(whole))))


@pytest.mark.usefixtures("float32")
def test_rewards_are_the_scores(reward: Made) -> None:
    directory, config, weights = reward
    judge = Judge(directory, "Q: {prompt}\nA: {text}")
    wanted = [oracle_scores(config, weights, judge._tokenizer.encode(f"Q: say\nA: {text}")) for text in TEXTS]
    np.testing.assert_allclose(judge("say", TEXTS), np.concatenate(wanted), rtol=1e-4, atol=1e-4)
    assert max(map(abs, judge("say", TEXTS))) > 1


@pytest.mark.usefixtures("float32")
def test_a_label_is_its_log_probability(tmp_path: Path) -> None:
    config, weights = make_classifier("qwen2", 3, vocab_size=SIZE)
    directory = write_judge(tmp_path, config, weights)
    judges = [Judge(directory, "{text}!", label=label) for label in range(3)]
    found = np.array([judge("", TEXTS) for judge in judges])
    scores = np.array([oracle_scores(config, weights, judges[0]._tokenizer.encode(text + "!")) for text in TEXTS])
    np.testing.assert_allclose(found.T, log_softmax(scores), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(np.exp(found).sum(axis=0), 1, atol=1e-5)


@pytest.mark.usefixtures("float32")
@pytest.mark.parametrize("verdicts", [("y", "n"), ("yes", "no"), ("same", "samba"), ("a", "ab"), ("a" * 20, "b")])
def test_verdicts_are_ratios_of_probabilities(language: Made, verdicts: tuple[str, str]) -> None:
    """Verdicts have one token or many, one length or two, and may cross a page's end."""
    judge = Judge(language[0], "{prompt}: {text} Good? ", verdicts=verdicts)
    texts = [*TEXTS, *("z" * count for count in range(30, 66, 5))]
    wanted = [
        log_probability(language, judge, f"say: {text} Good? ", verdicts[0])
        - log_probability(language, judge, f"say: {text} Good? ", verdicts[1])
        for text in texts
    ]
    np.testing.assert_allclose(judge("say", texts), wanted, rtol=1e-4, atol=2e-4)
    assert np.std(wanted) > 0.1


def test_a_value_is_the_texts_own(language: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the last bit: alone or among others, from the cache or anew, with room for few pages, from many threads."""
    fresh = {text: Judge(language[0], verdicts=("y", "n"))("ask", [text])[0] for text in TEXTS}
    judge = Judge(language[0], verdicts=("y", "n"))
    many = [*TEXTS, *(f"{number} and on" * 9 for number in range(12)), *TEXTS]
    assert judge("ask", many)[: len(TEXTS)] == list(fresh.values())
    assert len(judge._index) > 4
    assert judge("ask", TEXTS[::-1]) == list(fresh.values())[::-1]
    monkeypatch.setattr(judging, "_KEPT", 5)
    narrow = Judge(language[0], verdicts=("y", "n"))
    for _ in range(2):
        assert narrow("ask", many)[: len(TEXTS)] == list(fresh.values())
        assert len(narrow._index) <= 5
    monkeypatch.undo()
    found: dict[str, float] = {}
    threads = [threading.Thread(target=lambda t=text: found.update({t: judge("ask", [t])[0]})) for text in TEXTS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == fresh


def test_what_texts_share_is_computed_once(language: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    judge, pages = Judge(language[0], verdicts=("y", "n")), []
    step = Judge._step

    def counted(self: Judge, batch: Any, *rest: Any) -> Any:
        pages.append(len(batch))
        return step(self, batch, *rest)

    monkeypatch.setattr(Judge, "_step", counted)
    prompt = "p" * (4 * judging._PAGE)
    judge(prompt, [f"{number}" for number in range(6)])
    assert sum(pages) == 4 + 6
    judge(prompt, ["another"])
    assert sum(pages) == 4 + 6 + 1
    judge("q" + prompt, ["another"])
    assert sum(pages) == 2 * (4 + 1) + 6, "negative control: another beginning"


def test_a_failed_call_leaves_nothing_behind(language: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    judge = Judge(language[0], verdicts=("y", "n"))
    wanted = judge("ask" * 30, TEXTS)
    page = judging._page

    def fails(*arguments: Any) -> Any:
        page(*arguments)
        raise RuntimeError("no memory")

    monkeypatch.setattr(judging, "_page", fails)
    with pytest.raises(RuntimeError):
        judge("ask" * 31, TEXTS)
    monkeypatch.undo()
    assert judge("ask" * 30, TEXTS) == wanted


def test_the_battery_passes_it(language: Made, reward: Made) -> None:
    battery(TextPotential(Judge(language[0], verdicts=("y", "n")), ask=1), prompt="ask")
    battery(TextPotential(Judge(reward[0]), exponent=0.5), prompt="ask")


def test_jax_settings_change_nothing(language: Made) -> None:
    judge = Judge(language[0], verdicts=("y", "n"))
    wanted = judge("ask", TEXTS)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"), jax.transfer_guard("disallow"):
        assert Judge(language[0], verdicts=("y", "n"))("ask", TEXTS) == wanted


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("language", {}, "verdicts is None and label None, and "),
    ("language", {"verdicts": ("y", "n"), "label": 1}, "is a language model; give verdicts="),
    ("language", {"verdicts": ("y",)}, "verdicts must be two different texts"),
    ("language", {"verdicts": ("y", "y")}, "verdicts must be two different texts"),
    ("language", {"template": "{prompt}", "verdicts": ("y", "n")}, "template must have {text}"),
    ("language", {"template": "{text} {other}", "verdicts": ("y", "n")}, "template must have {text}"),
    ("language", {"template": "{text", "verdicts": ("y", "n")}, "template must have {text}"),
    ("language", {"template": "{text!r}", "verdicts": ("y", "n")}, "template must have {text}"),
    ("language", {"template": 3, "verdicts": ("y", "n")}, "template must have {text}"),
    ("reward", {"verdicts": ("y", "n")}, "is a classifier, which has labels; leave it out"),
    ("reward", {"label": 0}, "has one label, whose score is the value; leave it out"),
]


def test_what_does_not_go_together_is_refused(language: Made, reward: Made) -> None:
    for kind, fields, words in REFUSED:
        with pytest.raises(ValueError, match=re.escape(words) + r".*\.$"):
            Judge({"language": language, "reward": reward}[kind][0], **fields)


def test_labels_and_directories_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    config, weights = make_classifier("qwen2", 3, vocab_size=SIZE)
    directory = write_judge(tmp_path / "three", config, weights)
    for label in (None, 3, -1, True):
        with pytest.raises(ValueError, match=f"label must be a whole number from 0 to 2, got {label}"):
            Judge(directory, label=label)
    (tmp_path / "three" / "tokenizer.json").unlink()
    (tmp_path / "three" / "tokenizer_config.json").unlink()
    with pytest.raises(CheckpointError, match="has no tokenizer, by which a judge reads texts"):
        Judge(directory, label=1)
    config, weights = make_classifier("qwen2", 1, vocab_size=96)
    with pytest.raises(CheckpointError, match="a tokenizer of 258 token ids and a model of 96"):
        Judge(write_judge(tmp_path / "small", config, weights))


@pytest.fixture(scope="module")
def steered(pair: Pair) -> Iterator[LLM]:
    with smc_llm(pair, dtype="float32") as llm:
        yield llm


@pytest.mark.usefixtures("float32")
@pytest.mark.slow
def test_a_judge_steers_a_request(steered: LLM, reward: Made) -> None:
    """Its evidence and weights are those of a function with the oracle's numbers, seed by seed; another's are not."""
    directory, config, weights = reward
    judge = Judge(directory)

    def oracle(prompt: str, texts: list[str]) -> list[float]:
        return [float(oracle_scores(config, weights, judge._tokenizer.encode(prompt + text))[0]) for text in texts]

    def weight(score: Any) -> tuple[list[int], float]:
        potential = TextPotential(score, ask=3, exponent=0.2)
        params = SamplingParams(seed=3, max_tokens=12, potentials=[potential])
        (output,) = steered.generate("ab", params, use_tqdm=False)
        assert output.error is None
        assert output.smc is not None
        return list(output.outputs[0].token_ids), output.smc.log_evidence

    tokens, evidence = weight(judge)
    same, of_oracle = weight(oracle)
    assert tokens == same
    assert math.isclose(evidence, of_oracle, abs_tol=1e-3)
    assert abs(weight(lambda prompt, texts: [-value for value in oracle(prompt, texts)])[1] - evidence) > 0.05


@pytest.mark.usefixtures("float32")
@pytest.mark.slow
def test_an_llms_target_judges_by_its_own_arrays(steered: LLM, pair: Pair) -> None:
    """As a judge with weights of its own, also of a request that it steers itself; the draft as judge does not."""
    apart, own = Judge(pair.target, verdicts=("y", "n")), Judge(steered, verdicts=("y", "n"))
    held = jax.tree.leaves(steered.models.target_params)
    assert all(mine is its for mine, its in zip(jax.tree.leaves(own._params), held, strict=True))
    with LLM(pair.target, decoding=Autoregressive(), max_model_len=48, max_num_seqs=2, dtype="float32") as plain:
        assert Judge(plain, verdicts=("y", "n"))("ask", TEXTS) == apart("ask", TEXTS), "to the last bit"
    np.testing.assert_allclose(own("ask", TEXTS), apart("ask", TEXTS), atol=1e-5)  # beside a draft padding is cut

    def evidence(judge: Judge) -> float:
        params = SamplingParams(seed=3, max_tokens=12, potentials=[TextPotential(judge, ask=3, exponent=0.2)])
        output = steered.generate("ab", params, use_tqdm=False)[0]
        assert output.error is None
        assert output.smc is not None
        return output.smc.log_evidence

    assert math.isclose(evidence(own), evidence(apart), abs_tol=1e-5)
    assert abs(evidence(Judge(pair.draft, verdicts=("y", "n"))) - evidence(apart)) > 1e-3, "negative control"


def test_llms_that_cannot_judge_are_refused(steered: LLM, pair: Pair) -> None:
    with pytest.raises(ValueError, match=r"LLM\(.* is a language model; give verdicts=.*\.$"):
        Judge(steered)
    with (
        mock.patch.object(type(steered.models), "devices", 2),
        pytest.raises(ValueError, match=r"on 2 devices, and a judge runs on one; give its path\.$"),
    ):
        Judge(steered, verdicts=("y", "n"))
    with LLM(share=steered, decoding=Autoregressive(), max_model_len=48) as other:
        judge = Judge(other, verdicts=("y", "n"))
        assert judge("ask", TEXTS) == Judge(steered, verdicts=("y", "n"))("ask", TEXTS)
    with pytest.raises(ValueError, match="its LLM is closed and the weights are gone; keep it open while it judges"):
        judge("ask", TEXTS)
    with pytest.raises(ValueError, match=r"model must be an LLM that is not closed, got LLM\(.*\.$"):
        Judge(other, verdicts=("y", "n"))


@pytest.mark.slow
def test_what_is_too_long_ends_its_request(steered: LLM, tmp_path: Path) -> None:
    config, weights = make_classifier("llama", 1, vocab_size=SIZE, max_position_embeddings=40)
    judge = Judge(write_judge(tmp_path, config, weights), "x" * 40 + "{text}")
    output = steered.generate(
        "ab", SamplingParams(max_tokens=6, seed=1, potentials=[TextPotential(judge)]), use_tqdm=False
    )[0]
    assert output.error is not None
    assert re.match(r"the potential Judge failed: its text has \d+ tokens and .* reads 1 to 40; shorten", output.error)


@pytest.mark.usefixtures("float32")
@pytest.mark.slow
def test_a_head_on_the_targets_own_states_is_the_judge(pair: Pair, tmp_path: Path) -> None:
    """Where a classifier's decoder is the target: its judge's value of all of a particle's answer but its newest token.

    An answer that ends by its end token is so valued whole, one that ends by its limit without its last token.
    """
    config, weights = make_classifier("gemma3_text", 3, vocab_size=SIZE)
    judge = Judge(write_judge(tmp_path / "classifier", config, weights), label=1)
    model = {**config, "architectures": make_config("gemma3_text")["architectures"], "eos_token_id": EOS}
    weights.pop("score.weight")
    letters = [*judge._tokenizer.encode(string.ascii_lowercase), EOS]  # nothing else is likely
    weights["lm_head.weight"] = np.zeros((SIZE, 32), np.float32)
    weights["lm_head.weight"][letters] = 3 * np.random.default_rng(0).normal(size=(len(letters), 32))
    target = write_judge(tmp_path / "target", model, weights)
    head = smc.ValueHead.load(judge.model, label=1, exponent=0.5)
    rolled = dataclasses.replace(head, params=head.params._replace(weight=np.roll(head.params.weight, 1, axis=1)))
    with smc_llm(Pair(target, pair.draft), {"n_particles": 16, "ess_threshold": 0.0}, dtype="float32") as llm:
        fields = {"max_tokens": 6, "seed": 3}
        asked = [SamplingParams(**fields, potentials=potentials) for potentials in ([], [head], [rolled])]
        found = [output.smc.particles for output in llm.generate(["say "] * 3, asked, use_tqdm=False)]
    assert {particle.finish_reason for particle in found[0]} == {"stop", "length"}
    texts = [one.text if one.finish_reason == "stop" else one.text[:-1] for one in found[0]]
    wanted = 0.5 * np.array(judge("say ", texts))
    for particles, is_right in ((found[1], True), (found[2], False)):
        assert [one.token_ids for one in particles] == [one.token_ids for one in found[0]]
        gained = np.array([one.log_weight - was.log_weight for one, was in zip(particles, found[0], strict=True)])
        assert (np.abs(gained - wanted).max() < 1e-3) == is_right, "negative control: other columns"
    assert np.ptp(wanted) > 1
