"""Two replicas behind Ray Serve: prompts that begin alike meet, and a replica that dies costs no answer.

Ray believes that there are four GPUs, two for each.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("ray", reason="needs the extra ray: uv run --group dev --extra ray pytest tests/examples")

EXAMPLES = str(Path(__file__).parents[2] / "examples")
sys.path.insert(0, EXAMPLES)  # as PYTHONPATH does for `serve run`
with warnings.catch_warnings(action="ignore"):  # Ray's own, of what others deprecate
    import ray
    import ray_serve
    from ray import serve

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
PROMPT = "Tom has 3 books and buys 2. How many books does Tom have?"


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    environment = {"PYTHONPATH": f"{EXAMPLES}:{os.environ.get('PYTHONPATH', '')}", "RAY_AUTH_MODE": "disabled"}
    # Each replica compiles for itself: as in this process, without LLVM's passes.
    environment |= {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        resources = {"num_cpus": 2, "num_gpus": 4}
        ray.init(**resources, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": environment})
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        arguments = "--decoding autoregressive --max-num-seqs 1 --max-model-len 128"
        options = ray_serve.Options(replicas=2, arguments=arguments, most=2, affinity_tokens=4, gpus=2)
        serve.run(ray_serve.build(options))
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=300) as client:
            yield client
        serve.shutdown()
        ray.shutdown()


def ask(client: httpx.Client, prompt: Any = PROMPT, **fields: Any) -> tuple[str, str]:
    """The text, and which replica made it."""
    body = {"prompt": prompt, "max_tokens": 48, "seed": 1, "ignore_eos": True, **fields}
    reply = client.post("/v1/completions", json=body).raise_for_status()
    return reply.json()["choices"][0]["text"], reply.headers["x-replica"]


def test_prompts_that_begin_alike_meet(client: httpx.Client) -> None:
    """By their first tokens, of which four are sixteen characters; those that begin otherwise are spread."""
    whose = {}
    for number in range(8):
        first = f"{number} of the towns' people "
        whose[number] = {ask(client, first + more, max_tokens=1)[1] for more in ("went", "stayed at home", "")}
        assert len(whose[number]) == 1
    assert len(set.union(*whose.values())) == 2
    assert len({ask(client, [number + 5] * 9, max_tokens=1)[1] for number in range(8)}) == 2
    assert ask(client, [5, 6, 7, 8, 9], max_tokens=1)[1] == ask(client, [5, 6, 7, 8, 10, 11], max_tokens=1)[1]


def test_each_has_devices_of_its_own(client: httpx.Client) -> None:
    """Ray names a replica two GPUs that no other one has, and its server is told of these alone."""
    servers = {ask(client, f"{number} towns", max_tokens=1)[1].split()[1] for number in range(8)}
    seen = []
    for server in servers:
        settings = Path(f"/proc/{server}/environ").read_text().split("\0")
        seen += [line.partition("=")[2].split(",") for line in settings if line.startswith("CUDA_VISIBLE_DEVICES=")]
    assert [len(devices) for devices in seen] == [2, 2]
    assert sorted(device for devices in seen for device in devices) == ["0", "1", "2", "3"]


def test_a_stream_is_the_whole_and_errors_pass(client: httpx.Client) -> None:
    body = {"prompt": PROMPT, "max_tokens": 48, "seed": 1, "ignore_eos": True, "stream": True}
    with client.stream("POST", "/v1/completions", json=body) as stream:
        lines = [line.removeprefix("data: ") for line in stream.iter_lines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    assert "".join(json.loads(line)["choices"][0]["text"] for line in lines) == ask(client)[0]
    refused = client.post("/v1/completions", json={"prompt": "a", "nonsense": 1})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "nonsense")
    assert client.post("/v1/completions", content="{").status_code == 400
    assert client.get("/v1/models").json()["data"][0]["id"] == "bundled"


def test_a_full_replica_passes_requests_on(client: httpx.Client) -> None:
    """At most two of three alike requests wait for their replica, which stands still; the other one answers the rest.

    How many wait is Ray's: a replica that does not say how many it has may be passed by before it is full.
    """
    text, replica = ask(client)
    own = int(replica.split()[1])
    answers: list[tuple[str, str]] = []
    asking = [threading.Thread(target=lambda: answers.append(ask(client))) for _ in range(3)]
    os.kill(own, signal.SIGSTOP)
    try:
        for thread in asking:
            thread.start()
        deadline = time.monotonic() + 60
        while not answers:
            assert time.monotonic() < deadline, "nobody passes a request on"
            time.sleep(0.05)
    finally:
        os.kill(own, signal.SIGCONT)
    for thread in asking:
        thread.join()
    assert {said for said, _ in answers} == {text}
    assert answers[0][1] != replica, "while it stood still"
    assert sum(whose == replica for _, whose in answers) <= 2


def test_a_replica_that_dies_costs_no_answer(client: httpx.Client) -> None:
    """Its requests are asked again with their seeds, those without one too, and a new replica takes its place."""
    text, replica = ask(client)
    victim = int(replica.split()[1])
    os.kill(victim, signal.SIGSTOP)  # so that it has the requests, and no answer
    killer = threading.Timer(1.0, os.kill, (victim, signal.SIGKILL))
    killer.start()
    answers: list[tuple[str, str]] = []
    unseeded = threading.Thread(target=lambda: answers.append(ask(client, seed=None)))
    unseeded.start()
    again, other = ask(client)
    assert (again, other != replica) == (text, True)
    unseeded.join()
    assert answers[0][1] != replica
    deadline = time.monotonic() + 120
    while len(replicas := {ask(client, f"{i} towns", max_tokens=1)[1] for i in range(8)} - {replica}) < 2:
        assert time.monotonic() < deadline
        time.sleep(1)
    assert len(replicas) == 2


def test_a_key_is_of_the_model_and_the_beginning() -> None:
    def key(tokens: int = 4, **ask: Any) -> str:
        return ray_serve.affinity_of(ask, tokens)

    assert key(prompt="a" * 16 + "b") == key(prompt="a" * 16 + "c") != key(prompt="a" * 15 + "c")
    assert key(prompt="a", model="x") != key(prompt="a", model="y")
    assert key(prompt=["ab", "c"]) == key(prompt="ab")
    assert key(prompt=[[1, 2], [3]]) == key(prompt=[1, 2])
    system = {"role": "system", "content": "You are terse."}
    chats = [[system, {"role": "user", "content": text}] for text in ("one", "two")]
    assert key(messages=chats[0]) == key(messages=chats[1])
    assert key(99, messages=chats[0]) != key(99, messages=chats[1])
    assert key() == key(prompt="") == key(prompt=[]) == key(prompt=3) == ""
    for refused in (b"[1]", b"{", b"\xff"):
        assert ray_serve.prepared(refused, 4) == ("", refused)
    _, sent = ray_serve.prepared(b'{"prompt": "a"}', 4)
    assert isinstance(json.loads(sent)["seed"], int)
    assert json.loads(ray_serve.prepared(b'{"prompt": "a", "seed": 7}', 4)[1])["seed"] == 7
