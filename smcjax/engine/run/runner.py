"""The batch in flight on the device: every call enqueues one program, none waits for the device.

A `smcjax.decoding.decoder.Decoder` says how a token is chosen; this file does not know. The state of a batch of `size`
slots is donated to every program and taken from its result:

    evict     the pages that some cache slots keep
    join      requests into free slots: rows, pages, no KV yet but in the pages that cache slots keep
    prefill   one chunk of the prompts in some slots; where a prompt ends there, its first tokens; full pages are cached
    step      one cycle of all groups that have started
    leave     one slot's population, its pages given back
    move      the groups into a batch of another size (`smcjax.engine.run.slots`): integers only
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np

from smcjax.decoders import Decoding
from smcjax.decoding.constraints import PlacedAutomata
from smcjax.decoding.decoder import Decoder
from smcjax.decoding.groups import PairParams
from smcjax.decoding.sequences import Population
from smcjax.device import on_cpu
from smcjax.engine.requests.batch import Batch
from smcjax.engine.requests.requests import Request
from smcjax.engine.run.constraints import AutomatonPlaces
from smcjax.engine.run.jobs import BatchInputs, BatchJobs, PrefillReport, pages_of, stepping
from smcjax.engine.run.programs import Job, Programs, Progress, delete
from smcjax.engine.run.settings import own_settings
from smcjax.engine.run.sharded_programs import ShardedPrograms
from smcjax.engine.schedule.scheduler import ChunkLengths
from smcjax.kv import TRASH
from smcjax.smc.steering import TextValues
from smcjax.structured.automaton import Automaton

PREFILL_CHUNK = 128  # prompt tokens of a slot between two cycles
# … of several prompts at once on a CPU, where a chunk costs what its padding costs: 16 short prompts read in chunks of
# 128 took five times as long.
SHORT_CHUNK = 32
# … of a prompt that is read by itself, by kernels. On an H200 a chunk of 512 tokens takes twice as long as one of 128
# (docs/explanation/engine.md); plain XLA keeps all its scores, in memory that a long context may not leave.
LONG_CHUNK = 512


class Chunk(NamedTuple):
    """A piece of the prompt in one slot."""

    slot: int
    start_at: int
    length: int
    cached: int  # tokens of the prompt whose KV is there
    stored: Sequence[tuple[int, int]]  # full pages, by their number in the prompt, and the cache slots to put them in


class Runner:
    """One decoder's programs and state.

    Methods take a `program` where there may be several: the decoder, or the same with features that some requests ask
    for (`smcjax.engine.run.features`). With `sharded` all programs run on its devices, and `decoder` is that of one of
    them. `readings` are decoders with the same tokens that may have a cycle in place of the decoder's own; None: it
    alone.
    """

    def __init__(
        self,
        decoder: Decoder[Any, Any, Any],
        params: PairParams,
        num_pages: int,
        programs: Programs,
        sharded: ShardedPrograms | None = None,
        readings: tuple[Decoding, ...] | None = None,
    ) -> None:
        self.program = decoder
        self.readings = readings or (decoder.decoding,)
        self.sharded = sharded
        self._workspaces = None if sharded is None else sharded.workspaces(decoder.implementation)
        self.params = params
        if self._workspaces is not None:
            self.params = dataclasses.replace(params, peer_memory=self._workspaces.peer_memory())
        self.programs = programs
        self.num_pages = num_pages
        self.size = 0  # slots of the batch in flight; 0: none yet
        # KV and pages while there is no batch, the batch's state otherwise. All None before `take_memory`.
        self._memory: Any = None
        self.state: Any = None
        self.cached: Any = None  # [S] the pages that cache slots keep
        self._automata: PlacedAutomata | None = None  # of the requests in the slots, for programs that know of forms
        self._constrained: tuple[int, dict[int, Automaton]] | None = None  # whose these are: slots, and who is where
        self._places = AutomatonPlaces(decoder.target.vocab_size)
        self.chunks = self._chunk_lengths()
        self._new_memory_compiled = jax.jit(lambda: self._new_memory())

    @property
    def _jobs(self) -> BatchJobs:
        return BatchJobs(self.program, self.params, self.num_pages, self.chunks, self.readings, self.sharded)

    def _new_memory(self) -> Any:
        return self.program.create_memory(self.params, self.num_pages)

    def _put(self, tree: Any) -> Any:
        """Sends arrays of the host to the device, or to all."""
        return jax.device_put(tree) if self.sharded is None else self.sharded.put(tree)

    @own_settings()
    def take_memory(self, fill: Callable[[Any], Any] = lambda memory: memory) -> None:
        """Takes the missing memory for KV, which otherwise waits for the first batch; `fill` says what is in it."""
        if self.memory is None:
            sharded, new = self.sharded, self._new_memory
            self._memory = fill(self._new_memory_compiled() if sharded is None else sharded.run(new))
        if self.cached is None:
            self.cached = self._put(np.full(self.cache_slots, TRASH, np.int32))

    @own_settings()
    def _chunk_lengths(self) -> ChunkLengths:
        """Chooses how many tokens of a prompt one program reads."""
        memory = jax.eval_shape(self._new_memory)
        lengths = (SHORT_CHUNK, PREFILL_CHUNK) if on_cpu() else (PREFILL_CHUNK, LONG_CHUNK)
        short, long = (min(length, self.program.max_model_len) for length in lengths)
        pays = on_cpu() or self.program.prefills_by_kernels(memory, long)
        return ChunkLengths(together=short, alone=long if pays else short)

    @property
    def cache_slots(self) -> int:
        """S: as many as there are pages."""
        return self.num_pages - 1

    @property
    def memory(self) -> Any:
        """The KV and pages of all models; None before they are taken."""
        return self._memory if self.state is None else self.state.memory

    def free_pages(self) -> int:
        """Pages that no group names; what only the cache keeps is among them. Waits for the device."""
        if self.memory is None:
            return self.num_pages - 1
        pool = self.memory.pool
        cached, counts, free = jax.device_get((self.cached, pool.refcount, pool.num_free))
        return int(free) + int(np.sum((cached != TRASH) & (counts[cached] == 1)))

    def discard(self) -> None:
        """Forgets the batch and deletes its memory, other references or not: what follows gets new memory."""
        # While all of it can be found, should this be interrupted.
        delete((self._memory, self.state, self.cached, self._automata))
        self._memory, self.state, self.cached, self.size = None, None, None, 0
        self._automata, self._constrained = None, None
        self._places = AutomatonPlaces(self.program.target.vocab_size)

    def close(self) -> None:
        """Deletes weights and KV from the device, even where other references to them remain."""
        self.discard()
        delete(self.params)
        if self._workspaces is not None:
            self._workspaces.give_back()

    # Enqueueing.

    def resize(self, size: int, sources: Sequence[int]) -> None:
        """A batch of `size` slots; slot i goes on with what slot `sources[i]` of the old one held, −1: with nothing."""
        if max(sources) < 0:  # no group is there
            self.take_memory()
            self.state = self.programs[size, "empty"](self.memory)
            self._memory = None
        else:
            slots = np.where(np.asarray(sources) < 0, self.size, sources).astype(np.int32)
            groups, memory = dataclasses.replace(self.state, memory=None), self.state.memory
            self.state = self.programs[(self.size, size), "move"](groups, memory, self._put(slots))
        self.size = size

    def evict(self, cache_slots: Sequence[int]) -> None:
        """Empties cache slots. Pages that no group names are free from now on."""
        marked = np.zeros(self.cache_slots, bool)
        marked[list(cache_slots)] = True
        memory = self.state.memory
        pool, self.cached = self.programs["cache", "evict"](memory.pool, self.cached, self._put(marked))
        self.state = dataclasses.replace(self.state, memory=dataclasses.replace(memory, pool=pool))

    def join(self, batch: Batch, cached: Mapping[int, Sequence[int]]) -> None:
        """Puts the batch's present groups into their slots, which must be free; groups do not run yet.

        `cached` says which cache slots keep the first pages of their prompts, by slot.
        """
        cache_slots = np.full((self.size, self.program.max_pages), self.cache_slots, np.int32)
        for slot, some in cached.items():
            cache_slots[slot, : len(some)] = some
        arrays, prefix = self._put((dataclasses.asdict(batch), cache_slots))
        self.state = self.programs[self.size, "join"](self.state, self.cached, arrays, prefix)

    @own_settings()
    def constrain(self, requests: Mapping[int, Request]) -> None:
        """Sends the automata of the requests in all slots, by slot, where others are there than the last time."""
        wanted = {slot: request.automaton for slot, request in requests.items() if request.automaton is not None}
        if self._constrained == (self.size, wanted):
            return
        places, tables = self._places.place(wanted, self.size)
        if tables is None:
            assert self._automata is not None
            self._automata = dataclasses.replace(self._automata, place=self._put(places))
        else:
            self._automata = self._put(PlacedAutomata(places, tables))  # type: ignore[arg-type]
        self._constrained = self.size, wanted

    def _inputs(
        self, program: Any, requests: Mapping[int, Request], values: TextValues | None = None
    ) -> tuple[BatchInputs, ...]:
        """The last argument of a program with features, for the requests in all slots, by slot."""
        automata = self._automata if "grammar" in program.features else None
        columns = program.requested_potentials
        if not columns and values is None:
            return BatchInputs(automata).as_arguments()
        wanted = np.zeros((self.size, len(columns)), bool)
        for slot, request in requests.items():
            wanted[slot] = [one in request.params.potentials for one in columns]
        return BatchInputs(automata, *self._put((wanted if columns else None, values))).as_arguments()

    def _computed(self, key: Hashable, *arguments: Any) -> Any:
        """The results of a program that runs models, in which devices wait for each other where there are several."""
        program = self.programs[key]
        if self.sharded is None:
            return program(self.params, *arguments)
        return self.sharded.launch(program, self.params, *arguments)

    def prefill(
        self, program: Any, chunks: Sequence[Chunk], requests: Mapping[int, Request] = MappingProxyType({})
    ) -> PrefillReport:
        """Reads the next chunks of some slots' prompts; starts groups whose prompt ends. Reports in order of `chunks`.

        `requests` are those of all slots, for programs with features. All `chunks` have one
        length. There are programs for one chunk (if `chunks.one_slot`) and for one of every slot.
        """
        count, length = self.chunks.slots(len(chunks), self.size), chunks[0].length
        slots = np.full(count, self.size, np.int32)
        start_at = np.full(count, program.max_model_len, np.int32)  # beyond every prompt: absent slots write nothing
        cached = np.zeros(count, np.int32)
        cache_slots = np.full((count, pages_of(length, self.program.page_size)), self.cache_slots, np.int32)
        for i, chunk in enumerate(chunks):
            slots[i], start_at[i], cached[i] = chunk.slot, chunk.start_at, chunk.cached
            for page, cache_slot in chunk.stored:
                cache_slots[i, page - chunk.start_at // program.page_size] = cache_slot
        key = program, self.size, count, length, "prefill"
        asked = self._put((slots, start_at, cached, cache_slots))
        inputs = self._inputs(program, requests)
        (self.state, self.cached), first = self._computed(key, self.state, self.cached, *asked, *inputs)
        return first

    def step(
        self,
        program: Any,
        reading: Decoding | None = None,
        requests: Mapping[int, Request] = MappingProxyType({}),
        values: TextValues | None = None,
    ) -> tuple[Any, jax.Array]:
        """Advances all groups by one cycle; returns the decoder's Info, and how many pages are free after it.

        `reading` is one of `readings`; None: the program's own. `requests` as for `prefill`; `values` are those that
        text potentials give, for programs that know of them.
        """
        key = stepping(program, reading), self.size, "step"
        inputs = self._inputs(program, requests, values)
        self.state, info, free = self._computed(key, self.state, *inputs)
        return info, free

    def leave(self, slot: int) -> tuple[Population, jax.Array]:
        """The population of a slot, one group, which is free from now on, and how many pages are then."""
        population, self.state, free = self.programs[self.size, "leave"](self.state, self._put(np.int32(slot)))
        return population, free

    # Compiling.

    @own_settings()
    def compile(
        self, sizes: Sequence[int], program: Any, others: Iterable[int] = (), progress: Progress | None = None
    ) -> None:
        """Compiles what is missing for batches of these sizes, and for moves between any two of them and the `others`.

        `progress`: see `Programs.compile`.
        """
        jobs: dict[Any, Job] = {}
        for size in sizes:
            if not self.has(size, program):
                jobs |= self.jobs(size, program)
        for move in self._missing_moves(sizes, others):
            jobs |= self._jobs.moving(*move)
        least, most = min(sizes), max(sizes)
        many = f"{least} to {most}" if least < most else f"{most}"
        self.programs.compile(f"for {many} request{'s' if most > 1 else ''} at a time", jobs, progress)

    def has(self, size: int, program: Any) -> bool:
        """True where all of `jobs` are compiled."""
        one = self.chunks.slots(1, size)
        keys = ((program, size, one, self.chunks.alone, "prefill"), (stepping(program), size, "step"))
        return all(key in self.programs for key in keys)

    def jobs(self, size: int, program: Any) -> dict[Any, Job]:
        """The programs of this batch size, to be compiled, by the keys they are called by."""
        return self._jobs.of(size, program)

    def _missing_moves(self, sizes: Sequence[int], others: Iterable[int]) -> list[tuple[int, int]]:
        """Moves between any two of `sizes`, or one of them and one of `others`, that are not compiled."""
        pairs = ((size, other) for size in sizes for other in {*sizes, *others} - {size})
        moves = dict.fromkeys(move for size, other in pairs for move in ((other, size), (size, other)))
        return [move for move in moves if (move, "move") not in self.programs]
