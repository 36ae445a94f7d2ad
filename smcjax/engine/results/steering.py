"""Text potentials of running requests: which texts to ask about, what is known, and the weights at the end.

A group's rows are followed by its reports, as for stop strings. Behind each cycle every row has, for each potential,
the beginning of its answer that is to be asked about, and a value once the potential's function has returned:

    cycle t        its report is read: new beginnings go to a thread
    cycle t + 1    is under way meanwhile
    cycle t + 2    is enqueued with the values (`smcjax.smc.steering`), or waits for them: this group alone does
    the end        Φ of the rows' whole answers; only then are the final weights, the evidence and the answer known

Values are kept by text as long as the request lives, so that copies of a row, and a request that begins again after it
was preempted, ask for nothing twice.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from smcjax.decoders.text_potential import TextPotential
from smcjax.decoding.sequences import Population
from smcjax.engine.requests.requests import Request
from smcjax.engine.results.completion import completion_of, first_stop, normalized
from smcjax.engine.results.cycles import rows_after
from smcjax.engine.results.text import AnswerText
from smcjax.smc.history import log_mean
from smcjax.smc.steering import TextValues
from smcjax.tokenizer.tokenizer import Tokenizer

THREADS = 16  # functions that run at once
FIRST = 3  # the first cycle that takes values: those behind cycle 1, as one token says little
_SELECT = 0x5E1EC7  # beside a request's seed, for the draw of its answer


class Scorer:
    """Threads in which the potentials of an engine's requests run. A process that ends does not wait for them."""

    def __init__(self) -> None:
        self._places = threading.BoundedSemaphore(THREADS)
        self._open: set[Future[list[float]]] = set()
        self._returned = threading.Event()

    def ask(self, potential: TextPotential, prompt: str, texts: list[str], *, whole: bool) -> Future[list[float]]:
        """Begins to ask about texts."""
        self._open = {future for future in self._open if not future.done()}
        future: Future[list[float]] = Future()
        self._open.add(future)
        asked = (future, potential, prompt, texts, whole)
        threading.Thread(target=self._work, args=asked, name="smcjax-potential", daemon=True).start()
        return future

    def wait(self, seconds: float) -> None:
        """Waits until a function returns, or has returned since the last wait, for so many seconds at most.

        A function that returned before that is no reason to return at once: a caller that waits for another one would
        then spin, and keep Python's lock from the threads.
        """
        self._returned.wait(seconds)
        self._returned.clear()

    def close(self) -> None:
        """Begins no further function; what those that run return is of no use."""
        for future in self._open:
            future.cancel()

    def _work(
        self, future: Future[list[float]], potential: TextPotential, prompt: str, texts: list[str], whole: bool
    ) -> None:
        with self._places:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(potential.values(prompt, texts, whole=whole))
            except BaseException as error:
                future.set_exception(error)
            self._returned.set()


@dataclasses.dataclass(frozen=True)
class _Key:
    """A question: a potential by its number in the request is asked about a text, which may be a whole answer."""

    potential: int
    text: str
    whole: bool

    @functools.cached_property
    def digest(self) -> bytes:
        """Stands for the key among all of a request's, in 16 bytes: beginnings of a long answer are long together."""
        return hashlib.blake2b(
            repr((self.potential, self.text, self.whole)).encode(errors="backslashreplace"), digest_size=16
        ).digest()


@dataclasses.dataclass(frozen=True)
class _Row:
    tokenizer: AnswerText
    length: int = 0  # tokens
    text: str = ""  # final: no later token changes it
    keys: tuple[_Key | None, ...] = ()  # by potential; None: nothing is to be asked yet
    ended: bool = False


