"""The batch in flight on the device: every call enqueues one program, none waits for the device.

A `smcjax.decoding.decoder.Decoder` says how a token is chosen; this file does not know. The state of a batch of `size`
lanes is donated to every program and taken from its result:

    evict     the pages that some cache slots keep
    join      requests into free lanes: rows, pages, no KV yet but in the pages that cache slots keep
    prefill   one chunk of the prompts in some lanes; where a prompt ends there, its first tokens; full pages are cached
    step      one cycle of all groups that have started
    catch up  the draft reads tokens that cycles without drafts have made
    leave     one lane's population, its pages given back
    move      the groups into a batch of another size (`smcjax.engine.lanes`): integers only
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from smcjax.decoding.adjustments import Adjustments
from smcjax.decoding.constraints import states_behind
from smcjax.decoding.decoder import Decoder
from smcjax.decoding.groups import PairParams
from smcjax.decoding.scores import Scores, first_scores
from smcjax.decoding.sequences import Population, Requests
from smcjax.device import on_cpu
from smcjax.engine.attached import Attached, Constraints, attach, detach
from smcjax.engine.batch import Batch
from smcjax.engine.constraints import AutomatonPlaces, make_tables
from smcjax.engine.lanes import put, take
from smcjax.engine.narrowing import advance, catch_up
from smcjax.engine.programs import Job, Programs, Progress, abstract, delete, step_job
from smcjax.engine.requests import Request, make_adjustments
from smcjax.engine.scheduler import ChunkLengths
from smcjax.engine.settings import own_settings
from smcjax.engine.spread import Spread
from smcjax.kv import TRASH, drop, keep
from smcjax.numerics import key_of

PREFILL_CHUNK = 128  # prompt tokens of a lane between two cycles
# … of several prompts at once on a CPU, where a chunk costs what its padding costs: 16 short prompts read in chunks of
# 128 took five times as long.
SHORT_CHUNK = 32
# … of a prompt that is read by itself, by kernels. On an H200 a chunk of 512 tokens takes twice as long as one of 128
# (docs/engine.md); plain XLA keeps all its scores, in memory that a long context may not leave.
LONG_CHUNK = 512


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PrefillReport:
    """The report of a chunk of prefill about its P lanes; stale where no prompt ended in it."""

    tokens: Int[Array, "P N"]  # the first token of each row
    done: Bool[Array, " P"]  # ended by it
    scores: Scores | None = None  # [P, N], of the first tokens
    prompt: Scores | None = None  # [P, chunk], of the prompts' tokens behind the chunk's


class Chunk(NamedTuple):
    """A piece of the prompt in one lane."""

    lane: int
    start_at: int
    length: int
    cached: int  # tokens of the prompt whose KV is there
    stored: Sequence[tuple[int, int]]  # full pages, by their number in the prompt, and the cache slots to put them in


class Runner:
    """One decoder's programs and state.

    Methods take a `program` where there may be several: the decoder, or the same with fields set that some requests ask
    for (`smcjax.engine.extras`). With `spread` all programs run on its devices, `decoder` being that of one of them.
    """

    def __init__(
        self,
        decoder: Decoder[Any, Any, Any],
        params: PairParams,
        num_pages: int,
        programs: Programs,
        spread: Spread | None = None,
    ) -> None:
        self.program = decoder
        self.spread = spread
        self._workspaces = None if spread is None else spread.workspaces(decoder.implementation)
        self.params = params
        if self._workspaces is not None:
            self.params = dataclasses.replace(params, peers=self._workspaces.peers())
        self.programs = programs
        self.num_pages = num_pages
        self.takes_turns = False  # whether cycles without drafts are among those of several decoders
        self.size = 0  # lanes of the batch in flight; 0: none yet
        # KV and pages while there is no batch, the batch's state otherwise. All None before `take_memory`.
        self._memory: Any = None
        self.state: Any = None
        self.cached: Any = None  # [S] the pages that cache slots keep
        self._adjustments: Any = None  # of the requests in the lanes, for programs that adjust
        self._adjusted: tuple[Any, ...] = ()  # whose these are: lanes of the batch, and who is where
        self._constraints: Constraints | None = None  # of the requests in the lanes, for programs that constrain
        self._places = AutomatonPlaces(decoder.target.vocab_size)
        self.chunks = self._chunk_lengths()

    def _new_memory(self) -> Any:
        return self.program.create_memory(self.params, self.num_pages)

    def _create_memory(self) -> Any:
        return jax.jit(lambda: self._new_memory())() if self.spread is None else self.spread.run(self._new_memory)

    def _put(self, tree: Any) -> Any:
        """Sends arrays of the host to the device, or to all."""
        return jax.device_put(tree) if self.spread is None else self.spread.put(tree)

    def _job(self, job: Job) -> Job:
        return job if self.spread is None else self.spread.job(job)

    @own_settings()
    def take_memory(self, fill: Callable[[Any], Any] = lambda memory: memory) -> None:
        """Takes the missing memory for KV, which otherwise waits for the first batch; `fill` says what is in it."""
        if self.memory is None:
            self._memory = fill(self._create_memory())
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
        """Forgets the batch and deletes its memory, whoever else still refers to it: what follows gets new memory."""
        # While all of it can be found, should this be interrupted.
        delete((self._memory, self.state, self.cached, self._adjustments, self._constraints))
        self._memory, self.state, self.cached, self.size = None, None, None, 0
        self._adjustments, self._adjusted = None, ()
        self._constraints, self._places = None, AutomatonPlaces(self.program.target.vocab_size)

    def close(self) -> None:
        """Deletes weights and KV from the device, whoever else still refers to them."""
        self.discard()
        delete(self.params)
        if self._workspaces is not None:
            self._workspaces.give_back()

    # Enqueueing.

    def resize(self, size: int, sources: Sequence[int]) -> None:
        """A batch of `size` lanes; lane i goes on with what lane `sources[i]` of the old one held, −1: with nothing."""
        if max(sources) < 0:  # nobody is there
            self.take_memory()
            self.state = self.programs[size, "empty"](self.memory)
            self._memory = None
        else:
            lanes = np.where(np.asarray(sources) < 0, self.size, sources).astype(np.int32)
            groups, memory = dataclasses.replace(self.state, memory=None), self.state.memory
            self.state = self.programs[(self.size, size), "move"](groups, memory, self._put(lanes))
        self.size = size

    def evict(self, slots: Sequence[int]) -> None:
        """Empties cache slots. Pages that no group names are free from now on."""
        marked = np.zeros(self.cache_slots, bool)
        marked[list(slots)] = True
        memory = self.state.memory
        pool, self.cached = self.programs["cache", "evict"](memory.pool, self.cached, self._put(marked))
        self.state = dataclasses.replace(self.state, memory=dataclasses.replace(memory, pool=pool))

    def join(self, batch: Batch, cached: Mapping[int, Sequence[int]]) -> None:
        """Puts the batch's present groups into their lanes, which must be free; groups do not run yet.

        `cached` says which cache slots keep the first pages of their prompts, by lane.
        """
        slots = np.full((self.size, self.program.max_pages), self.cache_slots, np.int32)
        for lane, some in cached.items():
            slots[lane, : len(some)] = some
        arrays, prefix = self._put((dataclasses.asdict(batch), slots))
        self.state = self.programs[self.size, "join"](self.state, self.cached, arrays, prefix)

    def adjust(self, requests: Mapping[int, Request]) -> None:
        """Sends the adjustments of the requests in all lanes, by lane, where others are there than the last time."""
        whose = (self.size, *((lane, request.request_id) for lane, request in requests.items()))
        if whose != self._adjusted:
            adjustments = make_adjustments(requests, self.size, self.program.target.vocab_size)
            self._adjustments = self._put(Adjustments(**adjustments))  # type: ignore[arg-type]
            self._adjusted = whose

    @own_settings()
    def constrain(self, requests: Mapping[int, Request], *, moved: bool) -> None:
        """Sends the automata of the requests in all lanes, by lane, and walks them along what rows have, where `moved`.

        Else the same requests are in the same lanes as the last time.
        """
        if not moved and self._constraints is not None:
            return
        wanted = {lane: request.automaton for lane, request in requests.items() if request.automaton is not None}
        index, tables = self._places.place(wanted, self.size)
        sent = self._put((index, tables))
        old = self._constraints
        tables = sent[1] if tables is not None or old is None else old.tables
        states = self.programs[self.size, "walk"](self.state, sent[0], tables)
        self._constraints = Constraints(sent[0], states, tables)

    def _extra(self, program: Any) -> tuple[Any, ...]:
        """The last arguments of a program that reads more than the others."""
        if not (program.adjusts or program.constrains):
            return ()
        return (
            Attached(self._adjustments if program.adjusts else None, self._constraints if program.constrains else None),
        )

    def _computed(self, key: Hashable, *arguments: Any) -> Any:
        """The results of a program that runs models, in which devices wait for each other where there are several."""
        program = self.programs[key]
        if self.spread is None:
            return program(self.params, *arguments)
        return self.spread.launch(program, self.params, *arguments)

    def _walked(self, states: Any) -> None:
        """Keeps the states of automata after a program, None from one that knows of none."""
        if states is not None:
            assert self._constraints is not None
            self._constraints = dataclasses.replace(self._constraints, states=states)

    def prefill(self, program: Any, chunks: Sequence[Chunk]) -> PrefillReport:
        """Reads the next chunks of some lanes' prompts; starts groups whose prompt ends. Reports in order of `chunks`.

        All `chunks` have one length. There are programs for one chunk and for one of every lane.
        """
        count, length = 1 if len(chunks) == 1 else self.size, chunks[0].length
        lanes = np.full(count, self.size, np.int32)
        start_at = np.full(count, program.max_model_len, np.int32)  # beyond every prompt: absent lanes write nothing
        cached = np.zeros(count, np.int32)
        slots = np.full((count, self._pages_of(length)), self.cache_slots, np.int32)
        for i, chunk in enumerate(chunks):
            lanes[i], start_at[i], cached[i] = chunk.lane, chunk.start_at, chunk.cached
            for page, slot in chunk.stored:
                slots[i, page - chunk.start_at // program.page_size] = slot
        key = reading(program), self.size, count, length, "prefill"
        asked = self._put((lanes, start_at, cached, slots))
        extra = self._extra(program)
        (self.state, self.cached), first, states = self._computed(key, self.state, self.cached, *asked, *extra)
        self._walked(states)
        return first

    def _pages_of(self, length: int) -> int:
        """Pages that a chunk of `length` tokens touches and fills, at most."""
        return length // self.program.page_size + 1

    def step(self, program: Any) -> tuple[Any, jax.Array]:
        """Advances all groups by one cycle; returns the decoder's Info, and how many pages are free after it."""
        key = stepping(program), self.size, "step"
        self.state, info, free, states = self._computed(key, self.state, *self._extra(program))
        self._walked(states)
        return info, free

    def catch_up(self, lacking: Mapping[int, tuple[int, int]]) -> None:
        """Has the draft read tokens of the groups in some lanes: positions from the first number to before the second.

        Positions of the prompts it does not read again, and there may be fewer tokens than that.
        """
        chunk = self.chunks.together
        for number in range(max((-(-(end - begin) // chunk) for begin, end in lacking.values()), default=0)):
            start_at = np.full(self.size, self.program.max_model_len, np.int32)  # beyond every answer
            for lane, (begin, end) in lacking.items():
                if begin + number * chunk < end:
                    start_at[lane] = begin + number * chunk
            self.state = self._computed((self.size, chunk, "catch up"), self.state, self._put(start_at))

    def leave(self, lane: int) -> tuple[Population, jax.Array]:
        """The population of a lane, one group, which is free from now on, and how many pages are then."""
        population, self.state, free = self.programs[self.size, "leave"](self.state, self._put(np.int32(lane)))
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
            if not self._is_compiled(size, program):
                jobs |= self.jobs(size, program)
        for size in sizes:
            for other in {*sizes, *others} - {size}:
                for move in ((other, size), (size, other)):
                    if (move, "move") not in self.programs and (move, "move") not in jobs:
                        jobs |= self._moving(*move)
        least, most = min(sizes), max(sizes)
        many = f"{least} to {most}" if least < most else f"{most}"
        self.programs.compile(f"for {many} request{'s' if most > 1 else ''} at a time", jobs, progress)

    def _is_compiled(self, size: int, program: Any) -> bool:
        """True where all of `jobs` are there."""
        keys = ((reading(program), size, 1, self.chunks.alone, "prefill"), (stepping(program), size, "step"))
        return all(key in self.programs for key in keys)

    def _abstract_state(self, size: int) -> Any:
        memory = jax.eval_shape(self._new_memory)
        return memory, jax.eval_shape(lambda memory: self._empty(memory, size), memory)

    def jobs(self, size: int, program: Any) -> dict[Any, Job]:
        """The programs of this batch size, to be compiled, by the keys they are called by."""
        memory, state = self._abstract_state(size)
        params, lane = abstract(self.params), jax.ShapeDtypeStruct((), jnp.int32)
        cached, marked = (jax.ShapeDtypeStruct((self.cache_slots,), dtype) for dtype in (jnp.int32, jnp.bool_))
        slots = jax.ShapeDtypeStruct((size, self.program.max_pages), jnp.int32)
        vocab_size = program.target.vocab_size
        arrays = abstract(
            dataclasses.asdict(Batch.empty(size, max_model_len=program.max_model_len, vocab_size=vocab_size))
        )

        adjustments: Any = None
        constraints: Any = None
        if program.adjusts:
            adjustments = abstract(Adjustments(**make_adjustments({}, size, vocab_size)))  # type: ignore[arg-type]
        if program.constrains:
            of_lanes: Any = jax.ShapeDtypeStruct((size,), jnp.int32)
            of_rows: Any = jax.ShapeDtypeStruct((size * program.rows,), jnp.int32)
            constraints = Constraints(of_lanes, of_rows, abstract(make_tables({}, size, vocab_size)))
        extra = (Attached(adjustments, constraints),) if program.adjusts or program.constrains else ()

        def step(params: Any, state: Any, *attached: Attached) -> Any:
            state, info = advance(program, params, attach(state, *attached))
            return detach(state), info, state.memory.pool.num_free, state.sequences.automaton

        jobs: dict[Any, Job] = {
            (stepping(program), size, "step"): step_job(step, program, self.params, state, *extra, spread=self.spread),
        }
        plain: dict[Any, Job] = {
            (size, "empty"): Job(lambda memory: self._empty(memory, size), (0,), (memory,)),
            ("cache", "evict"): Job(drop, (0, 1), (memory.pool, cached, marked)),
            (size, "join"): Job(self._join, (0,), (state, cached, arrays, slots)),
            (size, "leave"): Job(self._leave, (0,), (state, lane)),
        }
        for count, length in {(1, self.chunks.alone), (1, self.chunks.together), (size, self.chunks.together)}:
            lanes = jax.ShapeDtypeStruct((count,), jnp.int32)
            stored = jax.ShapeDtypeStruct((count, self._pages_of(length)), jnp.int32)
            arguments = (params, state, cached, lanes, lanes, lanes, stored, *extra)
            plain[reading(program), size, count, length, "prefill"] = Job(
                self._prefill(program, length), (1, 2), arguments
            )
        if constraints is not None:
            plain[size, "walk"] = Job(self._walk, (), (state, constraints.automaton, constraints.tables))
        if self.takes_turns and program.proposer is not None:
            plain[size, self.chunks.together, "catch up"] = self._catching_up(params, state, lanes=size)
        jobs |= {key: self._job(job) for key, job in plain.items()}
        return {key: job._replace(identity=(self.program, self.spread, size, key)) for key, job in jobs.items()}

    def _walk(self, state: Any, automaton: jax.Array, tables: Any) -> jax.Array:
        """The states of all rows' automata behind the tokens that they have."""
        none_yet = jnp.zeros_like(state.sequences.length)
        return states_behind(attach(state, Attached(constraints=Constraints(automaton, none_yet, tables))))

    def _catching_up(self, params: Any, state: Any, lanes: int) -> Job:
        def read(params: Any, state: Any, start_at: jax.Array) -> Any:
            return catch_up(self.program, params, state, start_at, self.chunks.together)

        return Job(read, (1,), (params, state, jax.ShapeDtypeStruct((lanes,), jnp.int32)))

    def _moving(self, old_size: int, size: int) -> dict[Any, Job]:
        _, state = self._abstract_state(old_size)
        sources = jax.ShapeDtypeStruct((size,), jnp.int32)

        def move(groups: Any, memory: Any, sources: jax.Array) -> Any:
            lanes = jnp.where(sources < old_size, jnp.arange(size), size)
            empty = self._empty(memory, size)
            return put(empty, lanes, take(dataclasses.replace(groups, memory=empty.memory), sources))

        arguments = (dataclasses.replace(state, memory=None), state.memory, sources)
        key = ((old_size, size), "move")
        return {key: self._job(Job(move, (1,), arguments, identity=(self.program, self.spread, key)))}

    def _empty(self, memory: Any, size: int) -> Any:
        """Makes a state without groups."""
        vocab_size = self.program.target.vocab_size
        requests = Requests.alike(key_of(0), jnp.ones(size, jnp.int32), vocab_size=vocab_size, max_tokens=0)
        nobody = jnp.zeros(size, bool)
        return self.program.begin(memory, jnp.zeros((size, 1), jnp.int32), requests, nobody)

    def _join(self, state: Any, cached: jax.Array, arrays: dict[str, jax.Array], slots: jax.Array) -> Any:
        present = arrays["present"]
        prefix = cached.at[slots].get(mode="fill", fill_value=TRASH)
        requests = requests_of(arrays)
        joined = self.program.begin(state.memory, arrays["prompts"], requests, present, prefix)
        size = present.shape[0]
        lanes = jnp.where(present, jnp.arange(size), size)
        return put(state, lanes, dataclasses.replace(joined, running=jnp.zeros_like(present)))

    def _prefill(self, program: Any, chunk: int) -> Callable[..., tuple[Any, PrefillReport, Any]]:
        def prefill(
            params: Any,
            state: Any,
            cache: jax.Array,
            lanes: jax.Array,
            start_at: jax.Array,
            cached: jax.Array,
            slots: jax.Array,
            *attached: Attached,
        ) -> tuple[Any, PrefillReport, Any]:
            given = attach(state, *attached)
            groups = take(given, lanes)
            size, dtype = state.running.shape[0], state.memory.target.keys[0].dtype
            hidden = jnp.zeros((lanes.shape[0], program.target.hidden_size), dtype)
            prompt = None
            if program.scores_prompts:
                groups, hidden, prompt = program.prefill_scored(params, groups, start_at, chunk, hidden, cached)
            else:
                groups, hidden = program.prefill(params, groups, start_at, chunk, hidden, cached)
            groups, cache = self._store(groups, cache, start_at, slots)
            prompt_length = groups.requests.prompt_length
            ends = (lanes < size) & (start_at < prompt_length) & (prompt_length <= start_at + chunk)
            before = dataclasses.replace(groups, running=ends)
            groups = program.start(params, before, hidden)
            scores = first_scores(program, params, before, groups, hidden) if program.scores else None
            tokens = groups.sequences.tokens.reshape(lanes.shape[0], -1, groups.sequences.tokens.shape[1])
            first = jnp.take_along_axis(tokens, prompt_length[:, None, None], axis=2)[:, :, 0]
            report = PrefillReport(first, ends & ~groups.running, scores, prompt)
            constraints = given.sequences.automaton is not None
            given = put(detach(given, constraints=not constraints), lanes, detach(groups, constraints=not constraints))
            return (detach(given), cache), report, given.sequences.automaton

        return prefill

    def _store(self, groups: Any, cached: jax.Array, start_at: jax.Array, slots: jax.Array) -> tuple[Any, jax.Array]:
        """Puts pages of P groups' prompts, from the one of position `start_at` on, into cache slots [P, pages]."""
        each = groups.sequences.block_table.shape[0] // slots.shape[0]
        table, first = groups.sequences.block_table[::each], start_at // self.program.page_size
        numbers = jnp.minimum(first[:, None] + jnp.arange(slots.shape[1]), table.shape[1] - 1)
        pages = jnp.take_along_axis(table, numbers, axis=1)
        pool, cached = keep(groups.memory.pool, cached, slots.reshape(-1), pages.reshape(-1))
        return dataclasses.replace(groups, memory=dataclasses.replace(groups.memory, pool=pool)), cached

    def _leave(self, state: Any, lane: jax.Array) -> tuple[Population, Any, jax.Array]:
        lanes = lane[None]
        population, memory = self.program.conclude(take(state, lanes))
        return population, put(state, lanes, self._empty(memory, 1)), memory.pool.num_free


def stepping(program: Any) -> Any:
    """The program of whose cycles `program`'s are: prompts make no difference to them."""
    return dataclasses.replace(program, scores_prompts=False) if program.scores_prompts else program


def reading(program: Any) -> Any:
    """The program by which prompts are read where `program` advances the groups."""
    return dataclasses.replace(program, by=None) if program.by is not None else program


def requests_of(arrays: dict[str, jax.Array]) -> Requests:
    """Makes a decoder's requests of a `Batch`, given as a dictionary of its arrays. Traced."""
    fields = [field.name for field in dataclasses.fields(Requests) if field.name in arrays]
    keys = jax.vmap(key_of)(arrays["seed"])
    return Requests(**{name: arrays[name] for name in fields}, key=keys)
