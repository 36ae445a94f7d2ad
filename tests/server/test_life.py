"""Requests over time: who leaves frees its pages, too many are turned away, nothing is left behind."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from smcjax import Autoregressive
from smcjax.engine.run.ready_programs import ReadyPrograms
from smcjax.engine.run.runner import Runner
from smcjax.server.connections import HEAD_BYTES, MAX_PIPELINED
from smcjax.server.models import Models, load
from tests.checkpoints import Pair
from tests.memory import give_back
from tests.server.conftest import EXACT_NAME, SMC_NAME, WAITING, Running, connect, events_of, idle, running

LONG: dict[str, Any] = {"prompt": "ab", "max_tokens": 90, "ignore_eos": True, "seed": 1}


def warm(server: Running) -> None:
    """Compiles what the tests of this file use."""
    with server.http() as http:
        for body in ({**LONG, "max_tokens": 8}, {**LONG, "max_tokens": 8, "n": 4}):
            assert http.post("/v1/completions", json=body).status_code == 200


def test_a_small_request_passes_the_choices_of_a_large_one(server: Running) -> None:
    """Two slots, taken by two of many choices: two more may be admitted before it."""
    warm(server)
    before = server.llm().metrics()
    with ThreadPoolExecutor() as pool, server.http() as http:
        large = pool.submit(http.post, "/v1/completions", json={**LONG, "n": 24})
        while server.llm().metrics()["num_waiting"] < 16:
            time.sleep(0.005)
        begun = server.llm().metrics()["requests"]
        assert http.post("/v1/completions", json={**LONG, "max_tokens": 4}).status_code == 200
        ended = server.llm().metrics()["requests"] - begun
        assert ended <= 9, "of both slots one that ran and those of two rounds, and what the test itself takes"
        assert not large.done()
        assert large.result().status_code == 200
    assert server.llm().metrics()["requests"] == before["requests"] + 25


def test_a_stream_says_that_it_waits_for_a_compilation(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others are answered meanwhile, by the same decoder."""
    compile_all, go = Runner.compile, threading.Event()

    def held(runner: Runner, sizes: Any, program: Any, *rest: Any) -> None:
        if "prompt_logprobs" in program.features:
            assert go.wait(60)
        compile_all(runner, sizes, program, *rest)

    monkeypatch.setattr(Runner, "compile", held)
    with running(models, ping_seconds=0.05) as server, server.http() as http:
        warm(server)
        body = {"prompt": "ab", "max_tokens": 4, "prompt_logprobs": 1, "stream": True}
        with http.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            assert ": compiling" in itertools.islice(lines, 100)
            with server.http() as other:
                assert other.post("/v1/completions", json={"prompt": "ab", "max_tokens": 4}).status_code == 200
            go.set()
            assert "data: [DONE]" in lines


@pytest.mark.usefixtures("slowly")
@pytest.mark.parametrize(("stream", "choices"), [(False, 6), (True, 1)])
def test_a_client_that_leaves(server: Running, stream: bool, choices: int) -> None:
    """While its answers run, and while some wait: pages are free again soon."""
    warm(server)
    before = server.llm().metrics()

    async def session() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
            body = {**LONG, "stream": stream, "n": choices}
            asked = asyncio.create_task(http.post("/v1/completions", json=body))
            come = 0.0
            while come < choices:
                metrics = await asyncio.to_thread(server.llm().metrics)
                come = metrics["num_running"] + metrics["num_waiting"]
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)

    asyncio.run(session())
    assert idle(server.llm(), 5.0)
    generated = server.llm().metrics()["generated_tokens"] - before["generated_tokens"]
    assert generated < 90 * choices  # a control: they had not ended


HEAD = "HTTP/1.1\r\nhost: 127.0.0.1\r\n"
HEALTH = f"GET /health {HEAD}\r\n"


def posted(body: dict[str, Any], *headers: str) -> bytes:
    """A request in bytes."""
    text = json.dumps(body)
    lines = ("content-type: application/json", f"content-length: {len(text)}", *headers)
    return f"POST /v1/completions {HEAD}{''.join(f'{line}\r\n' for line in lines)}\r\n{text}".encode()


