"""How many pages an `LLM` takes, and what does not fit."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import pytest

from smcjax import LLM, SMC, Autoregressive, Rejection, SamplingParams
from smcjax.bench.shapes import SHAPES
from smcjax.engine.load import loading
from smcjax.engine.run import memory, programs
from smcjax.engine.run.memory import buckets, choose_num_pages, device_memory, memory_needed, weight_bytes
from smcjax.engine.run.runner import Runner
from smcjax.engine.schedule.page_budget import Footprint
from tests.checkpoints import Pair
from tests.engine.conftest import llm_arguments, smc_llm

pytestmark = pytest.mark.compiled_at_once

GIB = 1 << 30


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device of 100 GiB."""
    monkeypatch.setattr(memory, "gpu_memory", lambda: 100 * GIB)


def choose(num_pages: int | None = None, **changes: Any) -> int:
    fields: dict[str, Any] = {
        "page_bytes": GIB // 64,
        "largest_request": 100,
        "max_num_seqs": 8,
        "weight_bytes": 20 * GIB,
        "gpu_memory_utilization": 0.8,
    }
    return choose_num_pages(num_pages, **{**fields, **changes})


def test_worst_case_by_hand() -> None:
    # 5 prompt tokens in pages of 4, 10 in all, 3 rows: page 0 stays shared; positions 4 … 9 are 2 pages a row.
    assert Footprint(3, 4, 1).worst_case(5, 10) == 1 + 3 * 2
    assert Footprint(3, 4, 1).worst_case(4, 5) == 1 + 3 * 1
    assert Footprint(3, 4, 1).worst_case(3, 4) == 3
    assert Footprint(1, 1, 1).worst_case(7, 9) == 9
    assert Footprint(8, 16, 1).worst_case(1, 2048) == 8 * 128
    # Eight candidates of four drafts, which agree between cycles: in one each touches two pages of 16 at most.
    assert Footprint.of(Rejection(4, n_candidates=8), 16).worst_case(1000, 2048) == 128 + 8 * 2
    assert Footprint.of(SMC(n_particles=8, gamma=4, control=0), 16).worst_case(1000, 2048) == 62 + 8 * 66


def test_buckets() -> None:
    assert buckets(1) == [1]
    assert buckets(8) == [1, 2, 4, 8]
    assert buckets(6) == [1, 2, 4, 6]


