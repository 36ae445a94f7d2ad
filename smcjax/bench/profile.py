"""`smcjax profile`: what each strategy of a pair takes and gives on this device, for `smcjax.planner`.

Times are of cycles through the engine, with its own programs, on real weights, tokens and KV: requests of a context's
length, made of the prompts' tokens, are admitted together and read in; cycles that warm up follow, then windows that
are timed, each ended by a wait for the device. Tokens a cycle are those of answers to the prompts, counted at the
context that a prompt is nearest to in length. A strategy is measured whole or left out, so that all of a profile have
the same loads and contexts.
"""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import math
import statistics
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax

import smcjax
from smcjax.bench.engine import end_all
from smcjax.bench.record import commit
from smcjax.decoders import Autoregressive, Decoding, Rejection
from smcjax.engine.engine import Engine
from smcjax.engine.llm import LLM
from smcjax.engine.load.defaults import default_page_size, default_sparse_mode
from smcjax.engine.load.fingerprints import fingerprints
from smcjax.engine.load.loading import models_for
from smcjax.engine.requests.requests import Prompt
from smcjax.engine.requests.sampling_params import MAX_SEED, SamplingParams
from smcjax.engine.run.memory import buckets
from smcjax.planner import Cell, Counted, Measured, Profile

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}  # seconds that pass, and those of this process's cores
_SAID_OF_PLAN = ("max_tokens", "temperature", "seed", "cycles", "windows", "clock")  # in a profile's settings
WARMUP = 4  # cycles; the first runs of a program on a GPU are eager, then record the graph


@dataclasses.dataclass(frozen=True)
class Plan:
    """A plan of what to measure."""

    strategies: tuple[Decoding, ...]  # those first that are wanted most
    loads: tuple[int, ...] = (1, 2, 4, 8)  # running requests: powers of two, and the largest, as the engine's batches
    contexts: tuple[int, ...] = (128,)  # tokens of a request when its cycles are timed
    cycles: int = 16  # timed, of a window
    windows: int = 3
    max_tokens: int = 96  # of the answers that tokens a cycle are counted in, as what follows
    temperature: float = 0.7
    seed: int = 0
    budget: float | None = None  # seconds after which no further strategy is begun or gone on with; None: no end
    clock: str = "wall"  # one of `CLOCKS`, which times cycles: "cpu" on a CPU that others use too

    def __post_init__(self) -> None:
        unknown = sorted({*self.loads} - {*buckets(max(self.loads))})
        if unknown:
            raise ValueError(
                f"requests must be powers of two, but for the largest, as batches are, got {unknown[0]}; leave it out."
            )

    @property
    def room(self) -> int:
        """Tokens by which a request grows while it is timed, at most."""
        width = max(one.tokens_per_cycle for one in self.strategies)
        return (2 * WARMUP + self.windows * self.cycles + 2) * width


def strategies(decodings: Sequence[Decoding]) -> tuple[Decoding, ...]:
    """The target alone, once for each schedule by which these decoders' layers select blocks, and then these."""
    sparse = dict.fromkeys(one.speculation.sparse for one in decodings) or {None: None}
    alone = (Autoregressive(None if one is None else one.of_single_queries) for one in sparse)
    return tuple(dict.fromkeys([*alone, *decodings]))


class _LeftOut(Exception):
    """The time for this profile is used up, or a load needs more memory than there is."""


