"""The target's own answers to prompts, as padded rows for training, and batches of them of about equal tokens."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from smcjax.decoders import Autoregressive, Rejection
from smcjax.engine.llm import LLM
from smcjax.engine.requests.sampling_params import MAX_SEED, SamplingParams
from smcjax.engine.results.outputs import RequestOutput

Asked = str | list[dict[str, Any]]  # a prompt, or messages
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


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the target's answers are drawn: by an exact decoder, with the draft as it is."""

    temperature: float = 0.7  # of target and draft, here and in the divergences: the one that SMC is to run at
    max_tokens: int = 256  # of an answer, at most
    seed: int = 0  # of all answers
    max_num_seqs: int = 32  # requests at once
    max_model_len: int | None = None  # prompt and answer together; None: what the models allow


def sample_outputs(
    sampling: Sampling,
    kinds: Sequence[Sequence[Asked]],
    *,
    samples: int = 1,
    on_line: Callable[[str], None] = lambda _: None,
    **models: Any,
) -> list[list[RequestOutput]]:
    """The target's answers to prompts of several kinds, `samples` of each prompt; requests that fail are left out.

    Each output has the text of its prompt. `models` are arguments of `LLM`. Raises ValueError where a kind has no
    answer, or a prompt cannot run.
    """
    began, found = time.perf_counter(), []
    alone = models["model"] is not None and models.get("draft_model") is None
    with LLM(
        **models,
        decoding=Autoregressive() if alone else Rejection(8),
        max_num_seqs=sampling.max_num_seqs,
        max_model_len=sampling.max_model_len,
        compile_at_start=False,
    ) as llm:
        decode = (lambda ids: "") if llm.tokenizer is None else llm.tokenizer.decode
        for number, asked in enumerate(kinds):
            prompts = [one if isinstance(one, str) else llm.chat_prompt(one) for one in asked for _ in range(samples)]
            seed = (2 * sampling.seed + number) * 1_000_003
            params = [
                SamplingParams(
                    max_tokens=sampling.max_tokens,
                    temperature=sampling.temperature,
                    seed=(seed + index) & MAX_SEED,
                )
                for index in range(len(prompts))
            ]
            outputs = llm.generate(prompts, params, use_tqdm=False)
            outputs = [one for one in outputs if one.error is None and one.outputs[0].token_ids]
            if not outputs:
                raise ValueError("prompts gave no answer of the target; look at its answers by smcjax generate.")
            # The prompt that a potential of text is asked about, as in `smcjax.engine.results.steering`.
            texts = (one.prompt if one.prompt is not None else decode(one.prompt_token_ids) for one in outputs)
            found.append([dataclasses.replace(one, prompt=text) for one, text in zip(outputs, texts, strict=True)])
    on_line(f"answers of the target drawn in {time.perf_counter() - began:.0f} s")
    return found


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
