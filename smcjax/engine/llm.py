"""`LLM`: models, tokenizer and a decoder behind `generate` and `chat`."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import jax
from tqdm import tqdm

from smcjax import autoregressive, smc
from smcjax.autoregressive import Autoregressive
from smcjax.engine.batch import BatchRunner
from smcjax.engine.loading import load_models
from smcjax.engine.memory import Budget, buckets, choose_num_pages, device_memory, worst_case_pages
from smcjax.engine.outputs import RequestOutput
from smcjax.engine.programs import Programs, enable_compilation_cache
from smcjax.engine.requests import Prompt, Request, limit_of, listed, make_batch, params_for_each, short, tokenize
from smcjax.engine.results import assemble
from smcjax.engine.sampling_params import MAX_SEED, SamplingParams
from smcjax.model.quantize import check_quantization, quantize_params
from smcjax.smc import SMC

logger = logging.getLogger("smcjax")

DEFAULT_MAX_MODEL_LEN = 2048


class LLM:
    """A target model, a draft where the decoder needs one, and the programs that run them.

    Args:
        model: directory (or locally cached hub id) of the target; None for the bundled pair.
        draft_model: the same for the draft, of the same tokenizer. Only `SMC` reads it.
        decoding: `SMC(...)` (the default) or `Autoregressive()`.
        dtype: "auto" (bfloat16 on GPU, float32 on CPU), "bfloat16" or "float32".
        quantization, draft_quantization: "int8" keeps the target's, the draft's matrices as int8 with a scale a row,
            made when they are loaded; activations and KV stay in `dtype`.
        max_model_len: prompt and generated tokens of a request at most; None: 2048, or what the models allow if less.
        max_num_seqs: requests (not particles) in one batch.
        page_size: tokens in a KV page, 1 to 64.
        implementation: "auto" uses the GPU kernels where they apply, "xla" never.
        num_pages: KV pages, the trash page included; None: enough for `max_num_seqs` requests if memory allows.
        gpu_memory_utilization: share of the GPU's memory that weights and KV may take.
        tensor_parallel_size: 1.
        seed: of requests that bring none.

    Raises ValueError (one sentence: argument, value, mend) before anything runs. A context manager; `close` frees
    the device memory.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        draft_model: str | os.PathLike[str] | None = None,
        decoding: SMC | Autoregressive | None = None,
        dtype: str = "auto",
        quantization: str | None = None,
        draft_quantization: str | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int = 8,
        page_size: int = 16,
        implementation: str = "auto",
        num_pages: int | None = None,
        gpu_memory_utilization: float = 0.85,
        tensor_parallel_size: int = 1,
        seed: int = 0,
    ) -> None:
        self.decoding = SMC() if decoding is None else decoding
        if not isinstance(self.decoding, SMC | Autoregressive):
            raise ValueError(f"decoding must be SMC(...) or Autoregressive(), got {decoding!r}.")
        _check_path("model", model)
        _check_path("draft_model", draft_model)
        check_quantization("quantization", quantization)
        check_quantization("draft_quantization", draft_quantization)
        _check_range("max_num_seqs", max_num_seqs, 1, 4096)
        _check_range("page_size", page_size, 1, 64)
        if implementation not in ("auto", "xla"):
            raise ValueError(f"implementation must be 'auto' or 'xla', got {implementation!r}.")
        _check_range("seed", seed, 0, MAX_SEED)
        if max_model_len is not None:
            _check_range("max_model_len", max_model_len, 2, 1 << 20)
        if num_pages is not None:
            _check_range("num_pages", num_pages, 2, 1 << 30)
        if isinstance(tensor_parallel_size, bool) or tensor_parallel_size != 1:
            raise ValueError(f"tensor_parallel_size must be 1 in this version, got {tensor_parallel_size!r}.")
        if not _is_share(gpu_memory_utilization):
            raise ValueError(f"gpu_memory_utilization must be above 0 and at most 1, got {gpu_memory_utilization!r}.")

        enable_compilation_cache()
        self._smc = self.decoding if isinstance(self.decoding, SMC) else None
        if draft_quantization is not None and self._smc is None:
            raise ValueError(f"draft_quantization is {draft_quantization!r} and {self.decoding} has no draft; omit it.")
        self.models = load_models(model, draft_model, needs_draft=self._smc is not None, dtype=dtype)
        if quantization is not None:
            target_params = quantize_params(self.models.target_params, consume=True)
            self.models = dataclasses.replace(self.models, target_params=target_params)
        if draft_quantization is not None and self.models.draft_params is not None:
            draft_params = quantize_params(self.models.draft_params, consume=True)
            self.models = dataclasses.replace(self.models, draft_params=draft_params)
        self.tokenizer = self.models.tokenizer
        longest = self.models.max_position_embeddings
        if max_model_len is not None and max_model_len > longest:
            raise ValueError(f"max_model_len is {max_model_len} and the models end at {longest} positions; lower it.")
        self.max_model_len = max_model_len or min(DEFAULT_MAX_MODEL_LEN, longest)
        self.max_num_seqs = max_num_seqs
        self.page_size = page_size
        self._implementation = implementation
        self._seed = seed
        self._counter = 0
        self._totals = {"requests": 0, "cycles": 0, "resamples": 0, "generated_tokens": 0}

        decoder, program, params = self._decoder()
        self._rows = self._smc.n_particles if self._smc else 1
        self.num_pages = self._num_pages(num_pages, gpu_memory_utilization)
        self._programs = Programs()
        self._runner: BatchRunner | None = BatchRunner(decoder, program, params, self.num_pages, self._programs)

    def _decoder(self) -> tuple[ModuleType, Any, Any]:
        """The module that decodes, its static program, its parameters."""
        models = self.models
        geometry: dict[str, Any] = {
            "max_model_len": self.max_model_len,
            "page_size": self.page_size,
            "implementation": self._implementation,
        }
        if self._smc is not None:
            assert models.draft is not None
            assert models.draft_params is not None
            pair = smc.Program(self._smc, models.target, models.draft, **geometry)
            return smc, pair, smc.PairParams(models.target_params, models.draft_params)
        alone = autoregressive.Program(models.target, **geometry)
        return autoregressive, alone, models.target_params

    def _num_pages(self, num_pages: int | None, gpu_memory_utilization: float) -> int:
        """How many pages to take; the whole budget is logged before they are."""
        models = self.models
        configs = (models.target, models.draft)
        page_bytes = self.page_size * sum(config.kv_bytes_per_token for config in configs if config is not None)
        weights = {"target": _bytes_of(models.target_params)}
        if models.draft_params is not None:
            weights["draft"] = _bytes_of(models.draft_params)
        chosen = choose_num_pages(
            num_pages,
            page_bytes=page_bytes,
            largest_request=worst_case_pages(1, self.max_model_len, self._rows, self.page_size),
            max_num_seqs=self.max_num_seqs,
            weight_bytes=sum(weights.values()),
            gpu_memory_utilization=gpu_memory_utilization,
        )
        logger.info("%s", Budget(device_memory(), weights, chosen * page_bytes, chosen, self.page_size))
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
        checked = listed(prompts)
        params = params_for_each(sampling_params, len(checked))
        requests = []
        for index, (prompt, one) in enumerate(zip(checked, params, strict=True)):
            try:
                text, token_ids = tokenize(prompt, self.tokenizer, self.models.target.vocab_size)
                requests.append(self._request(index, text, token_ids, one))
            except ValueError as error:
                raise ValueError(f"request {index}: {error}") from None
        return self._run(requests, use_tqdm)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answers a conversation, or a list of them, through the tokenizer's chat template."""
        if self.tokenizer is None:
            raise ValueError("the model directory has no tokenizer, and chat needs its chat template; use generate.")
        if not isinstance(messages, list | tuple) or not messages:
            raise ValueError(f"messages must be a list of {{'role': …, 'content': …}} mappings, got {short(messages)}.")
        conversations: Any = [messages] if isinstance(messages[0], Mapping) else messages
        prompts: list[Prompt] = []
        for index, conversation in enumerate(conversations):
            try:
                prompts.append({"prompt_token_ids": self.tokenizer.apply_chat_template(conversation)})
            except ValueError as error:
                raise ValueError(f"request {index}: {error}") from None
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def metrics(self) -> dict[str, float]:
        """Counters since construction, and the state of the KV pages."""
        runner = self._open()
        return {
            "kv_pages_total": self.num_pages - 1,
            "kv_pages_free": runner.free_pages(),
            "num_running": 0,  # a batch runs to its end inside generate
            "num_waiting": 0,
            "compilations": len(self._programs),
            "compile_seconds": self._programs.seconds,
            **self._totals,
        }

    def close(self) -> None:
        """Frees the device memory. The object cannot be used afterwards; closing again does nothing."""
        if self._runner is not None:
            self._runner.close()
            self._runner = None

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> BatchRunner:
        if self._runner is None:
            raise ValueError("this LLM is closed; make a new one.")
        return self._runner

    def _request(self, index: int, text: str | None, token_ids: list[int], params: SamplingParams) -> Request:
        if self._smc is not None:
            _refuse_for_smc(params, self._smc)
        if params.stop_strings and self.tokenizer is None:
            raise ValueError("stop needs a tokenizer, which the model directory lacks; use stop_token_ids.")
        vocab_size = self.models.target.vocab_size
        extra = tuple(params.stop_token_ids or ())
        if any(token >= vocab_size for token in extra):
            raise ValueError(f"stop_token_ids holds {max(extra)}; ids of this model are 0 to {vocab_size - 1}.")
        stop_ids = extra if params.ignore_eos else (*self.models.eos_token_ids, *extra)
        if params.min_tokens > 0 and len(set(stop_ids)) >= vocab_size:
            raise ValueError(f"min_tokens is {params.min_tokens} and every token is a stop token; lower it to 0.")
        limit = limit_of(token_ids, params, self.max_model_len)
        pages = worst_case_pages(len(token_ids), limit, self._rows, self.page_size)
        if pages > self.num_pages - 1:
            raise ValueError(
                f"it may need {pages} KV pages and there are {self.num_pages - 1}; "
                "raise num_pages, or lower max_tokens or n_particles."
            )
        seed = params.seed if params.seed is not None else (self._seed + self._counter + index) & MAX_SEED
        return Request(
            request_id=str(self._counter + index),
            prompt=text,
            token_ids=token_ids,
            params=params,
            limit=limit,
            stop_ids=stop_ids,
            seed=seed,
            worst_case_pages=pages,
        )

    def _run(self, requests: list[Request], use_tqdm: bool) -> list[RequestOutput]:
        """Batches in order: as many of the next requests as slots and worst-case pages allow, each to its end."""
        runner = self._open()
        self._counter += len(requests)
        outputs: list[RequestOutput] = []
        with tqdm(total=len(requests), desc="Requests", disable=not use_tqdm, dynamic_ncols=True) as bar:
            while len(outputs) < len(requests):
                chosen = self._next_batch(requests[len(outputs) :])
                size = min(size for size in buckets(self.max_num_seqs) if size >= len(chosen))
                batch = make_batch(
                    chosen, size, max_model_len=self.max_model_len, vocab_size=self.models.target.vocab_size
                )
                program = runner.program
                if any(request.params.truncates for request in chosen):
                    program = dataclasses.replace(program, truncates=True)
                result = runner.run(batch, program, bar.update)
                for group, request in enumerate(chosen):
                    outputs.append(assemble(request, group, result, self._smc, self.tokenizer))
                    self._count(outputs[-1])
        return outputs

    def _next_batch(self, waiting: Sequence[Request]) -> list[Request]:
        chosen: list[Request] = []
        pages = 0
        for request in waiting[: self.max_num_seqs]:
            pages += request.worst_case_pages
            if pages > self.num_pages - 1:
                break
            chosen.append(request)
        return chosen

    def _count(self, output: RequestOutput) -> None:
        self._totals["requests"] += 1
        self._totals["cycles"] += output.metrics.cycles
        self._totals["resamples"] += output.metrics.resamples
        self._totals["generated_tokens"] += output.metrics.generated_tokens


def _bytes_of(params: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(params))


def _check_range(name: str, value: object, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ValueError(f"{name} must be a whole number from {least} to {most}, got {value!r}.")


def _check_path(name: str, value: object) -> None:
    if not isinstance(value, str | os.PathLike | None):
        raise ValueError(f"{name} must be a model directory or a hub id, or None for the bundled pair, got {value!r}.")


def _is_share(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 1


def _refuse_for_smc(params: SamplingParams, decoding: SMC) -> None:
    """What SMC cannot do exactly it refuses, saying why and what to use (ALGORITHM.md)."""
    if params.temperature == 0:
        raise ValueError(
            "temperature is 0, where every draft token that differs from the target's would weigh nothing; "
            "use decoding=Autoregressive(), whose greedy decoding is exact, or a temperature above 0."
        )
    if params.truncates:
        raise ValueError(
            f"top_k is {params.top_k} and top_p is {params.top_p}, and draft tokens outside the kept set would weigh "
            "nothing; use decoding=Autoregressive(), which honours them, or leave them out."
        )
    if params.stop_strings and decoding.power != 1.0:
        raise ValueError(
            f"stop strings change the law at power {decoding.power}; use power=1, or stop_token_ids, which are exact."
        )
