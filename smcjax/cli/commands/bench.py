"""`smcjax bench`: decoding steps, the engine, decoders and a server are timed, most of them on random weights."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smcjax.cli.bench_options import (
    BATCH,
    CYCLES,
    LENGTH,
    add_decoding_option,
    add_figures_options,
    add_shape_options,
    check_files,
    shape_decoding,
    shape_models,
    write_figures,
)
from smcjax.cli.commands import bench_engine, bench_serve
from smcjax.cli.options import add_debug_option, one_decoder, remark
from smcjax.cli.parser import above, share, whole
from smcjax.decoders import SMC, Rejection

if TYPE_CHECKING:
    from smcjax.bench.cycle import Case, CycleResult
    from smcjax.bench.models import Models
    from smcjax.decoders import Speculation


# What `bench acceptance` times where nothing is named.
USUAL = tuple(
    decoding
    for gamma in (4, 8)
    for decoding in (
        *(Rejection(gamma), Rejection(gamma, n_candidates=8)),
        *(SMC(n_particles=n, gamma=gamma, control=0) for n in (4, 8, 16)),
    )
)


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Declares the command and its benchmarks."""
    parser = subparsers.add_parser("bench", help="measure", description=__doc__)
    benchmarks = parser.add_commands("benchmark", "cycle|table|acceptance|throughput|latency|engine|decoders|serve")

    cycle = benchmarks.add_parser(
        "cycle",
        help="one decoding step of LLM.generate, against the roofline",
        description="Times one decoding step of LLM.generate on random weights, against the roofline.",
    )
    _add_common_options(cycle, cycles=16)
    separate = "two devices: one drafts while the other scores (SMC, pipelined)"
    cycle.add_argument("--separate-draft", action="store_true", help=separate)
    add_decoding_option(cycle)
    cycle.add_argument("--requests", type=BATCH, default=1, help="groups in one batch (1)")
    cycle.add_argument("--context", type=LENGTH, default=256, help="prompt tokens (256)")
    cycle.add_argument("--private", type=whole(0, 1 << 20), default=0, help="of them, tokens that no two share (0)")
    cycle.add_argument("--max-model-len", type=LENGTH, default=1024, help="prompt and answer at most (1024)")
    cycle.add_argument("--synthetic-kv", action="store_true", help="random KV instead of the prompt's forward")
    cycle.add_argument(
        "--compare", action="store_true", help="this, the same in plain XLA, and the PyTorch peer, one after the other"
    )
    cycle.add_argument("--torch-python", metavar="FILE", help="of --compare: a Python that has torch (this one)")
    cycle.set_defaults(run=run_cycle)

    table = benchmarks.add_parser(
        "table",
        help="contexts, particles, draft lengths, batch sizes: one markdown table",
        description="Times decoding steps of many sizes on random weights, against the roofline.",
    )
    _add_common_options(table, cycles=12)
    table.add_argument("--contexts", type=LENGTH, nargs="+", default=None, metavar="T", help="256 4096 16384 32768")
    table.add_argument("--requests", type=BATCH, nargs="*", default=None, metavar="G", help="2 4 8 16 32")
    table.add_argument("--requests-context", type=LENGTH, default=1024, metavar="T", help="of several requests (1024)")
    table.set_defaults(run=run_table)

    acceptance = benchmarks.add_parser(
        "acceptance",
        help="tokens/s of exact decoders over assumed acceptance rates, beside SMC",
        description="Times exact decoders, SMC and the target alone on random weights. Their tokens/s depend on how "
        "many drafts are accepted, which random weights do not tell: it is stated for assumed rates.",
    )
    _add_common_options(acceptance, cycles=16, sizes=False)
    acceptance.add_argument(
        "--decoding",
        type=one_decoder,
        nargs="+",
        default=USUAL,
        metavar="DECODER",
        help="beside the target alone (K = 4, 8: rejection with 1 and 8 candidates, SMC at control 0 with 4, 8, 16 "
        "particles)",
    )
    acceptance.add_argument(
        "--acceptance",
        type=share,
        nargs="+",
        default=[0.5, 0.6, 0.7, 0.8, 0.9, 0.95],
        metavar="A",
        help="assumed rates: that a draft position accepts, all candidates together (0.5 0.6 0.7 0.8 0.9 0.95)",
    )
    acceptance.add_argument("--requests", type=BATCH, default=1, help="groups in one batch (1)")
    acceptance.add_argument("--context", type=LENGTH, default=256, help="prompt tokens (256)")
    acceptance.add_argument("--plot", metavar="FILE", help="tokens/s over acceptance: .svg, .png or .pdf")
    acceptance.set_defaults(run=run_acceptance)
    bench_engine.add_parsers(benchmarks)
    bench_serve.add_parser(benchmarks)


