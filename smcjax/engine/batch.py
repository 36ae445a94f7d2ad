"""Runs one batch of requests to its end: prefill, first tokens, cycles, answers.

The decoders share one shape (`begin`, `prefill`, `start`, `step`, `conclude`), so this file knows nothing of how a
token is chosen. Programs exist for a few batch sizes; a smaller batch is filled up with absent groups, which never run.
The host only enqueues: it reads the end-mask of a cycle after the next one is under way.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from smcjax.decoding.sequences import Population, Requests
from smcjax.engine.programs import CUBLAS_PRODUCTS, Job, Programs, abstract
from smcjax.model.quantize import QuantizedMatrix
from smcjax.pallas import uses_kernels

PREFILL_CHUNK = 128


@dataclasses.dataclass(frozen=True)
class Batch:
    """G requests as host arrays; `present` marks those that are real."""

    prompts: np.ndarray  # [G, max_model_len] int32
    prompt_length: np.ndarray  # [G] int32
    limit: np.ndarray  # [G] int32
    min_tokens: np.ndarray  # [G] int32
    temperature: np.ndarray  # [G] float32
    top_k: np.ndarray  # [G] int32
    top_p: np.ndarray  # [G] float32
    stops: np.ndarray  # [G, V] bool
    seed: np.ndarray  # [G] uint32
    present: np.ndarray  # [G] bool

    @classmethod
    def empty(cls, size: int, *, max_model_len: int, vocab_size: int) -> Batch:
        """Absent groups with harmless values."""
        return cls(
            prompts=np.zeros((size, max_model_len), np.int32),
            prompt_length=np.ones(size, np.int32),
            limit=np.ones(size, np.int32),
            min_tokens=np.zeros(size, np.int32),
            temperature=np.ones(size, np.float32),
            top_k=np.full(size, vocab_size, np.int32),
            top_p=np.ones(size, np.float32),
            stops=np.zeros((size, vocab_size), bool),
            seed=np.zeros(size, np.uint32),
            present=np.zeros(size, bool),
        )

    @property
    def size(self) -> int:
        """G."""
        return len(self.present)


@dataclasses.dataclass(frozen=True)
class BatchResult:
    """What a batch leaves behind, as host arrays."""

    population: Population
    infos: list[Any]  # the decoder's Info of every cycle
    seconds: np.ndarray  # [G] from the batch's start until the host saw the group's end


class BatchRunner:
    """One decoder's programs and memory. `decoder` is the module that implements it: `smcjax.smc`, …"""

    def __init__(self, decoder: ModuleType, program: Any, params: Any, num_pages: int, programs: Programs) -> None:
        self.decoder = decoder
        self.program = program
        self.params = params
        self.programs = programs
        self.num_pages = num_pages
        # The newest KV and pages: every program donates the last and returns the next. None after a failure.
        self.memory: Any = self._create_memory()
        self._chunk = min(PREFILL_CHUNK, program.max_model_len)
        self._lag = 0 if jax.default_backend() == "cpu" else 1

    def _create_memory(self) -> Any:
        return jax.jit(lambda: self.decoder.Memory.create(self.program, self.params, self.num_pages))()

    def free_pages(self) -> int:
        """Pages that nobody holds."""
        return self.num_pages - 1 if self.memory is None else int(self.memory.pool.num_free)

    def close(self) -> None:
        """Deletes weights and KV from the device, whoever else still refers to them."""
        self._discard_memory()
        _delete(self.params)

    def _discard_memory(self) -> None:
        memory, self.memory = self.memory, None
        _delete(memory)

    def compile(self, batch: Batch, program: Any) -> None:
        """Compiles the five programs of this batch size, unless they are there. Makes the memory if it is missing."""
        if self.memory is None:
            self.memory = self._create_memory()
        if (program, batch.size, "step") in self.programs:
            return
        what = f"for {batch.size} request{'s' if batch.size > 1 else ''} at a time"
        self.programs.compile(what, self.jobs(batch, program))

    def jobs(self, batch: Batch, program: Any) -> dict[tuple[Any, int, str], Job]:
        """The five programs of this batch size, to be compiled: by (program, size, name)."""
        key = (program, batch.size)
        params = abstract(self.params)
        begin, prefill, start, step, conclude = self._functions(program)
        arrays, memory = abstract(dataclasses.asdict(batch)), abstract(self.memory)
        state, hidden = jax.eval_shape(begin, memory, arrays)
        at = jax.ShapeDtypeStruct((), jnp.int32)
        stepped, _ = jax.eval_shape(step, params, state)
        return {
            (*key, "begin"): Job(begin, (0,), (memory, arrays)),
            (*key, "prefill"): Job(prefill, (1, 3), (params, state, at, hidden)),
            (*key, "start"): Job(start, (1,), (params, state, hidden)),
            (*key, "step"): Job(step, (1,), (params, stepped), _step_options(program, params, stepped)),
            (*key, "conclude"): Job(conclude, (1,), (dataclasses.replace(stepped, memory=None), stepped.memory)),
        }

    def _functions(self, program: Any) -> tuple[Callable[..., Any], ...]:
        decoder, chunk = self.decoder, self._chunk

        def begin(memory: Any, batch: dict[str, jax.Array]) -> tuple[Any, jax.Array]:
            named = {field.name: batch[field.name] for field in dataclasses.fields(Requests) if field.name != "key"}
            requests = Requests(**named, key=jax.vmap(jax.random.key)(batch["seed"]))
            state = decoder.begin(program, memory, batch["prompts"], requests, batch["present"])
            hidden = jnp.zeros(
                (batch["prompts"].shape[0], program.target.hidden_size), state.memory.target.keys[0].dtype
            )
            return state, hidden

        def prefill(params: Any, state: Any, at: jax.Array, hidden: jax.Array) -> Any:
            return decoder.prefill(program, params, state, at, chunk, hidden)

        def start(params: Any, state: Any, hidden: jax.Array) -> Any:
            return decoder.start(program, params, state, hidden)

        def step(params: Any, state: Any) -> Any:
            return decoder.step(program, params, state)

        def conclude(state: Any, memory: Any) -> tuple[Population, Any]:
            return decoder.conclude(program, dataclasses.replace(state, memory=memory))

        return begin, prefill, start, step, conclude

    def prefilled(self, batch: Batch, program: Any) -> Any:
        """State of the batch with its first tokens drawn. The batch holds pages until `conclude`."""
        state, hidden = self._call(program, batch, "begin")(self.memory, dataclasses.asdict(batch))
        self.memory = state.memory
        for at in range(0, int(batch.prompt_length[batch.present].max()), self._chunk):
            state, hidden = self._call(program, batch, "prefill")(self.params, state, np.int32(at), hidden)
            self.memory = state.memory
        state = self._call(program, batch, "start")(self.params, state, hidden)
        self.memory = state.memory
        return state

    def conclude(self, batch: Batch, program: Any, state: Any) -> Population:
        """The populations of an ended batch, whose pages are given back."""
        conclude = self._call(program, batch, "conclude")
        population, self.memory = conclude(dataclasses.replace(state, memory=None), state.memory)
        return jax.device_get(population)

    def run(self, batch: Batch, program: Any, on_done: Callable[[int], None]) -> BatchResult:
        """Decodes the batch; `on_done(number)` hears how many groups ended at a cycle."""
        self.compile(batch, program)
        try:
            return self._run(batch, program, on_done)
        except BaseException:
            # Interrupted half-way, its pages will never be given back: the next batch gets new memory. The traceback
            # keeps the old one referenced, so it is deleted, not only dropped.
            self._discard_memory()
            raise

    def _call(self, program: Any, batch: Batch, name: str) -> Callable[..., Any]:
        return self.programs[program, batch.size, name]

    def _run(self, batch: Batch, program: Any, on_done: Callable[[int], None]) -> BatchResult:
        began = time.perf_counter()
        state = self.prefilled(batch, program)
        step = self._call(program, batch, "step")

        seconds = np.zeros(batch.size)
        running = batch.present.copy()
        infos: list[Any] = []
        in_flight: deque[Any] = deque()

        def observe(done: np.ndarray) -> None:
            ended = running & done
            seconds[ended] = time.perf_counter() - began
            running[ended] = False
            if ended.any():
                on_done(int(ended.sum()))

        observe(~np.asarray(state.running))
        while running.any():
            state, info = step(self.params, state)
            self.memory = state.memory
            in_flight.append(info)
            if len(in_flight) > self._lag:
                infos.append(jax.device_get(in_flight.popleft()))
                observe(infos[-1].done)
        # Cycles still in flight began after every group had ended, and so changed nothing.
        return BatchResult(self.conclude(batch, program, state), infos, seconds)


def _step_options(program: Any, params: Any, state: Any) -> dict[str, Any] | None:
    """XLA's options for a decoding step.

    On an H200 cuBLAS streams bf16 weights past a verify's rows faster than XLA's Triton products do, which XLA's own
    timing of single products does not see (docs/performance.md). Int8 weights need Triton to be converted on the way,
    products of a few rows are not faster without, and "xla" is XLA as it is by itself.
    """
    leaves = jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, QuantizedMatrix))
    plain = all(not isinstance(leaf, QuantizedMatrix) and leaf.dtype == jnp.bfloat16 for leaf in leaves)
    few = state.sequences.length.shape[0] < 8  # sequences
    if few or not plain or jax.default_backend() != "gpu" or not uses_kernels(program.implementation):
        return None
    return CUBLAS_PRODUCTS


def _delete(arrays: Any) -> None:
    for leaf in jax.tree.leaves(arrays):
        if not leaf.is_deleted():
            leaf.delete()
