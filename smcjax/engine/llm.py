"""`LLM`: models, tokenizer and a decoder behind `generate` and `chat`."""

from __future__ import annotations

import dataclasses
import inspect
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from smcjax.auto import Auto, Choice, Routed, gives_draft, left_to_exact
from smcjax.checks import names_unknown, require, short
from smcjax.decoders import Decoding
from smcjax.decoding.drafts.ngram import NGRAM, NGram
from smcjax.decoding.drafts.proposer import Proposer
from smcjax.decoding.groups import PairParams
from smcjax.engine.arguments import OF_ENGINE, OF_LOADING, OF_MODELS, RULES, check_devices, compiles_at_start
from smcjax.engine.engine import Engine
from smcjax.engine.load.choice import DEFAULT_MAX_MODEL_LEN, check_draft_arguments, choose
from smcjax.engine.load.defaults import default_page_size, default_sparse_mode
from smcjax.engine.load.loading import (
    DECODERS,
    DEFAULT_PAGE_SIZE,
    Models,
    load_models,
    make_decoder,
    models_for,
    prepared_models,
    scores_bytes,
)
from smcjax.engine.prepare_request import RequestPreparer
from smcjax.engine.request_handle import Chunks, RequestHandle
from smcjax.engine.requests.requests import Prompt, Request, as_list, params_for_each
from smcjax.engine.requests.sampling_params import SamplingParams
from smcjax.engine.results.outputs import RequestOutput, StreamChunk
from smcjax.engine.run.fair_lock import FairRLock, require_own_process
from smcjax.engine.run.memory import GPU_MEMORY_UTILIZATION, Budget, choose_num_pages, memory_of_each, require_devices
from smcjax.engine.run.programs import Programs, delete, enable_compilation_cache
from smcjax.engine.run.runner import Runner
from smcjax.engine.run.settings import require_settings
from smcjax.engine.schedule.page_budget import Footprint
from smcjax.errors import RequestsLost
from smcjax.model.parallel import bytes_on_one, devices_of_host, two_devices
from smcjax.pallas.dispatch import check_runs_here
from smcjax.quantization import check_quantization
from smcjax.structured.automaton import Automata

logger = logging.getLogger("smcjax")


