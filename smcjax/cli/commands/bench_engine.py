"""`smcjax bench throughput|latency|engine|decoders`: the engine as a whole is timed, decoders compared on a task."""

from __future__ import annotations

import argparse
import dataclasses
import math
from pathlib import Path
from typing import TYPE_CHECKING

from smcjax.cli.bench_options import (
    BATCH,
    COUNT,
    CYCLES,
    LENGTH,
    ROWS,
    add_decoding_option,
    add_figures_options,
    add_shape_options,
    check_files,
    shape_decoding,
    shape_models,
    write_figures,
)
from smcjax.cli.options import add_debug_option, add_task_options, check_task, one_decoder, remark, shows_progress
from smcjax.cli.parser import above, whole
from smcjax.decoders import SMC, Rejection
from smcjax.engine.requests.sampling_params import MAX_SEED, SamplingParams

if TYPE_CHECKING:
    from smcjax.bench.engine import Overhead


# What `bench decoders` compares where nothing is named.
USUAL = (
    *(Rejection(4), Rejection(4, n_candidates=8)),
    *(SMC(n_particles=2, gamma=4, control=0), SMC(n_particles=8, gamma=4, control=0)),
)


def add_parsers(benchmarks: argparse._SubParsersAction) -> None:
    serving = "Times the engine, on random weights, with requests that come"
    throughput = benchmarks.add_parser(
        "throughput", help="requests that come all at once", description=f"{serving} all at once."
    )
    _add_serving_options(throughput)
    throughput.set_defaults(run=run_serving, rates=[math.inf], plot=None)
    latency = benchmarks.add_parser(
        "latency", help="requests that come at given rates", description=f"{serving} at given rates."
    )
    _add_serving_options(latency)
    rate = above(0, math.inf)
    latency.add_argument("--rates", type=rate, nargs="+", default=[1.0, 2.0, 4.0], metavar="R", help="a second: 1 2 4")
    latency.add_argument("--plot", metavar="FILE", help="latencies over load: .svg, .png or .pdf")
    latency.set_defaults(run=run_serving)

    engine = benchmarks.add_parser(
        "engine",
        help="the engine's cycles against bare ones",
        description="Times what the engine costs beside the cycles that it runs, on random weights.",
    )
    add_shape_options(engine)
    add_decoding_option(engine)
    engine.add_argument(
        "--requests", type=BATCH, nargs="+", default=[1, 2, 4, 8, 16, 32], metavar="G", help="at once (1 2 4 8 16 32)"
    )
    engine.add_argument("--input-len", type=LENGTH, default=256, help="prompt tokens (256)")
    engine.add_argument("--cycles", type=CYCLES, default=32, help="timed cycles (32)")
    add_figures_options(engine)
    add_debug_option(engine)
    engine.set_defaults(run=run_engine)

    decoders = benchmarks.add_parser(
        "decoders",
        help="accuracy and speed of exact decoders and SMC, of one pair",
        description="Compares exact decoders and SMC on a task, by accuracy and speed.",
    )
    add_task_options(decoders)
    decoders.add_argument("--model", metavar="MODEL", help="target (default: the pair that knows the task)")
    decoders.add_argument("--draft-model", metavar="MODEL", help="draft, with --model")
    decoders.add_argument("-n", "--num-problems", type=COUNT, default=200, help="problems (200)")
    decoders.add_argument("--seed", type=whole(0, MAX_SEED), default=7, help="of problems and all randomness (7)")
    decoders.add_argument("--temperature", type=float, default=0.7, help="0.7")
    decoders.add_argument(
        "--decoding",
        type=one_decoder,
        nargs="+",
        default=USUAL,
        metavar="DECODER",
        help="beside the target and the draft alone, as 'SMC(n_particles=2, gamma=4)' (rejection with 1 and 8 "
        "candidates, SMC at control 0 with 2 and 8 particles, K=4)",
    )
    decoders.add_argument(
        "--answers",
        type=ROWS,
        nargs="*",
        default=[],
        metavar="N",
        help="of a rejection, whose majority counts (none)",
    )
    decoders.add_argument("--max-num-seqs", type=BATCH, default=16, help="requests at once (16)")
    decoders.add_argument("--max-model-len", type=whole(2, 1 << 20), help="prompt and answer (320, or --context)")
    decoders.add_argument("--plot", metavar="FILE", help="accuracy over cost: .svg, .png or .pdf")
    add_figures_options(decoders)
    add_debug_option(decoders)
    decoders.set_defaults(run=run_decoders)


def _add_serving_options(parser: argparse.ArgumentParser) -> None:
    add_shape_options(parser)
    add_decoding_option(parser)
    parser.add_argument("--num-prompts", type=COUNT, default=32, help="requests in all (32)")
    parser.add_argument("--input-len", type=LENGTH, default=256, help="prompt tokens (256)")
    parser.add_argument("--output-len", type=LENGTH, default=128, help="tokens of an answer (128)")
    parser.add_argument("--max-num-seqs", type=BATCH, default=8, help="requests that run at once (8)")
    parser.add_argument("--no-overlap", action="store_true", help="read every cycle before the next is enqueued")
    add_figures_options(parser)
    add_debug_option(parser)