class Values:
    """Asks a request's potentials, and keeps what they have said by text, also over a preemption."""

    def __init__(self, request: Request, prompt: str, scorer: Scorer) -> None:
        self._potentials, self._prompt, self._scorer = request.params.text_potentials, prompt, scorer
        self._known: dict[bytes, float] = {}  # by digest
        self._asked: list[tuple[list[_Key], Future[list[float]]]] = []
        self.error: str | None = None  # why a potential's answer cannot be used

    def ask(self, keys: Iterable[_Key]) -> None:
        """Asks for what is neither known nor asked: each potential once, for all of its texts."""
        asked = {key for some, _ in self._asked for key in some}
        new = [key for key in dict.fromkeys(keys) if key not in asked and key.digest not in self._known]
        for number, whole in dict.fromkeys((key.potential, key.whole) for key in new):
            own = [key for key in new if (key.potential, key.whole) == (number, whole)]
            texts = [key.text for key in own]
            future = self._scorer.ask(self._potentials[number], self._prompt, texts, whole=whole)
            self._asked.append((own, future))

    def take(self) -> None:
        """Takes what functions have returned; sets `error` where one has failed."""
        going = []
        for keys, future in self._asked:
            if not future.done():
                going.append((keys, future))
            elif (error := future.exception()) is not None:
                told = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
                name = self._potentials[keys[0].potential].name
                self.error = self.error or f"the potential {name} failed: {told}."
            else:
                self._known |= {key.digest: value for key, value in zip(keys, future.result(), strict=True)}
        self._asked = going

    def of(self, keys: Sequence[_Key | None]) -> float | None:
        """The sum of the log values; None while one of them is not known."""
        found = [0.0 if key is None else self._known.get(key.digest) for key in keys]
        return None if None in found else float(sum(found))  # type: ignore[arg-type]


