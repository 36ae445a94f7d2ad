"""Tensor parallelism on eight virtual devices: the tokens of one device, and the engine's laws.

Run by `test_parallel.py` in a process of its own, for XLA is told the number of devices when it starts. In f32 the
order in which devices' sums are added up changes logits in the last bits alone, and no draw here is that close.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import smcjax.engine.run.sharded_programs as sharded_programs
import smcjax.matmul
from smcjax import LLM, SMC, Autoregressive, Rejection, SamplingParams, SparseVerification
from smcjax.bench.cycle import Bench, Case, Rates, budget_of
from smcjax.bench.models import Models
from smcjax.decoding.groups import PairParams
from smcjax.engine.load import loading
from smcjax.engine.run.programs import Programs
from smcjax.engine.run.runner import Runner
from smcjax.engine.run.sharded_programs import ShardedPrograms
from smcjax.engine.schedule.scheduler import ChunkLengths
from smcjax.kv import TRASH
from smcjax.model.config import LayerSpec
from smcjax.model.folding import folded_shapes
from smcjax.model.parallel import (
    AXIS,
    Layout,
    bytes_on_one,
    devices_of_host,
    held_by_one,
    layouts,
)
from smcjax.model.params import Folded
from smcjax.pallas import PeerMemory, Workspaces
from smcjax.pallas.collectives.peer_memory import workspace_bytes
from smcjax.sparse.nsa import NSA
from tests.checkpoints import write_model
from tests.engine.test_eagle import TARGET
from tests.model.parallel_laws import SHAPE
from tests.model.test_eagle import HEAD
from tests.pallas import seal
from tests.smc.test_one_program import HOST

TARGET_SHAPE = {**SHAPE, "num_layers": 1, "hidden_size": 16}
PROMPTS = [b"a tale of two", b"a tale of three cities", b"no"]


@pytest.fixture(scope="module", autouse=True)
def _eight_devices() -> None:
    assert jax.device_count() >= 8, "XLA_FLAGS=--xla_force_host_platform_device_count=8"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    """271 ids are no multiple of any number of devices, nor are the 264 that the draft leaves of them of 16."""
    return write_model(tmp_path_factory.mktemp("pair") / "target", 271, 1, **TARGET_SHAPE)


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A target with a layer that its draft can do without."""
    return write_model(tmp_path_factory.mktemp("deep") / "target", 271, 1, **{**TARGET_SHAPE, "num_layers": 2})


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> str:
    fields = {"num_heads": 4, "num_kv_heads": 2, "num_layers": 1}
    return write_model(tmp_path_factory.mktemp("pair") / "draft", 264, 2, hidden_size=12, **fields)


# Decoders.


def answers(target: str, draft: str | None, decoding: Any, size: int, **changes: Any) -> list[Any]:
    """All that requests see of three answers but log-probabilities, which differ in their last bits."""
    fields: dict[str, Any] = {"max_model_len": 48, "max_num_seqs": 1, "page_size": 4, "dtype": "float32"}
    with LLM(target, draft_model=draft, decoding=decoding, tensor_parallel_size=size, **{**fields, **changes}) as llm:
        found = asked(llm)
        if size > 1:
            same_everywhere(llm)
        return found


@functools.cache
def alone(target: str, draft: str | None, decoding: Any, **changes: Any) -> list[Any]:
    """The answers of one device."""
    return answers(target, draft, decoding, 1, **changes)


def asked(llm: LLM, top: int = 256) -> list[Any]:
    llm.engine.runner.chunks = llm.engine._scheduler.chunks = ChunkLengths(16, 16)  # one program fewer
    params = [
        SamplingParams(max_tokens=17, temperature=1.0, seed=seed, ignore_eos=True, logprobs=0)
        for seed in range(len(PROMPTS))
    ]
    prompts = [{"prompt_token_ids": [byte % top for byte in prompt]} for prompt in PROMPTS]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [told(output) for output in outputs]


def told(output: Any) -> Any:
    particles = None if output.smc is None else [particle.token_ids for particle in output.smc.particles]
    return output.outputs[0].token_ids, particles