def _add_common_options(parser: argparse.ArgumentParser, *, cycles: int, sizes: bool = True) -> None:
    add_shape_options(parser, sizes=sizes)
    parser.add_argument("--windows", type=whole(1, 1000), default=5, help="timed windows, each from a fresh prompt (5)")
    parser.add_argument("--cycles", type=CYCLES, default=cycles, help=f"cycles a window ({cycles})")
    parser.add_argument("--bandwidth", type=above(0, 1e6), metavar="GB/s", help="default: the datasheet's")
    add_figures_options(parser)
    add_debug_option(parser)


def run_cycle(args: argparse.Namespace) -> int:
    """Times, and prints a table."""
    check_files(args)
    without_peer = {
        "--decoding rejection": args.decoding.kind is Rejection,
        "a decoder with options": bool(args.decoding.options),
        f"--attention {args.attention}": args.attention is not None,
        f"--tensor-parallel-size {args.tensor_parallel_size}": args.tensor_parallel_size > 1,
        "--separate-draft": args.separate_draft,
        f"--target-layers {args.target_layers}": args.target_layers is not None,
    }
    for option, given in without_peer.items():
        if args.compare and given:
            raise ValueError(f"--compare has no peer for {option}; leave one of them out.")
    if args.torch_python is not None and not args.compare:
        raise ValueError("--torch-python is the peer's of --compare; leave it out, or add --compare.")
    from smcjax.bench.cycle import Case, run_cases

    decoding = shape_decoding(args)
    case = Case(
        decoding,
        groups=args.requests,
        context=args.context,
        private=args.private,
        max_model_len=args.max_model_len,
        page_size=args.page_size,
        implementation=args.implementation,
        synthetic_kv=args.synthetic_kv,
        windows=args.windows,
        cycles_per_window=args.cycles,
    )
    if args.compare:
        return _compare(args, decoding.speculation)
    models = shape_models(args)
    (result,) = run_cases(models, [case], bandwidth=_bandwidth(args))
    print(table(result, models.target, models.draft))
    _save(args, models, [dataclasses.asdict(result)])
    return 0


def _compare(args: argparse.Namespace, speculation: Speculation) -> int:
    """All implementations on one case; this process leaves the device alone."""
    from smcjax.bench.compare import contenders, markdown, rows_of

    both = [
        *("--decoding", args.decoding.kind.name),
        *("--n-particles", str(args.n_particles), "--gamma", str(args.gamma), "--requests", str(args.requests)),
        *("--context", str(args.context), "--max-model-len", str(args.max_model_len)),
        *("--windows", str(args.windows), "--cycles", str(args.cycles)),
    ]
    own = ["--page-size", str(args.page_size), "--private", str(args.private)]
    own += ["--synthetic-kv"] if args.synthetic_kv else []
    for name in ("target_shape", "draft_shape", "bandwidth", "quantization", "draft_quantization"):
        if (value := getattr(args, name)) is not None:
            own += [f"--{name.replace('_', '-')}", str(value)]
    ran = contenders([*both, *own], both, speculation, torch_python=args.torch_python)
    print(markdown(ran))
    write_figures(args, rows_of(ran), next((each.machine for each in ran if each.machine is not None), None))
    return 1 if ran[0].result is None or ran[1].result is None else 0


def run_table(args: argparse.Namespace) -> int:
    """Times all cases and prints one markdown table."""
    check_files(args)
    from smcjax.bench.table import CONTEXTS, REQUESTS, markdown, standard_cases

    cases = standard_cases(
        n_particles=args.n_particles,
        gamma=args.gamma,
        contexts=CONTEXTS if args.contexts is None else args.contexts,
        requests=REQUESTS if args.requests is None else args.requests,
        requests_context=args.requests_context,
        **_how(args),
    )
    models, results = _timed(args, cases)
    print(f"{_conditions(results[0], models)}\n")
    print(markdown(results))
    _save(args, models, [dataclasses.asdict(result) for result in results])
    return 0


def run_acceptance(args: argparse.Namespace) -> int:
    """Times exact decoders, SMC and the target alone; a table, and a plot on request."""
    check_files(args)

    from smcjax.bench.acceptance import ASSUMPTION, acceptance_cases, markdown, rows_of

    cases = acceptance_cases(args.decoding, requests=args.requests, context=args.context, **_how(args))
    models, results = _timed(args, cases)
    rows = rows_of(results, args.acceptance)
    requests = "1 request" if args.requests == 1 else f"{args.requests} requests"
    print(f"{_conditions(results[-1], models)}; {requests}, context {args.context:,}\n\n{ASSUMPTION}\n")
    print(markdown(rows))
    _save(args, models, rows)
    if args.plot is not None:
        from smcjax.viz.charts import draw_acceptance

        draw_acceptance(rows, Path(args.plot))
    return 0


