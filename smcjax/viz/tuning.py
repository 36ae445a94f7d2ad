"""The course of a draft's training, as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from smcjax.viz.picture import BASE, colour_of, log_ticks, new_figure, styled, write_figure

HELD_OUT = {
    "weight_variance": "χ² of a block: variance of weights",
    "token_divergence": "D₂ a token, nats",
    "kl": "KL a token, nats",
    "acceptance": "1 − probability that a draft is accepted",
}


@styled
def draw_tuning(report: dict[str, Any], path: Path) -> None:
    """The loss over the steps, and figures on held-out answers from before the first step on; 95% intervals.

    `report` holds what `smcjax.tuning.run.Report` does; the suffix of `path` says the format.
    """
    title = finding(report)
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


def finding(report: dict[str, Any]) -> str:
    """The title: the chance that a held-out draft is accepted, and its KL, before the training and after it."""
    (first, was), (last, now) = (
        (point["acceptance"][0], point["kl"][0]) for point in (report["before"], report["after"])
    )
    return f"{last:.0%} of drafts are accepted, {first:.0%} before; KL {now:.2g} nats a token, {was:.2g} before"