class Steering:
    """Follows the rows of one group, and knows their values. The caller reads `error` and ends the request by it."""

    def __init__(self, request: Request, tokenizer: Tokenizer, scorer: Scorer, values: Values | None = None) -> None:
        prompt = request.prompt if request.prompt is not None else tokenizer.decode(request.token_ids)
        self._request, self._tokenizer, self._scorer = request, tokenizer, scorer
        self.values = values or Values(request, prompt, scorer)
        self._potentials = request.params.text_potentials
        self._nothing = (None,) * len(self._potentials)  # the keys of a row that is not to be asked about
        self._patterns = [re.compile(one.ask) if isinstance(one.ask, str) else None for one in self._potentials]
        self._rows: list[_Row] = []
        self._behind: list[list[tuple[_Key | None, ...]]] = []  # of each report, the first tokens' too, by row
        self._whole: list[tuple[_Key, ...] | None] | None = None  # of the final population; None: a row without weight

    def again(self) -> Steering:
        """Another follower for the same request, which begins anew, with the values that are known."""
        return Steering(self._request, self._tokenizer, self._scorer, self.values)

    @property
    def error(self) -> str | None:
        """Why the request cannot be answered; None: it can so far. Takes what has been returned."""
        self.values.take()
        return self.values.error

    def begin(self, first: Sequence[int]) -> None:
        """Begins with the rows' first tokens, [N]."""
        row = _Row(AnswerText(self._tokenizer, self._request.token_ids), keys=self._nothing)
        self._rows, self._behind = [self._longer(row, [token], ended=False) for token in first], []
        self._note([True] * len(self._rows))

    def advance(
        self,
        blocks: Sequence[Sequence[int]],
        lengths: Sequence[int],
        ancestors: Sequence[int],
        alive: Sequence[bool],
        finished: Sequence[bool],
    ) -> None:
        """Follows a cycle: arguments as of `smcjax.engine.results.stopping.StopStrings.advance`."""
        before, ended = self._rows, dict(zip(ancestors, finished, strict=True))

        def longer(row: int, tokens: Sequence[int]) -> _Row:
            return self._longer(before[row], tokens, ended=ended[row])

        self._rows = rows_after([row.length for row in before], blocks, lengths, ancestors, longer)
        self._note(alive)

    def knows(self, cycle: int) -> bool:
        """True where the group's own `cycle`, from 1, may be enqueued: the values that it takes are known."""
        if cycle < FIRST:
            return True
        self.values.take()
        behind = cycle - 2
        return behind < len(self._behind) and all(self.values.of(keys) is not None for keys in self._behind[behind])

    def at(self, cycle: int) -> list[float] | None:
        """The values [N] that the group's own `cycle` takes; None: none."""
        if cycle < FIRST:
            return None
        found = [self.values.of(keys) for keys in self._behind[cycle - 2]]
        self._behind[cycle - 2 - 1] = []  # of no further use
        assert None not in found
        return found  # type: ignore[return-value]

    def end(self, population: Population) -> None:
        """Asks about the whole answers of a population, one group as host arrays."""
        start, log_weight = len(self._request.token_ids), population.log_weight[0]
        self._whole = []
        for tokens, length, weight in zip(population.tokens[0], population.length[0], log_weight, strict=True):
            if np.isneginf(weight):
                self._whole.append(None)
                continue
            text = completion_of(self._request, tokens[start:length].tolist(), self._tokenizer).text
            self._whole.append(tuple(_Key(i, text, whole=True) for i in range(len(self._potentials))))
        self.values.ask(key for keys in self._whole for key in keys or ())

    @property
    def ended(self) -> bool:
        """True once the values of the whole answers are known, or are not to be had."""
        self.values.take()
        assert self._whole is not None
        return self.values.error is not None or all(
            keys is None or self.values.of(keys) is not None for keys in self._whole
        )

    def final(self, population: Population, *, select: str) -> Population:
        """The population with the weights, the evidence and the answer that its whole answers' values make."""
        assert self._whole is not None
        assert population.log_text_potential is not None
        log_weight = np.asarray(population.log_weight[0], np.float64)
        told = np.asarray(population.log_text_potential[0], np.float64)
        value = np.array([-np.inf if keys is None else self.values.of(keys) for keys in self._whole], np.float64)
        dead = np.isneginf(log_weight) | np.isneginf(value)
        steered = np.full(dead.shape, -np.inf)
        steered[~dead] = log_weight[~dead] + value[~dead] - told[~dead]
        evidence = population.log_evidence[0] - log_mean(log_weight) + log_mean(steered)
        selected = 0
        if not dead.all():
            chance = np.cumsum(normalized(steered))
            point = np.random.default_rng((_SELECT, self._request.seed)).random() * chance[-1]
            selected = int(np.argmax(steered) if select == "best" else np.searchsorted(chance, point, side="right"))
        fields: Any = {
            "log_weight": steered[None].astype(np.float32),
            "log_evidence": np.array([evidence]),
            "selected": np.array([selected], np.int32),
            "failed": np.array([bool(dead.all())]),
        }
        return dataclasses.replace(population, **fields)

    def _note(self, alive: Sequence[bool]) -> None:
        """Notes what the rows are to be asked, and asks it; rows without weight have nothing to ask."""
        asked = [row.keys if living else self._nothing for row, living in zip(self._rows, alive, strict=True)]
        self._behind.append(asked)
        self.values.ask(key for keys in asked for key in keys if key is not None)

    def _longer(self, row: _Row, tokens: Sequence[int], *, ended: bool) -> _Row:
        """The row behind more tokens; one that has `ended`, or holds a stop string, is asked as a whole answer."""
        if row.ended:
            return dataclasses.replace(row, length=row.length + len(tokens))
        tokenizer, text, keys = row.tokenizer.copy(), row.text, list(row.keys)
        for at, token in enumerate(tokens, row.length + 1):
            if token in self._request.stop_ids:
                break
            text += tokenizer.feed(token)
            for number, potential in enumerate(self._potentials):
                if isinstance(potential.ask, int) and at % potential.ask == 0:
                    keys[number] = _Key(number, text, whole=False)
        for number, pattern in enumerate(self._patterns):
            asked = keys[number]
            done = 0 if asked is None else len(asked.text)
            if pattern is not None and (ends := [match.end() for match in pattern.finditer(text, done)]):
                keys[number] = _Key(number, text[: ends[-1]], whole=False)
        cut = first_stop(text, self._request.params.stop_strings)
        if ended or cut is not None:
            text = text[:cut] if cut is not None else text + tokenizer.rest()
            asks = [one.ask is not None for one in self._potentials]
            keys = [_Key(i, text, whole=True) if asks[i] else None for i in range(len(keys))]
            ended = True
        return _Row(tokenizer, row.length + len(tokens), text, tuple(keys), ended)


def values_of(size: int, rows: int, steering: Mapping[int, tuple[Steering, int, bool]]) -> TextValues:
    """Makes the values for a cycle of `size` slots; `steering` has the groups' slots, own cycles, and who waits."""
    values: Any = TextValues.nothing(size, rows)
    for slot, (group, cycle, waits) in steering.items():
        values.waits[slot] = waits
        found = None if waits else group.at(cycle)
        if found is not None:
            values.log_value[slot], values.known[slot] = found, True
    return values