class Profiler:
    """Measures a plan's strategies one after the other, on models that are loaded once.

    Args:
        plan: what to measure.
        models: arguments of `LLM` that say which models, and how they are kept.
        on_progress: hears a line now and then.

    A context manager; `measure` does the work.
    """

    def __init__(self, plan: Plan, models: dict[str, Any], on_progress: Callable[[str], None] = lambda _: None) -> None:
        self._heard = on_progress
        self._began = time.perf_counter()
        first: Decoding = next((one for one in plan.strategies if one.drafts), plan.strategies[0])
        # It holds the weights, and answers nothing.
        self._base = LLM(**{**models, "num_pages": 2}, decoding=_plain(first), max_num_seqs=1, compile_at_start=False)
        try:
            loaded, implementation = self._base.models, self._base._implementation
            own: dict[str, Any] = {name: models.get(name) for name in ("page_size", "num_pages")}
            # Said in the profile, as an engine by a profile reads as it says.
            read = (default_sparse_mode(one, loaded, own["page_size"], implementation) for one in plan.strategies)
            self.plan = dataclasses.replace(plan, strategies=tuple(read))
            self._max_model_len = self._longest(models.get("max_model_len"))
            if own["page_size"] is None:  # one for all, as readings that take turns have
                own["page_size"] = default_page_size(self.plan.strategies, loaded, implementation)
            for one in self.plan.strategies:  # before minutes go into those that come first
                models_for(one, loaded, own["page_size"])
        except BaseException:
            self._base.close()
            raise
        self._own = own

    def __enter__(self) -> Profiler:
        return self

    def __exit__(self, *_: object) -> None:
        self._base.close()

    def _longest(self, given: int | None) -> int:
        """The longest sequence; raises ValueError where contexts do not fit the models."""
        needed = max(self.plan.contexts) + self.plan.room
        longest = min(self._base.models.max_position_embeddings, given or (1 << 20))
        if needed > longest:
            raise ValueError(
                f"contexts of {max(self.plan.contexts)} tokens grow to {needed} while they are timed and the longest "
                f"sequence is {longest}; lower contexts, lower windows, lower cycles, or lower gamma."
            )
        return min(longest, max(needed, 2048))

    def measure(self, prompts: Sequence[Prompt]) -> Profile:
        """The profile. Raises ValueError where not even one strategy could be measured."""
        found: list[Measured] = []
        left_out: list[dict[str, str]] = []
        for number, decoding in enumerate(self.plan.strategies, 1):
            name = f"[{number}/{len(self.plan.strategies)}] {decoding}"
            try:
                found.append(self._strategy(name, decoding, prompts))
            except _LeftOut as error:
                left_out.append({"strategy": str(decoding), "why": str(error)})
                self._heard(f"{name}: left out, {error}")
        if not found:
            raise ValueError(f"no strategy could be measured ({left_out[0]['why']}); raise budget, or measure less.")
        models = self._base.models
        return Profile(
            **vars(fingerprints(models)),
            strategies=tuple(found),
            jax=jax.__version__,
            smcjax=smcjax.__version__,
            commit=commit(),
            date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            settings={
                "dtype": models.target.dtype,
                "page_size": self._own["page_size"],
                "implementation": self._base._implementation,
                "prompts": len(prompts),
                **{name: getattr(self.plan, name) for name in _SAID_OF_PLAN},
            },
            left_out=tuple(left_out),
        )

    @property
    def _seconds(self) -> float:
        return time.perf_counter() - self._began

    def _require_budget(self) -> None:
        if self.plan.budget is not None and self._seconds > self.plan.budget:
            raise _LeftOut(f"the budget of {self.plan.budget:g} s was used up")

    def _strategy(self, name: str, decoding: Decoding, prompts: Sequence[Prompt]) -> Measured:
        """Everything about one strategy, on an `LLM` of its own that shares the models."""
        self._require_budget()
        with LLM(
            share=self._base,
            decoding=decoding,
            max_model_len=self._max_model_len,
            max_num_seqs=max(self.plan.loads),
            enable_prefix_caching=False,  # all requests of a load read all of their prompts, and start together
            compile_at_start=False,
            **self._own,
        ) as llm:
            token_ids = [llm.request(one, SamplingParams(max_tokens=1)).token_ids for one in prompts]
            of_contexts = _by_context(self.plan.contexts, token_ids)
            cells = []
            for context, load in itertools.product(self.plan.contexts, self.plan.loads):
                cells.append(self._cell(llm, of_contexts[_nearest(of_contexts, context)], context, load))
                self._heard(
                    f"{name}: {load} running, {context:,} tokens: {cells[-1].ms:.2f} ms a cycle ({self._seconds:.0f} s)"
                )
                self._require_budget()
            counted = []
            for context, own in of_contexts.items():
                counted.append(self._counted(llm, decoding, context, own))
                self._heard(
                    f"{name}: {context:,} tokens: {counted[-1].tokens_per_cycle:.2f} tokens a cycle "
                    f"({self._seconds:.0f} s)"
                )
        return Measured(decoding, tuple(counted), tuple(cells))

    def _cell(self, llm: LLM, token_ids: Sequence[list[int]], context: int, load: int) -> Cell:
        """The time of a cycle, of `load` requests that have all been read and none of which ends meanwhile."""
        engine, plan = llm.engine, self.plan
        params = SamplingParams(max_tokens=plan.room, temperature=plan.temperature or 1.0, ignore_eos=True)
        try:
            asked = [
                llm.request({"prompt_token_ids": ids}, dataclasses.replace(params, seed=number))
                for number, ids in enumerate(_of_length(context, load, token_ids))
            ]
        except ValueError as error:  # even one alone
            raise _LeftOut(f"one request of {context:,} tokens cannot run: {str(error).rstrip('.')}") from None
        pages = sum(request.worst_case_pages for request in asked)
        if pages > llm.num_pages - 1:
            raise _LeftOut(f"{load} running may need {pages} KV pages and there are {llm.num_pages - 1}")
        try:
            for request in asked:
                engine.add_request(request)
            while not engine.all_started:
                engine.step()
            clock = CLOCKS[plan.clock]
            _steps(engine, WARMUP, clock)
            windows = [_steps(engine, plan.cycles, clock) for _ in range(plan.windows)]
        finally:
            end_all(engine)
        return Cell(load, context, statistics.median(windows), tuple(windows))

    def _counted(self, llm: LLM, decoding: Decoding, context: int, token_ids: Sequence[list[int]]) -> Counted:
        """Tokens a cycle on the prompts of a context."""
        if not decoding.ragged:
            tokens = float(decoding.tokens_per_cycle)
            return Counted(context, tokens, (tokens,) * len(token_ids))
        plan = self.plan
        params = [
            SamplingParams(
                max_tokens=plan.max_tokens, temperature=plan.temperature, seed=(plan.seed + number) & MAX_SEED
            )
            for number in range(len(token_ids))
        ]
        asked: list[Prompt] = [{"prompt_token_ids": ids} for ids in token_ids]
        outputs = [one.metrics for one in llm.generate(asked, params, use_tqdm=False)]
        cycles = sum(one.cycles for one in outputs)
        each = tuple(_per_cycle(one.generated_tokens, one.cycles) for one in outputs)
        if not cycles or any(one.accepted is None for one in outputs):  # SMC under a control does not count drafts
            return Counted(context, _per_cycle(sum(o.generated_tokens - 1 for o in outputs) + 1, cycles), each)
        return Counted(context, 1 + sum(one.accepted or 0 for one in outputs) / cycles, each)


