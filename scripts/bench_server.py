"""Output tokens/s of `smcjax serve` at many concurrent streams, over those of the engine alone, on random weights.

    python scripts/bench_server.py                                    # 1B and 8B shapes, 32 streams, one GPU
    python scripts/bench_server.py --target-shape tiny-target --draft-shape tiny-draft --stand-in 5   # on a CPU

Writes the pair, with a tokenizer of single bytes, into a temporary directory, or into `--directory` to stay, where it
is found the next time. A process of its own answers the prompts by `LLM.generate`; then `smcjax serve`, in another, is
asked for the same by `smcjax.bench.client`, which streams. Each has a round to warm up, then `--rounds` that count. One
in which a program was compiled does not: requests come one by one, and may meet a batch of a size that none had before.
A round's tokens/s are all tokens by the time from the first request to the last answer. Medians; answers are as long as
they may be, as random weights hardly ever end one.

    first token, ms    from a request's arrival, the mean of a round, by the process that answers: its own metrics
    then ms a token    from there to the request's end, over the tokens behind the first: a cycle, if each brings one
    waiting            the part of a round between asking for results of the device and having them, other threads'
                       turns included

The engine's first token is the first that is drawn, the server's the first that is certain. Under SMC these are far
apart, so there "–" stands for the engine's.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import stand_in_device
import tokenizers
from prometheus_client.parser import text_string_to_metric_families
from tokenizers import decoders, models, pre_tokenizers

from smcjax import LLM, SMC, Autoregressive, SamplingParams
from smcjax.bench.client import ClientLoad, figures
from smcjax.bench.client import run as load_server
from smcjax.bench.shapes import SHAPES
from smcjax.decoders import Decoding
from smcjax.markdown import head, row
from smcjax.tasks.questions import questions

DECODERS: dict[str, Decoding] = {"alone": Autoregressive(), "smc": SMC(8, 8)}
OPTIONS = {"alone": "--decoding autoregressive", "smc": "--decoding smc -N 8 -K 8"}  # of `serve`
WAIT = 900.0  # seconds for the server to be there
WRITTEN_LAST = "tokenizer_config.json"  # of a model
KEYS = ("output_throughput", "first_ms", "token_ms", "waiting")
MOST = 4  # rounds for each that is to count, and for the one to warm up

Round = dict[str, Any]  # the figures of one: the client's, or those of them that the engine has, and the engine's own


def main() -> None:
    """Prints a row a decoder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target-shape", default="llama-3.1-8b", choices=SHAPES)
    parser.add_argument("--draft-shape", default="llama-3.2-1b", choices=SHAPES)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--decoders", nargs="+", choices=DECODERS, default=list(DECODERS))
    parser.add_argument("--directory", help="where the pair is written and stays, or is already")
    parser.add_argument(
        "--stand-in", type=float, metavar="MS", help="on a CPU: of a cycle, by scripts/stand_in_device.py"
    )
    parser.add_argument("--json", action="store_true", help="one JSON line last")
    parser.add_argument("--engine", help=argparse.SUPPRESS)  # a process of our own: the directory of the pair
    args = parser.parse_args()
    if args.engine:
        if args.stand_in is not None:
            stand_in_device.install(args.stand_in / 1e3)
        print(json.dumps({name: engine_alone(args, name) for name in args.decoders}))
        return
    with contextlib.ExitStack() as stack:
        directory = args.directory or stack.enter_context(tempfile.TemporaryDirectory())
        own = [sys.executable, __file__, *sys.argv[1:]]
        for name, seed in (("target", 0), ("draft", 1)):
            if not Path(directory, name, WRITTEN_LAST).exists():
                write_model(Path(directory, name), getattr(args, f"{name}_shape"), seed)
        print("the pair is written", file=sys.stderr, flush=True)
        ran = subprocess.run([*own, "--engine", directory], stdout=subprocess.PIPE, text=True, check=True)
        alone = json.loads(ran.stdout.splitlines()[-1])
        print(f"engine: {alone}", file=sys.stderr, flush=True)
        served = {name: through_server(args, name, directory) for name in args.decoders}
    print(f"{args.target_shape}, {args.streams} streams of {args.max_tokens} tokens, medians of {args.rounds} rounds\n")
    columns = ["output tokens/s", "of the engine's", "first token, ms", "then ms a token", "waiting"]
    print(head(["decoder", "who", *columns]))
    for name in args.decoders:
        both = [{key: median(rounds, key) for key in KEYS} for rounds in (alone[name], served[name])]
        for who, found in zip(("engine", "server"), both, strict=True):
            share = found["output_throughput"] / both[0]["output_throughput"]
            cells = [f"{found['output_throughput']:,.0f}", f"{share:.1%}"]
            drawn = who == "engine" and isinstance(DECODERS[name], SMC)
            cells += ["–" if drawn else f"{found['first_ms']:.0f}"]
            cells += [f"{found['token_ms']:.2f}", f"{found['waiting']:.0%}"]
            print(row([DECODERS[name], who, *cells]))
    if args.json:
        print(json.dumps({"engine": alone, "server": served}))