@pytest.mark.usefixtures("gpu")
def test_the_share_of_a_gpu() -> None:
    assert choose() == 1 + 8 * 100  # all of them fit into 60 GiB of 3840 pages
    assert choose(max_num_seqs=64) == 3840  # else the share, the trash page included
    assert choose(max_num_seqs=64, gpu_memory_utilization=0.5) == 1920
    assert choose(max_num_seqs=64, gpu_memory_utilization=1) == 5120
    assert choose(largest_request=3839, max_num_seqs=64) == 3840
    for rows, fewer in ((None, "max_model_len"), ("n_particles", "max_model_len or n_particles")):
        message = rf"may need 3840 KV pages \(60\.00 GiB\) and only 3839 fit .*; lower {fewer}, or set num_pages"
        with pytest.raises(ValueError, match=message):
            choose(largest_request=3840, rows_argument=rows)
    with pytest.raises(ValueError, match="only 0 fit"):
        choose(weight_bytes=90 * GIB)
    assert choose(max_num_seqs=64, workspace_bytes=GIB // 64) == 3839
    assert choose(max_num_seqs=64, scores_bytes=20 * GIB) == 3840, "what is left to scratch is as much"
    assert choose(max_num_seqs=64, scores_bytes=30 * GIB) == 3200
    with pytest.raises(ValueError, match="and only 3838 fit"):
        choose(largest_request=3839, workspace_bytes=GIB // 64)


@pytest.mark.usefixtures("gpu")
def test_pages_that_were_asked_for() -> None:
    assert choose(5120) == 5120
    assert choose(2) == 2  # shorter requests may still fit
    with pytest.raises(ValueError, match=r"^num_pages must be at most 5120 .*, got 5121; lower it\.$"):
        choose(5121)
    with pytest.raises(ValueError, match=r"^num_pages must be at most 5119 .*, got 5120; lower it\.$"):
        choose(5120, workspace_bytes=1)


def test_a_host_lends_a_gibibyte_or_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "gpu_memory", lambda: None)
    monkeypatch.setattr(memory, "device_memory", lambda: 30 * GIB)
    assert choose(largest_request=10) == 64
    assert choose(largest_request=10, max_num_seqs=2) == 21
    assert choose(largest_request=100) == 101
    with pytest.raises(ValueError, match="may need 640 KV pages"):
        choose(largest_request=640)


def test_gpu_memory_is_what_the_device_says(monkeypatch: pytest.MonkeyPatch) -> None:
    class Device:
        def memory_stats(self) -> dict[str, int] | None:
            return {"bytes_limit": 7 * GIB, "bytes_in_use": 5}

    assert memory.gpu_memory() is None or jax.default_backend() == "gpu"
    monkeypatch.setattr(jax, "devices", lambda: [Device()])
    assert memory.gpu_memory() == device_memory() == 7 * GIB


def test_a_containers_limit_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(memory, "gpu_memory", lambda: None)
    for content, expected in (("12345\n", 12345), ("max\n", None), (None, None)):
        path = tmp_path / str(content)
        if content is not None:
            path.write_text(content)
        monkeypatch.setattr(memory, "_CGROUP_LIMIT", path)
        assert device_memory() == expected or (expected is None and device_memory() > 2**28)


def test_an_llm_on_a_gpu_takes_its_share(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    page_bytes = 4 * 2 * 2 * 8 * 4  # tokens, keys and values, layers of both models, head size, f32
    with smc_llm(pair) as full:
        weights = sum(leaf.nbytes for leaf in jax.tree.leaves(full.engine.runner.params))
        assert full.num_pages == 1 + 4 * Footprint(4, 4, 1).worst_case(1, 48)
    monkeypatch.setattr(memory, "gpu_memory", lambda: 2 * (weights + 99 * page_bytes))
    with smc_llm(pair, gpu_memory_utilization=0.5) as half:
        assert half.num_pages == 99
        assert half.metrics()["kv_pages_total"] == 98
    with pytest.raises(ValueError, match=r"max_model_len tokens may need 48 KV pages"):
        smc_llm(pair, gpu_memory_utilization=0.2)


def alone(pair: Pair, **changes: Any) -> LLM:
    """The target alone, one request at a time."""
    return LLM(**llm_arguments(pair, draft_model=None, decoding=Autoregressive(), max_num_seqs=1, **changes))


@pytest.mark.slow
def test_too_few_pages_for_one_request(pair: Pair) -> None:
    with alone(pair, num_pages=3) as small:
        with pytest.raises(ValueError, match=r"^request 1: it may need 3 KV pages and there are 2; raise num_pages"):
            small.generate(["a", "ab"], [SamplingParams(max_tokens=7), SamplingParams(max_tokens=8)], use_tqdm=False)
        outputs = small.generate(["a"] * 3, SamplingParams(max_tokens=7, ignore_eos=True), use_tqdm=False)
        assert [len(output.outputs[0].token_ids) for output in outputs] == [7, 7, 7]
        assert small.metrics()["kv_pages_free"] == 2


@pytest.mark.slow
def test_programs_that_exceed_the_device_are_refused_before_they_run(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sentence names only arguments that the decoder has."""
    with smc_llm(pair) as llm:
        assert llm.engine.runner.programs.sizes == "max_num_seqs, n_particles, gamma or max_model_len"
    said = r"needs .* GiB and the device has .*; lower max_num_seqs or max_model_len, or num_pages "
    with alone(pair) as llm:
        with monkeypatch.context() as patch:
            patch.setattr(programs, "device_memory", lambda: 1000)
            with pytest.raises(ValueError, match=said):
                llm.generate("ab", use_tqdm=False)
        assert llm.metrics()["compilations"] == 0
        assert llm.engine.runner.programs.scratch_bytes == 0
        assert llm.generate("ab", SamplingParams(max_tokens=3), use_tqdm=False)[0].finished
        assert 0 < llm.engine.runner.programs.scratch_bytes < 1 << 28


def test_the_budget_is_logged_before_it_is_taken(
    pair: Pair, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Runner, "__init__", lambda *_: (_ for _ in ()).throw(RuntimeError("taken")))
    with caplog.at_level("INFO", "smcjax"), pytest.raises(RuntimeError, match="taken"):
        smc_llm(pair)
    line = caplog.messages[-1]
    pages = 1 + 4 * Footprint(4, 4, 1).worst_case(1, 48)
    assert line.startswith("Memory, GiB of ")
    assert "weights target 0.00 + draft 0.00, KV 0.00" in line
    assert f"({pages} pages of 4 tokens), left for scratch" in line


def test_a_budget_adds_up() -> None:
    budget = memory.Budget(100 * GIB, {"target": 15 * GIB, "draft": 3 * GIB}, 40 * GIB, 2561, 16)
    assert budget.left == 42 * GIB
    assert str(budget) == (
        "Memory, GiB of 100.00: weights target 15.00 + draft 3.00, KV 40.00 (2561 pages of 16 tokens), "
        "left for scratch 42.00."
    )
    budget = dataclasses.replace(budget, workspace=GIB // 2)
    assert budget.left == 41.5 * GIB
    assert "weights target 15.00 + draft 3.00, workspace 0.50, KV 40.00" in str(budget)
    budget = dataclasses.replace(budget, scores=GIB)
    assert budget.left == 41.5 * GIB
    assert str(budget).endswith("left for scratch 41.50, of which scores of blocks need 1.00.")


def test_weights_that_exceed_the_device_are_refused_before_they_are_read(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "load_checkpoint", None)  # never reached
    monkeypatch.setattr(memory, "device_memory", lambda: 20_000)
    for dtype in ("float32", "bfloat16"):  # both are float32 on a CPU
        with pytest.raises(ValueError, match=r"draft_model 0\.0\) and the device has 0\.0 GB; use smaller models\.$"):
            smc_llm(pair, dtype=dtype)
    monkeypatch.setattr(loading, "on_cpu", lambda: False)
    with pytest.raises(ValueError, match=r"and the device has 0\.0 GB; use dtype='bfloat16', or smaller models\.$"):
        smc_llm(pair, dtype="float32")


def test_weight_bytes_are_those_of_the_arrays(pair: Pair) -> None:
    with smc_llm(pair) as llm:
        for config, params in (
            (llm.models.target, llm.models.target_params),
            (llm.models.draft, llm.models.draft_params),
        ):
            assert config is not None
            assert memory.weight_bytes(config) == sum(leaf.nbytes for leaf in jax.tree.leaves(params))


def test_what_a_decoder_needs_is_known_before_anything_is_loaded() -> None:
    """8B and 1B in bfloat16, N = 8: all weights, and KV of eight rows of 1,024 tokens that share their first page."""
    pair = [dataclasses.replace(SHAPES[name], dtype="bfloat16") for name in ("llama-3.1-8b", "llama-3.2-1b")]
    models: list[tuple[Any, str | None]] = [(config, None) for config in pair]
    few, many = (memory_needed(models, SMC(rows, 8), 1024, 16) for rows in (8, 16))
    assert few.weights == many.weights == sum(map(weight_bytes, pair))
    token = 2 * 2 * (32 * 8 * 128 + 16 * 8 * 64)  # keys and values of bfloat16, of both models
    assert 8 * 1000 * token < few.request < 8 * 1100 * token
    assert few.request < many.request < 2.1 * few.request
    assert few.requests(few.weights * 2, utilization=1.0) == few.weights // few.request
    assert few.requests(few.weights, utilization=1.0) == 0
    alike = memory_needed([models[1], models[1]], SMC(8, 8), 1024, 16)
    assert alike.weights == 2 * weight_bytes(pair[1]), "a pair of one shape is two models"


def test_memory_is_asked_for_what_will_be_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pair of 70B and 1B fits one H200 in eight bits, and is refused in sixteen before a byte is read."""
    monkeypatch.setattr(memory, "on_cpu", lambda: False)
    monkeypatch.setattr(loading, "on_cpu", lambda: False)
    monkeypatch.setattr(memory, "device_memory", lambda: 142_600_000_000)
    monkeypatch.setattr(memory, "gpu_memory", lambda: 142_600_000_000)

    def require_room(quantization: str | None) -> None:
        target = loading._Target(Path(), None, SHAPES["llama-3.1-70b"], "bfloat16", quantization, None)
        target.require_room({"draft_model": (SHAPES["llama-3.2-1b"], quantization)})

    require_room("int8")
    with pytest.raises(
        ValueError, match=r"take 14\d\.\d GB .* has 142\.6 GB; use quantization='int8' or 'float8', or smaller mod"
    ):
        require_room(None)
