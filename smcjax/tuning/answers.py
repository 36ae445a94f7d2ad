"""The target's own answers to prompts, as padded rows for training, and batches of them of about equal tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from smcjax.engine.llm import LLM
from smcjax.engine.requests.requests import Prompt
from smcjax.engine.requests.sampling_params import MAX_SEED, SamplingParams
from smcjax.engine.results.outputs import RequestOutput

_WIDTHS = 64  # rows are padded to multiples of this


@dataclasses.dataclass(frozen=True)
class Answers:
    """Texts of prompt and answer, padded with 0 to the longest."""

    tokens: Int[np.ndarray, "n T"]  # int32
    prompt: Int[np.ndarray, " n"]  # tokens of each prompt
    answer: Int[np.ndarray, " n"]  # tokens of each answer, EOS included

    def __len__(self) -> int:
        """n, the number of texts."""
        return len(self.tokens)

    @property
    def longest(self) -> int:
        """Tokens of the longest answer."""
        return int(self.answer.max())


def sample_answers(
    llm: LLM, prompts: Sequence[Prompt], *, temperature: float, max_tokens: int, seed: int, use_tqdm: bool = False
) -> Answers:
    """One sample of the target's law for each prompt, by an exact decoder; prompts whose request fails are left out.

    Raises ValueError where none is left, or a prompt cannot run.
    """
    outputs = sample_outputs(llm, prompts, temperature=temperature, max_tokens=max_tokens, seed=seed, use_tqdm=use_tqdm)
    return answers_of(outputs)


def sample_outputs(
    llm: LLM, prompts: Sequence[Prompt], *, temperature: float, max_tokens: int, seed: int, use_tqdm: bool = False
) -> list[RequestOutput]:
    """The outputs that `sample_answers` makes rows of."""
    if not llm.decoding.exact:
        raise ValueError(f"the decoder is {llm.decoding}, whose answers are not the target's own; use an exact one.")
    params = [
        SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=(seed * 1_000_003 + index) & MAX_SEED)
        for index in range(len(prompts))
    ]
    outputs = llm.generate(list(prompts), params, use_tqdm=use_tqdm)
    outputs = [one for one in outputs if one.error is None and one.outputs[0].token_ids]
    if not outputs:
        raise ValueError("prompts gave no answer of the target; look at its answers by smcjax generate.")
    return outputs


def answers_of(outputs: Sequence[RequestOutput]) -> Answers:
    """Prompts and answers of outputs as rows."""
    texts = [(one.prompt_token_ids, one.outputs[0].token_ids) for one in outputs]
    tokens = np.zeros((len(texts), max(len(prompt) + len(answer) for prompt, answer in texts)), np.int32)
    for row, (prompt, answer) in zip(tokens, texts, strict=True):
        row[: len(prompt) + len(answer)] = [*prompt, *answer]
    lengths = np.array([(len(prompt), len(answer)) for prompt, answer in texts], np.int32)
    return Answers(tokens, lengths[:, 0], lengths[:, 1])


class Batch(NamedTuple):
    """Rows of one width. A row of `counted` all False stands for none."""

    rows: Int[np.ndarray, " B"]  # of the answers; 0 for none
    tokens: Int[np.ndarray, "B W"]
    places: Int[np.ndarray, "B A"]  # where in `tokens` each token of the answer is predicted
    answer: Int[np.ndarray, "B A"]
    counted: Bool[np.ndarray, "B A"]


class Batches:
    """Cuts answers into batches, each of rows of like length and of about `batch_tokens` tokens with padding.

    So each token of an answer weighs the same in training, whichever text it stands in, and a step costs the same
    whether its texts are long or short.
    """

    def __init__(self, answers: Answers, batch_tokens: int) -> None:
        self.answers = answers
        widths = -(-(answers.prompt + answers.answer - 1) // _WIDTHS) * _WIDTHS
        self.buckets = [np.flatnonzero(widths == width) for width in np.unique(widths)]
        self.widths = [int(width) for width in np.unique(widths)]
        self.sizes = [
            min(max(1, batch_tokens // width), len(bucket))
            for width, bucket in zip(self.widths, self.buckets, strict=True)
        ]

    def __len__(self) -> int:
        """The number of batches in an epoch, which shows every row once."""
        return sum(-(-len(bucket) // size) for bucket, size in zip(self.buckets, self.sizes, strict=True))

    @property
    def tokens_per_batch(self) -> float:
        """Mean number of answers' tokens in a batch."""
        return float(self.answers.answer.sum()) / len(self)

    def epoch(self, rng: np.random.Generator | None = None) -> list[Batch]:
        """All rows once, in random order, or without `rng` as they come."""
        batches = []
        for number, (bucket, size) in enumerate(zip(self.buckets, self.sizes, strict=True)):
            order = bucket if rng is None else rng.permutation(bucket)
            batches += [self._batch(number, order[begin : begin + size]) for begin in range(0, len(order), size)]
        if rng is not None:
            rng.shuffle(batches)
        return batches

    def _batch(self, bucket: int, rows: np.ndarray) -> Batch:
        answers, width, size = self.answers, self.widths[bucket], self.sizes[bucket]
        longest = int(answers.answer[self.buckets[bucket]].max())
        padded = np.zeros(size, np.int64)
        padded[: len(rows)] = rows
        there = np.arange(size) < len(rows)
        index = np.arange(longest)
        counted = (index < answers.answer[padded][:, None]) & there[:, None]
        places = np.where(counted, answers.prompt[padded][:, None] - 1 + index, 0).astype(np.int32)
        tokens = np.zeros((size, width + 1), np.int32)
        kept = min(width + 1, answers.tokens.shape[1])
        tokens[:, :kept] = answers.tokens[padded, :kept]
        answer = np.where(counted, np.take_along_axis(tokens, places + 1, axis=1), 0)
        return Batch(padded, tokens[:, :width], places, answer, counted)
