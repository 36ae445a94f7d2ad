"""The programs of a batch: what each computes, as functions of arrays alone, and as jobs to compile.

`smcjax.engine.run.runner` says what they are for, and calls them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from smcjax.decoders import Decoding
from smcjax.decoding.adjustments import Adjustments
from smcjax.decoding.constraints import PlacedAutomata, with_automata, without_automata
from smcjax.decoding.decoder import Decoder
from smcjax.decoding.groups import PairParams
from smcjax.decoding.scores import Scores, first_scores
from smcjax.decoding.sequences import Population, Requests
from smcjax.engine.requests.batch import Batch
from smcjax.engine.requests.sampling_params import MAX_BIASED_TOKENS
from smcjax.engine.run.constraints import make_tables
from smcjax.engine.run.programs import Job, abstract, step_job
from smcjax.engine.run.sharded_programs import ShardedPrograms
from smcjax.engine.run.slots import put, take
from smcjax.engine.schedule.scheduler import ChunkLengths
from smcjax.kv import TRASH, drop, keep
from smcjax.noise import key_of
from smcjax.smc.steering import TextValues, steered


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PrefillReport:
    """The report of a chunk of prefill about its P slots; stale where no prompt ended in it."""

    tokens: Int[Array, "P N"]  # the first token of each row
    done: Bool[Array, " P"]  # ended by it
    scores: Scores | None = None  # [P, N], of the first tokens
    prompt: Scores | None = None  # [P, chunk], of the prompts' tokens behind the chunk's


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BatchInputs:
    """Programs of requests with features take these arrays of G slots beside the state."""

    automata: PlacedAutomata | None = None  # where a program knows of forms
    potentials: Bool[Array, "G P"] | None = None  # which of the program's `requested_potentials` each request has
    values: TextValues | None = None  # of a cycle, where a program knows of text potentials

    def into(self, state: Any) -> Any:
        """The state as the program reads it."""
        requests = dataclasses.replace(state.requests, potentials=self.potentials)
        return with_automata(dataclasses.replace(state, requests=requests), self.automata)

    @staticmethod
    def out_of(state: Any) -> Any:
        """The state as it is kept between programs."""
        requests = dataclasses.replace(state.requests, potentials=None)
        return without_automata(dataclasses.replace(state, requests=requests))

    def as_arguments(self) -> tuple[BatchInputs, ...]:
        """The program's further arguments: these, or none for a plain program."""
        return (self,) if jax.tree.leaves(self) else ()

    @classmethod
    def shapes(cls, program: Any, size: int) -> BatchInputs:
        """The inputs' shapes, without values."""
        potentials, automata = len(program.requested_potentials), None
        if "grammar" in program.features:
            places: Any = jax.ShapeDtypeStruct((size,), jnp.int32)
            automata = PlacedAutomata(places, abstract(make_tables({}, size, program.target.vocab_size)))
        wanted: Any = jax.ShapeDtypeStruct((size, potentials), jnp.bool_) if potentials else None
        return cls(automata, wanted)


PLAIN = BatchInputs()  # of requests without features


