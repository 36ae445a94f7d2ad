"""Measurements as pictures: each says in its title what it shows, and the suffix of its path says the format."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from smcjax.viz.picture import BASE, INK, colour_of, label_right, log_ticks, new_figure, styled, write_figure

MARKERS = "o^vDPX*s"  # of exact decoders, by candidates
DASHES = ("--", "-.", (0, (6, 2, 1, 2, 1, 2)), (0, (2, 2)))  # of SMC, by particles
COSTS = {"device_seconds_per_question": "device-seconds a question", "tokens_per_cycle": "tokens a cycle"}
LATENCIES = {"ttft": "first token a reader gets", "first_cycle": "first tokens drawn", "e2el": "whole request"}
HELD_OUT = {
    "weight_variance": "χ² of a block: variance of weights",
    "token_divergence": "D₂ a token, nats",
    "kl": "KL a token, nats",
    "acceptance": "1 − probability that a draft is accepted",
}


@styled
def draw_acceptance(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Tokens a second: of exact decoders at their rates, of SMC and the target alone as level lines. One colour a K.

    `rows` are `smcjax.bench.acceptance.rows_of`.
    """
    title = _acceptance_title(rows)
    figure = new_figure(9, 5.5, title)
    axes = figure.subplots()
    drafting = [row for row in rows if row["gamma"]]
    gammas = list(dict.fromkeys(row["gamma"] for row in drafting))
    smc = list(dict.fromkeys(row["n_particles"] for row in drafting if row["acceptance"] is None))
    exact = list(dict.fromkeys(row["n_particles"] for row in drafting if row["acceptance"] is not None))
    labels = []
    for row in rows:
        speeds, count = row["tokens_per_second"], row["n_particles"]
        colour = colour_of(gammas.index(row["gamma"])) if row["gamma"] else INK
        if not row["gamma"]:
            axes.axhline(speeds[0], linestyle=":", color=colour)
        elif row["acceptance"] is None:
            axes.axhline(speeds[0], linestyle=DASHES[smc.index(count) % len(DASHES)], color=colour)
        else:
            marker = MARKERS[exact.index(count) % len(MARKERS)]
            rates, speeds = zip(*sorted(zip(row["acceptance"], speeds, strict=True)), strict=True)
            axes.plot(rates, speeds, marker=marker, color=colour)
        labels.append((speeds[-1], row["decoder"], colour))
    axes.set_xlabel("assumed acceptance rate of a draft position")
    axes.set_ylabel("tokens a second")
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set_ylim(bottom=0)
    axes.grid()
    label_right(axes, labels)
    write_figure(figure, path, title)


def _acceptance_title(rows: Sequence[dict[str, Any]]) -> str:
    """The title: the acceptance from which an exact decoder is as fast as the fastest SMC, among the rates drawn."""
    level = [row for row in rows if row["gamma"] and row["acceptance"] is None]
    exact = [row for row in rows if row["acceptance"] is not None]
    if not exact:
        return "Tokens a second, without an exact decoder"
    if not level:
        fastest = max(exact, key=lambda row: max(row["tokens_per_second"]))
        return f"{fastest['decoder']} is the fastest, at most {max(fastest['tokens_per_second']):,.0f} tokens a second"
    smc = max(level, key=lambda row: row["tokens_per_second"][0])
    speed = smc["tokens_per_second"][0]
    reached = []
    for row in exact:
        rates, speeds = zip(*sorted(zip(row["acceptance"], row["tokens_per_second"], strict=True)), strict=True)
        if speeds[-1] >= speed:  # speeds grow with the rate
            reached.append((float(np.interp(speed, speeds, rates)), row["decoder"]))
    if not reached:
        highest = max(max(row["acceptance"]) for row in exact)
        return f"No exact decoder is as fast as {smc['decoder']} up to an acceptance of {highest:g}"
    rate, name = min(reached)
    return f"{name} is as fast as {smc['decoder']} from an acceptance of {rate:.2f} on"