def _plain(decoding: Decoding) -> Decoding:
    """The least decoder that needs the same models."""
    return Rejection(1, sparse=decoding.speculation.sparse) if decoding.drafts else Autoregressive()


def _per_cycle(tokens: int, cycles: int) -> float:
    """Tokens a cycle of an answer, whose first token no cycle made."""
    return max(1.0, (tokens - 1) / cycles) if cycles else 1.0


def _steps(engine: Engine, cycles: int, clock: Callable[[], float]) -> float:
    """Milliseconds a cycle of so many steps, the device's end awaited."""
    began = clock()
    for _ in range(cycles):
        if engine.step():
            raise RuntimeError("a request ended while it was timed: its weights broke, so the timing says nothing")
    jax.block_until_ready(engine.runner.state)
    return 1e3 * (clock() - began) / cycles


def _by_context(contexts: Sequence[int], token_ids: Sequence[list[int]]) -> dict[int, list[list[int]]]:
    """The prompts of each context that is the nearest one to some prompt's length, by ascending context."""
    found: dict[int, list[list[int]]] = {}
    for ids in token_ids:
        found.setdefault(_nearest(contexts, len(ids)), []).append(ids)
    return dict(sorted(found.items()))


def _nearest(contexts: Collection[int], length: int) -> int:
    """The context that is nearest to a length in logarithm, as predictions take contexts."""
    return min(contexts, key=lambda context: abs(math.log(context / length)))


def _of_length(context: int, count: int, token_ids: Sequence[list[int]]) -> list[list[int]]:
    """So many prompts of `context` tokens each, made of the given ones, another one first in each."""
    result = []
    for number in range(count):
        endless = itertools.chain.from_iterable(itertools.cycle(token_ids))
        skipped = sum(len(ids) for ids in token_ids[: number % len(token_ids)])
        result.append(list(itertools.islice(endless, skipped, skipped + context)))
    return result
