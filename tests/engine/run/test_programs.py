"""Programs by key, compiled alone or side by side with others'."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smcjax import LLM, Autoregressive, SamplingParams, smc
from smcjax.bench.shapes import SHAPES
from smcjax.engine.run import programs as module
from smcjax.engine.run.programs import CUBLAS_PRODUCTS, Job, Programs, Wanted, compile_together, step_job
from smcjax.model.decoder import logits
from smcjax.model.params import init_params
from smcjax.model.quantize import quantize_params
from smcjax.quantization import FLOAT8
from tests.checkpoints import Pair
from tests.engine.conftest import llm_arguments
from tests.helpers import Ask, batch
from tests.lazily import lazily

pytestmark = [pytest.mark.all_sizes, pytest.mark.compiled_at_once]

VECTOR = jax.ShapeDtypeStruct((1024,), jnp.float32)


def times(factor: float) -> Job:
    """x · factor, by way of a product that takes some scratch."""
    return Job(lambda x: x[:, None] * x[None, :] @ jnp.ones(1024) * factor, (), (VECTOR,))


def test_each_gets_its_own() -> None:
    one, other = Programs(), Programs()
    one.compile("before", {"a": times(2.0)})
    before = one["a"]
    heard: list[tuple[int, int]] = []
    wanted = [Wanted(one, "one", {"a": times(7.0), "b": times(3.0)}), Wanted(other, "other", {"a": times(5.0)})]
    compile_together(wanted, lambda done, of: heard.append((done, of)))
    assert heard == [(0, 2), (1, 2), (2, 2)]  # "a" of the first was there
    assert one["a"] is before
    assert (len(one), len(other)) == (2, 1)
    x = jnp.arange(1024.0) / 1024
    for program, factor in ((one["a"], 2.0), (one["b"], 3.0), (other["a"], 5.0)):
        np.testing.assert_allclose(program(x), factor * np.asarray(x) * np.asarray(x).sum(), rtol=1e-4)
    assert one.seconds > other.seconds > 0
    compile_together(wanted, lambda *_: pytest.fail("nothing is left"))


@pytest.fixture
def shared() -> Iterator[WeakValueDictionary[Any, Any]]:
    """The store as users have it; other tests keep what nobody has any more."""
    before, module._shared = module._shared, WeakValueDictionary()
    yield module._shared
    module._shared = before


def test_equal_jobs_are_compiled_once(shared: WeakValueDictionary[Any, Any]) -> None:
    traced: list[str] = []

    def job(name: str, identity: str | None, size: int = 3, **changes: Any) -> Job:
        def function(x: jax.Array) -> jax.Array:
            traced.append(name)
            return x + 1

        return Job(function, (), (jax.ShapeDtypeStruct((size,), jnp.float32),), identity=identity)._replace(**changes)

    one, other = Programs(), Programs()
    one.compile("one", {"a": job("first", "x")})
    other.compile(
        "other",
        {
            "alike": job("alike", "x"),
            "longer": job("longer", "x", 4),
            "donates": job("donates", "x", donate=(0,)),
            "other": job("other", "y"),
            "own": job("own", None),
        },
    )
    assert other["alike"] is one["a"]
    assert sorted(traced) == ["donates", "first", "longer", "other", "own"]
    with jax.numpy_rank_promotion("warn"):  # a context's, which the threads that compile do not see
        other.compile("other", {"again": job("again", "x")})
    assert other["again"] is one["a"]
    before = jax.config.jax_default_matmul_precision
    jax.config.update("jax_default_matmul_precision", "highest")
    try:
        other.compile("other", {"precise": job("precise", "x")})
    finally:
        jax.config.update("jax_default_matmul_precision", before)
    assert other["precise"] is not one["a"]
    assert len(shared) == 5
    del one, other
    gc.collect()
    assert not shared  # nobody has them any more


@pytest.mark.slow
def test_a_workspace_counts_beside_what_programs_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "device_memory", lambda: 1 << 20)
    job = Job(lambda x: x + 1, (), (VECTOR,))
    Programs((1 << 20) - (1 << 14)).compile("small", {"a": job})
    with pytest.raises(ValueError, match=r"^a program large needs .*; lower max_num_seqs"):
        Programs(1 << 20).compile("large", {"a": job})


@pytest.mark.slow
def test_a_second_engine_of_the_same_shapes_compiles_nothing(shared: WeakValueDictionary[Any, Any], pair: Pair) -> None:
    params = SamplingParams(max_tokens=6, seed=3)
    few = llm_arguments(pair, draft_model=None, decoding=Autoregressive(), max_num_seqs=1)
    with lazily(), LLM(**few) as one, LLM(**few) as alike, LLM(**{**few, "page_size": 8}) as other:
        answer = one.generate({"prompt_token_ids": [1, 2, 3]}, params)[0]
        made = set(shared)
        again = alike.generate({"prompt_token_ids": [1, 2, 3]}, params)[0]
        assert set(shared) == made
        assert again.outputs[0].token_ids == answer.outputs[0].token_ids
        other.warm_up(use_tqdm=False)
        assert len(shared) > len(made)


def test_one_that_does_not_fit_leaves_all_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = Programs(), Programs()
    large = jax.ShapeDtypeStruct((1 << 22,), jnp.float32)  # 16 MiB, and its result as much
    cosine = Job(jnp.cos, (), (large,))
    monkeypatch.setattr(module, "device_memory", lambda: 24 << 20)
    wanted = [Wanted(one, "for one", {"a": times(2.0)}), Wanted(other, "for another", {"a": cosine})]
    with pytest.raises(ValueError, match=r"^a program for another needs 0\.0 GiB of weights"):
        compile_together(wanted)
    assert (len(one), len(other), one.seconds, other.seconds) == (0, 0, 0.0, 0.0)


def test_an_error_of_one_program_is_raised() -> None:
    programs = Programs()

    def broken(x: jax.Array) -> jax.Array:
        raise TypeError("broken")

    with pytest.raises(TypeError, match="broken"):
        programs.compile("what breaks", {"good": times(1.0), "bad": Job(broken, (), (VECTOR,))})
    assert len(programs) == 0


def test_programs_on_disk_are_those_used_last(tmp_path: Path) -> None:
    """Read or written last, as many as fit; what is no file stays."""
    (tmp_path / "products").mkdir()
    for name, read, written in (("a", 10, 10), ("b", 40, 5), ("c", 20, 20), ("d", 5, 30)):
        (tmp_path / name).write_bytes(bytes(100))
        os.utime(tmp_path / name, (read, written))
    everything = {"a", "b", "c", "d", "products"}
    for limit, gone in ((400, set()), (399, {"a"}), (250, {"a", "c"}), (99, {"a", "b", "c", "d"})):
        module._prune(tmp_path, limit)
        assert {path.name for path in tmp_path.iterdir()} == everything - gone
    module._prune(tmp_path / "nowhere", 0)


def test_a_process_that_has_a_cache_keeps_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = jax.config.jax_compilation_cache_dir
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "smcjax" / "xla").mkdir(parents=True)
    (tmp_path / "smcjax" / "xla" / "old").write_bytes(bytes(100))
    monkeypatch.setattr(module, "CACHE_BYTES", 99)
    try:
        jax.config.update("jax_compilation_cache_dir", str(tmp_path / "mine"))
        module.enable_compilation_cache()
        assert jax.config.jax_compilation_cache_dir == str(tmp_path / "mine")
        assert (tmp_path / "smcjax" / "xla" / "old").exists()
        jax.config.update("jax_compilation_cache_dir", None)
        module.enable_compilation_cache()
        assert jax.config.jax_compilation_cache_dir == str(tmp_path / "smcjax" / "xla")
        assert not (tmp_path / "smcjax" / "xla" / "old").exists()
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


@pytest.mark.slow
def test_a_step_of_several_rows_leaves_products_to_cublas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any program leaves those of float8, none those of int8 weights alone; what kernels multiply does not count."""
    asked: list[Any] = []
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda self, options=None: asked.append(options))
    config = SHAPES["tiny-target"]
    program = smc.Program(smc.SMC(n_particles=8, gamma=2), config, config, max_model_len=32)
    one = init_params(config, jax.random.key(0), jnp.bfloat16)
    kept = quantize_params(one)
    eight = quantize_params(one, FLOAT8)
    plain, whole, half, both = (smc.PairParams(*of) for of in ((one, one), (kept, one), (one, kept), (eight, kept)))
    prompts, requests = batch([Ask((1, 2, 3), 4)], config.vocab_size, 32)
    state = jax.eval_shape(lambda params: smc.init(program, params, prompts, requests), plain)

    def step(params: Any, state: Any) -> Any:
        return smc.step(program, params, state)

    def of_target(params: Any, state: Any) -> Any:
        return logits(config, params.target, prompts)

    def options(function: Any, params: Any, cublas: bool = True) -> Any:
        with monkeypatch.context() as patched:
            patched.setattr(jax, "default_backend", lambda: "gpu")
            patched.setattr(module, "active_implementation", lambda: "mosaic")
            job = step_job(function, program, params, state)
            assert job.cublas
            module._compiled(job._replace(cublas=cublas))
        return asked.pop()

    assert options(step, plain) == CUBLAS_PRODUCTS
    assert options(step, whole) is options(step, half) is None
    assert options(step, both) == options(of_target, half) == CUBLAS_PRODUCTS
    assert options(of_target, plain, cublas=False) is None, "a prompt's program"
    assert options(of_target, both, cublas=False) == CUBLAS_PRODUCTS
    for params in (plain, both):
        job = step_job(step, program, params, state)  # on a CPU
        assert not job.cublas
        module._compiled(job)
        assert asked.pop() is None
