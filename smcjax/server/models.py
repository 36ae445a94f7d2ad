"""The decoders of one pair of models as virtual models, each an `AsyncLLM` of its own on the same weights."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import os
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from smcjax.auto import Auto, exact_beside, gives_draft, left_to_exact
from smcjax.checks import short
from smcjax.decoders import SMC, Decoding, Rejection
from smcjax.engine.arguments import compiles_at_start
from smcjax.engine.async_llm import AsyncLLM
from smcjax.engine.requests.sampling_params import SamplingParams
from smcjax.planner import Profile
from smcjax.planner.laws import as_json
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
        options = hashlib.sha256(repr(self.decoding).encode()).hexdigest()
        return f"smcjax-{label_of(self.decoding)}-{options[:8]}"

    def description(self) -> dict[str, Any]:
        """The decoder in replies."""
        decoding = self.decoding
        numbers: dict[str, float | str | None] = {}
        if isinstance(decoding, SMC):
            numbers = {
                "n_particles": decoding.n_particles,
                "gamma": decoding.gamma,
                "control": decoding.rejection_control,
            }
            numbers |= {"pipelined": True} if decoding.pipelined else {}
            numbers |= {"select": "best"} if decoding.select == "best" else {}
        elif isinstance(decoding, Rejection):
            numbers = {"n_candidates": decoding.n_candidates, "gamma": decoding.gamma}
        return {"decoder": self.name, "decoding": decoding.name, "exact": decoding.exact, **numbers}


class Models:
    """The virtual models of a server, in their order. The first one also answers to `name`, the pair's own."""

    def __init__(self, name: str, llms: Sequence[AsyncLLM]) -> None:
        self.name = name
        self.all = [VirtualModel(f"{name}:{label_of(llm.llm.decoding)}", llm) for llm in llms]
        self._by_name = {model.name: model for model in self.all}
        if len(self._by_name) < len(self.all):
            ((twice, _),) = Counter(model.name for model in self.all).most_common(1)
            raise ValueError(f"two decoders would both be called {twice}; leave one of them out.")
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
        exact = self.exact
        why = None if exact is None else left_to_exact(asked.decoding, params)
        return (asked, None) if exact is None or why is None else (exact, why)

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
        for model in sorted(self.all, key=lambda model: model.llm.llm._owns_models):
            with contextlib.suppress(asyncio.CancelledError):
                await model.llm.close()


def label_of(decoding: Decoding) -> str:
    """The decoder's part of a virtual model's name, such as smc-n8-k8 or rejection-k4."""
    parts = [decoding.name]
    if isinstance(decoding, SMC):
        parts += [f"n{decoding.n_particles}", f"k{decoding.gamma}"]
        parts += [f"c{decoding.rejection_control:g}"] if decoding.rejection_control else []
        parts += [f"p{decoding.power:g}"] if decoding.power != 1 else []
        parts += ["early"] if decoding.early_end else []
        parts += ["pipelined"] if decoding.pipelined else []
    elif isinstance(decoding, Rejection):
        parts += [f"n{decoding.n_candidates}"] if decoding.n_candidates > 1 else []
        parts += [f"k{decoding.gamma}" if decoding.tree is None else f"tree{'x'.join(map(str, decoding.tree))}"]
    else:  # one that is not ours, by all that is said of it
        parts += [f"{name}{value}" for name, value in as_json(decoding).items() if name not in ("decoder", "sparse")]
    return "-".join(parts)


def with_exact(
    decodings: Sequence[Decoding | Auto], profile: str | os.PathLike[str] | None = None
) -> list[Decoding | Auto]:
    """`decodings` with an exact one, where none of them is: `Rejection`, by the same draft, or one by the `profile`.

    Raises ValueError for a profile where the exact decoder is named.
    """
    if any(isinstance(one, Auto) or not one.weighted for one in decodings):
        if profile is not None and not any(isinstance(one, Auto) for one in decodings):
            raise ValueError("profile is given and an exact decoder is named; leave one of them out.")
        return list(decodings)
    first = decodings[0]
    assert isinstance(first, Decoding)
    exact = exact_beside(first)
    return [*decodings, exact if profile is None else Auto(sparse=exact.speculation.sparse, profile=profile)]


def base_name(model: str | os.PathLike[str] | None) -> str:
    """The pair's name: that of the target's directory or file, or hub id."""
    return "bundled" if model is None else os.path.basename(os.path.normpath(os.fspath(model))) or "model"


def load(
    model: str | None,
    decodings: Sequence[Decoding | Auto],
    *,
    name: str | None = None,
    max_waiting: int | None = None,
    max_num_seqs: int = 8,
    seed: int = 0,
    compile_at_start: bool | None = None,
    **of_models: Any,
) -> Models:
    """Loads the pair once and makes a virtual model of each decoder; `of_models` are further arguments of `LLM`.

    The profile of an `Auto` among the decoders is read before any weights are. All are checked before any is compiled.
    """
    shared = {"max_model_len", "page_size", "num_pages", "admission"}
    per_llm = {key: value for key, value in of_models.items() if key in shared}
    per_llm |= {"max_num_seqs": max_num_seqs, "seed": seed, "num_pages": per_llm.get("num_pages") or 1 / len(decodings)}
    per_llm |= {"max_waiting": max_waiting, "compile_at_start": False}
    has_draft = gives_draft(model, of_models.get("draft_model"), of_models.get("draft_drop_layers"))
    for one in decodings:
        if isinstance(one, Auto) and one.profile is not None:
            one.candidates(Profile.load(one.profile), has_draft=has_draft)
    # The first decoder that needs a draft loads it for all, on the devices that any needs. One by a profile may need
    # none.
    drafting = sorted(
        (isinstance(one, Auto), not (isinstance(one, Decoding) and one.overlaps), at)
        for at, one in enumerate(decodings)
        if one.drafts
    )
    first = drafting[0][-1] if drafting else 0
    llms: dict[int, AsyncLLM] = {}
    try:
        llms[first] = AsyncLLM(model, decoding=decodings[first], **{**of_models, **per_llm})
        for at, one in enumerate(decodings):
            if at != first:
                llms[at] = AsyncLLM(share=llms[first].llm, decoding=one, **per_llm)
        models = Models(name or base_name(model), [llms[at] for at in range(len(decodings))])
        if compiles_at_start(compile_at_start):
            for llm in llms.values():
                llm.llm.warm_up()
    except BaseException:
        for llm in reversed(llms.values()):
            llm.llm.close()
        raise
    return models