@pytest.mark.usefixtures("slowly")
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("behind", "refused"),
    [
        (HEALTH.encode(), False),
        (posted({"prompt": "a" * 50_000}), False),
        (HEALTH.encode() * (MAX_PIPELINED + 1), True),
        (posted({"prompt": "a" * HEAD_BYTES}), True),
    ],
    ids=["one", "a body", "many", "a large body"],
)
def test_a_client_that_leaves_with_requests_behind_the_first(
    server: Running, caplog: pytest.LogCaptureFixture, stream: bool, behind: bytes, refused: bool
) -> None:
    """The first request of its connection ends too, and none of them writes to the connection that is gone."""
    warm(server)
    before = server.llm().metrics()
    with connect(server) as client:
        client.sendall(posted({**LONG, "stream": stream}))
        while server.llm().metrics()["num_running"] == 0:
            time.sleep(0.005)
        client.sendall(behind)
        if refused:
            assert b"HTTP/1.1 503" in b"".join(iter(lambda: client.recv(1 << 16), b""))
    assert idle(server.llm(), 5.0)
    assert server.llm().metrics()["generated_tokens"] - before["generated_tokens"] < 90, "a control: it had not ended"
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_requests_behind_each_other_are_answered_in_order(server: Running) -> None:
    """However many there are in all, as long as few wait at a time."""
    warm(server)
    with connect(server) as client, client.makefile("rb") as answers:
        client.sendall(posted({**LONG, "max_tokens": 8, "user": "a" * 30_000}) * 2)
        for _ in range(8):
            client.sendall(posted({**LONG, "max_tokens": 8, "user": "a" * 30_000}))
            assert answers.readline().startswith(b"HTTP/1.1 200")
            (length,) = (
                int(line[16:]) for line in iter(answers.readline, b"\r\n") if line.startswith(b"content-length: ")
            )
            assert json.loads(answers.read(length))["usage"]["completion_tokens"] == 8


@pytest.mark.usefixtures("slowly")
def test_events_of_a_request_that_runs(server: Running) -> None:
    """HEAD does not wait for them, GET follows them to the end, also where the client of the request leaves."""
    warm(server)
    with server.http() as http, connect(server) as client, client.makefile("rb") as answers:
        with http.stream("POST", "/v1/completions", json={**LONG, "stream": True, "smc": {"events": True}}) as asked:
            lines = asked.iter_lines()
            chunk = next(line for line in lines if line.startswith("data: "))
            path = f"/v1/smc/requests/{json.loads(chunk[6:])['id']}/events"
            client.sendall(f"HEAD {path} {HEAD}\r\n{HEALTH}GET {path} {HEAD}connection: close\r\n\r\n".encode())
            found = list(itertools.takewhile(lambda line: line != b'{"status":"ok"}HTTP/1.1 200 OK\r\n', answers))
            assert server.llm().metrics()["num_running"] == 1
        assert len(found) < 20
        followed = answers.read().count(b'"cycle":')
    assert 1 <= followed < 23  # a control: 90 tokens take more cycles
    with server.http() as http:
        assert len(events_of(http.get(path))) == followed


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_while_its_form_waits(server: Running, stream: bool) -> None:
    """The form is compiled for none, and others find room to wait."""
    forms, go = server.served.forms, threading.Event()
    forms._thread.submit(go.wait, 60)
    try:
        with connect(server) as client:
            client.sendall(posted({**LONG, "stream": stream, "guided_regex": "[a-f]{3}" if stream else "[a-g]{3}"}))
            while not len(forms):
                time.sleep(0.005)
        end = time.monotonic() + 5.0
        while (len(forms) or server.served.in_flight) and time.monotonic() < end:
            time.sleep(0.005)
        assert len(forms) == server.served.in_flight == 0
    finally:
        go.set()


@pytest.mark.parametrize(("holder", "name", "stream"), [(ReadyPrograms, "of_round", False), (Runner, "prefill", True)])
def test_a_client_that_leaves_before_anything_has_come(
    server: Running, monkeypatch: pytest.MonkeyPatch, holder: Any, name: str, stream: bool
) -> None:
    """While programs are made ready, which may be to compile them, and while the prompt is read."""
    warm(server)
    before = server.llm().metrics()["generated_tokens"]
    under_way, go, really = threading.Event(), threading.Event(), getattr(holder, name)

    def held(*args: Any, **kwargs: Any) -> Any:
        under_way.set()
        assert go.wait(100)
        return really(*args, **kwargs)

    async def session() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
            asked = asyncio.create_task(http.post("/v1/completions", json={**LONG, "stream": stream}))
            assert await asyncio.to_thread(under_way.wait, 60)
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
            while server.served.in_flight:
                await asyncio.sleep(0.001)

    with monkeypatch.context() as patch:
        patch.setattr(holder, name, held)
        try:
            asyncio.run(asyncio.wait_for(session(), 60))
            assert server.served.models.all[0].llm._inboxes, "a control: the engine has the request still"
        finally:
            go.set()
    assert idle(server.llm(), 5.0)
    assert server.llm().metrics()["generated_tokens"] - before < 90


@pytest.mark.usefixtures("slowly")
def test_too_many_are_turned_away(server: Running) -> None:
    """As a whole: of n answers none stays behind, and no stream begins."""
    warm(server)
    with server.http() as http, http.stream("POST", "/v1/completions", json={**LONG, "stream": True, "n": WAITING}):
        for body in ({**LONG, "n": 8}, {**LONG, "n": 8, "stream": True}):
            refused = httpx.post(f"{server.url}/v1/completions", json=body, timeout=30)
            assert refused.status_code == 429
            assert int(refused.headers["retry-after"]) >= 1
            assert refused.json()["error"]["code"] == "queue_full"
        with pytest.raises(openai.RateLimitError):
            server.client().completions.create(model="pair", prompt="a", n=8)
        metrics = server.llm().metrics()
        assert metrics["num_running"] + metrics["num_waiting"] <= WAITING
    assert idle(server.llm(), 5.0)


