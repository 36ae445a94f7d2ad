"""`AsyncLLM`: the engine under asyncio. One thread steps while event loops, one or several, serve readers.

Readers put new requests into a queue, and requests whose reader has left into a list of the `LLM`. The thread empties
both before every step, so readers that come or leave do not wait for a step.

The thread hands out the results of a step once the next step is enqueued: event loops and the thread share one
interpreter, which is free while the thread waits for the device. Results are handed out at once if a request has ended,
if nothing is left to do, or if another thread waits for the engine's lock. Another thread compiles programs, so that
neither steps nor readers wait for a compilation.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from smcjax.checks import or_none, require, short, whole
from smcjax.engine.llm import LLM
from smcjax.engine.request_handle import RequestHandle
from smcjax.engine.requests.requests import Prompt, Request, params_for_each
from smcjax.engine.requests.sampling_params import SamplingParams
from smcjax.engine.results.outputs import StreamChunk
from smcjax.errors import QueueFull, RequestsLost


class AsyncLLM:
    """An `LLM`, of the same arguments, whose `generate` is an async iterator, for any number of event loops.

    Requests that come while others run join them at the next cycle.

    Args:
        max_waiting: requests in flight beyond `max_num_seqs`, at most; one more raises QueueFull. None: any number.
    """

    def __init__(self, *args: Any, max_waiting: int | None = None, **kwargs: Any) -> None:
        require({"max_waiting": max_waiting}, {"max_waiting": or_none(whole(0, 1 << 30), "")})
        self._begin(LLM(*args, **kwargs), max_waiting, {}, set())

    def _begin(self, llm: LLM, max_waiting: int | None, named: dict[str, str], unwanted: set[str]) -> None:
        self.llm, self._max_waiting = llm, max_waiting
        llm.engine.programs.in_background = True
        self._beside: AsyncLLM | None = None  # of the LLM that answers what this one's decoder leaves to it
        self._arriving: deque[_Inbox] = deque()
        self._inboxes: dict[str, _Inbox] = {}  # of requests that the engine has taken in
        self._busy = False  # whether the engine has more to do
        self._news: list[tuple[_Inbox, list[StreamChunk] | RequestsLost]] = []  # for readers, to be handed out
        self._starting = threading.Lock()  # held for moments only
        self._thread: threading.Thread | None = None  # there while there is anything to do
        self._closed = self._draining = False
        self._named = named  # requests with a name of their caller's, by it
        self._unwanted = unwanted  # requests to be aborted that still have a reader

    @property
    def closed(self) -> bool:
        """True once `close` has been called."""
        return self._closed

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        trace: bool = False,
    ) -> ChunkStream:
        """Yields the answer to one prompt as it becomes certain; the last chunk brings the whole output.

        Raises ValueError at once for a request that cannot run, QueueFull where too many are in flight, RuntimeError
        once closed or draining. The request comes to the engine by `start`, or with the first chunk that is asked for,
        which raises the last two as well. Who stops iterating (by `aclose`, a cancelled task, or letting go of the
        iterator) aborts it. `request_id` is its name for `abort` and in its output, any text that no other request in
        flight has. With `trace`, here or in `sampling_params`, chunks bring each cycle (`StreamChunk.cycle`), and the
        output of a population its history, as with SMC(trace=True).

        Any thread may call this, so that no event loop has to wait for a long text to be cut into tokens.
        """
        params = params_for_each(sampling_params, 1)[0]
        return self._streams(prompt, params, [params.seed], trace, request_id)[0]

    def choices(
        self, prompt: Prompt, sampling_params: SamplingParams, seeds: Sequence[int | None], *, trace: bool = False
    ) -> list[ChunkStream]:
        """An answer to one prompt for each of `seeds`, in place of the parameters' own seed.

        Each is what `generate` gives, and all are checked as one. Raises what `generate` raises.
        """
        return self._streams(prompt, sampling_params, seeds, trace)

    def _streams(
        self,
        prompt: Prompt,
        params: SamplingParams,
        seeds: Sequence[int | None],
        trace: bool,
        request_id: str | None = None,
    ) -> list[ChunkStream]:
        served = self._answering(params)
        served._require_room()
        requests = self.llm._choices(prompt, params, seeds)
        return [ChunkStream(served, dataclasses.replace(one, trace=trace or one.trace), request_id) for one in requests]

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        trace: bool = False,
    ) -> ChunkStream:
        """Answers a conversation through the tokenizer's chat template, as `generate` does a prompt."""
        self._require_room()
        prompt = self.llm.chat_prompt(messages)
        return self.generate(prompt, sampling_params, request_id=request_id, trace=trace)

    def abort(self, request_id: str) -> bool:
        """Ends the request of this name: its reader gets what is certain by then, and finish_reason "abort".

        Returns False, and does nothing, where none in flight has the name. Any thread may call this.
        """
        number = self._named.get(request_id)
        if number is not None:
            self._unwanted.add(number)
        return number is not None

    async def drain(self) -> None:
        """Waits until all requests that have come are answered; from now on further ones raise RuntimeError."""
        self._draining = True
        while self._arriving or self._thread is not None:
            await asyncio.sleep(0.01)
        if self._beside is not None:
            await self._beside.drain()

    async def metrics(self) -> dict[str, float]:
        """`LLM.metrics`, with all that have come and left taken into account."""
        return await asyncio.to_thread(self._metrics)

    async def close(self) -> None:
        """Ends all requests, whose readers get a RuntimeError, and frees the device memory; again, it does nothing.

        It can be called in any event loop. Where it is cancelled the work goes on to its end.
        """
        self._closed = True
        await asyncio.to_thread(self._close)

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _answering(self, params: SamplingParams) -> AsyncLLM:
        """The one whose LLM answers a request, of the same names; this one, where none can begin any more."""
        if self._closed or self._draining or (llm := self.llm._answering(params)) is self.llm:
            return self
        with self._starting:
            if self._beside is None:
                self._beside = object.__new__(AsyncLLM)
                self._beside._begin(llm, self._max_waiting, self._named, self._unwanted)
            return self._beside

    def _require_room(self) -> None:
        """Raises what keeps a further request from coming."""
        if self._closed:
            raise _closed()
        if self._draining:
            raise RuntimeError("this AsyncLLM is draining and takes no further requests; make a new one.")
        if self._max_waiting is not None:
            in_flight = len(self._arriving) + len(self._inboxes)
            if in_flight >= self.llm.max_num_seqs + self._max_waiting:
                raise QueueFull(self._max_waiting)

    def _submit(self, inbox: _Inbox) -> None:
        """Lets a request come, or raises what keeps it from that."""
        self._require_room()
        self._arriving.append(inbox)
        with self._starting:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._serve, name="AsyncLLM", daemon=True)
                self._thread.start()

    def _metrics(self) -> dict[str, float]:
        if self._beside is not None:
            with self._beside.llm._turn:
                self._beside._take_in()
        with self.llm._turn:
            self._take_in()
            return self.llm.metrics()

    def _close(self) -> None:
        if self._beside is not None:
            self._beside._stop()
        self._stop()
        self.llm.close()

    def _stop(self) -> None:
        """Ends all readers and, after the step in progress, the thread."""
        self._closed = True
        with self._starting:
            thread = self._thread
        if thread is not None:
            thread.join()

    # In the thread.

    def _serve(self) -> None:
        """Steps as long as there is anything to do."""
        while not self._done():
            try:
                self._round()
            except BaseException as error:  # of any kind: every reader gets its end
                try:
                    self._hand_out()
                finally:
                    self._end_all(error)

    def _done(self) -> bool:
        """True where nothing is left to do; the next reader then starts another thread."""
        with self._starting:
            if not (self._arriving or self._inboxes or self._busy):
                self._thread = None
            return self._thread is None

    def _round(self) -> None:
        """Takes one step, in which readers get what there is from the last one."""
        self._busy = False  # also where what follows fails: nothing is in flight then
        ended = False
        with self.llm._turn:
            self._take_in()
            if self._closed:
                raise _closed()
            engine = self.llm.engine
            if engine.busy:
                self.llm._advance(engine, self._hand_out)
            self._busy = engine.busy
            for name, inbox in list(self._inboxes.items()):
                chunks = engine.chunks(name)
                if chunks:
                    self._news.append((inbox, chunks))
                if chunks and chunks[-1].finished:
                    engine.forget(name)
                elif not engine.follows(name):  # left by its reader, or ended by a failed step of another caller
                    self._news.append((inbox, RequestsLost({name})))
                else:
                    continue
                ended = True
                del self._inboxes[name]
            if ended or not self._busy or self.llm._turn.wanted:
                self._hand_out()

    def _hand_out(self) -> None:
        """Gives readers what there is for them, each event loop woken once."""
        news, self._news = self._news, []
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Inbox, list[StreamChunk] | RequestsLost]]] = {}
        for inbox, item in news:
            by_loop.setdefault(inbox.loop, []).append((inbox, item))
        for loop, its in by_loop.items():
            try:
                loop.call_soon_threadsafe(_take, its)
            except RuntimeError:  # the loop is closed: it has no readers any more
                self.llm._cancel([inbox.request.request_id for inbox, _ in its])

    def _take_in(self) -> None:
        """Hands requests that have come to the engine. The caller has the `_turn`."""
        while self._arriving:
            inbox = self._arriving.popleft()
            if not inbox.left:
                self._inboxes[inbox.request.request_id] = inbox  # first: an error reaches its reader from now on
                if not self._closed:
                    self.llm.engine.add_request(inbox.request, stream=True, arrived=inbox.arrived)
        if not self._closed:
            for number in list(self._unwanted):
                self.llm.engine.abort(number)

    def _end_all(self, error: BaseException) -> None:
        while self._inboxes:
            name, inbox = self._inboxes.popitem()
            self.llm._cancel([name])  # should the engine still have it
            inbox.put(_told(error, name))