def median(rounds: list[Round], key: str) -> float:
    """The median of a figure over rounds."""
    return statistics.median(one[key] for one in rounds)


def counted(rounds: int, one: Callable[[int], Round], figures_now: Callable[[], Round]) -> list[Round]:
    """`rounds` rounds in which nothing was compiled, after one to warm up; each with the part of it spent waiting.

    `one` makes the round of a number, `figures_now` says what has been compiled and waited for since the start. Raises
    RuntimeError if rounds go on compiling.
    """
    found: list[Round] = []
    for number in range(MOST * (1 + rounds)):
        before, began = figures_now(), time.perf_counter()
        result = one(number)
        seconds, after = time.perf_counter() - began, figures_now()
        compiled = after["compilations"] - before["compilations"]
        waiting = (after["waited_seconds"] - before["waited_seconds"]) / seconds
        said = f"{result['output_throughput']:,.0f} tokens/s"
        if compiled:
            said = f"{compiled:.0f} programs compiled"
        elif number:
            found.append({**result, "waiting": waiting})
        print(f"round {number}: {said}", file=sys.stderr, flush=True)
        if len(found) == rounds:
            return found
    raise RuntimeError(f"of {MOST * (1 + rounds)} rounds fewer than {rounds} had nothing to compile.")


def write_model(directory: Path, shape: str, seed: int) -> None:
    """Writes random weights of a shape and the tokenizer, in a process that gives the device back."""
    code = (
        "import jax, sys; from smcjax.bench.models import random_params; from smcjax.bench.shapes import SHAPES; "
        "from smcjax.model.export import save_checkpoint; config = SHAPES[sys.argv[1]]; "
        "save_checkpoint(config, random_params(config, int(sys.argv[2])), sys.argv[3])"
    )
    subprocess.run([sys.executable, "-c", code, shape, str(seed), str(directory)], check=True)
    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {character: number for number, character in enumerate(characters)}
    # Other ids say six letters each, so that every token of an answer is text of its own.
    for number in range(len(words), SHAPES[shape].vocab_size):
        words[f"{number:x}".translate(str.maketrans("0123456789abcdef", "ghijklmnopqrstuv")).rjust(6, "z")] = number
    made = tokenizers.Tokenizer(models.BPE(vocab=words, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.save(str(directory / "tokenizer.json"))
    (directory / WRITTEN_LAST).write_text("{}")


def engine_alone(args: argparse.Namespace, name: str) -> list[Round]:
    """Rounds of `LLM.generate` on the prompts that the client sends."""
    decoding = DECODERS[name]
    prompts = [question.prompt for question in questions("words", 0, args.streams)]
    with LLM(
        os.path.join(args.engine, "target"),
        draft_model=os.path.join(args.engine, "draft") if decoding.drafts else None,
        decoding=decoding,
        max_num_seqs=args.streams,
        max_model_len=longest(args),
        compile_at_start=False,
    ) as llm:

        def one(number: int) -> Round:
            params = [
                SamplingParams(max_tokens=args.max_tokens, temperature=0.7, seed=1000 * number + seed)
                for seed in range(args.streams)
            ]
            began = time.perf_counter()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            seconds = time.perf_counter() - began
            tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
            first = sum(one.metrics.queue_seconds + one.metrics.first_token_seconds for one in outputs)
            whole = sum(one.metrics.queue_seconds + one.metrics.seconds for one in outputs)
            return {"output_throughput": tokens / seconds, **times(first, whole, len(outputs), tokens)}

        return counted(args.rounds, one, llm.metrics)


def times(first: float, whole: float, requests: int, tokens: int) -> Round:
    """Mean times in ms, from sums over requests: of seconds to the first token, and to the end."""
    return {"first_ms": 1e3 * first / requests, "token_ms": 1e3 * (whole - first) / max(tokens - requests, 1)}


def longest(args: argparse.Namespace) -> int:
    """Tokens of the longest prompt and its answer, in whole pages."""
    return -(-(512 + args.max_tokens) // 64) * 64


def through_server(args: argparse.Namespace, name: str, directory: str) -> list[Round]:
    """Rounds of the server: the client's figures, and the server's own times."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    smcjax = [sys.executable, "-m", "smcjax"]
    if args.stand_in is not None:
        smcjax = [sys.executable, stand_in_device.__file__, str(args.stand_in)]
    command = [*smcjax, "serve", "--port", str(port), "--no-compile-at-start"]
    command += OPTIONS[name].split()
    command += ["--model", os.path.join(directory, "target"), "--draft-model", os.path.join(directory, "draft")]
    command += ["--max-num-seqs", str(args.streams), "--max-model-len", str(longest(args))]

    def one(number: int) -> Round:
        before = metrics(url)
        client = asyncio.run(one_round(args, port, number))
        after = metrics(url)
        first, whole = (after[key] - before[key] for key in ("first_seconds", "whole_seconds"))
        return {**client, **times(first, whole, args.streams, client["total_output_tokens"])}

    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server:
        try:
            wait_for(f"{url}/health", server)
            return counted(args.rounds, one, lambda: metrics(url))
        finally:
            server.terminate()


def metrics(url: str) -> Round:
    """The server's own figures since its start, summed over its models."""
    names = {
        "smcjax_compilations_total": "compilations",
        "smcjax_waited_seconds_total": "waited_seconds",
        "smcjax_time_to_first_token_seconds_sum": "first_seconds",
        "smcjax_request_seconds_sum": "whole_seconds",
    }
    found = dict.fromkeys(names.values(), 0.0)
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as reply:
        for family in text_string_to_metric_families(reply.read().decode()):
            for sample in family.samples:
                if sample.name in names:
                    found[names[sample.name]] += sample.value
    return found


async def one_round(args: argparse.Namespace, port: int, number: int) -> Round:
    """All streams at once; raises RuntimeError if one fails."""
    load = ClientLoad(
        f"http://127.0.0.1:{port}",
        num_prompts=args.streams,
        max_tokens=args.max_tokens,
        request_rate=math.inf,
        # The same prompts each time, as `seed` draws them: the engine's rounds repeat them too.
        seed=0,
    )
    model, requests = await load_server(load)
    failed = [request.error for request in requests if request.error is not None]
    if failed:
        raise RuntimeError(f"{len(failed)} of {args.streams} requests failed in round {number}: {failed[0]}")
    return figures(load, model, requests)


def wait_for(url: str, server: subprocess.Popen[bytes]) -> None:
    """Returns when `url` answers. Raises RuntimeError if the server ends or is not there in time."""
    began = time.monotonic()
    while time.monotonic() - began < WAIT:
        if server.poll() is not None:
            raise RuntimeError(f"smcjax serve ended with {server.returncode}.")
        try:
            urllib.request.urlopen(url, timeout=5).close()
        except (urllib.error.URLError, OSError):
            time.sleep(0.3)
        else:
            return
    raise RuntimeError(f"smcjax serve was not there after {WAIT:.0f} s.")


if __name__ == "__main__":
    main()