def run_serving(args: argparse.Namespace) -> int:
    """Plays requests against the engine, rate by rate; a table, and a plot on request."""
    check_files(args)
    decoding = shape_decoding(args)

    from tqdm import tqdm

    from smcjax.bench.record import this_machine
    from smcjax.bench.serving import Load, figures, make_engine, make_requests, markdown, serve

    load = Load(
        decoding,
        num_prompts=args.num_prompts,
        input_len=args.input_len,
        output_len=args.output_len,
        max_num_seqs=args.max_num_seqs,
        page_size=args.page_size,
        implementation=args.implementation,
        overlap=False if args.no_overlap else None,
    )
    models = shape_models(args)
    engine = make_engine(models, load)
    results = []
    for number, rate in enumerate(args.rates):
        # Other prompts at each rate: the last one's KV is in the prefix cache.
        at_rate = dataclasses.replace(load, request_rate=rate, seed=load.seed + 2 + number)
        with tqdm(
            total=load.num_prompts, desc=f"{rate:g} requests/s", disable=not shows_progress(args), dynamic_ncols=True
        ) as bar:
            results.append(figures(at_rate, serve(engine, make_requests(models, at_rate), bar.update)))
    print(markdown(results))
    write_figures(args, results, this_machine(models.devices))
    if args.plot is not None:
        from smcjax.viz.charts import draw_latency

        draw_latency(results, Path(args.plot))
    return 0


def run_engine(args: argparse.Namespace) -> int:
    """Times cycles bare and through the engine; a table."""
    check_files(args)
    from smcjax.bench.engine import WARMUP, markdown, measure
    from smcjax.bench.record import this_machine
    from smcjax.bench.serving import Load

    decoding = shape_decoding(args)
    load = Load(
        decoding,
        input_len=args.input_len,
        output_len=(2 * WARMUP + args.cycles + 2) * decoding.tokens_per_cycle,
        max_num_seqs=max(args.requests),
        page_size=args.page_size,
        implementation=args.implementation,
    )

    def on_result(one: Overhead) -> None:
        times = f"{one.engine_ms:.2f} ms a cycle in the engine, {one.bare_ms:.2f} bare"
        remark(f"{one.requests} requests: {times}, prompts {one.prefill_ms:.0f} ms")

    models = shape_models(args)
    results = measure(models, load, args.requests, cycles=args.cycles, on_result=on_result)
    print(markdown(results))
    write_figures(args, [dataclasses.asdict(result) for result in results], this_machine(models.devices))
    return 0


def run_decoders(args: argparse.Namespace) -> int:
    """Answers the same problems with every decoder; a table, and a plot on request."""
    check_files(args)
    SamplingParams(temperature=args.temperature)
    check_task(args)
    if (args.model is None) != (args.draft_model is None):
        raise ValueError("--model and --draft-model go together; give both, or neither for the bundled pair.")
    for decoding in args.decoding:
        decoding.check(SamplingParams(temperature=args.temperature))

    from smcjax.bench.decoders import compare, contenders, markdown
    from smcjax.bench.record import this_machine
    from smcjax.decoding.drafts.ngram import NGRAM
    from smcjax.model.files.checkpoint import load_config, resolve_model_path
    from smcjax.model.files.eagle_files import is_eagle
    from smcjax.model.files.hub import bundled_model
    from smcjax.tasks.questions import LONGEST_ANSWER, questions

    chosen = contenders(args.decoding, args.answers)
    target = bundled_model("target") if args.model is None else resolve_model_path(args.model)
    selecting = load_config(target).selecting.values()
    for one in chosen:
        if one.decoding.speculation.sparse is not None:
            one.decoding.speculation.sparse.check(selecting)

    # An EAGLE-3 head and looked-up drafts say nothing without the target.
    if args.draft_model == NGRAM or (args.draft_model and is_eagle(resolve_model_path(args.draft_model))):
        chosen = [one for one in chosen if not one.of_draft]
    rows = compare(
        chosen,
        questions(args.task, args.seed, args.num_problems, context=args.context),
        SamplingParams(max_tokens=LONGEST_ANSWER[args.task], temperature=args.temperature),
        seed=args.seed,
        model=args.model,
        draft_model=args.draft_model,
        on_result=lambda row: remark(f"{row['decoder']}: {100 * row['accuracy']:.1f}%"),
        max_num_seqs=min(args.max_num_seqs, args.num_problems),
        max_model_len=args.max_model_len or (args.context if args.task == "recall" else 320),
    )
    print(markdown(rows))
    write_figures(args, rows, this_machine())
    if args.plot is not None:
        from smcjax.viz.charts import draw_frontier

        draw_frontier(rows, Path(args.plot))
    return 0