def copies(leaf: Any, num_pages: int) -> list[Any]:
    """Returns each device's copy, in NumPy, of an array that all of them have; of keys, their numbers.

    The trash page is left out: many rows write there at once, which a GPU does in any order, and none reads it.
    """
    plain = jax.random.key_data(leaf) if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
    pages = slice(TRASH + 1, None) if plain.ndim == 4 and len(plain) == num_pages else ...
    return [np.asarray(shard.data)[pages] for shard in plain.addressable_shards]


def same_everywhere(llm: LLM) -> None:
    """Checks that arrays which all devices have whole are alike, to the last bit, but for the trash page."""
    runner = llm.engine.runner
    whole = [leaf for leaf in jax.tree.leaves((runner.state, runner.cached)) if leaf.is_fully_replicated]
    assert len(whole) > 20
    for leaf in whole:
        first, *others = copies(leaf, runner.num_pages)
        assert len(others) + 1 == llm.models.devices
        for other in others:
            np.testing.assert_array_equal(first, other)


BLOCKS = {"kernel_size": 4, "kernel_stride": 2, "block_size": 8, "num_blocks": 2, "init_blocks": 0, "local_blocks": 1}
KIND = NSA(**BLOCKS, window=4, kv="shared")


def test_tokens_of_a_sparse_target(tmp_path: Path) -> None:
    """Four devices have a key-value head by pairs, whose query heads select together, as have those of the draft."""
    decoding = Rejection(tree=(2,), sparse=SparseVerification("shared", group=2))
    fields = {**TARGET_SHAPE, "layers": (LayerSpec(KIND),)}
    target, draft = (write_model(tmp_path / str(seed), 271, seed, **fields) for seed in (1, 2))
    divided = {"draft_tensor_parallel_size": 4}
    assert answers(target, draft, decoding, 4, **divided) == alone(target, draft, decoding)


def test_an_eagle_head_reads_what_devices_hold_of_its_target() -> None:
    def by(size: int) -> list[Any]:
        fields = {"max_model_len": 48, "max_num_seqs": 1, "page_size": 4, "dtype": "float32"}
        with LLM(TARGET, draft_model=HEAD, decoding=Rejection(gamma=3), tensor_parallel_size=size, **fields) as llm:
            return asked(llm)

    assert by(2) == by(1)


# The engine.


@pytest.fixture(scope="module")
def pressed(target: str, draft: str) -> Iterator[LLM]:
    """Two requests at a time on two devices, in memory for little more than one, prompts read page by page."""
    fields: dict[str, Any] = {"max_model_len": 48, "max_num_seqs": 2, "page_size": 4, "dtype": "float32"}
    with LLM(
        target,
        draft_model=draft,
        decoding=SMC(3, 2, ess_threshold=0.0, control=0),  # rows that are never resampled share few pages
        tensor_parallel_size=2,
        admission="optimistic",
        num_pages=26,
        **fields,
    ) as llm:
        llm.engine.runner.chunks = llm.engine._scheduler.chunks = ChunkLengths(8, 8)
        yield llm


def test_seeds_preemption_and_cached_prefixes(pressed: LLM) -> None:
    """Each alone, then all at once, from cached beginnings and with some that give their pages up: the same tokens."""
    prompts = [[*b"a tale of two", *tail] for tail in (b"", b" cities", b"!", b" cities")]
    params = [SamplingParams(max_tokens=20, temperature=1.0, seed=seed, ignore_eos=True) for seed in range(4)]
    asked = [{"prompt_token_ids": prompt} for prompt in prompts]
    apart = [pressed.generate(one, p, use_tqdm=False)[0] for one, p in zip(asked, params, strict=True)]
    assert [output.metrics.num_cached_tokens for output in apart] == [0, 12, 12, 16]
    pressed.engine._scheduler.free.utilization = 0.0  # of their worst cases that requests are believed to use
    together = pressed.generate(asked, params, use_tqdm=False)
    assert [told(output) for output in together] == [told(output) for output in apart]
    assert sum(output.metrics.preemptions for output in together) > 0
    assert len({tuple(output.outputs[0].token_ids) for output in apart}) == 4
    same_everywhere(pressed)


