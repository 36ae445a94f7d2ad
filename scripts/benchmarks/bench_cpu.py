"""Times a real model on a CPU: one request, sixteen at once, a long prompt; beside PyTorch in the same run.

    uv run python scripts/benchmarks/bench_cpu.py model.gguf --torch-python path/to/python

`model.gguf` is a GGUF file of the Llama architecture. The other Python needs torch, transformers, accelerate and gguf,
which this package does not (`torch_generate.py`). Every process times every case once a round, and the
processes take turns; a figure is the median over rounds. Decoding is greedy, prompts are random tokens, nothing is
cached.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple


class Case(NamedTuple):
    """A workload: requests at once, tokens of each prompt, tokens of each answer, the limit of a sequence."""

    requests: int
    prompt: int
    answer: int
    max_model_len: int


CASES = {
    "1 request": Case(1, 16, 32, 2048),
    "1 request, max_model_len 8,192": Case(1, 16, 32, 8192),
    "16 requests": Case(16, 16, 32, 2048),
    "prompt of 1,500": Case(1, 1500, 1, 2048),
}
OURS: dict[str, dict[str, Any]] = {"float32": {}, "bfloat16": {"dtype": "bfloat16"}, "int8": {"quantization": "int8"}}
TORCH = ("float32", "bfloat16")


def serve(model: str, kind: str) -> None:
    """Answers each line of the input, the name of a case, with the seconds that it takes."""
    import numpy as np

    from smcjax import LLM, Autoregressive, SamplingParams

    llms: dict[int, LLM] = {}
    rng = np.random.default_rng(0)
    for line in sys.stdin:
        case = CASES[line.strip()]
        if case.max_model_len not in llms:
            llms[case.max_model_len] = LLM(
                model,
                decoding=Autoregressive(),
                max_num_seqs=16,
                max_model_len=case.max_model_len,
                enable_prefix_caching=False,
                **OURS[kind],
            )
        prompts = [{"prompt_token_ids": rng.integers(10, 49_000, case.prompt).tolist()} for _ in range(case.requests)]
        began = time.perf_counter()
        params = SamplingParams(max_tokens=case.answer, temperature=0, ignore_eos=True)
        llms[case.max_model_len].generate(prompts, params, use_tqdm=False)
        print(time.perf_counter() - began, flush=True)


def main() -> None:
    """Runs all processes by turns and prints a table."""
    # Here, as the baseline imports `CASES` where there is no JAX.
    from smcjax.bench.record import save, this_machine
    from smcjax.cli.bench_options import add_save_option, check_files

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a GGUF file")
    parser.add_argument("--torch-python", help="the Python of the peer (default: no peer)")
    parser.add_argument("--rounds", type=int, default=5, help="after one that is not counted (5)")
    add_save_option(parser)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.model, args.serve)
        return
    check_files(args)
    commands = {f"smcjax {kind}": [sys.executable, __file__, args.model, "--serve", kind] for kind in OURS}
    if args.torch_python:
        baseline = str(Path(__file__).parent / "torch_generate.py")
        commands |= {f"torch {kind}": [args.torch_python, baseline, args.model, kind] for kind in TORCH}
    rounds = measure(commands, args.rounds)
    seconds = {name: {case: statistics.median(some) for case, some in own.items()} for name, own in rounds.items()}
    width = max(map(len, CASES))
    print(f"{platform.processor() or platform.machine()}; seconds, tokens/s, medians of {args.rounds} rounds")
    print(" " * width, *(f"{name:>17}" for name in commands))
    for case, what in CASES.items():
        tokens = what.requests * (what.answer if what.answer > 1 else what.prompt)
        print(f"{case:<{width}}", *(f"{s:8.2f} {tokens / s:8.1f}" for s in (seconds[name][case] for name in commands)))
    if args.save is not None:
        rows = [
            {"case": case, "contender": name, "seconds": seconds[name][case], "seconds_rounds": some}
            for name, own in rounds.items()
            for case, some in own.items()
        ]
        save(args.save, rows, this_machine())


def measure(commands: dict[str, list[str]], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Seconds of each case by command and round; the first round, which loads and compiles, is left out."""
    processes = {
        name: subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        for name, command in commands.items()
    }
    taken: dict[str, dict[str, list[float]]] = {name: {case: [] for case in CASES} for name in commands}
    for index in range(rounds + 1):
        for case in CASES:
            for name, process in processes.items():
                assert process.stdin is not None
                assert process.stdout is not None
                process.stdin.write(case + "\n")
                process.stdin.flush()
                answer = process.stdout.readline()
                if not answer:
                    raise RuntimeError(f"{name} ended at {case!r}; run it by itself: {' '.join(commands[name])}")
                if index:
                    taken[name][case].append(float(answer))
    for process in processes.values():
        process.terminate()
    return taken


if __name__ == "__main__":
    main()