def _save(args: argparse.Namespace, models: Models, rows: Sequence[dict[str, Any]]) -> None:
    """Writes the rows of a table of these models, as the options for figures say."""
    from smcjax.bench.record import this_machine

    named = {"target": models.target, "draft": models.draft}
    write_figures(args, [{**named, **row} for row in rows], this_machine(models.devices))


def _bandwidth(args: argparse.Namespace) -> float | None:
    return None if args.bandwidth is None else args.bandwidth * 1e9


def _how(args: argparse.Namespace) -> dict[str, Any]:
    """Arguments that all cases of a run have in common."""
    names = ("page_size", "implementation", "windows", "cycles")
    return {name: getattr(args, name) for name in names}


def _timed(args: argparse.Namespace, cases: Sequence[Case]) -> tuple[Models, list[CycleResult]]:
    """The cases on one set of weights; a line each as they end."""
    from smcjax.bench.cycle import run_cases

    models = shape_models(args)
    return models, run_cases(models, cases, bandwidth=_bandwidth(args), on_result=remark)


def _conditions(result: CycleResult, models: Models) -> str:
    """One line with the conditions that all rows of a table share."""
    return (
        f"{_devices(result)}, {result.bandwidth / 1e12:.2f} TB/s, {result.flop_rate / 1e12:.0f} TFLOP/s; "
        f"{_models_named(result, models.draft, models.target)}, random weights, synthetic KV, "
        f"page {result.page_size}, {_implementation(result)}"
    )


def _devices(result: CycleResult) -> str:
    """The device, or how many; bytes, rates and rooflines beside it are those of each."""
    size, of_draft = result.tensor_parallel_size, result.draft_tensor_parallel_size
    if result.separate_draft:
        return f"2 × {result.device} (one drafts, one scores), the busier one"
    if size == 1:
        return result.device
    collectives = ", collectives by XLA" if result.collectives == "xla" else ""
    return f"{size} × {result.device} (draft {'divided' if of_draft > 1 else 'on each'}{collectives}), each"


def _models_named(result: CycleResult, draft: str, target: str) -> str:
    target += f" ({result.target_layers} of its layers)" if result.target_layers else ""
    target += f" with {result.attention}" if result.attention else ""
    target += f" ({result.quantization})" if result.quantization else ""
    draft += f" ({result.draft_quantization})" if result.draft_quantization else ""
    return f"{draft} → {target}" if result.gamma else target


def _implementation(result: CycleResult) -> str:
    said = {"xla": "plain XLA", "triton": "Triton kernels where they apply"}
    return said.get(result.implementation, "kernels where they apply")


def table(result: CycleResult, target: str, draft: str) -> str:
    """The result for people."""
    private = f" ({result.private} private)" if result.private else ""
    kv = ", synthetic KV" if result.synthetic_kv else ""
    workspace = f"workspace {result.held_workspace_bytes / 2**30:.2f} GiB, " if result.held_workspace_bytes else ""
    rows = [
        ("device", f"{_devices(result)}, {result.bandwidth / 1e12:.2f} TB/s, {result.flop_rate / 1e12:.0f} TFLOP/s"),
        ("models", f"{_models_named(result, draft, target)}, random weights{kv}"),
        (
            "case",
            f"{result.described}, {result.groups} request(s), context {result.context}{private}, "
            f"page {result.page_size}, {_implementation(result)}",
        ),
        ("max_model_len", str(result.max_model_len)),
        (
            "memory",
            f"weights {result.held_weight_bytes / 2**30:.2f} GiB, KV {result.held_kv_bytes / 2**30:.2f} GiB, "
            f"{workspace}scratch {result.scratch_bytes / 2**30:.2f} GiB",
        ),
        ("weights a cycle", f"{result.weight_bytes / 1e9:.2f} GB → {result.weight_roofline_ms:.2f} ms"),
        ("KV a cycle", f"{result.kv_bytes / 1e9:.3f} GB; roofline with KV and FLOPs {result.roofline_ms:.2f} ms"),
        ("measured", f"{result.ms:.2f} ms a cycle (windows {', '.join(f'{ms:.2f}' for ms in result.ms_windows)})"),
        (
            "tokens/s",
            f"{result.tokens_per_second:,.0f}"
            + (", if all drafts are accepted" if result.decoding == Rejection.name else ""),
        ),
        ("of the weight roofline", f"{100 * result.weight_roofline_fraction:.1f}%"),
        ("of the roofline", f"{100 * result.roofline_fraction:.1f}%"),
        ("compilation", f"{result.compile_seconds:.1f} s"),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)