def test_another_decoder_on_the_same_devices(pressed: LLM, target: str, draft: str) -> None:
    with LLM(share=pressed, decoding=Autoregressive(), max_model_len=48, page_size=4, max_num_seqs=1) as llm:
        shared = asked(llm)
    assert shared == alone(target, draft, Autoregressive())


def collectives(jaxpr: Any) -> dict[str, int]:
    """How often each operation on a mesh axis stands in a program, those within others too."""
    found: dict[str, int] = {}
    for equation in jaxpr.eqns:
        if "axes" in equation.params or "axis_name" in equation.params:
            found[equation.primitive.name] = found.get(equation.primitive.name, 0) + 1
        for inner in jax.tree.leaves(list(equation.params.values())):
            if not hasattr(inner, "eqns"):
                continue
            for name, count in collectives(inner).items():
                found[name] = found.get(name, 0) + count
    return found


def test_a_cycle_sums_once_a_row_parallel_product(pressed: LLM) -> None:
    """And gathers logits once: the draft, the allocator, sampling and resampling say nothing to other devices."""
    runner = pressed.engine.runner
    job = runner.jobs(1, runner.program)[runner.program, 1, "step"]
    counts = collectives(jax.make_jaxpr(job.function)(*job.arguments).jaxpr)
    sums = sum(count for name, count in counts.items() if name.startswith("psum"))
    assert sums == 2 * TARGET_SHAPE["num_layers"] + 1
    assert counts.pop("all_gather") == 1
    assert all(name.startswith(("psum", "axis_index", "reduce_", "arg", "cum", "split")) for name in counts), counts


def test_a_cycle_is_one_program_that_keeps_its_memory(pressed: LLM) -> None:
    pressed.generate([{"prompt_token_ids": [1]}], SamplingParams(max_tokens=2), use_tqdm=False)
    runner = pressed.engine.runner
    program: Any = runner.programs[runner.program, runner.size, "step"]
    sizes = program.memory_analysis()
    kept = sum(leaf.nbytes for leaf in jax.tree.leaves(runner.memory.target)) / 2
    assert sizes.alias_size_in_bytes >= kept > 0, "the state is donated on each device"
    assert "all-reduce" in program.as_text()
    assert not [word for word in HOST if word in program.as_text()], "no host stands between devices"


def lowered_for_cuda() -> Any:
    """A cycle of SMC on two GPUs, which both draft, lowered without one."""
    parallel = devices_of_host(2)
    addresses = jax.ShapeDtypeStruct((2, 6), jnp.int32, sharding=parallel.sharding(Layout(0)))

    def piece(layout: Layout, leaf: Any) -> Any:
        if isinstance(leaf, Folded):
            return leaf
        shape = [n * 2 if axis == layout.axis else n for axis, n in enumerate(leaf.shape)]
        return jax.ShapeDtypeStruct(tuple(shape), leaf.dtype, sharding=parallel.sharding(layout))

    def pieces(config: Any, size: int, vocabulary: bool) -> Any:
        own = folded_shapes(held_by_one(config, size, vocabulary), jnp.bfloat16)
        return jax.tree.map(piece, layouts(config, size, vocabulary), own)

    target, draft = pieces(seal.TARGET, 2, vocabulary=True), pieces(seal.DRAFT, 2, vocabulary=False)
    local = parallel.local(seal.TARGET), parallel.local(seal.DRAFT)
    decoder = loading.make_decoder(seal.PUBLISHED, *local, 1280, implementation="mosaic")
    sharded = ShardedPrograms(parallel, seal.TARGET, seal.DRAFT)
    params = PairParams(target, draft, PeerMemory(addresses, 2))
    job = Runner(decoder, params, seal.PAGES, Programs(), sharded).jobs(1, decoder)[decoder, 1, "step"]
    return jax.jit(job.function, donate_argnums=job.donate).trace(*job.arguments).lower(lowering_platforms=("cuda",))


