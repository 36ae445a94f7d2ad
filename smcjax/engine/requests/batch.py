"""Parameters of joining requests as host arrays: a row for each slot that a group may join."""

from __future__ import annotations

import dataclasses

import numpy as np

from smcjax.engine.requests.sampling_params import MAX_BIASED_TOKENS


@dataclasses.dataclass(frozen=True)
class Batch:
    """G requests as host arrays; `present` marks those that are real."""

    prompts: np.ndarray  # [G, max_model_len] int32
    prompt_length: np.ndarray  # [G] int32
    limit: np.ndarray  # [G] int32
    min_tokens: np.ndarray  # [G] int32
    temperature: np.ndarray  # [G] float32
    top_k: np.ndarray  # [G] int32
    top_p: np.ndarray  # [G] float32
    stops: np.ndarray  # [G, V] bool
    control: np.ndarray  # [G] float32; below 0: the decoder's
    automaton: np.ndarray  # [G] int32; −1: the request has none
    repetition: np.ndarray  # [G] float32, as the four that follow a field of `smcjax.decoding.adjustments.Adjustments`
    frequency: np.ndarray  # [G] float32
    presence: np.ndarray  # [G] float32
    biased: np.ndarray  # [G, B] int32; V: no token's
    bias: np.ndarray  # [G, B] float32
    seed: np.ndarray  # [G] uint32
    present: np.ndarray  # [G] bool

    @classmethod
    def empty(cls, size: int, *, max_model_len: int, vocab_size: int) -> Batch:
        """Absent groups with harmless values."""
        return cls(
            prompts=np.zeros((size, max_model_len), np.int32),
            prompt_length=np.ones(size, np.int32),
            limit=np.ones(size, np.int32),
            min_tokens=np.zeros(size, np.int32),
            temperature=np.ones(size, np.float32),
            top_k=np.full(size, vocab_size, np.int32),
            top_p=np.ones(size, np.float32),
            stops=np.zeros((size, vocab_size), bool),
            control=np.full(size, -1, np.float32),
            automaton=np.full(size, -1, np.int32),
            repetition=np.ones(size, np.float32),
            frequency=np.zeros(size, np.float32),
            presence=np.zeros(size, np.float32),
            biased=np.full((size, MAX_BIASED_TOKENS), vocab_size, np.int32),
            bias=np.zeros((size, MAX_BIASED_TOKENS), np.float32),
            seed=np.zeros(size, np.uint32),
            present=np.zeros(size, bool),
        )