@styled
def draw_frontier(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Accuracy with its interval over cost and over speed, exact decoders filled.

    `rows` are `smcjax.bench.decoders.compare`.
    """
    title = _frontier_title(rows)
    figure = new_figure(11, 4.5, title)
    panels = figure.subplots(1, 2, sharey=True)
    for axes, (field, label) in zip(panels, COSTS.items(), strict=True):
        for number, row in enumerate(rows):
            accuracy = 100 * row["accuracy"]
            axes.errorbar(
                [row[field]],
                [accuracy],
                yerr=[[accuracy - 100 * row["ci_low"]], [100 * row["ci_high"] - accuracy]],
                fmt="o" if row["exact"] else "s",
                color=colour_of(number),
                fillstyle="full" if row["exact"] else "none",
                capsize=3,
            )
        axes.set_xlabel(label)
        axes.grid()
    panels[0].set_xscale("log")
    log_ticks(panels[0].xaxis)
    panels[0].set_ylabel("accuracy, % (filled: exact)")
    label_right(panels[1], [(100 * row["accuracy"], row["decoder"], colour_of(i)) for i, row in enumerate(rows)])
    write_figure(figure, path, title)


def _frontier_title(rows: Sequence[dict[str, Any]]) -> str:
    """The title: the cheapest decoder whose accuracy is not found to be below the first one's, and what it costs."""
    first, *others = rows
    equal = [row for row in others if row["difference_high"] >= 0]
    if not equal:
        return f"No decoder is as accurate as {first['decoder']}"
    best = min(equal, key=lambda row: row["device_seconds_per_question"])
    cost = best["device_seconds_per_question"] / first["device_seconds_per_question"]
    named = f"{best['decoder']}: no less accurate than {first['decoder']}"
    return f"{named}, within noise, at {cost:.0%} of its device time"


@styled
def draw_latency(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Median and 99th percentile of each latency over the requests per second that were completed, to a file.

    `results` are `smcjax.bench.serving.figures`.
    """
    title = _latency_title(results)
    figure = new_figure(8, 4.5, title)
    axes = figure.subplots()
    results = sorted(results, key=lambda one: one["request_throughput"])
    rates = [one["request_throughput"] for one in results]
    labels = []
    for number, (name, label) in enumerate(LATENCIES.items()):
        for statistic, line in (("median", "o-"), ("p99", "x:")):
            values = [one[f"{statistic}_{name}_ms"] for one in results]
            axes.plot(rates, values, line, color=colour_of(number))
            labels.append((values[-1], f"{label}, {statistic}", colour_of(number)))
    axes.set_xlabel("requests a second")
    axes.set_ylabel("ms")
    axes.set_yscale("log")
    log_ticks(axes.yaxis)
    axes.grid()
    label_right(axes, labels)
    write_figure(figure, path, title)


def _latency_title(results: Sequence[dict[str, Any]]) -> str:
    """The title: what the highest load adds to whole requests, by their 99th percentile."""
    least, most = (pick(results, key=lambda one: one["request_throughput"]) for pick in (min, max))
    low, high = least["p99_e2el_ms"], most["p99_e2el_ms"]
    rate = f"{most['request_throughput']:.3g} requests a second"
    if len(results) == 1:
        return f"99% of requests end within {high:,.0f} ms at {rate}"
    return f"99% of requests end within {high:,.0f} ms at {rate}, {low:,.0f} ms at {least['request_throughput']:.3g}"


@styled
def draw_tuning(report: dict[str, Any], path: Path) -> None:
    """The loss over the steps, and figures on held-out answers from before the first step on; 95% intervals.

    `report` holds what `smcjax.tuning.run.Report` does.
    """
    title = _tuning_title(report)
    figure = new_figure(11, 6, title)
    axes = figure.subplots(2, 3).flatten()
    axes[0].plot(*zip(*report["loss"], strict=True), color=colour_of(0))
    axes[0].set_title("loss a token, on answers trained on", fontsize=BASE)
    course = [{"step": 0, **report["before"]}, *report["held_out"]]
    for number, (name, label) in enumerate(HELD_OUT.items(), 1):
        values = [[1 - value for value in point[name]] if name == "acceptance" else point[name] for point in course]
        means, ends = [value[0] for value in values], [sorted(value[1:]) for value in values]
        steps = [point["step"] for point in course]
        axes[number].plot(steps, means, color=colour_of(number))
        axes[number].fill_between(steps, *zip(*ends, strict=True), color=colour_of(number), alpha=0.2)
        axes[number].set_title(f"held out: {label}", fontsize=BASE)
    for one in axes[:5]:
        one.set_yscale("log")
        log_ticks(one.yaxis)
        one.set_xlabel("step")
        one.grid()
    axes[5].set_axis_off()
    write_figure(figure, path, title)


def _tuning_title(report: dict[str, Any]) -> str:
    """The title: the chance that a held-out draft is rejected, and its KL, before the training and after it."""
    (first, was), (last, now) = (
        (point["acceptance"][0], point["kl"][0]) for point in (report["before"], report["after"])
    )
    rejected = f"{100 * (1 - last):.2g}% of drafts are rejected, {100 * (1 - first):.2g}% before"
    return f"{rejected}; KL {now:.2g} nats a token, {was:.2g} before"
