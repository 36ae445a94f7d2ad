"""The cycle compiled for an H200 on a machine without a GPU: its kernels, its copies, how long compiling takes.

XLA and Mosaic compile for a described GPU; nothing runs. What a profile would list can be counted, and that no buffer
of KV's size is copied can be seen. Algorithms that XLA chooses by timing are its defaults here, and the one draw of a
cycle of rejection goes as on a CPU, in two launches more.

    uv run --isolated --no-project --with jax==0.11.2 --with jax-cuda13-plugin==0.11.2 --with jax-cuda13-pjrt \\
        --with nvidia-cuda-nvcc --with . python scripts/benchmarks/compile_for_gpu.py --layers 2

`--sparse --context 65536 --max-model-len 65792 --requests 8 --list` is a cycle of rejection over a sparse target whose
drafts are looked up, launch by launch: what is between two `swiglu` is a layer.

`MOSAIC_GPU_DUMP_PTX=1` and `MOSAIC_GPU_DUMP_PTXAS=1` print the kernels' PTX and registers.
"""

from __future__ import annotations

import ast
import collections
import dataclasses
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from profile_cycle import cycle_parser

from smcjax import rejection, smc
from smcjax.bench.models import Models
from smcjax.decoders import Rejection
from smcjax.decoding.drafts.ngram import NGram
from smcjax.decoding.groups import PairParams
from smcjax.decoding.sequences import Requests
from smcjax.engine.run.programs import CUBLAS_PRODUCTS, leaves_to_cublas
from smcjax.engine.schedule.page_budget import Footprint
from smcjax.matmul import product_dtypes
from smcjax.model.config import ModelConfig
from smcjax.model.folding import folded_shapes
from smcjax.model.params import Params, param_shapes
from smcjax.model.quantize import quantize_params
from smcjax.quantization import QUANTIZATIONS
from smcjax.sparse.verification import SparseVerification

H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128 block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535 block_dim_limit_z: 65535 memory_bandwidth: 4800000000000 l2_cache_size: 52428800
  clock_rate_ghz: 1.98 device_memory_size: 150000000000 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA" dnn_version_info { major: 9 minor: 10 } runtime_version { major: 13 }
device_description_str: "NVIDIA H200"
"""
RUNS = ("fusion", "custom-call", "copy", "sort", "scatter", "gather", "reduce", "conditional")  # on the device
NOTHING = "empty"  # custom calls that only name memory


def main() -> None:
    """Compiles one cycle and prints what it consists of."""
    parser = cycle_parser(__doc__)
    parser.add_argument("--layers", type=int, help="of both models (all)")
    parser.add_argument("--implementation", choices=("mosaic", "xla"), default="mosaic")
    parser.add_argument("--hlo", type=Path, help="write the optimised program there")
    parser.add_argument("--sparse", action="store_true", help="rejection over a sparse target instead of SMC")
    parser.add_argument(
        "--refresh",
        type=ast.literal_eval,
        metavar="R",
        help="with --sparse: spacing of the layers that select, or a flag for each, as (True,False) (1: all)",
    )
    parser.add_argument("--list", action="store_true", help="print all launches outside loops, in order")
    args = parser.parse_args()

    attention = "nsa-shared" if args.sparse else None
    models = Models(args.target_shape, args.draft_shape, attention=attention, target_layers=args.layers)
    target, draft = models.target_config, models.draft_config
    if args.layers is not None:
        draft = dataclasses.replace(draft, num_layers=args.layers)
    how = {"max_model_len": args.max_model_len, "implementation": args.implementation}
    if args.sparse:
        sparse = SparseVerification("merged", args.gamma + 1, schedule=args.refresh)
        program: Any = rejection.Program(Rejection(args.gamma, sparse=sparse), target, NGram(), page_size=128, **how)
    else:
        program = smc.Program(smc.SMC(args.n_particles, args.gamma, control=0), target, draft, **how)
    params = PairParams(
        kept(target, args.implementation, args.quantization),
        None if args.sparse else kept(draft, args.implementation, args.draft_quantization),
    )
    began = time.perf_counter()
    text = compiled(rejection if args.sparse else smc, program, params, args.requests, args.context)
    print(f"compiled in {time.perf_counter() - began:.1f} s")
    if args.hlo:
        args.hlo.write_text(text)
    if args.list:
        print(*launches(text[text.index("ENTRY") :]), sep="\n")
    report(text)


def kept(config: ModelConfig, implementation: str, quantization: str | None) -> Params:
    """Describes a model's weights as the engine keeps them."""
    if quantization is not None:
        kind = QUANTIZATIONS[quantization]
        return jax.eval_shape(lambda params: quantize_params(params, kind), param_shapes(config, jnp.bfloat16))
    return (param_shapes if implementation == "xla" else folded_shapes)(config, jnp.bfloat16)


