"""Sums over the GPUs of one host, inside a chain of products: `peer_memory`, XLA's, and one by Pallas alone.

    python scripts/bench_reduction.py                  # all ways on two GPUs, each in a process of its own
    python scripts/bench_reduction.py --devices 4 --ways psum peers

    peers    `smcjax.pallas.collectives.peer_memory`; its gather as well, which is compared alone
    psum     `jax.lax.psum`, for which XLA takes kernels of its own up to some size (the output says which), else NCCL
    nccl     the same without XLA's kernels
    remote   Pallas' remote references and semaphores

Every way is first compared with exact sums, and all devices' results with each other to the last bit. Then it stands
behind each product of a chain like a model's (o, down) in one jitted program, and the same chain without sums is
subtracted. A way that hangs is ended. NVLink multicast stays off.
"""

from __future__ import annotations

import argparse
import collections
import functools
import itertools
import os
import re
import statistics
import subprocess
import sys
import time
from typing import Any

from smcjax.markdown import head, row

WAYS = {  # flags of XLA
    "peers": "",
    "psum": "",
    "nccl": "--xla_gpu_experimental_use_collective_kernels=-ALL_REDUCE",
    "remote": "",
}


def main() -> None:
    """Runs each way in a process of its own, then prints what they found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--rows", nargs="+", type=int, default=[8, 72, 144])
    parser.add_argument("--hidden", nargs="+", type=int, default=[8192, 4096])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=60, help="limit of a way")
    parser.add_argument("--all-seconds", type=float, default=600, help="limit of all")
    parser.add_argument("--tiny", action="store_true", help="small products, to try it on a CPU")
    parser.add_argument("--way", choices=WAYS, help="(run this way here)")
    args = parser.parse_args()
    if args.way:
        measure(args)
        return
    began, found = time.monotonic(), []
    for way in args.ways:
        left = min(args.seconds, args.all_seconds - (time.monotonic() - began))
        if left < 5:
            print(f"{way}: no time left", flush=True)
            continue
        flags = f"{os.environ.get('XLA_FLAGS', '')} {WAYS[way]}".strip()
        environment = {"NCCL_NVLS_ENABLE": "0", **os.environ, "XLA_FLAGS": flags}
        command = ["timeout", "-k", "2", f"{left:.0f}", sys.executable, "-u", __file__, *sys.argv[1:], "--way", way]
        ran = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        lines = ran.stdout.splitlines()
        found += [line for line in lines if line.startswith("| ")]
        print(f"== {way}: {'hung' if ran.returncode in (124, 137) else f'ended with {ran.returncode}'}", flush=True)
        shown = lines if ran.returncode == 0 else lines[-25:]
        print("\n".join(line[:400] for line in shown), flush=True)
    heads = ["way", "devices", "rows", "E", "µs a sum", "µs the chain", "without sums"]
    print("", head(heads), *found, sep="\n")


def measure(args: argparse.Namespace) -> None:
    """Checks and times one way."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import AxisType, NamedSharding, PartitionSpec

    from smcjax.pallas import Workspaces

    size = args.devices
    print("jax", jax.__version__, jax.devices()[:size], flush=True)
    mesh = jax.make_mesh((size,), ("model",), axis_types=(AxisType.Auto,), devices=jax.devices()[:size])
    divided, whole = PartitionSpec("model"), PartitionSpec()

    def put(shape: tuple[int, ...], scale: float, key: int) -> jax.Array:
        def draw() -> jax.Array:
            return (jax.random.normal(jax.random.key(key), (size, *shape), jnp.float32) * scale).astype(jnp.bfloat16)

        return jax.jit(draw, out_shardings=NamedSharding(mesh, divided))()

    def mapped(function: Any, *specs: Any, out: Any = divided) -> Any:
        return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False))

    def psum(x: Any, _: Any) -> Any:
        return jax.lax.psum(x, "model")

    ways: dict[str, Any] = {"remote": functools.partial(remote_sum, size=size), "peers": lambda x, peers: peers.sum(x)}
    add = ways.get(args.way, psum)
    workspaces = Workspaces(mesh)
    extra = workspaces.peers()
    for hidden, rows in itertools.product(args.hidden, args.rows):
        x = put((rows, hidden), 1.0, 7 * rows)
        one = mapped(lambda x, e: add(x[0], e)[None], divided, divided)
        results = [np.asarray(one(x, extra)) for _ in range(3)]
        exact = np.asarray(x).astype(np.float64).sum(0)
        alike = all((result == results[0][:1]).all() for result in results)
        error = np.abs(results[0].astype(np.float64)[0] - exact).max() / np.abs(exact).max()
        print(f"{args.way}, {rows} rows of {hidden}: devices and runs alike {alike}, error {error:.1e}", flush=True)
        assert alike
        assert error < 5e-3
    if args.way == "peers":
        check_others(mapped, put, extra, np)

    for hidden in args.hidden:
        inputs = (hidden // size // (8 if args.tiny else 1), 7 * hidden // 2 // size // (8 if args.tiny else 1))
        weights = [[put((hidden, n), n**-0.5, 100 * layer + n) for n in inputs] for layer in range(args.layers)]
        specs = (jax.tree.map(lambda _: divided, weights), whole, divided)
        for rows in args.rows:
            drawn = np.random.default_rng(0).normal(size=(rows, hidden)).astype(jnp.bfloat16)
            given = (weights, jax.device_put(drawn, NamedSharding(mesh, whole)), extra)
            programs = [
                mapped(functools.partial(chain, way), *specs, out=whole).lower(*given).compile()
                for way in (lambda x, _: x, add)
            ]
            if add is psum:
                kinds = collections.Counter(re.findall(r"KERNEL_STRATEGY_\w+", programs[1].as_text()))
                print(f"{rows} rows: kernels of XLA's own {dict(kinds)}", flush=True)
            without, taken = (timed(program, given) for program in programs)
            first, *others = (np.asarray(shard.data) for shard in programs[1](*given).addressable_shards)
            assert all((other == first).all() for other in others), "devices differ behind the chain"
            assert np.isfinite(first.astype(np.float32)).all()
            each = (taken - without) / (2 * args.layers)
            cells = [args.way, size, rows, hidden, f"{each:.1f}", f"{taken:.0f}", f"{without:.0f}"]
            print(row(cells), flush=True)
    workspaces.give_back()


def chain(add: Any, weights: Any, x: Any, extra: Any) -> Any:
    """Products as of layers' o and down, each device's summed by `add`, with a norm behind."""
    import jax
    import jax.numpy as jnp

    for w in (w[0] for pair in weights for w in pair):
        hidden, n = w.shape
        wide = jnp.concatenate([x] * -(-n // hidden), axis=-1)[:, :n]
        y = jax.lax.dot_general(wide, w, (((1,), (1,)), ((), ())), preferred_element_type=x.dtype)
        y = add(y, extra).astype(jnp.float32)
        x = (y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-6)).astype(x.dtype)
    return x


def timed(program: Any, given: Any) -> float:
    """µs of a program, the median of 9 windows of 20 calls."""
    import jax

    for _ in range(5):
        jax.block_until_ready(program(*given))
    windows = []
    for _ in range(9):
        began = time.perf_counter()
        for _ in range(20):
            result = program(*given)
        jax.block_until_ready(result)
        windows.append((time.perf_counter() - began) / 20 * 1e6)
    return statistics.median(windows)


def check_others(mapped: Any, put: Any, peers: Any, np: Any) -> None:
    """Sums of float32 with an array that all have, and gathers, also of more than all slots: to the last bit."""
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec

    by_device, size = PartitionSpec("model"), peers.size
    for rows, width in ((8, 64), (3, 4), (72, 64128), (600, 8192)):
        for dtype in (jnp.float32, jnp.bfloat16) if width % 8 == 0 else (jnp.float32,):
            x, added = put((rows, width), 1.0, rows).astype(dtype), put((rows, width), 1.0, 1).astype(dtype)[:1]

            def both(x: Any, added: Any, peers: Any) -> Any:
                return peers.sum(x[0], added[0])[None], peers.gather(x[0])[None]

            total, side = (np.asarray(y) for y in mapped(both, by_device, PartitionSpec(), by_device)(x, added, peers))
            wide = np.asarray(x).astype(np.float32)
            want = functools.reduce(np.add, [*wide, np.asarray(added[0]).astype(np.float32)]).astype(total.dtype)
            same = all((one == want).all() for one in total)
            beside = all((one == np.concatenate(list(np.asarray(x)), axis=-1)).all() for one in side)
            print(f"{rows} × {width} {dtype.__name__} on {size}: sum {same}, gather {beside}", flush=True)
            assert same
            assert beside


def remote_sum(x: Any, _: Any, *, size: int) -> Any:
    """The sum by Pallas' remote references and semaphores, of blocks of 128 threads with 8 numbers each."""
    import jax
    import jax.numpy as jnp
    from jax import lax
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    each = 1024
    blocks = x.size // each
    layout = plgpu.Layout.WG_STRIDED((each,), vec_size=8)

    def kernel(x_ref: Any, out_ref: Any, pushed_ref: Any, arrived: Any) -> None:
        block, rank = lax.axis_index("block"), lax.axis_index("model")
        mine = plgpu.load(x_ref.at[block], layout=layout)
        for distance in range(1, size):
            peer = lax.rem(rank + distance, jnp.int32(size))
            plgpu.remote_ref(pushed_ref, peer).at[rank, block][...] = mine
        pushed_ref.at[rank, block][...] = mine
        for distance in range(1, size):
            pl.semaphore_signal(arrived, device_id=lax.rem(rank + distance, jnp.int32(size)))
        pl.semaphore_wait(arrived, size - 1)
        total = plgpu.load(pushed_ref.at[0, block], layout=layout).astype(jnp.float32)
        for device in range(1, size):
            total += plgpu.load(pushed_ref.at[device, block], layout=layout).astype(jnp.float32)
        out_ref[block] = total.astype(x.dtype)

    out, _ = plgpu.kernel(
        kernel,
        out_type=[jax.ShapeDtypeStruct((blocks, each), x.dtype), jax.ShapeDtypeStruct((size, blocks, each), x.dtype)],
        grid=(blocks,),
        grid_names=("block",),
        scratch_types=[plgpu.SemaphoreType.REGULAR],
        kernel_name="remote_sum",
    )(x.reshape(blocks, each))
    return out.reshape(x.shape)


if __name__ == "__main__":
    main()
