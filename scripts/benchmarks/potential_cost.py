"""Times requests through the engine without a potential, with one on the device, and with one on the host.

    python scripts/benchmarks/potential_cost.py --requests 8 --milliseconds 10

Models have random weights of Llama 3.1 8B's and 3.2 1B's shapes on a GPU, of tiny ones on a CPU. The device's potential
counts a token id; the host's waits so many milliseconds at each call and gives every text the same value, and is asked
every eight tokens of a row, so that each cycle of K = 8 has something new to ask. Cases take turns, and the table has
medians over turns.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Iterable
from typing import Any, SupportsInt, cast

from smcjax import TextPotential
from smcjax.bench.models import Models
from smcjax.bench.record import save, this_machine
from smcjax.bench.serving import Load, build_engine, make_requests, serve
from smcjax.cli.bench_options import ON_CPU, ON_GPU, add_save_option, check_files
from smcjax.decoders import SMC
from smcjax.device import on_cpu
from smcjax.engine.engine import Engine
from smcjax.markdown import table
from smcjax.smc import TokenPotential
from smcjax.tokenizer.tokenizer import Tokenizer


class Numbers:
    """A tokenizer for random weights: the text of a token is its number."""

    byte_ids: frozenset[int] = frozenset()

    def __init__(self, vocab: int) -> None:
        self.text_ids = frozenset(range(vocab))

    def decode(self, ids: Iterable[SupportsInt]) -> str:
        """The numbers, each behind a space."""
        return "".join(f" {int(id)}" for id in ids)


def host_potential(milliseconds: float) -> TextPotential:
    """A potential of text that takes so long a call."""

    def score(prompt: str, texts: list[str]) -> list[float]:
        time.sleep(milliseconds / 1e3)
        return [0.0] * len(texts)

    return TextPotential(score, ask=8)


def seconds(engine: Engine, models: Models, load: Load, potentials: tuple[Any, ...], seed: int) -> float:
    """Time in which all of the load's requests are answered, with the potentials."""
    arrivals = [
        (at, dataclasses.replace(request, params=dataclasses.replace(request.params, potentials=potentials)))
        for at, request in make_requests(models, dataclasses.replace(load, seed=seed))
    ]
    served = serve(engine, arrivals)
    if any(one.output.outputs[0].finish_reason != "length" for one in served):
        raise RuntimeError("a request ended early: its weights broke, so the timing says nothing")
    return max(one.ended for one in served)


def main() -> None:
    """Measures what the command line says and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=8, help="requests at once (8)")
    parser.add_argument(
        "--milliseconds", type=float, default=10.0, help="that a call of the host's potential takes (10)"
    )
    parser.add_argument("--output-len", type=int, default=378, help="tokens of an answer (378: 42 cycles)")
    parser.add_argument("--turns", type=int, default=3, help="runs of each case (3)")
    add_save_option(parser)
    args = parser.parse_args()
    check_files(args)
    models = Models(*(ON_CPU if on_cpu() else ON_GPU))
    load = Load(
        SMC(n_particles=8, gamma=8, control=0),
        num_prompts=args.requests,
        input_len=256,
        output_len=args.output_len,
        max_num_seqs=args.requests,
    )
    tokenizer = cast(Tokenizer, Numbers(models.target_config.vocab_size))
    engine = build_engine(models, load, tokenizer)
    cases: dict[str, tuple[Any, ...]] = {
        "none": (),
        "one on the device": (TokenPotential(((5, -0.5),)),),
        f"one on the host, {args.milliseconds:g} ms": (host_potential(args.milliseconds),),
    }
    found: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(args.turns + 1):  # the first compiles
        for case, (name, potentials) in enumerate(cases.items()):
            took = seconds(engine, models, load, potentials, seed=len(cases) * turn + case)
            if turn:
                found[name].append(took)
    tokens = args.requests * args.output_len
    rows = [
        {"potential": name, "tokens_per_second": tokens / statistics.median(times), "raw_seconds": times}
        for name, times in found.items()
    ]
    base = tokens / statistics.median(found["none"])
    lines = [
        (row["potential"], f"{row['tokens_per_second']:,.0f}", f"{row['tokens_per_second'] / base:.3f}") for row in rows
    ]
    print(table(["potential", "tokens/s", "of none"], lines))
    if args.save is not None:
        save(args.save, rows, this_machine())


if __name__ == "__main__":
    main()