@names_unknown
class LLM:
    """A target model, a draft where the decoder needs one, and the programs that run them.

    Args:
        model: the target: a Hugging Face directory, a GGUF file, a hub id ("org/name" or "org/name:file.gguf", at a
            branch, tag or commit "org/name@v1:file.gguf"; downloaded unless huggingface_hub has it in its cache), a
            model that an extra installs, "smollm2" (extra smollm2) or "gemma3-270m" (extra gemma), or "recall", whose
            drafts are "recall-draft" and the EAGLE-3 head "recall-eagle", or "words", whose drafts are "words-draft"
            and "words-smc-draft"; None for the bundled pair, "words" and "words-draft".
        draft_model: likewise the draft, of the same tokenizer; the directory of an EAGLE-3 head made for the target; or
            "ngram", which looks the newest tokens up in the text before them, for `Rejection`. `Autoregressive` does
            not read it.
        draft_drop_layers: layers, counted from 0, that the draft does without; `draft_model` None then means the
            target, whose other weights are shared.
        decoding: `SMC(...)`, `Rejection(...)` or `Autoregressive()`, which then answers every request or refuses it; or
            "auto", `Auto(...)`, which chooses one of them now by what is asked for. None: `SMC()` answers what it can,
            and `Rejection()` with the same draft the rest (temperature 0, top_k, top_p, penalties, biases); without a
            draft the target alone answers all. `RequestOutput.decoding` says which one did.
        dtype: "auto" (bfloat16 on GPU, float32 on CPU), "bfloat16" or "float32".
        quantization: "int8" or "float8" keeps the target's matrices in eight bits a number with a scale a row, made
            when they are loaded, or as a directory stores them; KV stays in `dtype`, and with "int8" activations do
            (`smcjax.quantization`).
        draft_quantization: likewise the draft's.
        max_model_len: prompt and generated tokens of a request at most; None: 2048, or what the models allow if less.
        max_num_seqs: requests (not particles) in one batch.
        page_size: tokens in a KV page, 1 to 128; None: 16, or 128 where kernels read a sparse target in groups, which
            find compressed tokens by eight.
        implementation: "auto" uses the GPU kernels where they apply, "xla" never, "triton" those in Triton alone.
        num_pages: KV pages, the trash page included; None: enough for `max_num_seqs` requests if memory allows. LLMs
            that share models each take a share, such as 0.5, of the GPU memory that `gpu_memory_utilization` leaves
            beside the weights.
        gpu_memory_utilization: share of the GPU's memory that weights and KV may take.
        enable_prefix_caching: whether the KV of prompts' full pages stays, while memory allows, for later requests
            whose prompts begin alike. Tokens are the same either way.
        admission: "worst_case" admits a request when the pages are free that it needs if all its particles diverge
            right after the prompt; "optimistic" by what requests have been using of late, and when pages run out
            the youngest request gives its own up and begins again. Tokens are the same either way.
        compile_at_start: whether to compile the programs of all batch sizes now, with a progress bar, or each when it
            is first needed; None: now on a GPU, when needed on a CPU.
        tensor_parallel_size: devices of this host that hold the target together, each a part of every layer; a number
            that divides the model's attention heads and intermediate size.
        draft_tensor_parallel_size: devices that hold a draft model together: 1, each of the target's then has all of
            it, or as many as the target's, which then divide its layers. None: the target's number where the draft
            shares its weights, and where two devices were quicker so (docs/explanation/tensor-parallelism.md); else 1.
        seed: of requests that bring none.
        share: an LLM whose loaded models this one runs on, by a decoder, batches and KV of its own; arguments about
            models then stay at their defaults. Close it after this one.

    Raises ValueError (one sentence: argument, value, mend) before anything runs, and RuntimeError in a process that was
    forked from one with an LLM. A context manager; `close` frees the device memory. Threads may share one: their
    requests then run side by side.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        draft_model: str | os.PathLike[str] | None = None,
        draft_drop_layers: Sequence[int] | None = None,
        decoding: Choice | Literal["auto"] | None = None,
        dtype: Literal["auto", "bfloat16", "float32"] = "auto",
        quantization: Literal["int8", "float8"] | None = None,
        draft_quantization: Literal["int8", "float8"] | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int = 8,
        page_size: int | None = None,
        implementation: Literal["auto", "triton", "xla"] = "auto",
        num_pages: int | float | None = None,
        gpu_memory_utilization: float = GPU_MEMORY_UTILIZATION,
        enable_prefix_caching: bool = True,
        admission: Literal["worst_case", "optimistic"] = "worst_case",
        compile_at_start: bool | None = None,
        tensor_parallel_size: int = 1,
        draft_tensor_parallel_size: int | None = None,
        seed: int = 0,
        share: LLM | None = None,
    ) -> None:
        given = locals()  # all arguments, by name
        choice: Any = Routed() if decoding is None else Auto() if decoding == Auto.name else decoding
        if type(choice) not in (*DECODERS, Auto, Routed):
            raise ValueError(
                f"decoding must be SMC(...), Rejection(...), Autoregressive(), Auto(...) or 'auto', got {decoding!r}."
            )
        require(given, RULES)
        check_quantization("quantization", quantization)
        check_quantization("draft_quantization", draft_quantization)
        check_devices(tensor_parallel_size, draft_tensor_parallel_size)
        if share is not None:
            _check_shares(share, given)
            implementation = share._implementation

        require_own_process()
        require_devices()
        check_runs_here("implementation", implementation)
        enable_compilation_cache()
        self._beside: LLM | None = None  # which decodes by `_exact`, once a request needs it
        own_draft = gives_draft(model, draft_model, draft_drop_layers)
        has_draft = own_draft if share is None else share.models.proposer is not None
        self.decoding: Decoding
        self.decoding, self._exact, self._planned = choose(choice, given, has_draft=has_draft)
        if draft_model == NGRAM and self.decoding.drafts:
            self._accept(NGram())
        check_draft_arguments(self.decoding, given)
        require_settings()
        own_name = "the bundled pair" if model is None else repr(str(model))
        self._name: str = own_name if share is None else share._name
        self._closed = False
        self._making = threading.Lock()  # held while the LLM beside this one is made
        self._engine: Engine | None = None
        self._awaited: dict[str, RequestOutput | None] = {}  # by `generate`; None: not yet there
        self._turn = FairRLock()  # of the engine, which one thread may use at a time
        self._cancelled: deque[str] = deque()  # requests whose callers have left
        self._implementation: Literal["auto", "triton", "xla"] = implementation
        self._owns_models = share is None
        self._of_beside = self._with_memory_divided(given)
        self.max_num_seqs = max_num_seqs
        # Blocks that pages of 16 would cut are cut by 128 as well.
        checked_size = DEFAULT_PAGE_SIZE if page_size is None else page_size
        if share is not None:
            self.models: Models = models_for(self.decoding, share.models, checked_size)
        else:
            parallel = devices_of_host(tensor_parallel_size) if tensor_parallel_size > 1 else None
            overlaps = self.decoding.overlaps and parallel is None and draft_tensor_parallel_size is None
            disaggregated = two_devices() if overlaps else None
            self.models = load_models(
                **{name: given[name] for name in OF_LOADING},
                needs_draft=self.decoding.drafts,
                page_size=checked_size,
                sparse=self.decoding.speculation.sparse,
                accepts=self._accept,
                parallel=parallel,
                draft_divided=None if draft_tensor_parallel_size is None else draft_tensor_parallel_size > 1,
            )
        try:
            if share is None:
                loaded = dataclasses.replace(self.models, disaggregated=disaggregated)
                self.models = prepared_models(loaded, implementation)
            if self._planned is None:
                self.decoding = default_sparse_mode(self.decoding, self.models, page_size, implementation)
            else:
                self._planned.check(self.models)
            self._readings = (self.decoding,) if self._planned is None else self._planned.readings
            usual = default_page_size(self._readings, self.models, implementation)
            self.page_size = usual if page_size is None else page_size
            self._footprint = Footprint.of(self.decoding, self.page_size)
            self.tokenizer = self.models.tokenizer
            self._set_up(given, None if share is None else share._preparer.automata)
            if compiles_at_start(compile_at_start):
                self.warm_up()
        except BaseException:  # whose traceback may be kept, and with it whatever refers to memory of the device
            self.close()
            raise

    def _with_memory_divided(self, given: dict[str, Any]) -> dict[str, Any]:
        """Arguments of an LLM beside this one, for what this one leaves to it: memory is divided by rows."""
        beside, pages = {name: given[name] for name in OF_ENGINE}, given["num_pages"]
        if self._exact is not None and (pages is None or isinstance(pages, float)):
            share_of_both, rows = pages or 1.0, self._exact.rows + self.decoding.rows
            given["num_pages"] = share_of_both * self.decoding.rows / rows
            beside["num_pages"] = share_of_both * self._exact.rows / rows
        return beside

    def _set_up(self, given: Mapping[str, Any], automata: Automata | None) -> None:
        """Takes memory for KV and makes the engine, as the arguments that were `given` say."""
        longest, max_model_len = self.models.max_position_embeddings, given["max_model_len"]
        if max_model_len is not None and max_model_len > longest:
            raise ValueError(f"max_model_len is {max_model_len} and the models end at {longest} positions; lower it.")
        self.max_model_len = max_model_len or min(DEFAULT_MAX_MODEL_LEN, longest)
        models, longest = self.models, self.max_model_len
        if not models.eos_token_ids:
            logger.warning("No file of the model names a token that ends an answer: answers end at max_tokens.")
        geometry = (longest, self.page_size, self._implementation)
        decoder = make_decoder(
            self.decoding,
            models.local_target,
            models.local_proposer,
            *geometry,
            disaggregated=models.disaggregated is not None,
        )
        workspace = 0 if models.sharded is None else models.sharded.workspace_bytes(decoder.implementation)
        self.num_pages = self._num_pages(
            decoder.page_bytes, workspace, given["num_pages"], given["gpu_memory_utilization"]
        )
        self._preparer: RequestPreparer = RequestPreparer(
            decoder,
            tokenizer=self.tokenizer,
            eos_token_ids=models.eos_token_ids,
            num_pages=self.num_pages,
            seed=given["seed"],
            automata=automata,
        )
        params = PairParams(models.target_params, models.draft_params)
        rows, drafts = decoder.decoding.rows, decoder.decoding.drafts
        sizes = ["max_num_seqs", *[decoder.decoding.rows_argument] * (rows > 1), *["gamma"] * drafts]
        programs = Programs(workspace, f"{', '.join(sizes)} or max_model_len")
        runner = Runner(decoder, params, self.num_pages, programs, models.sharded, self._readings)
        self._engine = Engine(
            runner,
            max_num_seqs=self.max_num_seqs,
            tokenizer=self.tokenizer,
            prefix_caching=given["enable_prefix_caching"],
            optimistic=given["admission"] == "optimistic",
            switch=None if self._planned is None else self._planned.switch(),
        )
        runner.take_memory()

    def _num_pages(
        self, page_bytes: int, workspace: int, num_pages: int | float | None, gpu_memory_utilization: float
    ) -> int:
        """The number of pages to take; the whole budget is logged before they are."""
        models = self.models
        weights = {"target": bytes_on_one(models.target_params)}
        if models.draft_params is not None:
            weights["draft"] = bytes_on_one((models.target_params, models.draft_params)) - weights["target"]
        scores = max(
            scores_bytes(
                models.local_target,
                one,
                requests=self.max_num_seqs,
                max_model_len=self.max_model_len,
                page_size=self.page_size,
                implementation=self._implementation,
            )
            for one in self._readings
        )
        chosen = choose_num_pages(
            num_pages,
            page_bytes=page_bytes,
            largest_request=self._footprint.worst_case(1, self.max_model_len),
            max_num_seqs=self.max_num_seqs,
            weight_bytes=sum(weights.values()),
            gpu_memory_utilization=gpu_memory_utilization,
            devices=models.devices,
            workspace_bytes=workspace,
            scores_bytes=scores,
            rows_argument=self.decoding.rows_argument,
        )
        device = memory_of_each(models.devices)
        logger.info("%s", Budget(device, weights, chosen * page_bytes, chosen, self.page_size, workspace, scores))
        return chosen

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answers prompts (text or {"prompt_token_ids": [...]}, one or a list) in their order.

        `sampling_params` is one for all or one a prompt. A request that cannot run raises ValueError naming its index
        before anything runs; one that fails while running ends with finish_reason "error" and costs no other anything.
        """
        checked = as_list(prompts)
        each = params_for_each(sampling_params, len(checked))
        by = [self._answering(one) for one in each]
        requests = self._preparer.requests(checked, each, [llm._preparer for llm in by])
        outputs: dict[str, RequestOutput] = {}
        for llm in dict.fromkeys(by):
            own = [request for request, its in zip(requests, by, strict=True) if its is llm]
            outputs |= {output.request_id: output for output in llm._run(own, use_tqdm)}
        return [outputs[request.request_id] for request in requests]

    def generate_stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[StreamChunk]:
        """Yields the answer to one prompt as it becomes certain; the chunks joined are what `generate` returns.

        Certain is what all particles that may still be selected begin with: after a resampling that is often much,
        without one it is as far as they happen to agree. With `SamplingParams(trace=True)` each cycle comes with a
        chunk too. A reader who stops iterating aborts the request. Raises ValueError at once for a request that cannot
        run.
        """
        params = params_for_each(sampling_params, 1)[0]
        request, llm = self.request(prompt, params), self._answering(params)
        chunks = Chunks(llm, request.request_id)
        with llm._turn:
            llm.engine.programs.shows_progress = True
            llm.engine.add_request(request, stream=True)
        return chunks

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answers a conversation, or a list of them, through the tokenizer's chat template."""
        if not isinstance(messages, list | tuple) or not messages:
            raise ValueError(f"messages must be a list of {{'role': …, 'content': …}} mappings, got {short(messages)}.")
        conversations: Any = [messages] if isinstance(messages[0], Mapping) else messages
        prompts: list[Prompt] = []
        for index, conversation in enumerate(conversations):
            try:
                prompts.append(self.chat_prompt(conversation))
            except ValueError as error:
                raise ValueError(f"request {index}: {error}") from None
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def chat_prompt(
        self, messages: Sequence[Mapping[str, Any]], template_variables: Mapping[str, Any] | None = None
    ) -> Prompt:
        """The prompt that the chat template makes of a conversation; raises ValueError where it makes none.

        `template_variables` are the template's own, as {"enable_thinking": False}.
        """
        if self.tokenizer is None:
            raise ValueError("the model directory has no tokenizer, and chat needs its chat template; use generate.")
        return {
            "prompt_token_ids": self.tokenizer.apply_chat_template(messages, template_variables, self.max_model_len)
        }

    @property
    def batch_cycles(self) -> dict[str, int]:
        """Cycles of the whole batch since construction, by decoder and reading of a sparse target, in its words."""
        beside = {} if self._beside is None else self._beside.batch_cycles
        return {str(one): count for one, count in self.engine.batch_cycles.items()} | beside

    def metrics(self) -> dict[str, float]:
        """Counters since construction, and the state of the KV pages."""
        with self._turn:
            engine = self.engine
            self._abort_cancelled()
            counts = engine.metrics()
        if self._beside is None:
            return counts
        beside = self._beside.metrics()
        return {name: count + beside.get(name, 0) for name, count in counts.items()}

    def close(self) -> None:
        """Frees the device memory. The object cannot be used afterwards, by those that wait for an answer neither.

        Closing again does nothing, but for what an interruption has left to do.
        """
        self._closed = True  # first, so that no other thread begins anything
        if self._beside is not None:
            self._beside.close()
        with self._turn:
            if self._engine is not None and self._owns_models:
                self._engine.close()
            elif self._engine is not None:
                self._engine.reset()
            self._engine = None
            if self._owns_models:
                delete((self.models.target_params, self.models.draft_params))

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{self.max_model_len} tokens, {self.num_pages} KV pages"
        return f"LLM({self._name}, {self.decoding}, {state})"

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def engine(self) -> Engine:
        """The engine that runs the requests. Raises ValueError once the LLM is closed."""
        if self._closed or self._engine is None:
            raise ValueError("this LLM is closed; make a new one.")
        return self._engine

    def request(self, prompt: Prompt, params: SamplingParams) -> Request:
        """A checked request for `engine.add_request` of `_answering`. Raises ValueError for one that cannot run."""
        return self._choices(prompt, params, [params.seed])[0]

    def _choices(self, prompt: Prompt, params: SamplingParams, seeds: Sequence[int | None]) -> list[Request]:
        """Likewise one for each of `seeds`, which stand in place of the parameters' own."""
        return self._preparer.choices(prompt, params, seeds, self._answering(params)._preparer)

    def _answering(self, params: SamplingParams) -> LLM:
        """The LLM on these models that answers a request: this one, or where no decoder was named an exact one."""
        if self._exact is None or self._closed or left_to_exact(self.decoding, params) is None:
            return self
        with self._making:
            if self._beside is None:
                self._beside = LLM(
                    share=self,
                    decoding=self._exact,
                    max_model_len=self.max_model_len,
                    compile_at_start=False,
                    **self._of_beside,
                )
            return self._beside

    def _accept(self, draft: Proposer) -> None:
        """Raises ValueError for drafts that the decoder cannot use, where no decoder was named but by an exact one."""
        try:
            self.decoding.check_draft(draft)
        except ValueError:
            if self._exact is None:
                raise
            self.decoding, self._exact = self._exact, None
            self.decoding.check_draft(draft)

    def warm_up(self, *, use_tqdm: bool = True) -> None:
        """Compiles the programs of every batch size, which otherwise wait for the first batch of that size."""
        with self._turn:
            self.engine.warm_up(use_tqdm=use_tqdm)

    def has_prepared(self, params: SamplingParams) -> bool:
        """True where the form that a request asks for is known already, as its automaton or by why it has none.

        Neither this nor a request with such parameters waits for a compilation.
        """
        return self._preparer.has_prepared(params)

    def prepare(self, params: SamplingParams) -> None:
        """Makes the automaton of the form that a request asks for, which may take seconds, if it asks for one.

        Raises ValueError where there is none. Any thread may call this before others have to wait for it.
        """
        self._preparer.prepare(params)

    def _run(self, requests: list[Request], use_tqdm: bool) -> list[RequestOutput]:
        """Answers all `requests`, at once as far as slots and memory allow."""
        from tqdm import tqdm  # a tenth of what the package takes to be imported

        ids = [request.request_id for request in requests]
        handle = RequestHandle(self, ids)
        try:
            with self._turn:
                engine = self.engine
                engine.programs.shows_progress = use_tqdm
                for request in requests:
                    self._awaited[request.request_id] = None
                    engine.add_request(request)
            with tqdm(total=len(ids), desc="Requests", disable=not use_tqdm, dynamic_ncols=True) as bar:
                while missing := {request_id for request_id in ids if self._awaited[request_id] is None}:
                    with self._turn:
                        if all(self._awaited[request_id] is None for request_id in missing):
                            self._advance_for(self.engine, missing)
                    bar.update(sum(self._awaited[request_id] is not None for request_id in missing))
            return [output for request_id in ids if (output := self._awaited[request_id]) is not None]
        finally:  # also after an interruption, when the caller has left
            handle.close()

    def _advance(self, engine: Engine, meanwhile: Callable[[], None] | None = None) -> None:
        """Steps everything in flight and keeps the outputs that callers await. The caller has the `_turn`.

        `meanwhile`: see `Engine.step`.
        """
        self._abort_cancelled()
        for output in engine.step(meanwhile):
            if output.request_id in self._awaited:
                self._awaited[output.request_id] = output

    def _advance_for(self, engine: Engine, awaited: set[str]) -> None:
        """Steps for the caller that awaits these requests. Raises RequestsLost if an error has ended some of them."""
        lost = {request_id for request_id in awaited if not engine.holds(request_id)}
        if lost:
            raise RequestsLost(lost)
        self._advance(engine)

    def _cancel(self, request_ids: Iterable[str]) -> None:
        """Notes that these requests' caller has left. At any time, and in any thread."""
        self._cancelled.extend(request_ids)

    def _abort_cancelled(self) -> None:
        """Aborts requests whose callers have left. The caller has the `_turn`, and no step is in progress."""
        while self._cancelled:
            request_id = self._cancelled[0]
            self._awaited.pop(request_id, None)
            if not self._closed and self._engine is not None:
                self._engine.abort(request_id)
                self._engine.forget(request_id)
            self._cancelled.popleft()  # last: what is interrupted before is done again


def _check_shares(share: LLM, given: Mapping[str, Any]) -> None:
    """Raises ValueError where `share` is no LLM with models, or an argument would ask for others."""
    if not isinstance(share, LLM) or share._closed:
        raise ValueError(f"share must be an LLM that is not closed, or None, got {short(share)}.")
    usual = inspect.signature(LLM).parameters
    for name in OF_MODELS:
        same = name == "implementation" and given[name] == share._implementation
        if given[name] != usual[name].default and not same:
            raise ValueError(f"{name} is {short(given[name])} and share brings the models; leave one of them out.")