class _Inbox:
    """A request, and a queue of its reader's event loop for what comes of it."""

    def __init__(self, request: Request) -> None:
        self.request, self.arrived = request, time.perf_counter()
        self.left = False  # by its reader
        self.loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[list[StreamChunk] | Exception] = asyncio.Queue()

    def put(self, item: list[StreamChunk] | Exception) -> None:
        """Hands `item` to the reader, from any thread; nothing happens where the reader's event loop is closed."""
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self.take, item)

    def take(self, item: list[StreamChunk] | Exception) -> None:
        """Takes `item`, in the reader's event loop."""
        self._queue.put_nowait(item)

    async def get(self) -> list[StreamChunk]:
        """The next chunks, of which there are none after the end. Raises what was put instead of them."""
        item = await self._queue.get()
        if isinstance(item, Exception):
            raise item
        if not item:
            self._queue.put_nowait([])  # for other readers that wait
        return item


class ChunkStream(RequestHandle, AsyncIterator[StreamChunk]):
    """The stream of one request; `AsyncLLM.generate` makes it."""

    def __init__(self, served: AsyncLLM, request: Request, name: str | None) -> None:
        self.request = request  # whose call `start` may change
        self._served, self._name = served, name
        if name is not None:
            if not isinstance(name, str) or not name:
                raise ValueError(f"request_id must be some text, or None, got {short(name)}.")
            if served._named.setdefault(name, request.request_id) != request.request_id:
                raise ValueError(f"request_id is {short(name)}, which a request in flight has; choose another.")
        super().__init__(served.llm, [request.request_id])
        self._inbox: _Inbox | None = None  # from the first chunk that is asked for
        self._ready: deque[StreamChunk] = deque()

    @property
    def lacks_programs(self) -> bool:
        """True while the request waits until programs that it needs are compiled, beside the others that run."""
        return self.held and not self._served.closed and self._llm.engine.lacks_programs(self.request.request_id)

    def start(self, beside: ChunkStream | None = None) -> None:
        """Lets the request come to the engine now, for readers in the running event loop; again, it does nothing.

        `beside` is the first of several that are asked for at once; these take turns with other requests as one call
        (docs/explanation/engine.md, "Admission"). Raises QueueFull where too many are in flight, RuntimeError once
        closed or draining.
        """
        if self._inbox is None and self.held:
            if beside is not None:
                self.request = dataclasses.replace(self.request, call=beside.request.call)
            inbox = _Inbox(self.request)
            self._served._submit(inbox)
            self._inbox = inbox

    async def __anext__(self) -> StreamChunk:
        try:
            while self.held and not self._ready:
                self.start()
                assert self._inbox is not None
                self._ready += await self._inbox.get()
        except BaseException:
            await self.aclose()
            raise
        if not self._ready:
            raise StopAsyncIteration
        chunk = self._ready.popleft()
        if chunk.finished:
            await self.aclose()
        if chunk.output is not None and self._name is not None:
            return dataclasses.replace(chunk, output=dataclasses.replace(chunk.output, request_id=self._name))
        return chunk

    async def aclose(self) -> None:
        """Ends the stream, for others that wait for a chunk too. Waits for nothing."""
        self._ready.clear()
        self.cancel()
        if self._inbox is not None:
            self._inbox.put([])

    def cancel(self) -> None:
        """Notes that the reader has left."""
        if self.held:
            self._served._unwanted.discard(self.request.request_id)
            if self._name is not None:
                self._served._named.pop(self._name, None)
            if self._inbox is not None:
                self._inbox.left = True  # should it not have been taken in yet
        super().cancel()


def _take(news: Sequence[tuple[_Inbox, list[StreamChunk] | RequestsLost]]) -> None:
    """Takes what there is for readers of the running event loop."""
    for inbox, item in news:
        inbox.take(item)


def _told(error: BaseException, name: str) -> Exception:
    """Makes an error for the reader of `name`, who shares `error` with others: a copy, or RequestsLost from it."""
    if isinstance(error, Exception):
        try:
            told = copy.copy(error)
        except Exception:  # not every one can be copied
            told = None
        if type(told) is type(error):
            return told
    lost = RequestsLost({name})
    lost.__cause__ = error
    return lost


def _closed() -> RuntimeError:
    return RuntimeError("this AsyncLLM is closed; make a new one.")
