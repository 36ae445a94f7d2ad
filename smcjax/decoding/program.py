"""The static description of a decoder's programs: the choice of decoder, its models and its shapes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any, Concatenate, Literal, cast

from smcjax.checks import short
from smcjax.decoders import Decoding, Speculation
from smcjax.decoders.parts import Potential, hidden_size_of
from smcjax.decoding.drafts.draft_model import DraftModel
from smcjax.decoding.drafts.proposer import FeatureProposer, Proposer
from smcjax.decoding.groups import Memory, PairParams
from smcjax.kv import PagePool, pages_for
from smcjax.model.config import ModelConfig
from smcjax.model.decoder import AuxHiddenStates
from smcjax.model.paged import create_cache, reads_by_kernels
from smcjax.pallas.dispatch import implementations

Name = Literal["truncation", "control", "grammar", "adjustments", "logprobs", "prompt_logprobs", "text_potentials"]
Feature = Name | Potential


def by_implementation[**P, R](
    function: Callable[Concatenate[Any, P], R],
) -> Callable[Concatenate[Any, P], R]:
    """A function of a program first, traced with the implementations that the program asks for."""

    @functools.wraps(function)
    def call(program: Any, *args: P.args, **kwargs: P.kwargs) -> R:
        with implementations(program.implementation):
            return function(program, *args, **kwargs)

    return call


@dataclasses.dataclass(frozen=True)
class Program[D: Decoding]:
    """All that is static about a decoder. Hashable: a static argument of `jax.jit`.

    Attributes:
        decoding: the decoder, with its options.
        target: the target model.
        draft: the proposer; a `ModelConfig` stands for the `DraftModel` of it. None for decoders without drafts.
        max_model_len: prompt and generated tokens of a row at most.
        page_size: B, tokens of a KV page.
        implementation: of operations, as `smcjax.pallas.dispatch.implementations` takes it.
        features: what the requests of the program's batches may bring beside the plain options; a program without one
            does not know of it. "truncation": top_k and top_p, which sort a vocabulary at every step. "control": a
            control of its own for `SMC(control=0)`, for which whole distributions of drafts are kept. "adjustments":
            `Requests.adjustments`. "grammar": the forms of answers, `Memory.automata`.
            "text_potentials": values that the host sends (`smcjax.smc.steering`). A `Potential`: that factor, of
            requests which ask for it.
            "logprobs": the `Scores` of new tokens in reports (`smcjax.decoding.scores`); "prompt_logprobs": those of
            the prompt's tokens.
        disaggregated_axis: the mesh axis of two devices, one of which drafts while the other scores. Only a decoder
            whose drafts do not wait for scores can do so (`SMC(pipelined=True)`). None: each device does both.

    Raises ValueError for a draft or a target that does not suit the decoder, a draft or a potential that does not suit
    the target.
    """

    decoding: D
    target: ModelConfig
    draft: Proposer | ModelConfig | None
    max_model_len: int
    page_size: int = 16
    implementation: str = "auto"
    features: frozenset[Feature] = frozenset()
    disaggregated_axis: str | None = None

    def __post_init__(self) -> None:
        if self.proposer is not None:
            self.proposer.check(self.target)
        self._check_draft()
        self._check_potentials((*getattr(self.decoding, "potentials", ()), *self.requested_potentials))
        if self.speculation.sparse is not None:
            self.speculation.sparse.check(self.target.selecting.values())

    def check(self, params: Any) -> None:
        """Raises ValueError for `SamplingParams` that the decoder cannot honour exactly, or not with these drafts."""
        self.decoding.check(params)
        self._check_draft(params.control)
        self._check_potentials(params.device_potentials)

    def _check_potentials(self, potentials: Iterable[Potential]) -> None:
        for one in potentials:
            if (size := hidden_size_of(one)) not in (None, self.target.hidden_size):
                raise ValueError(
                    f"the potential {short(one)} reads hidden states of {size} numbers and the target's have "
                    f"{self.target.hidden_size}; use one that was made for this model."
                )

    def _check_draft(self, control: float | None = None) -> None:
        if self.proposer is not None:
            self.decoding.check_draft(self.proposer, control)

    @property
    def ragged(self) -> bool:
        """True where drafts can be rejected."""
        return "control" in self.features or self.decoding.ragged

    @property
    def requested_potentials(self) -> tuple[Potential, ...]:
        """The potentials among the features, in a fixed order."""
        return tuple(sorted((one for one in self.features if not isinstance(one, str)), key=repr))

    @property
    def proposer(self) -> Proposer | None:
        """The way that tokens are drafted; None for decoders without drafts."""
        return DraftModel(self.draft) if isinstance(self.draft, ModelConfig) else self.draft

    @property
    def features_proposer(self) -> FeatureProposer:
        """The proposer, of programs that have `aux_hidden_states`."""
        return cast(FeatureProposer, self.proposer)

    def aux_hidden_states(self) -> AuxHiddenStates | None:
        """A collector for one forward of the target; None if the proposer reads no hidden states."""
        proposer = self.proposer
        return None if proposer is None or not proposer.aux_layers else AuxHiddenStates(proposer.aux_layers)

    @property
    def speculation(self) -> Speculation:
        """The numbers of a cycle."""
        return self.decoding.speculation

    @property
    def rows(self) -> int:
        """N, rows of a group."""
        return self.speculation.rows

    @property
    def max_tokens(self) -> int:
        """T_max of the token buffer: the longest sequence and one block beyond it."""
        return self.max_model_len + self.speculation.width

    @property
    def max_pages(self) -> int:
        """M, pages of the longest sequence."""
        return pages_for(self.max_model_len, self.page_size)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in all models."""
        own = self.target.page_bytes(self.page_size)
        return own + (0 if self.proposer is None else self.proposer.page_bytes(self.page_size))

    @by_implementation
    def prefills_by_kernels(self, memory: Memory, columns: int) -> bool:
        """True where a chunk of `columns` prompt tokens of one row costs no more memory than a short one."""
        target = reads_by_kernels(self.target, memory.target, columns=columns)
        return target and (self.proposer is None or self.proposer.prefills_by_kernels(memory.draft, columns))

    def create_memory(self, params: PairParams, num_pages: int) -> Memory:
        """Empty memory of `num_pages` pages, the trash page included, in each model's dtype."""
        target = create_cache(self.target, params.target, num_pages=num_pages, page_size=self.page_size)
        draft = None if self.proposer is None else self.proposer.create_memory(params.draft, num_pages, self.page_size)
        return Memory(PagePool.create(num_pages), target, draft)
