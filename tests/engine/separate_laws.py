"""A draft on a device of its own, on virtual devices: the tokens of one device, and each device's own part of a cycle.

Run by `test_parallel.py` in a process of its own.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from smcjax import LLM, SMC, SamplingParams
from smcjax.bench.cycle import Bench, Case, Rates
from smcjax.bench.models import Models
from smcjax.decoding import disaggregation
from smcjax.engine.load.fingerprints import fingerprints
from tests.checkpoints import write_model
from tests.engine.parallel_laws import TARGET_SHAPE, asked, collectives, same_everywhere, told
from tests.smc.test_one_program import HOST

FIELDS: dict[str, Any] = {"max_model_len": 48, "max_num_seqs": 2, "page_size": 4, "dtype": "float32"}
FEW_PAGES: dict[str, Any] = {"admission": "optimistic", "num_pages": 34}
DECODING = SMC(4, 3, pipelined=True, ess_threshold=0.9)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    directory = tmp_path_factory.mktemp("pair")
    fields = {"num_heads": 4, "num_kv_heads": 2, "num_layers": 1}
    target = write_model(directory / "target", 271, 1, **TARGET_SHAPE)
    return target, write_model(directory / "draft", 264, 2, hidden_size=12, **fields)


def of(pair: tuple[str, str], **changes: Any) -> LLM:
    return LLM(pair[0], draft_model=pair[1], **{"decoding": DECODING, **FIELDS, **changes})


@pytest.fixture(scope="module")
def two(pair: tuple[str, str]) -> Iterator[LLM]:
    with of(pair, **FEW_PAGES) as llm:
        yield llm


def test_tokens_are_those_of_one_device(pair: tuple[str, str], two: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("smcjax.engine.llm.two_devices", lambda: None)
    with of(pair) as one:
        want, whose = asked(one), fingerprints(one.models)
    assert asked(two) == want
    assert fingerprints(two.models) == whose, "what one device was measured to take, two take as well"
    integers_alike(two)
    assert two.models.devices == 2


def integers_alike(llm: LLM) -> None:
    """Checks that devices have all alike but for models' KV, of which each keeps its own."""
    runner = llm.engine.runner
    state = runner.state
    runner.state = dataclasses.replace(state, memory=dataclasses.replace(state.memory, target=None, draft=None))
    try:
        same_everywhere(llm)
    finally:
        runner.state = state


def test_each_device_computes_its_own_part(two: LLM) -> None:
    """KV of an answer's tokens is on the device that computed it; the other has none of it there."""
    two.engine.reset()
    two.generate([{"prompt_token_ids": [1, 2]}], SamplingParams(max_tokens=30, ignore_eos=True, seed=1), use_tqdm=False)
    memory = two.engine.runner.memory
    for cache, keeper in ((memory.draft, 0), (memory.target, 1)):
        written = [np.asarray(shard.data).any(axis=(2, 3)).sum() for shard in cache.keys[0].addressable_shards]
        assert written[keeper] > 3 * written[1 - keeper] > 0, "prompts are read by both"


def test_a_draft_of_the_targets_layers_shares_them(tmp_path: Path) -> None:
    """On each device, as on one."""
    target = write_model(tmp_path, 264, 1, **{**TARGET_SHAPE, "num_layers": 2})
    fields = {**FIELDS, "draft_drop_layers": (1,)}
    with LLM(target, decoding=DECODING, compile_at_start=False, **fields) as llm:
        kept = [shard.data.unsafe_buffer_pointer() for shard in shards(llm.models.target_params)]
        shared = [shard.data.unsafe_buffer_pointer() for shard in shards(llm.models.draft_params)]
    assert len(shared) > 10
    assert not set(shared) - set(kept)


def shards(params: Any) -> list[Any]:
    return [shard for leaf in jax.tree.leaves(params) for shard in leaf.addressable_shards]


def test_control_devices_must_be_told(pair: tuple[str, str], two: LLM, patch_programs: Any) -> None:
    """Without a word of the results devices would go apart. Programs but a cycle's are those of `two`."""
    want, executables = asked(two), two.engine.runner.programs
    patch_programs(disaggregation, "_sum_over_devices", lambda results, axis: results)
    with of(pair, **FEW_PAGES) as deaf:
        others = {key: executable for key, executable in executables.items() if key[-1] != "step"}
        deaf.engine.runner.programs.update(others)
        assert asked(deaf) != want
        with pytest.raises(AssertionError):
            integers_alike(deaf)


def test_seeds_preemption_and_cached_prefixes(two: LLM) -> None:
    prompts = [[*b"a tale of two", *tail] for tail in (b"", b" cities", b"!", b" cities")]
    params = [SamplingParams(max_tokens=20, temperature=1.0, seed=seed, ignore_eos=True) for seed in range(4)]
    questions = [{"prompt_token_ids": prompt} for prompt in prompts]
    two.engine.reset()
    one_by_one = [two.generate(one, p, use_tqdm=False)[0] for one, p in zip(questions, params, strict=True)]
    assert [output.metrics.num_cached_tokens for output in one_by_one] == [0, 12, 12, 16]
    two.engine._scheduler.free.utilization = 0.0
    together = two.generate(questions, params, use_tqdm=False)
    assert [told(output) for output in together] == [told(output) for output in one_by_one]
    assert sum(output.metrics.preemptions for output in together) > 0
    integers_alike(two)


def test_a_cycle_is_one_program_with_one_word_between_devices(two: LLM) -> None:
    two.generate([{"prompt_token_ids": [1]}], SamplingParams(max_tokens=2), use_tqdm=False)
    runner = two.engine.runner
    job = runner.jobs(1, runner.program)[runner.program, 1, "step"]
    counts = collectives(jax.make_jaxpr(job.function)(*job.arguments).jaxpr)
    assert sum(count for name, count in counts.items() if name.startswith("psum")) == 1
    assert "all_gather" not in counts
    program: Any = runner.programs[runner.program, runner.size, "step"]
    text, sizes = program.as_text(), program.memory_analysis()
    kept = [leaf.nbytes for leaf in jax.tree.leaves((runner.memory.target, runner.memory.draft))]
    assert sizes.alias_size_in_bytes >= sum(kept) > 0, "the state is donated on each device"
    pages = {",".join(map(str, leaf.shape)) for leaf in jax.tree.leaves((runner.memory.target, runner.memory.draft))}
    copied = re.findall(r"= \w+\[([\d,]+)\]\S* copy\(", text)
    assert not pages & set(copied), "no pages are copied into a device's part or out of it"
    assert not [word for word in HOST if word in text]
    assert len(re.findall(r"= \S+ all-reduce\(", text)) == 1


def test_a_benchmark_counts_the_busier_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bench, "time_window", lambda bench: 1.0)
    models = Models("tiny-target", "tiny-draft", separate_draft=True)
    sizes = {"context": 8, "max_model_len": 48, "page_size": 4, "windows": 1, "cycles_per_window": 2}
    bench = Bench(
        models,
        Case(SMC(2, 2, pipelined=True), synthetic_kv=True, **sizes),
        models.target_params("auto"),
        models.draft_params("auto"),
    )
    result = bench.measure(Rates(1e10, 1e12))
    by_part: dict[bool, int] = {}
    for phase in bench._phases():
        scores = phase.name == "verify"
        by_part[scores] = by_part.get(scores, 0) + phase.times * phase.weight_bytes
    assert result.weight_bytes == max(by_part.values())
    assert result.separate_draft
    assert result.tokens_per_second == pytest.approx(2 / result.ms * 1e3)
