"""One batch of requests from prompts to pages given back, program by program: what the benchmarks time.

The programs are those of the engine (`smcjax.engine.runner`), on all groups at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from smcjax.decoding.sequences import Population
from smcjax.engine.batch import Batch
from smcjax.engine.programs import Job, Programs, abstract, step_job
from smcjax.engine.runner import PREFILL_CHUNK, requests_of


class BatchRunner:
    """One decoder's programs and memory. `decoder` is the module that implements it: `smcjax.smc`, …"""

    def __init__(self, decoder: ModuleType, program: Any, params: Any, num_pages: int, programs: Programs) -> None:
        self.decoder = decoder
        self.program = program
        self.params = params
        self.programs = programs
        self.num_pages = num_pages
        self._empty_memory = jax.jit(lambda: decoder.Memory.create(program, params, num_pages))
        # The newest KV and pages: every program donates the last and returns the next.
        self.memory: Any = self._create_memory()
        self._chunk = min(PREFILL_CHUNK, program.max_model_len)

    def _create_memory(self) -> Any:
        return self._empty_memory()

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
            (*key, "step"): step_job(step, program, self.params, stepped),
            (*key, "conclude"): Job(conclude, (1,), (dataclasses.replace(stepped, memory=None), stepped.memory)),
        }

    def _functions(self, program: Any) -> tuple[Callable[..., Any], ...]:
        decoder, chunk = self.decoder, self._chunk

        def begin(memory: Any, batch: dict[str, jax.Array]) -> tuple[Any, jax.Array]:
            state = decoder.begin(program, memory, batch["prompts"], requests_of(batch), batch["present"])
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

    def _call(self, program: Any, batch: Batch, name: str) -> Callable[..., Any]:
        return self.programs[program, batch.size, name]