def test_kernels_of_a_gpu_stand_within_the_program_of_all_devices() -> None:
    """The draft by the persistent step, one that sums; the target by the kernels of its heads.

    Devices speak by kernels alone: 2 sums a layer, that of the embedding's rows, and a gather of logits.
    """
    module = lowered_for_cuda()
    text = module.as_text()
    assert not re.search("all_reduce|all_gather|collective_permute|uses_xla_collective_metadata = true", text)
    assert not [word for word in HOST if word in text], "nor does a host stand between them"
    assert len(re.findall(r"call @_over_peers", text)) == 2 * seal.TARGET.num_layers + 2
    assert len(re.findall(r"call @decode_step", text)) == 8
    found = {hashlib.sha256(text.encode()).hexdigest()[:16] for text in seal.kernels(module.compiler_ir())}
    stored = set(json.loads(seal.STORED.read_text())["smc, 1 request"])
    assert len(found - stored) >= 2, "attention and KV writes of half the heads"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ByXLA(PeerMemory):
    """`PeerMemory` that XLA computes, NaN for a device that was given another's row of addresses."""

    def sums(self, x: jax.Array) -> bool:
        return True

    def gathers(self, x: jax.Array) -> bool:
        return True

    def sum(self, x: jax.Array, add_to: jax.Array | None = None) -> jax.Array:
        return self._checked(jax.lax.psum(x, AXIS) + (0 if add_to is None else add_to))

    def gather(self, x: jax.Array) -> jax.Array:
        return self._checked(jax.lax.all_gather(x, AXIS, axis=x.ndim - 1, tiled=True))

    def _checked(self, x: jax.Array) -> jax.Array:
        assert self.addresses.shape == (1, 2 + 2 * self.size)
        return jnp.where(self.addresses[0, 0] == jax.lax.axis_index(AXIS), x, jnp.nan)


def test_programs_have_peers_in_every_sum_and_gather(
    target: str, draft: str, monkeypatch: pytest.MonkeyPatch, patch_programs: Any, caplog: pytest.LogCaptureFixture
) -> None:
    decoding, size = Autoregressive(), 2
    want = alone(target, draft, decoding)
    given = []

    class Spaces(Workspaces):
        def peer_memory(self) -> PeerMemory:
            given.append(super().peer_memory())
            return ByXLA(given[-1].addresses, given[-1].size)

    launched: list[Any] = []

    def launch(sharded: ShardedPrograms, program: Any, *arguments: Any) -> Any:
        launched.append(program)
        return right(sharded, program, *arguments)

    right = ShardedPrograms.launch
    monkeypatch.setattr(ShardedPrograms, "launch", launch)
    monkeypatch.setattr(ShardedPrograms, "has_peers", lambda sharded, implementation: implementation == "auto")
    monkeypatch.setattr(sharded_programs, "Workspaces", Spaces)
    patch_programs(smcjax.matmul, "_sum_over", lambda axis, x, peer_memory, add_to=None: peer_memory.sum(x, add_to))
    patch_programs(smcjax.matmul, "_gather_over", lambda axis, x, peer_memory: peer_memory.gather(x))
    with caplog.at_level("INFO", "smcjax"):
        assert answers(target, draft, decoding, size) == want
    (budget,) = (line for line in caplog.messages if line.startswith("Memory, "))
    assert "weights target 0.00, workspace 0.02, KV 0.00" in budget
    assert len(set(map(id, launched))) >= 2, "prompts and steps, in each of which devices wait for each other"
    (made,) = given
    assert made.addresses.is_deleted(), "with the weights"
    (idle,) = Workspaces._idle.pop(tuple(jax.devices()[:size]))
    assert not idle.is_deleted(), "kept for the next engine"
    assert {shard.data.nbytes for shard in idle.addressable_shards} == {workspace_bytes(size)}, "as planned"
    assert made.size == size


def test_devices_get_programs_of_several_threads_in_one_order(pressed: LLM) -> None:
    """A program that is launched while another is goes to all devices behind it."""
    sharded, order = pressed.models.sharded, list[str]()
    assert sharded is not None
    other = threading.Thread(target=sharded.launch, args=(order.append, "second"))

    def first(name: str) -> None:
        for device in range(sharded.parallel.size):
            order.append(f"{name} on {device}")
            if device == 0:
                other.start()
                assert sharded_programs._launching.locked()

    sharded.launch(first, "first")
    other.join()
    assert order == [*(f"first on {device}" for device in range(sharded.parallel.size)), "second"]


