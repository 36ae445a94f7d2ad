"""The decoders of one pair of models as virtual models, each an `AsyncLLM` of its own on the same weights."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import time
from collections.abc import Sequence
from typing import Any

from smcjax.decoders import SMC, Autoregressive, Decoding, Rejection
from smcjax.engine.async_llm import AsyncLLM
from smcjax.engine.sampling_params import SamplingParams
from smcjax.plain import short
from smcjax.server.errors import APIError


@dataclasses.dataclass(frozen=True)
class VirtualModel:
    """A decoder under a name that requests may ask for."""

    name: str
    llm: AsyncLLM
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))  # seconds since 1970

    @property
    def decoding(self) -> Decoding:
        """The decoder's choice."""
        return self.llm.llm.decoding

    @property
    def fingerprint(self) -> str:
        """A text that changes with what could change the tokens of a seed."""
        return f"smcjax-{label_of(self.decoding)}"

    def description(self) -> dict[str, Any]:
        """The decoder in replies."""
        decoding = self.decoding
        numbers: dict[str, float | None] = {}
        if isinstance(decoding, SMC):
            numbers = {"n_particles": decoding.n_particles, "gamma": decoding.gamma, "control": decoding.control}
        elif isinstance(decoding, Rejection):
            numbers = {"n_candidates": decoding.n_candidates, "gamma": decoding.gamma}
        return {"decoder": self.name, "decoding": decoding.name, "exact": decoding.exact, **numbers}


class Models:
    """The virtual models of a server. The first one also answers to the pair's own name.

    Attributes:
        name: the pair's.
        all: the virtual models in their order.
    """

    def __init__(self, name: str, llms: Sequence[AsyncLLM]) -> None:
        self.name = name
        self.all = [VirtualModel(f"{name}:{label_of(llm.llm.decoding)}", llm) for llm in llms]
        self._by_name = {model.name: model for model in self.all}
        if len(self._by_name) < len(self.all):
            raise ValueError(f"two decoders would both be called {_twice(self.all)}; leave one of them out.")
        self._by_name[name] = self.all[0]

    @property
    def exact(self) -> VirtualModel | None:
        """The virtual model that answers at temperature 0, with top_k, top_p, penalties and biases.

        It is the first one without weights.
        """
        return next((model for model in self.all if not model.decoding.weighted), None)

    def named(self, name: str | None) -> VirtualModel:
        """The model of this name, the first one for None. Raises APIError where there is none."""
        if name is None:
            return self.all[0]
        if name not in self._by_name:
            there = ", ".join(sorted(self._by_name))
            message = f"model {short(name)} does not exist here; use one of {there}."
            raise APIError(404, message, param="model", code="model_not_found")
        return self._by_name[name]

    def answering(self, asked: VirtualModel, params: SamplingParams) -> tuple[VirtualModel, str | None]:
        """The model that answers in place of the one that was asked for, and why; (asked, None) where it does."""
        if not asked.decoding.weighted or self.exact is None:
            return asked, None
        if params.temperature == 0:
            return self.exact, "temperature is 0, which an exact decoder answers"
        if params.truncates:
            return self.exact, "top_k or top_p cuts the distribution, which an exact decoder honours"
        if params.adjusts:
            return self.exact, f"{params.adjustments[0]} changes the distribution, which an exact decoder honours"
        return asked, None

    @property
    def names(self) -> list[str]:
        """All names that a request may give, the pair's own first."""
        return [self.name, *(model.name for model in self.all)]

    @property
    def closed(self) -> bool:
        """True where some model can answer no more."""
        return any(model.llm.closed for model in self.all)

    async def close(self) -> None:
        """Closes all, those that share another's weights before it."""
        for model in sorted(self.all, key=lambda model: model.llm.llm.owns_models):
            with contextlib.suppress(asyncio.CancelledError):
                await model.llm.close()


def label_of(decoding: Decoding) -> str:
    """The decoder's part of a virtual model's name, such as smc-n8-k8 or rejection-k4."""
    parts = [decoding.name]
    if isinstance(decoding, SMC):
        parts += [f"n{decoding.n_particles}", f"k{decoding.gamma}"]
        parts += [f"c{decoding.control:g}"] if decoding.control else []
        parts += [f"w{decoding.watchdog:g}"] if decoding.watchdog is not None else []
        parts += [f"p{decoding.power:g}"] if decoding.power != 1 else []
        parts += ["early"] if decoding.early_end else []
    elif isinstance(decoding, Rejection):
        parts += [f"n{decoding.n_candidates}"] if decoding.n_candidates > 1 else []
        parts += ["tree" if decoding.tree is not None else f"k{decoding.gamma}"]
        parts += ["block"] if decoding.verification == "block" else []
    return "-".join(parts)


def _twice(models: Sequence[VirtualModel]) -> str:
    names = [model.name for model in models]
    return next(name for name in names if names.count(name) > 1)


def with_exact(decodings: Sequence[Decoding]) -> list[Decoding]:
    """`decodings` with an exact one, where none of them is: `Rejection`, by the same draft."""
    if not all(decoding.weighted for decoding in decodings):
        return list(decodings)
    sparse = decodings[0].speculation.sparse
    if sparse is not None and sparse.precision == "approximate":
        return [*decodings, Autoregressive()]
    return [*decodings, Rejection(sparse=sparse)]


def base_name(model: str | os.PathLike[str] | None) -> str:
    """The pair's name: that of the target's directory or file, or hub id."""
    return "bundled" if model is None else os.path.basename(os.path.normpath(os.fspath(model))) or "model"


def load(
    model: str | None,
    decodings: Sequence[Decoding],
    *,
    name: str | None = None,
    max_waiting: int | None = None,
    max_num_seqs: int = 8,
    seed: int = 0,
    **of_models: Any,
) -> Models:
    """Loads the pair once and makes a virtual model of each decoder; `of_models` are further arguments of `LLM`."""
    shared = {"max_model_len", "page_size", "num_pages", "admission", "compile_at_start"}
    per_llm = {key: value for key, value in of_models.items() if key in shared}
    per_llm |= {"max_num_seqs": max_num_seqs, "seed": seed, "kv_fraction": 1 / len(decodings)}
    # Whoever needs a draft loads it for all.
    first = next((index for index, decoding in enumerate(decodings) if decoding.drafts), 0)
    owner = AsyncLLM(model, decoding=decodings[first], max_waiting=max_waiting, **{**of_models, **per_llm})
    llms = []
    for index, decoding in enumerate(decodings):
        if index == first:
            llms.append(owner)
        else:
            llms.append(AsyncLLM(share=owner.llm, decoding=decoding, max_waiting=max_waiting, **per_llm))
    return Models(name or base_name(model), llms)