def compiled(decoder: Any, program: Any, params: Any, requests: int, context: int) -> str:
    """The optimised program of one cycle of `decoder`, a module."""
    topology = topologies.get_topology_desc("1x1", "cuda", target_config=H200, topology="1x1x1")
    sharding = jax.sharding.SingleDeviceSharding(topology.devices[0])
    footprint = Footprint.of(program.decoding, program.page_size)
    pages = 1 + requests * footprint.worst_case(context, program.max_model_len)

    def start() -> Any:
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), params)
        memory = program.create_memory(zeros, pages)
        lengths = jnp.full(requests, context)
        vocabulary = program.target.vocab_size
        asked = Requests.alike(jax.random.key(0), lengths, vocab_size=vocabulary, max_tokens=program.max_model_len)
        return decoder.begin(
            program, memory, jnp.zeros((requests, context), jnp.int32), asked, jnp.ones(requests, bool)
        )

    def placed(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree)

    step = jax.jit(lambda params, state: decoder.step(program, params, state), donate_argnums=1, out_shardings=sharding)
    with product_dtypes() as dtypes:
        lowered = step.trace(placed(params), placed(jax.eval_shape(start))).lower(lowering_platforms=("cuda",))
    asked = requests * program.rows >= 8 and program.implementation != "xla"  # as `programs.step_job` does
    return lowered.compile(CUBLAS_PRODUCTS if leaves_to_cublas(asked, dtypes, "gpu") else None).as_text()


def launches(body: str) -> Iterator[str]:
    """Yields a line for each launch on the device, in order: its name, its result's shape, its place in the program."""
    for line in body.splitlines():
        found = re.match(r"\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z\-]+)\(", line)
        if found and found[3] in RUNS and not found[1].startswith(NOTHING):
            origin = re.search(r'op_name="([^"]*)"', line)
            shape = re.sub(r"\{[^}]*\}", "", found[2])
            yield f"{found[1]:45} {shape[:70]:70} {origin[1][-80:] if origin else ''}"


def report(text: str) -> None:
    """Launches by kernel class, in the draft loop and outside, and copies by size."""
    entry = text[text.index("ENTRY") :]
    loops = {}
    for line in text.splitlines():
        found = re.search(r"while\(.*body=(%[\w.\-]+).*\"known_trip_count\":\{\"n\":\"(\d+)\"", line)
        if found:
            start = text.index(f"\n{found[1]} (")
            loops[found[1]] = (text[start : text.index("\n}\n", start)], int(found[2]))
    total = 0
    for name, body, times in (("outside loops", entry, 1), *((name, body, n) for name, (body, n) in loops.items())):
        kinds: collections.Counter[str] = collections.Counter()
        for launch in launches(body):
            kinds[re.sub(r"[._]\d+", "", launch.split()[0])] += 1
        total += times * kinds.total()
        print(f"\n{name}, {times} ×: {kinds.total()} launches")
        for kind, count in kinds.most_common():
            print(f"{count:6d}  {kind}")
    print(f"\n{total} launches a cycle")
    copies = re.findall(r"= ((?:bf16|f32|s32|u32|pred)\[[\d,]*\])[^=]* copy\(", text)
    print(
        "copies:",
        ", ".join(f"{count} of {what}" for what, count in collections.Counter(copies).most_common()) or "none",
    )


if __name__ == "__main__":
    main()
