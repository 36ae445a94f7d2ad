"""An interpreter that ends under a running engine, and a fork of a process with one."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.checkpoints import Pair

MADE = """
import asyncio, multiprocessing, sys, threading, time
from smcjax import LLM, AsyncLLM, Autoregressive, SamplingParams

fields = dict(model=sys.argv[1], max_model_len=64, max_num_seqs=1, page_size=4, decoding=Autoregressive())
long = SamplingParams(seed=1, max_tokens=40, ignore_eos=True)
"""
FORKED = """
llm = LLM(**fields)

def in_child(use):
    try:
        use()
    except RuntimeError as error:
        print(error, flush=True)

fork = multiprocessing.get_context("fork")
for use in (lambda: llm.generate("ab", long), lambda: LLM(**fields), llm.close):
    child = fork.Process(target=in_child, args=(use,))
    child.start()
    child.join(30)
    assert child.exitcode == 0, child.exitcode
"""
SYNCHRONOUS = """
llm.generate("ab", long, use_tqdm=False)

def work():
    while True:
        llm.generate("ab", long, use_tqdm=False)

threading.Thread(target=work, daemon=True).start()
time.sleep(0.3)
"""
ASYNCHRONOUS = """
async def read(served, params):
    return [chunk async for chunk in served.generate("ab", params)][-1]

def work(served):
    while True:
        asyncio.run(read(served, long))

async def begin():
    served = AsyncLLM(**fields)
    await read(served, long)
    threading.Thread(target=work, args=(served,), daemon=True).start()
    await asyncio.sleep(0.3)
    compiling = served.generate("ab", SamplingParams(max_tokens=4, logprobs=1))  # at which the interpreter ends
    compiling.start()
    while not compiling.lacks_programs:
        await asyncio.sleep(0.001)
    return served

served = asyncio.run(begin())
"""
IN_FLIGHT = """
served = AsyncLLM(**{**fields, "max_model_len": 1024})
left = [served.generate("ab", SamplingParams(max_tokens=1000, ignore_eos=True))]

async def begin():
    reading = asyncio.ensure_future(anext(left[0]))
    while not served.llm.engine._running:
        await asyncio.sleep(0.01)

asyncio.new_event_loop().run_until_complete(begin())
"""


def run(pair: Pair, script: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "-c", MADE + script, pair.target]
    quickly = os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}  # as programs of this process
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=quickly)


@pytest.mark.slow
@pytest.mark.parametrize(
    "script", [FORKED + SYNCHRONOUS, ASYNCHRONOUS, IN_FLIGHT], ids=["generate", "async", "in flight"]
)
def test_an_interpreter_ends_while_a_thread_asks(pair: Pair, script: str) -> None:
    """Not by an abort (134): the step in progress ends first, and no further one begins. Forks before it are told."""
    ended = run(pair, script)
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert "Fatal" not in ended.stderr
    sentences = ended.stdout.splitlines()
    assert len(sentences) == 3 * script.count("fork.Process")
    assert all(one.startswith("this process is a fork of one that has made an LLM") for one in sentences)
