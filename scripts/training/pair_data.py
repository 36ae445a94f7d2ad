"""Tokenizer and token arrays for `train_pair.py`. Imports no JAX: worker processes run it."""

from __future__ import annotations

import concurrent.futures
import functools
import json
import multiprocessing
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from smcjax.tasks.word_problems import completion, generate

PAD, BOS, EOS = 0, 1, 2
SPECIAL_TOKENS = ["<pad>", "<bos>", "<eos>"]
# A digit is a token, so that numbers are read and written digit by digit; so is a newline, so that a question's tokens
# do not depend on whether the solution follows.
PRE_TOKENS = r"\p{N}|\n| ?\p{L}+| ?[^\s\p{L}\p{N}]+|[^\S\n]"
# The newline is an expression, because Jinja drops one that ends a template.
CHAT_TEMPLATE = "{{ bos_token + messages[-1]['content'] + '\\n' }}"
TOKENIZER_SEED, DATA_SEED = 0, 1_000


def train_tokenizer(vocab_size: int, problems: int) -> Tokenizer:
    """Byte-level BPE over training problems; every text is encoded with one <bos> in front."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRE_TOKENS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (p.question + completion(p) for p in generate(TOKENIZER_SEED, problems, "train"))
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    return tokenizer


def save_tokenizer(
    tokenizer: Tokenizer, directory: Path, max_length: int, *, chat_template: str = CHAT_TEMPLATE, **tokens: str
) -> None:
    """tokenizer.json and the tokenizer_config.json that transformers' AutoTokenizer wants beside it.

    `tokens` are special ones, by their names there, beside <pad>, <bos> and <eos>.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        **tokens,
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        "chat_template": chat_template,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def encode_problems(tokenizer: Tokenizer, seed: int, n: int) -> list[list[int]]:
    """Token ids of training problems: <bos> question, newline and solution, <eos>."""
    texts = [p.question + completion(p) for p in generate(seed, n, "train")]
    return [[*encoding.ids, EOS] for encoding in tokenizer.encode_batch_fast(texts)]


def bucket_widths(tokenizer: Tokenizer, quantiles: Sequence[float]) -> list[int]:
    """Row widths, multiples of 16, such that rows of those shares of all lengths fit; the last fits all but a few."""
    lengths = [len(ids) for ids in encode_problems(tokenizer, TOKENIZER_SEED, 2_000)]
    return sorted({-(-int(np.quantile(lengths, q)) // 16) * 16 for q in quantiles})


def _rows(tokenizer_json: str, seed: int, n: int, widths: Sequence[int]) -> list[np.ndarray]:
    tokenizer = Tokenizer.from_str(tokenizer_json)
    buckets: list[list[list[int]]] = [[] for _ in widths]
    for ids in encode_problems(tokenizer, seed, n):
        fitting = [bucket for bucket, width in zip(buckets, widths, strict=True) if len(ids) <= width]
        if fitting:
            fitting[0].append(ids)
    arrays = []
    for bucket, width in zip(buckets, widths, strict=True):
        array = np.full((len(bucket), width), PAD, np.uint16)
        for row, ids in zip(array, bucket, strict=True):
            row[: len(ids)] = ids
        arrays.append(array)
    return arrays


def make_rows(
    tokenizer: Tokenizer, seed: int, n: int, widths: Sequence[int], workers: int, chunk: int = 10_000
) -> list[np.ndarray]:
    """About `n` encoded training problems, one a row, padded to the narrowest of `widths`: uint16 [rows, width] each.

    The same for any number of workers: chunk i has its own seed.
    """
    chunks = max(1, -(-n // chunk))
    each = -(-n // chunks)
    seeds = [DATA_SEED + seed * 1_000_000 + index for index in range(chunks)]
    make = functools.partial(_rows, tokenizer.to_str(), n=each, widths=list(widths))
    return [np.concatenate(bucket) for bucket in zip(*in_processes(make, seeds, workers), strict=True)]


def in_processes[T](function: Callable[[int], T], seeds: Sequence[int], workers: int, chunksize: int = 1) -> list[T]:
    """`function` of each seed, in order, by that many processes; in this one for one worker."""
    if workers <= 1:
        return list(map(function, seeds))
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context) as pool:
        return list(pool.map(function, seeds, chunksize=chunksize))
