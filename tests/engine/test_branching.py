"""SMC with branching through the engine: replayed, in any mix, preempted, streamed, scored; what a trace says of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from smcjax import LLM, SMC, SamplingParams
from tests.checkpoints import Pair
from tests.engine.conftest import smc_llm
from tests.engine.test_control import COUNT, MAX_MODEL_LEN, PAGES, ROWS, Run, params, run
from tests.engine.test_engine import fingerprint, prompt


@pytest.fixture(scope="module")
def branched(pair: Pair) -> Iterator[LLM]:
    """Pages for two requests at a time; no batch of one is ever compiled."""
    fields = {"num_pages": 1 + 2 * PAGES, "max_num_seqs": 2, "max_model_len": MAX_MODEL_LEN}
    with smc_llm(pair, {"n_particles": ROWS, "branching": 2.0}, admission="optimistic", **fields) as llm:
        yield llm


@pytest.fixture(scope="module")
def answers(branched: LLM) -> Run:
    done = run(branched, list(range(COUNT)))
    for output, tokens, text in done.values():
        assert (output.outputs[0].token_ids, output.outputs[0].text) == (tokens, text), "streamed is whole"
    return done


def test_the_history_is_the_populations(answers: Run) -> None:
    """Rows are copies first and then go on; replayed they are the particles, and their mean weights log Ẑ."""
    siblings = 0
    for output, *_ in answers.values():
        trace = output.smc.trace
        assert trace.branched
        assert trace.resampled.all()
        rows: list[list[int]] = []
        for block, ancestors, lengths in zip(trace.tokens, trace.ancestors, trace.lengths, strict=True):
            if not rows:  # first tokens are no cycle's
                first = [particle.token_ids[:1] for particle in output.smc.particles]
                rows = _first_rows(first, trace.ancestors)
            rows = [rows[a] + own for a, own in zip(ancestors, block, strict=True)]
            assert [len(row) for row in rows] == lengths.tolist()
            siblings += any(np.ptp(lengths[ancestors == a]) > 0 for a in set(ancestors.tolist()))
        assert rows == [particle.token_ids for particle in output.smc.particles]
        assert (output.smc.log_weights == 0).all()
        assert output.smc.log_evidence == pytest.approx(trace.log_evidences[-1], abs=1e-4)
        assert output.smc.log_evidence != 0
        assert output.smc.control == 0
    assert siblings > 3


def _first_rows(first: list[list[int]], ancestors: np.ndarray) -> list[list[int]]:
    """The first tokens of rows from which some particle descends; of the others nothing is known, nor asked."""
    origin = np.arange(len(first))
    for one in ancestors[::-1]:
        origin = one[origin]
    rows: list[list[int]] = [[-1] for _ in first]
    for particle, row in enumerate(origin):
        rows[row] = first[particle]
    return rows


def test_cycles_replayed_as_they_come_are_the_population(branched: LLM) -> None:
    """By what docs/usage.md says of them; with copies made after tokens, as elsewhere, they are not."""
    chunks = list(branched.generate_stream(prompt(1), SamplingParams(seed=1, ignore_eos=True, trace=True)))
    output = chunks[-1].output
    assert output is not None
    assert output.smc is not None
    first, *others = (chunk.cycle for chunk in chunks if chunk.cycle is not None)
    assert not first.branched
    rows = tokens_late = [list(block) for block in first.blocks]
    for cycle in others:
        assert cycle.branched
        late = [row + block for row, block in zip(tokens_late, cycle.blocks, strict=True)]
        tokens_late = [late[ancestor] for ancestor in cycle.ancestors]
        rows = [rows[ancestor] + block for ancestor, block in zip(cycle.ancestors, cycle.blocks, strict=True)]
    particles = [particle.token_ids for particle in output.smc.particles]
    assert rows == particles
    assert tokens_late != particles


def test_few_pages_and_another_order_change_nothing(branched: LLM, answers: Run) -> None:
    """Two at a time in the pages of one: some are preempted, all have their tokens, and streams hold."""
    done = run(branched, list(range(COUNT))[::-1], PAGES)
    for number, (answer, *_) in answers.items():
        output, tokens, text = done[number]
        assert fingerprint(output) == fingerprint(answer)
        assert output.smc.log_evidence == answer.smc.log_evidence
        assert (output.outputs[0].token_ids, output.outputs[0].text) == (tokens, text)
    assert sum(output.metrics.preemptions for output, *_ in done.values()) > 0


def test_tokens_have_their_own_scores(branched: LLM, answers: Run) -> None:
    """Log-probabilities by way of reports are those that rows keep, streamed or whole; and each is of its token."""
    asked = SamplingParams(seed=7, temperature=0.7, ignore_eos=True, logprobs=20)
    chunks = list(branched.generate_stream(prompt(1), asked))
    output = chunks[-1].output
    assert output is not None
    assert fingerprint(output) == fingerprint(answers[1][0])
    answer = output.outputs[0]
    streamed = [value for chunk in chunks for value in chunk.logprobs or []]
    np.testing.assert_allclose(streamed, answer.logprobs, atol=1e-5)
    found = 0
    for token, own, top in zip(answer.token_ids, answer.logprobs, answer.top_logprobs, strict=True):
        by_token = {one.token_id: one.logprob for one in top}
        if token in by_token:
            assert by_token[token] == pytest.approx(own, abs=1e-5)
            found += 1
    assert found > len(answer.token_ids) / 2


def test_a_stop_string_is_seen_in_the_copies_own_text(branched: LLM, answers: Run) -> None:
    """An answer ends before the first one, and who has not said it goes on."""
    text = answers[2][0].outputs[0].text
    stop = text[len(text) // 2]
    asked = SamplingParams(seed=8, temperature=0.8, ignore_eos=True, stop=[stop])
    (output,) = branched.generate(prompt(2), asked, use_tqdm=False)
    assert output.outputs[0].finish_reason == "stop"
    assert stop not in output.outputs[0].text
    assert output.metrics.cycles <= answers[2][0].metrics.cycles


@pytest.mark.parametrize(
    "options",
    [{"control": 0.1}, {"watchdog": 0.5}, {"early_end": True}, {"select": "best"}],
    ids=lambda options: next(iter(options)),
)
def test_what_branching_takes_the_place_of(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"^branching is 2 and {next(iter(options))} .* leave one of them out"):
        SMC(branching=2.0, **options)


def test_who_brings_a_control(branched: LLM) -> None:
    with pytest.raises(ValueError, match=r"^request 0: control is 0\.5 and decoding branches"):
        branched.generate("ab", params(0, 0.5))