def test_a_benchmark_says_how_devices_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharded_programs, "supports_peers", lambda size: True)
    monkeypatch.setattr(sharded_programs, "reach_each_other", lambda devices: len(devices) == 2)
    sharded_programs._reach_each_other.cache_clear()
    two = Models("tiny-target", "tiny-draft", tensor_parallel_size=2)
    four = dataclasses.replace(two, tensor_parallel_size=4)
    try:
        assert Models("tiny-target", "tiny-draft").collectives_of("auto") is None
        assert (two.collectives_of("auto"), two.workspace_bytes("auto")) == ("peers", workspace_bytes(2))
        assert (two.collectives_of("xla"), two.workspace_bytes("xla")) == ("xla", 0)
        assert four.collectives_of("auto") == "xla", "four do not reach each other"
        assert four.workspace_bytes("auto") == 0
    finally:
        sharded_programs._reach_each_other.cache_clear()


def test_a_benchmark_counts_what_each_device_holds_and_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """On random weights that are made where they belong. No cycle runs."""
    monkeypatch.setattr(Bench, "time_window", lambda bench: 1.0)
    models = Models("tiny-target", "tiny-draft", tensor_parallel_size=2)
    sizes = {"context": 8, "max_model_len": 48, "page_size": 4, "windows": 1, "cycles_per_window": 2}
    case = Case(SMC(2, 2, control=0), synthetic_kv=True, **sizes)
    bench = Bench(models, case, models.target_params("auto"), models.draft_params("auto"))
    result = bench.measure(Rates(1e10, 1e12))
    held = [bytes_on_one(params) for params in (bench.runner.params.target, bench.runner.params.draft)]
    assert list(budget_of(models, case).weights.values()) == held
    one = Bench(Models("tiny-target", "tiny-draft"), case, models.target_params("auto"), models.draft_params("auto"))
    whole = sum(phase.times * phase.weight_bytes for phase in one._phases())
    drafts = sum(phase.times * phase.weight_bytes for phase in one._phases() if phase.name != "verify")
    assert result.weight_bytes == (whole + drafts) // 2, "each has all of the draft"
    assert result.tensor_parallel_size == 2
    assert (result.collectives, result.held_workspace_bytes) == ("xla", 0), "whatever was asked for: there is no GPU"
    divided = dataclasses.replace(models, draft_divided=True)
    held = [bytes_on_one(params) for params in (divided.target_params("auto"), divided.draft_params("auto"))]
    assert list(budget_of(divided, case).weights.values()) == held


# Refusals.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tensor_parallel_size": 16}, "tensor_parallel_size is 16 and JAX has 8 devices here"),
        (
            {"tensor_parallel_size": 3},
            "tensor_parallel_size is 3 and the target has 8 attention heads, 2 key-value heads and intermediate size "
            "32, .*; use 1, 2, 4 or 8",
        ),
        (
            {"tensor_parallel_size": 8, "draft_tensor_parallel_size": 8},
            "draft_tensor_parallel_size is 8 and the draft has 4 attention heads",
        ),
        (
            {"tensor_parallel_size": 4, "quantization": "int8"},
            "tensor_parallel_size is 4 and the target has .* in int8, .*; use 1 or 2",
        ),
        ({"tensor_parallel_size": 2, "draft_tensor_parallel_size": 3}, "draft_tensor_parallel_size must be 1 or"),
        (
            {"tensor_parallel_size": 2, "draft_tensor_parallel_size": 1, "draft_model": None, "draft_drop_layers": [0]},
            "draft_tensor_parallel_size is 1 and the draft has the weights of the target",
        ),
        (
            {"tensor_parallel_size": 2, "draft_tensor_parallel_size": 2, "model": TARGET, "draft_model": HEAD},
            "draft_tensor_parallel_size is 2 and draft_model is an EAGLE-3 head",
        ),
    ],
)
def test_refusals_before_weights_are_read(
    changes: dict[str, Any], message: str, target: str, deep: str, draft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "load_checkpoint", None)  # never reached
    model = deep if "draft_drop_layers" in changes else target
    with pytest.raises(ValueError, match=message) as raised:
        LLM(**{"model": model, "draft_model": draft, "decoding": SMC(2, 2), **changes})
    assert "\n" not in str(raised.value)
