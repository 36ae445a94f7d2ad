"""One server of a tiny pair that the tests share: real uvicorn on loopback, asked by OpenAI's client."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest

from smcjax import LLM, SMC, Autoregressive, TextPotential, smc
from smcjax.engine.engine import Engine
from smcjax.server import models as virtual
from smcjax.server.models import Models
from smcjax.server.process import Server, address_of, bound
from smcjax.server.state import Served, Settings
from tests.checkpoints import Pair, write_pair
from tests.sizes import one_size

MAX_MODEL_LEN = 96
WAITING = 80
SMC_NAME, EXACT_NAME = "pair:smc-n4-k3", "pair:autoregressive"


@dataclasses.dataclass(frozen=True)
class Running:
    """A server that answers, and how it is asked."""

    url: str
    served: Served

    def client(self, api_key: str = "none") -> openai.OpenAI:
        """OpenAI's client, which tries once."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=api_key, max_retries=0, timeout=120)

    def http(self, **headers: str) -> httpx.Client:
        """A plain client."""
        return httpx.Client(base_url=self.url, timeout=120, headers=headers)

    def llm(self, name: str = SMC_NAME) -> LLM:
        """The engine behind a virtual model."""
        return self.served.models.named(name).llm.llm


@contextlib.contextmanager
def running(models: Models, **settings: Any) -> Iterator[Running]:
    """Serves in a thread of its own."""
    served, listening = Served(models, Settings(**settings)), bound("127.0.0.1", 0)
    server, url = Server(served), address_of(listening)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield Running(url, served)
    finally:
        server.should_exit = True
        thread.join()


def connect(server: Running) -> socket.socket:
    """A connection without a client of HTTP."""
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=20)


@pytest.fixture(scope="session")
def pair_on_disk(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return write_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="session")
def models(pair_on_disk: Pair) -> Models:
    """SMC with N = 4, K = 3 and no control, and the target alone, on the same weights."""
    with one_size():
        return virtual.load(
            pair_on_disk.target,
            [SMC(n_particles=4, gamma=3, control=0), Autoregressive()],
            name="pair",
            draft_model=pair_on_disk.draft,
            max_waiting=WAITING,
            max_num_seqs=2,
            max_model_len=MAX_MODEL_LEN,
            page_size=4,
        )


@pytest.fixture(scope="session")
def server(models: Models) -> Iterator[Running]:
    with running(models) as server:
        yield server


def vowels(prompt: str, texts: list[str]) -> list[float]:
    return [sum(letter in "aeiou" for letter in text) ** 2 for text in texts]


NAMED: dict[str, Any] = {"vowels": TextPotential(vowels, ask=3), "b": smc.TokenPotential(((98, 1.0),))}


@pytest.fixture(scope="session")
def steering(models: Models) -> Iterator[Running]:
    """Serves the same models with potentials that requests may name."""
    with running(models, potentials=NAMED) as server:
        yield server


@pytest.fixture(scope="session")
def client(server: Running) -> Iterator[openai.OpenAI]:
    with server.client() as client:
        yield client


@pytest.fixture(scope="session")
def http(server: Running) -> Iterator[httpx.Client]:
    with server.http() as http:
        yield http


@contextlib.contextmanager
def slow_steps() -> Iterator[None]:
    """Every engine step takes a twentieth of a second longer."""
    step: Callable[..., Any] = Engine.step

    def slow(engine: Engine, *args: Any) -> Any:
        time.sleep(0.05)
        return step(engine, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "step", slow)
        yield


@pytest.fixture
def slowly() -> Iterator[None]:
    with slow_steps():
        yield


def events_of(response: httpx.Response) -> list[str]:
    """The data of a stream's events, pings left out."""
    return [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]


def idle(llm: LLM, seconds: float) -> bool:
    """True once no request is left and all pages are free, within this time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        metrics = llm.metrics()
        free = metrics["kv_pages_free"] == metrics["kv_pages_total"]
        if free and not metrics["num_running"] and not metrics["num_waiting"]:
            return True
        time.sleep(0.02)
    return False
