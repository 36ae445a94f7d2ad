"""A model that values texts: a reward model, a classifier, or a language model that is asked for a verdict.

    score      a head on the last hidden state: the reward itself of one label, else the log-probability of `label`
    verdict    log p(first of `verdicts`) − log p(second) behind a text, under a language model

Both are sums of terms at a text's last positions, so one program makes them: a forward of one page of `_PAGE` tokens in
each of a few rows. Full pages of what many texts begin with, as a prompt and a particle's earlier lines, are kept
(`smcjax.engine.schedule.prefix_cache`) and computed once. Shapes depend on a page's place alone, never on what is asked
beside it or was asked before, so that a text's value does not either.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import string
import threading
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from smcjax.checks import is_whole, short
from smcjax.device import on_cpu
from smcjax.engine.llm import LLM
from smcjax.engine.run.settings import own_settings
from smcjax.engine.schedule.prefix_cache import PrefixCache
from smcjax.errors import CheckpointError
from smcjax.kv import TRASH, KVCache
from smcjax.model.config import ModelConfig
from smcjax.model.decoder import product
from smcjax.model.files.checkpoint import load_checkpoint, resolve_model_path
from smcjax.model.files.classifier import is_classifier, load_classifier
from smcjax.model.paged import create_cache, paged_hidden_states, plan_attention
from smcjax.model.params import Params
from smcjax.model.view import BatchView
from smcjax.tokenizer.tokenizer import Tokenizer

_PAGE = 32
_ROWS, _ROWS_ON_CPU = 8, 2  # a CPU gains little by more: pages of two rows keep it busy
_KEPT = 512  # full pages, of texts being valued and of earlier ones
_TAIL = 2  # pages of a row behind the full ones: those that hold what is scored


@dataclasses.dataclass(frozen=True)
class _Item:
    """Tokens to feed, and what is scored: at each position from `first` on the weighed tokens that may follow."""

    tokens: tuple[int, ...]
    first: int
    scored: tuple[tuple[int, int, float], ...]  # position, token (or label), weight

    @property
    def full(self) -> int:
        """The number of full pages before what is scored."""
        return self.first // _PAGE


@dataclasses.dataclass(frozen=True)
class _Work:
    """One page of a row: the physical pages up to it, and the item that is scored in it, if one is."""

    place: int
    tokens: tuple[int, ...]
    pages: tuple[int, ...]
    item: int = -1


class Judge:
    """Values texts by a model of a Hugging Face directory, hub id or GGUF file, or an `LLM`'s target.

    `TextPotential(Judge(…))` steers by it.

    A sequence classifier (`…ForSequenceClassification`) of one label is a reward model, whose score is the value; one
    of several gives the log-probability of `label`. A language model gives log p(yes) − log p(no) of the two
    `verdicts` behind the text. The judge has its own tokenizer, and its weights beside the engine's on the default
    device, bfloat16 on a GPU and float32 on a CPU. Of an `LLM` it reads the target's own arrays, while that is open,
    and has pages of its own. Threads may share it.

    Attributes:
        model: the directory, hub id or file, or an `LLM` on one device.
        template: the text that is judged, of `{prompt}` and `{text}`, the answer or its beginning, as `str.format`
            writes it; a chat's special tokens are written out.
        verdicts: two texts that may follow, as (" yes", " no"), for a language model.
        label: the number of a classifier's label, for one with several.

    Raises CheckpointError for a model that cannot be used and ValueError for arguments that do not go with it, and when
    called for a text that is too long.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | LLM,
        template: str = "{prompt}{text}",
        *,
        verdicts: tuple[str, str] | None = None,
        label: int | None = None,
    ) -> None:
        self.model, self.template = model, template
        self.verdicts, self.label = _pair(verdicts), label
        _check_template(template)
        with own_settings():
            tokenizer, self._config, self._params, *head = _read(model)
        if tokenizer is None:
            raise CheckpointError(f"{model} has no tokenizer, by which a judge reads texts; fetch tokenizer.json")
        self._tokenizer = tokenizer
        self._head = head[0] if head else self._params.unembed
        self._check_arguments(self._head.shape[0] if head else 0)
        needed = max(tokenizer.vocab.values(), default=-1) + 1
        if needed > self._config.vocab_size:
            raise CheckpointError(
                f"{model} has a tokenizer of {needed} token ids and a model of {self._config.vocab_size}; use the "
                "tokenizer that belongs to the weights"
            )
        self._is_reward = self.verdicts is None and self._head.shape[0] == 1
        self._most = min(self._config.max_position_embeddings, _KEPT * _PAGE)
        self._rows = _ROWS_ON_CPU if on_cpu() else _ROWS
        self._scratch = 1 + self._rows * _TAIL  # pages before the kept ones: the trash page, and each row's tail
        self._lock = threading.Lock()
        self._forget()

    def __repr__(self) -> str:
        return f"Judge({str(self.model)!r}, {short(self.template)})"

    def __call__(self, prompt: str, texts: Sequence[str]) -> list[float]:
        """The value of each of `texts`, as answers to `prompt` or beginnings of them."""
        if isinstance(self.model, LLM) and self.model._closed:
            raise ValueError("its LLM is closed and the weights are gone; keep it open while it judges")
        with self._lock, own_settings():
            owners, items = [], []
            for owner, text in enumerate(texts):
                found = self._items(self.template.format(prompt=prompt, text=text))
                owners += [owner] * len(found)
                items += found
            values = np.zeros(len(texts))
            try:
                np.add.at(values, owners, self._values(items))
            except BaseException:
                self._forget()  # pages that were to be written, and a cache that a failed program was given
                raise
        return [float(value) for value in values]

    def _check_arguments(self, labels: int) -> None:
        """Raises ValueError for arguments that do not go with a head of so many labels, 0 being a language model's."""
        if not labels and (self.verdicts is None or self.label is not None):
            raise ValueError(
                f"verdicts is {short(self.verdicts)} and label {self.label!r}, and {self.model} is a language model; "
                'give verdicts=(" yes", " no") or likewise, and no label.'
            )
        if labels and self.verdicts is not None:
            raise ValueError(
                f"verdicts is {short(self.verdicts)} and {self.model} is a classifier, which has labels; leave it out."
            )
        if labels == 1 and self.label is not None:
            raise ValueError(
                f"label is {self.label!r} and {self.model} has one label, whose score is the value; leave it out."
            )
        if labels > 1 and not is_whole(self.label, 0, labels - 1):
            raise ValueError(f"label must be a whole number from 0 to {labels - 1}, got {self.label!r}.")

    def _forget(self) -> None:
        """Begins with an empty cache."""
        self._index = PrefixCache(_KEPT, _PAGE)
        with own_settings():
            self._cache = create_cache(self._config, self._params, num_pages=self._scratch + _KEPT, page_size=_PAGE)

    def _items(self, text: str) -> list[_Item]:
        """Returns the items whose values add up to the text's: two of verdicts, one where both are a token."""
        if self.verdicts is None:
            tokens = self._encoded(text)
            last = len(tokens) - 1
            return [_Item(tokens, last, ((last, self.label or 0, 1.0),))]
        yes, no = (self._encoded(text + verdict) for verdict in self.verdicts)
        common = next((at for at, (x, y) in enumerate(zip(yes, no, strict=False)) if x != y), min(len(yes), len(no)))
        if yes == no:
            raise ValueError("its verdicts have the same tokens behind the text; give others")
        if not common:
            raise ValueError("its template and text have no token before the verdict; let the template say something")
        if max(len(yes), len(no)) - common > _PAGE:
            raise ValueError(f"a verdict has more than {_PAGE} tokens; give shorter ones")
        terms: dict[tuple[int, ...], tuple[tuple[int, int, float], ...]] = {}
        for tokens, weight in ((yes, 1.0), (no, -1.0)):
            scored = tuple((at - 1, tokens[at], weight) for at in range(common, len(tokens)))
            if scored:
                terms[tokens[:-1]] = terms.get(tokens[:-1], ()) + scored
        return [_Item(tokens, common - 1, scored) for tokens, scored in terms.items()]

    def _encoded(self, text: str) -> tuple[int, ...]:
        tokens = tuple(self._tokenizer.encode(text))
        if not 0 < len(tokens) <= self._most:
            raise ValueError(
                f"its text has {len(tokens)} tokens and {self.model} reads 1 to {self._most}; shorten the template, or "
                "the request by max_tokens"
            )
        return tokens

    def _values(self, items: Sequence[_Item]) -> list[float]:
        """The items' values, in rounds of as many as have a tail and, in the cache, pages."""
        values, at = [0.0] * len(items), 0
        while at < len(items):
            works: list[_Work] = []
            held: list[list[bytes]] = []
            begin = at
            while at < len(items) and at - begin < self._rows:
                keys = self._index.keys(items[at].tokens[: items[at].full * _PAGE])
                new = len(keys) - len(self._index.match(keys))
                if held and _KEPT - len(self._index) + self._index.unused < len(keys):
                    break
                works += self._works(items[at], at, at - begin, keys, new)
                held.append(keys)
                at += 1
            for item, value in self._run(works, items):
                values[item] += value
            for keys in held:
                self._index.release(keys)
        return values

    def _works(self, item: _Item, number: int, row: int, keys: list[bytes], new: int) -> list[_Work]:
        """The pages of an item that are to be computed; holds its full ones."""
        known, missing = keys[: len(keys) - new], keys[len(keys) - new :]
        slots = self._index.hold(known)
        self._index.evict(max(0, new - (_KEPT - len(self._index))))
        made = [self._index.insert(key) for key in missing]
        assert None not in made
        pages = [self._scratch + slot for slot in [*slots, *made] if slot is not None]
        pages += range(1 + row * _TAIL, 1 + (row + 1) * _TAIL)
        count = -(-len(item.tokens) // _PAGE)
        return [
            _Work(
                place,
                item.tokens[place * _PAGE : (place + 1) * _PAGE],
                tuple(pages[: place + 1]),
                number if place >= len(keys) else -1,
            )
            for place in range(len(known), count)
        ]

    def _run(self, works: list[_Work], items: Sequence[_Item]) -> list[tuple[int, float]]:
        """Computes pages, those of an earlier place first; returns items with what is scored in each of their pages."""
        found: list[tuple[int, float]] = []
        kinds = sorted({(work.place, work.item >= 0) for work in works})
        for place, scores in kinds:
            alike = [work for work in works if (work.place, work.item >= 0) == (place, scores)]
            for begin in range(0, len(alike), self._rows):
                batch = alike[begin : begin + self._rows]
                found += self._step(batch, items, place, scores)
        return found

    def _step(
        self, batch: Sequence[_Work], items: Sequence[_Item], place: int, scores: bool
    ) -> list[tuple[int, float]]:
        width = 1 << place.bit_length()
        tokens, targets = np.zeros((self._rows, _PAGE), np.int32), np.zeros((self._rows, _PAGE, 2), np.int32)
        weights, count = np.zeros((self._rows, _PAGE, 2), np.float32), np.zeros(self._rows, np.int32)
        table = np.full((self._rows, width), TRASH, np.int32)
        for row, work in enumerate(batch):
            count[row] = len(work.tokens)
            tokens[row, : count[row]] = work.tokens
            table[row, : len(work.pages)] = work.pages
            for position, token, weight in items[work.item].scored if scores else ():
                if position // _PAGE == place:
                    column, of_no = position % _PAGE, int(weight < 0)
                    targets[row, column, of_no], weights[row, column, of_no] = token, weight
        arrays = jax.device_put((tokens, np.int32(place * _PAGE), count, table, targets, weights))
        cache, values = _page(self._config, scores, self._is_reward, self._params, self._head, self._cache, *arrays)
        self._cache = cache
        if not scores:
            return []
        return [(work.item, value) for work, value in zip(batch, jax.device_get(values).tolist(), strict=False)]


@functools.partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=5)
def _page(
    config: ModelConfig,
    scores: bool,
    is_reward: bool,
    params: Params,
    head: Any,
    cache: KVCache,
    tokens: Int[Array, "R C"],
    start: Int[Array, ""],
    count: Int[Array, " R"],
    table: Int[Array, "R W"],
    targets: Int[Array, "R C K"],
    weights: Float[Array, "R C K"],
) -> tuple[KVCache, Float[Array, " R"]]:
    """Feeds the first `count` tokens of each row, at the positions from `start` on; returns Σ weight·log p(target).

    Of a reward model it is Σ weight·score.
    """
    column = jnp.arange(_PAGE, dtype=jnp.int32)[None]
    page = jax.lax.dynamic_slice_in_dim(table, start // _PAGE, 1, axis=1)
    view = BatchView(
        tokens=tokens,
        positions=jnp.broadcast_to(start + column, tokens.shape),
        block_table=table,
        write_pages=jnp.where(column < count[:, None], page, TRASH),
        lengths=jnp.where(count > 0, start + count, 0),
        num_immutable=jnp.broadcast_to(start, count.shape),
        page_size=_PAGE,
    )
    plans = plan_attention(config, params, view, columns=_PAGE)
    hidden, cache = paged_hidden_states(config, params, cache, view, plans)
    if not scores:
        return cache, jnp.zeros(count.shape, jnp.float32)
    logits = product(hidden, head, out=jnp.float32)
    values = logits if is_reward else jax.nn.log_softmax(logits)
    found = jnp.take_along_axis(values, targets, axis=2)
    return cache, jnp.sum(jnp.where(weights != 0, weights * found, 0.0), axis=(1, 2))


def _read(model: str | os.PathLike[str] | LLM) -> tuple[Any, ...]:
    """A model's tokenizer or None, its config, its arrays, and a classifier's head.

    Raises ValueError for an LLM that is closed or on several devices.
    """
    if not isinstance(model, LLM):
        path = resolve_model_path(model)
        load = load_classifier if path.is_dir() and is_classifier(path) else load_checkpoint
        return Tokenizer.load(path), *load(path)
    if model._closed:
        raise ValueError(f"model must be an LLM that is not closed, got {model}.")
    if model.models.devices > 1:
        raise ValueError(f"model is {model} on {model.models.devices} devices, and a judge runs on one; give its path.")
    return model.tokenizer, model.models.target, model.models.target_params


def _pair(verdicts: Any) -> tuple[str, str] | None:
    """The two verdicts. Raises ValueError for what is no pair of two different texts."""
    if verdicts is None:
        return None
    is_pair = isinstance(verdicts, list | tuple) and len(verdicts) == 2
    if not is_pair or not all(isinstance(one, str) and one for one in verdicts) or verdicts[0] == verdicts[1]:
        raise ValueError(f'verdicts must be two different texts, as (" yes", " no"), got {short(verdicts)}.')
    return verdicts[0], verdicts[1]


def _check_template(template: Any) -> None:
    """Raises ValueError for a template that is not made of `{prompt}` and `{text}`."""
    try:
        parts = list(string.Formatter().parse(template))
    except (TypeError, ValueError):
        parts = []
    fields = {name for _, name, _, _ in parts if name is not None}
    plain = all(not form and not conversion for _, _, form, conversion in parts)
    if "text" not in fields or not fields <= {"prompt", "text"} or not plain:
        raise ValueError(
            f"template must have {{text}}, may have {{prompt}}, and doubles other braces, got {short(template)}."
        )