@dataclasses.dataclass(frozen=True, eq=False)
class BatchJobs:
    """The jobs of batches of any size."""

    program: Decoder[Any, Any, Any]  # on one device of several
    params: PairParams  # as they are on the devices
    num_pages: int  # the trash page included
    chunks: ChunkLengths  # prompt tokens that one program reads
    readings: tuple[Decoding, ...]  # decoders with the same tokens, each of which has cycles
    sharded: ShardedPrograms | None  # the devices, where there are several

    def state(self, size: int) -> Any:
        """Shapes of the memory, and of the state of a batch of `size` slots with it."""
        memory = jax.eval_shape(lambda: self.program.create_memory(self.params, self.num_pages))
        return memory, jax.eval_shape(lambda memory: self._empty(memory, size), memory)

    def of(self, size: int, program: Any) -> dict[Any, Job]:
        """The programs of this batch size, to be compiled, by the keys they are called by."""
        memory, state = self.state(size)
        params, slot = abstract(self.params), jax.ShapeDtypeStruct((), jnp.int32)
        cached, marked = (jax.ShapeDtypeStruct((self.num_pages - 1,), dtype) for dtype in (jnp.int32, jnp.bool_))
        cache_slots = jax.ShapeDtypeStruct((size, self.program.max_pages), jnp.int32)
        vocab_size = program.target.vocab_size
        empty = Batch.empty(size, max_model_len=program.max_model_len, vocab_size=vocab_size)
        arrays = abstract(dataclasses.asdict(empty))

        inputs = BatchInputs.shapes(program, size)
        with_values = inputs
        if "text_potentials" in program.features:
            nothing: Any = abstract(TextValues.nothing(size, program.rows))
            with_values = dataclasses.replace(inputs, values=nothing)

        jobs: dict[Any, Job] = {}
        for reading in self.readings:
            stepped = stepping(program, reading)
            jobs[stepped, size, "step"] = step_job(
                self._step(stepped), program, self.params, state, *with_values.as_arguments(), sharded=self.sharded
            )
        plain: dict[Any, Job] = {
            (size, "empty"): Job(lambda memory: self._empty(memory, size), (0,), (memory,)),
            ("cache", "evict"): Job(drop, (0, 1), (memory.pool, cached, marked)),
            (size, "join"): Job(self._join, (0,), (state, cached, arrays, cache_slots)),
            (size, "leave"): Job(self._leave, (0,), (state, slot)),
        }
        one = self.chunks.slots(1, size)
        for count, length in {(one, self.chunks.alone), (one, self.chunks.together), (size, self.chunks.together)}:
            slots = jax.ShapeDtypeStruct((count,), jnp.int32)
            stored = jax.ShapeDtypeStruct((count, pages_of(length, self.program.page_size)), jnp.int32)
            arguments = (params, state, cached, slots, slots, slots, stored, *inputs.as_arguments())
            plain[program, size, count, length, "prefill"] = Job(self._prefill(program, length), (1, 2), arguments)
        jobs |= {key: self._job(job) for key, job in plain.items()}
        return {key: job._replace(identity=(self.program, self.sharded, size, key)) for key, job in jobs.items()}

    def _job(self, job: Job) -> Job:
        return job if self.sharded is None else self.sharded.job(job)

    def moving(self, old_size: int, size: int) -> dict[Any, Job]:
        """The program that moves groups from `old_size` slots into a batch of `size`, by the key it is called by."""
        _, state = self.state(old_size)
        sources = jax.ShapeDtypeStruct((size,), jnp.int32)

        def move(groups: Any, memory: Any, sources: jax.Array) -> Any:
            slots = jnp.where(sources < old_size, jnp.arange(size), size)
            empty = self._empty(memory, size)
            return put(empty, slots, take(dataclasses.replace(groups, memory=empty.memory), sources))

        arguments = (dataclasses.replace(state, memory=None), state.memory, sources)
        key = ((old_size, size), "move")
        return {key: self._job(Job(move, (1,), arguments, identity=(self.program, self.sharded, key)))}

    def _empty(self, memory: Any, size: int) -> Any:
        """Makes a state without groups."""
        vocab_size = self.program.target.vocab_size
        requests = dataclasses.replace(
            Requests.alike(key_of(0), jnp.ones(size, jnp.int32), vocab_size=vocab_size, max_tokens=0),
            adjustments=Adjustments.none(size, MAX_BIASED_TOKENS, vocab_size),
            automaton=jnp.full(size, -1, jnp.int32),
        )
        nobody = jnp.zeros(size, bool)
        return self.program.begin(memory, jnp.zeros((size, 1), jnp.int32), requests, nobody)

    def _join(self, state: Any, cached: jax.Array, arrays: dict[str, jax.Array], cache_slots: jax.Array) -> Any:
        present = arrays["present"]
        prefix = cached.at[cache_slots].get(mode="fill", fill_value=TRASH)
        requests = requests_of(arrays)
        joined = self.program.begin(state.memory, arrays["prompts"], requests, present, prefix)
        size = present.shape[0]
        slots = jnp.where(present, jnp.arange(size), size)
        return put(state, slots, dataclasses.replace(joined, running=jnp.zeros_like(present)))

    def _step(self, program: Any) -> Callable[..., tuple[Any, Any, jax.Array]]:
        def step(params: Any, state: Any, inputs: BatchInputs = PLAIN) -> tuple[Any, Any, jax.Array]:
            state, step = inputs.into(state), functools.partial(program.step, params)
            state, info = step(state) if inputs.values is None else steered(step, state, inputs.values)
            return inputs.out_of(state), info, state.memory.pool.num_free

        return step

    def _prefill(self, program: Any, chunk: int) -> Callable[..., tuple[Any, PrefillReport]]:
        def prefill(
            params: Any,
            state: Any,
            cache: jax.Array,
            slots: jax.Array,
            start_at: jax.Array,
            cached: jax.Array,
            cache_slots: jax.Array,
            inputs: BatchInputs = PLAIN,
        ) -> tuple[Any, PrefillReport]:
            given = inputs.into(state)
            groups = take(given, slots)
            size, dtype = state.running.shape[0], state.memory.target.keys[0].dtype
            hidden = jnp.zeros((slots.shape[0], program.target.hidden_size), dtype)
            prompt = None
            if "prompt_logprobs" in program.features:
                groups, hidden, prompt = program.prefill_scored(params, groups, start_at, chunk, hidden, cached)
            else:
                groups, hidden = program.prefill(params, groups, start_at, chunk, hidden, cached)
            groups, cache = self._store(groups, cache, start_at, cache_slots)
            prompt_length = groups.requests.prompt_length
            ends = (slots < size) & (start_at < prompt_length) & (prompt_length <= start_at + chunk)
            before = dataclasses.replace(groups, running=ends)
            groups = program.start(params, before, hidden)
            scores = first_scores(program, params, before, groups, hidden) if "logprobs" in program.features else None
            tokens = groups.sequences.tokens.reshape(slots.shape[0], -1, groups.sequences.tokens.shape[1])
            first = jnp.take_along_axis(tokens, prompt_length[:, None, None], axis=2)[:, :, 0]
            report = PrefillReport(first, ends & ~groups.running, scores, prompt)
            return (inputs.out_of(put(given, slots, groups)), cache), report

        return prefill

    def _store(
        self, groups: Any, cached: jax.Array, start_at: jax.Array, cache_slots: jax.Array
    ) -> tuple[Any, jax.Array]:
        """Puts pages of P groups' prompts, from the one of position `start_at` on, into cache slots [P, pages]."""
        table, first = groups.leaders.block_table, start_at // self.program.page_size
        numbers = jnp.minimum(first[:, None] + jnp.arange(cache_slots.shape[1])[None], table.shape[1] - 1)
        pages = jnp.take_along_axis(table, numbers, axis=1)
        pool, cached = keep(groups.memory.pool, cached, cache_slots.reshape(-1), pages.reshape(-1))
        return groups.with_memory(pool=pool), cached

    def _leave(self, state: Any, slot: jax.Array) -> tuple[Population, Any, jax.Array]:
        slots = slot[None]
        population, memory = self.program.conclude(take(state, slots))
        return population, put(state, slots, self._empty(memory, 1)), memory.pool.num_free


def pages_of(length: int, page_size: int) -> int:
    """Pages that a chunk of `length` tokens touches and fills, at most."""
    return length // page_size + 1


def stepping(program: Any, reading: Decoding | None = None) -> Any:
    """The program of a cycle by this reading, the program's own for None: what is asked of prompts does not matter."""
    reading = reading or program.decoding
    if reading == program.decoding and "prompt_logprobs" not in program.features:
        return program
    return dataclasses.replace(program, decoding=reading, features=program.features - {"prompt_logprobs"})


def requests_of(arrays: dict[str, jax.Array]) -> Requests:
    """Makes a decoder's requests of a `Batch`, given as a dictionary of its arrays. Traced."""

    def fields(kind: type) -> dict[str, jax.Array]:
        return {field.name: arrays[field.name] for field in dataclasses.fields(kind) if field.name in arrays}

    keys = jax.vmap(key_of)(arrays["seed"])
    return Requests(**fields(Requests), key=keys, adjustments=Adjustments(**fields(Adjustments)))
