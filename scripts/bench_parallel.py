"""Tensor parallelism on the GPUs of one host, in one run: the same tokens as one device, then times beside predictions.

    python scripts/bench_parallel.py                       # on two GPUs: tokens, 8B on one and two, 70B on two
    python scripts/bench_parallel.py --only tokens         # also on virtual devices of a CPU

Each case runs in a process of its own by `smcjax bench cycle`. Of a 70B target as many layers are timed as fit, and
half of them: the time of a layer follows, and of the whole model, which the table says was computed.

NVLink multicast stays off, and JAX may take nearly all of a GPU's memory, unless the environment says otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from typing import Any

from smcjax.markdown import table

FOR_GPUS = {"NCCL_NVLS_ENABLE": "0", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95"}
SPARE = 4e9  # bytes of a device beside weights: KV, scratch, and what libraries take
PARTS = ("tokens", "8b", "70b")


def main() -> None:
    """Runs the parts that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=2, metavar="n", help="devices that hold a model together (2)")
    parser.add_argument("--only", choices=PARTS, nargs="+", default=PARTS, help="parts to run (all)")
    parser.add_argument("--json", action="store_true", help="all results last, one line")
    args = parser.parse_args()
    for name, value in FOR_GPUS.items():
        os.environ.setdefault(name, value)
    if "tokens" in args.only:
        # In a process of its own, or this one would hold the GPUs' memory.
        command = f"import bench_parallel; bench_parallel.compare_tokens({args.devices})"
        here = os.path.dirname(os.path.abspath(__file__))
        subprocess.run([sys.executable, "-c", command], cwd=here, check=True)
    results: list[dict[str, Any]] = []
    if "8b" in args.only:
        for size in (1, args.devices):
            results += [timed("llama-3.1-8b", size, gamma) for gamma in (0, 8)]
            results.append(timed("llama-3.1-8b", size, 8, "--requests", "8", "--context", "1024", "--synthetic-kv"))
        results.append(timed("llama-3.1-8b", args.devices, 8, "--draft-tensor-parallel-size", str(args.devices)))
    if "70b" in args.only:
        results += large("llama-3.1-70b", args.devices)
    if results:
        print(markdown(results))
    if args.json:
        print(json.dumps(results))


def compare_tokens(size: int) -> None:
    """Raises AssertionError where the bundled pair gives other tokens on `size` devices than on one, in float32."""
    import jax

    from smcjax import LLM, SMC, Autoregressive, Rejection, SamplingParams
    from smcjax.tasks.word_problems import generate, prompt

    questions = [prompt(problem) for problem in generate(0, 8, "eval")]
    params = [SamplingParams(max_tokens=64, temperature=0.7, seed=seed) for seed in range(len(questions))]
    for decoding in (Autoregressive(), Rejection(gamma=4), SMC(8, 4), SMC(8, 4, control=0.1)):
        answers = []
        for devices in (1, size):
            with LLM(decoding=decoding, dtype="float32", tensor_parallel_size=devices, compile_at_start=False) as llm:
                outputs = llm.generate(questions, params, use_tqdm=False)
                answers.append([output.outputs[0].token_ids for output in outputs])
                if devices > 1:
                    runner = llm.engine.runner
                    leaves = jax.tree.leaves((runner.state, runner.cached))
                    assert all(alike(leaf, runner.num_pages) for leaf in leaves), "devices differ in what all have"
        same = sum(one == other for one, other in zip(*answers, strict=True))
        print(f"{decoding}: {same} of {len(questions)} answers are one device's, all devices alike", flush=True)
        assert same == len(questions)


def alike(leaf: Any, num_pages: int) -> bool:
    """True for an array that is divided among devices, or that all of them have to the last bit (`copies`)."""
    if not leaf.is_fully_replicated:
        return True
    first, *others = (copy.tobytes() for copy in copies(leaf, num_pages))
    return all(other == first for other in others)


def copies(leaf: Any, num_pages: int) -> list[Any]:
    """Returns each device's copy, in NumPy, of an array that all of them have; of keys, their numbers.

    The trash page is left out: many rows write there at once, which a GPU does in any order, and none reads it.
    """
    import jax
    import numpy as np

    from smcjax.kv import TRASH

    plain = jax.random.key_data(leaf) if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
    pages = slice(TRASH + 1, None) if plain.ndim == 4 and len(plain) == num_pages else ...
    return [np.asarray(shard.data)[pages] for shard in plain.addressable_shards]


