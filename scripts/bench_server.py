"""Output tokens/s of `smcjax serve` at many concurrent streams, over those of the engine alone, on random weights.

    python scripts/bench_server.py                                    # 1B and 8B shapes, 32 streams, one GPU
    python scripts/bench_server.py --target-shape tiny-target --draft-shape tiny-draft --max-tokens 64   # on a CPU

Writes the pair, with a tokenizer of single bytes, into a temporary directory, or into `--directory` to stay. A process
of its own answers the prompts by `LLM.generate`; then `smcjax serve`, in another, is asked for the same by
`smcjax.bench.client`, which streams. Each has one round that compiles, then `--rounds` that count; a round's tokens/s
are all tokens by the time from the first request to the last answer. Medians; answers are as long as they may be, as
random weights hardly ever end one.
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
from pathlib import Path
from typing import Any

import tokenizers
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


def main() -> None:
    """Prints a row a decoder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target-shape", default="llama-3.1-8b", choices=SHAPES)
    parser.add_argument("--draft-shape", default="llama-3.2-1b", choices=SHAPES)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--decoders", nargs="+", choices=DECODERS, default=list(DECODERS))
    parser.add_argument("--directory", help="where the pair is written, and stays")
    parser.add_argument("--json", action="store_true", help="one JSON line last")
    parser.add_argument("--engine", help=argparse.SUPPRESS)  # a process of our own: the directory of the pair
    args = parser.parse_args()
    if args.engine:
        print(json.dumps({name: engine_alone(args, name) for name in args.decoders}))
        return
    with contextlib.ExitStack() as stack:
        directory = args.directory or stack.enter_context(tempfile.TemporaryDirectory())
        own = [sys.executable, __file__, *sys.argv[1:]]
        for name, seed in (("target", 0), ("draft", 1)):
            write_model(Path(directory, name), getattr(args, f"{name}_shape"), seed)
        print("the pair is written", file=sys.stderr, flush=True)
        ran = subprocess.run([*own, "--engine", directory], stdout=subprocess.PIPE, text=True, check=True)
        alone = json.loads(ran.stdout.splitlines()[-1])
        print(f"engine: {alone}", file=sys.stderr, flush=True)
        served = {name: through_server(args, name, directory) for name in args.decoders}
    print(f"{args.target_shape}, {args.streams} streams of {args.max_tokens} tokens, medians of {args.rounds} rounds\n")
    print(head(["decoder", "engine, tokens/s", "server", "of the engine's", "between chunks, ms"]))
    for name in args.decoders:
        engine = statistics.median(alone[name])
        server = statistics.median(each["output_throughput"] for each in served[name])
        times = [each["median_itl_ms"] for each in served[name] if each["median_itl_ms"] is not None]
        between = f"{statistics.median(times):.1f}" if times else "–"  # answers of one chunk have none between
        print(row([DECODERS[name], f"{engine:,.0f}", f"{server:,.0f}", f"{server / engine:.1%}", between]))
    if args.json:
        print(json.dumps({"engine": alone, "server": served}))


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
    (directory / "tokenizer_config.json").write_text("{}")


def engine_alone(args: argparse.Namespace, name: str) -> list[float]:
    """Tokens/s of each round of `LLM.generate` on the prompts that the client sends."""
    decoding = DECODERS[name]
    prompts = [question.prompt for question in questions("words", 0, args.streams)]
    found = []
    with LLM(
        os.path.join(args.engine, "target"),
        draft_model=os.path.join(args.engine, "draft") if decoding.drafts else None,
        decoding=decoding,
        max_num_seqs=args.streams,
        max_model_len=longest(args),
        compile_at_start=False,
    ) as llm:
        for number in range(1 + args.rounds):
            params = [
                SamplingParams(max_tokens=args.max_tokens, temperature=0.7, seed=1000 * number + seed)
                for seed in range(args.streams)
            ]
            began = time.perf_counter()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            seconds = time.perf_counter() - began
            found.append(sum(len(output.outputs[0].token_ids) for output in outputs) / seconds)
    return found[1:]


def longest(args: argparse.Namespace) -> int:
    """Tokens of the longest prompt and its answer, in whole pages."""
    return -(-(512 + args.max_tokens) // 64) * 64


def through_server(args: argparse.Namespace, name: str, directory: str) -> list[dict[str, Any]]:
    """The client's figures of each round."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "smcjax", "serve", "--port", str(port), "--no-compile-at-start"]
    command += OPTIONS[name].split()
    command += ["--model", os.path.join(directory, "target"), "--draft-model", os.path.join(directory, "draft")]
    command += ["--max-num-seqs", str(args.streams), "--max-model-len", str(longest(args))]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server:
        try:
            wait_for(f"http://127.0.0.1:{port}/health", server)
            rounds = [asyncio.run(one_round(args, port, number)) for number in range(1 + args.rounds)]
        finally:
            server.terminate()
    return rounds[1:]


async def one_round(args: argparse.Namespace, port: int, number: int) -> dict[str, Any]:
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
