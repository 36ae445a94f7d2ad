"""Tokenizer and token arrays for `train_recall.py`. Imports no JAX: worker processes run it."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pair_data
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from smcjax.tasks.recall import BOS, PIECES, SPECIAL, UNKNOWN, Split, tokens, vocabulary

ROUNDS = {512: 2, 8192: 4, 16384: 8}  # of questions, in three of four training documents of a length; else one
# The words `questions` and `answers` end a document; what follows a chat's message is the answer itself.
CHAT_TEMPLATE = "{{ bos_token + messages[-1]['content'] }}"


def tokenizer() -> Tokenizer:
    """Splits text into the pieces that are the task's vocabulary, whatever else into <unk>; one <bos> in front."""
    ids = {piece: index for index, piece in enumerate(vocabulary())}
    made = Tokenizer(models.WordLevel(ids, unk_token=SPECIAL[UNKNOWN]))
    made.add_special_tokens(list(SPECIAL))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(PIECES), "isolated")
    made.decoder = decoders.Fuse()
    made.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    return made


def save_tokenizer(directory: Path, max_length: int) -> None:
    """The tokenizer's files, as for the bundled pair."""
    unknown = SPECIAL[UNKNOWN]
    pair_data.save_tokenizer(tokenizer(), directory, max_length, chat_template=CHAT_TEMPLATE, unk_token=unknown)


def _rows(seed: int, count: int, length: int, split: Split, several: bool) -> np.ndarray:
    rng = np.random.default_rng([seed, length])
    rounds = ROUNDS.get(length, 1) if several else 1
    # One document in four has one round, as those that are measured have.
    return np.stack([tokens(rng, length, split, rounds if index % 4 else 1) for index in range(count)])


def make_rows(seed: int, count: int, length: int, split: Split, workers: int, *, several: bool = True) -> np.ndarray:
    """About `count` documents of `length` tokens, one a row, uint16; `several`: of more than one round where they fit.

    The same for any number of workers: chunk i has its own seed.
    """
    each = min(count, 64)
    chunks = -(-count // each)
    seeds = [seed * 1_000_003 + chunk for chunk in range(chunks)]
    make = functools.partial(_rows, count=each, length=length, split=split, several=several)
    return np.concatenate(pair_data.in_processes(make, seeds, workers, chunksize=4))