@pytest.mark.slow
def test_seven_hundred_requests(server: Running) -> None:
    """Memory does not grow with requests, nor do descriptors: some 100 of 700 add less than 4,000 bytes each.

    A body that is kept adds its two pages in every part, while other tests' memory, which is in this process too, comes
    and goes in steps, so that one part may grow by megabytes.
    """
    page = os.sysconf("SC_PAGE_SIZE")
    body = {"model": EXACT_NAME, "prompt": "ab", "max_tokens": 1, "user": "x" * 8000}

    def resident() -> int:
        give_back()
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * page

    async def ask(times: int) -> None:
        async def some(http: httpx.AsyncClient, seeds: range) -> None:
            for seed in seeds:
                response = await http.post("/v1/completions", json={**body, "seed": seed, "stream": seed % 2 == 0})
                assert response.status_code == 200

        async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
            await asyncio.gather(*(some(http, range(first, times, 8)) for first in range(8)))

    asyncio.run(ask(100))
    descriptors, memory = len(os.listdir("/proc/self/fd")), [resident()]
    for _ in range(6):
        asyncio.run(ask(100))
        memory.append(resident())
    grown = [after - before for before, after in itertools.pairwise(memory)]
    assert min(grown) < 400_000, grown
    assert len(os.listdir("/proc/self/fd")) <= descriptors + 2
    assert server.served.in_flight == 0
    assert idle(server.llm(EXACT_NAME), 5.0)


def samples(http: httpx.Client) -> dict[tuple[str, str], float]:
    """Counters and gauges of the SMC model, by name and further labels."""
    families = text_string_to_metric_families(http.get("/metrics").text)
    return {
        (sample.name, sample.labels.get("finished_reason", "")): sample.value
        for family in families
        for sample in family.samples
        if sample.labels.get("model_name") == SMC_NAME and "le" not in sample.labels
    }


def test_metrics(http: httpx.Client) -> None:
    """They parse, count what was asked, and never fall; vLLM's names say what ours do."""
    asked = http.post("/v1/completions", json={**LONG, "max_tokens": 7}).json()
    before = samples(http)
    for stream in (False, True):
        http.post("/v1/completions", json={**LONG, "max_tokens": 7, "stream": stream})
    after = samples(http)
    assert all(after[name] >= value for name, value in before.items() if name[0].endswith(("_total", "_count")))

    def gained(name: str, reason: str = "") -> float:
        return after[name, reason] - before[name, reason]

    assert asked["usage"]["completion_tokens"] == 7
    for ours, theirs, gain in (
        ("smcjax_generated_tokens_total", "vllm:generation_tokens_total", 14),
        ("smcjax_prompt_tokens_total", "vllm:prompt_tokens_total", 4),
        ("smcjax_time_to_first_token_seconds_count", "vllm:time_to_first_token_seconds_count", 2),
        ("smcjax_request_seconds_count", "vllm:e2e_request_latency_seconds_count", 2),
    ):
        assert gained(ours) == gained(theirs) == gain
    assert gained("vllm:request_success_total", "length") == 2
    assert after["vllm:num_requests_running", ""] == after["vllm:kv_cache_usage_perc", ""] == 0


@pytest.fixture
def other(models: Models) -> Iterator[Running]:
    with running(models) as server:
        yield server


@pytest.mark.usefixtures("slowly")
def test_a_server_that_drains(other: Running) -> None:
    """It still listens and says so, takes nothing further, and ends what has come before it goes."""
    warm(other)
    with other.http() as http, http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as stream:
        lines = stream.iter_lines()
        next(lines)
        other.served.draining = True
        assert httpx.get(f"{other.url}/health").status_code == 503
        refused = httpx.post(f"{other.url}/v1/completions", json=LONG)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "unavailable"
        assert [line for line in lines if line][-1] == "data: [DONE]"
    for _ in range(100):
        try:
            httpx.get(f"{other.url}/health")
        except httpx.TransportError:
            return
        time.sleep(0.05)
    raise AssertionError("it goes on")


def test_a_server_whose_engine_is_dead(pair_on_disk: Pair) -> None:
    """It says so, for whoever watches it, and to each request: in a whole reply, and in place of a stream."""
    made = load(pair_on_disk.target, [Autoregressive()], name="pair", max_num_seqs=1, max_model_len=32, page_size=4)
    with running(made) as dead, dead.http() as http:
        assert http.get("/health").status_code == 200  # a control
        asyncio.run(made.close())
        assert http.get("/health").status_code == http.head("/health").status_code == 503
        for stream in (False, True):
            refused = http.post("/v1/completions", json={"prompt": "ab", "stream": stream})
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")
            assert int(refused.headers["retry-after"]) >= 1