def timed(target: str, size: int, gamma: int, *options: str) -> dict[str, Any]:
    """The JSON of one `smcjax bench cycle`, with 8 particles, or the target alone for `gamma` 0; {} if it fails."""
    decoding = ["-N", "8", "-K", str(gamma)] if gamma else ["--decoding", "autoregressive"]
    command = [sys.executable, "-m", "smcjax", "bench", "cycle", "--json", *decoding, *options]
    command += ["--target-shape", target, "--draft-shape", "llama-3.2-1b", "--tensor-parallel-size", str(size)]
    print(" ".join(command[1:]), file=sys.stderr, flush=True)
    ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if ran.returncode:
        return {}
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    print(ran.stdout, file=sys.stderr, flush=True)
    return found


def large(target: str, size: int) -> list[dict[str, Any]]:
    """Cycles of as many layers as fit and of half of them, each with that of all layers computed from the two."""
    from smcjax.bench.predict import weights
    from smcjax.bench.shapes import SHAPES
    from smcjax.model.parallel import held_by_one

    whole, memory = held_by_one(SHAPES[target], size), _memory()
    two, one = (weights(held_by_one(SHAPES[target].with_layers(SHAPES[target].layers * n), size)) for n in (2, 1))
    room = memory - SPARE - weights(SHAPES["llama-3.2-1b"]) - (weights(whole) - whole.num_layers * (two - one))
    layers = min(whole.num_layers, int(room / (two - one)))
    results = []
    for gamma in (0, 8, 16):
        many, few = (timed(target, size, gamma, "--target-layers", str(n)) for n in (layers, layers // 2))
        if many and few:
            layer = (many["ms"] - few["ms"]) / (layers - layers // 2)
            many["ms_all_layers"] = many["ms"] + layer * (whole.num_layers - layers)
            many["ms_a_layer"] = layer
        results += [many, few]
    return results


def _memory() -> float:
    """Bytes that JAX may take of the default device, asked in a process that ends."""
    code = "from smcjax.engine.run.memory import device_memory; print(device_memory())"
    return float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


def markdown(results: list[dict[str, Any]]) -> str:
    """Measured times beside the predicted ones of the same shape."""
    heads = ["target", "devices", "layers", "decoder", "requests", "ms a cycle", "all layers, computed", "predicted"]
    heads += ["tokens/s", "of the weight roofline", "compiled in, s"]
    rows = []
    for one in filter(None, results):
        layers = one["target_layers"]
        computed = f"{one['ms_all_layers']:.2f}" if layers and "ms_all_layers" in one else "–"
        cells = (
            one["target"],
            f"{one['tensor_parallel_size']} × {one['device']}"
            + (", draft divided" if one["draft_tensor_parallel_size"] > 1 else ""),
            layers or "all",
            one["described"],
            one["groups"],
            f"{one['ms']:.2f}",
            computed,
            _predicted(one),
            f"{one['tokens_per_second']:,.0f}",
            f"{100 * one['weight_roofline_fraction']:.1f}%",
            f"{one['compile_seconds']:.0f}",
        )
        rows.append(cells)
    return table(heads, rows)


def _predicted(one: dict[str, Any]) -> str:
    """Milliseconds that `smcjax bench predict` says for all layers; a dash for what it does not speak of."""
    from smcjax.bench.predict import Pieces, predict
    from smcjax.decoders import SMC, Autoregressive
    from smcjax.device import KNOWN

    if one["groups"] > 1 or one["draft_tensor_parallel_size"] > 1 or one["device"] not in KNOWN:
        return "–"
    decoding = SMC(one["n_particles"], one["gamma"]) if one["gamma"] else Autoregressive()
    said = predict(
        KNOWN[one["device"]], one["target"], one["draft"], one["tensor_parallel_size"], decoding, Pieces()
    ).seconds
    return " to ".join(dict.fromkeys(f"{seconds * 1e3:.2f}" for seconds in said))


if __name__ == "__main__":
    main()
