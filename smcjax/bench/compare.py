"""`smcjax bench cycle --compare`: ours, ours without GPU kernels, and the PyTorch peer, one after the other.

Each runs in a process of its own, because a process keeps the GPU memory that it has taken.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import smcjax
from smcjax.markdown import table

ROOT = Path(smcjax.__file__).parents[1]
PEER = ROOT / "scripts" / "peers" / "torch_cycle.py"
OWN = (sys.executable, "-m", "smcjax")


@dataclasses.dataclass(frozen=True)
class Contender:
    """One row of the comparison: its JSON result, or why there is none."""

    name: str
    result: dict[str, Any] | None
    reason: str = ""


def contenders(own: Sequence[str], peer: Sequence[str], peer_script: Path = PEER) -> list[Contender]:
    """Runs all three. `own` are options of `smcjax bench cycle`, `peer` those of the peer's script but for the shapes.

    The peer takes the shapes that ours took: which those are depends on the device, which this process leaves alone.
    """
    ours = [*OWN, "bench", "cycle", *own, "--json"]
    ran = [
        _run("this package", [*ours, "--implementation", "auto"]),
        _run("this package, plain XLA", [*ours, "--implementation", "xla"]),
    ]
    name = "PyTorch, torch.compile and one CUDA graph"
    if importlib.util.find_spec("torch") is None:
        return [*ran, Contender(name, None, "torch is not installed")]
    if not peer_script.exists():
        return [*ran, Contender(name, None, f"{peer_script} does not exist: the peer is part of the repository only")]
    took = next((each.result for each in ran if each.result is not None), None)
    if took is None:
        return [*ran, Contender(name, None, "neither of ours ran")]
    shapes = ["--target-shape", took["target"], "--draft-shape", took["draft"]]
    return [*ran, _run(name, [sys.executable, str(peer_script), *peer, *shapes])]


def _run(name: str, command: Sequence[str]) -> Contender:
    """The last line of the command's output as JSON. Its stderr is ours."""
    print(f"{name} …", file=sys.stderr, flush=True)
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path})
    lines = done.stdout.strip().splitlines()
    if done.returncode != 0 or not lines:
        return Contender(name, None, f"it ended with exit code {done.returncode}; its message is above")
    return Contender(name, json.loads(lines[-1]))


def markdown(ran: Sequence[Contender]) -> str:
    """The comparison as a table."""
    rows: list[tuple[str, ...]] = []
    for each in ran:
        result = each.result
        if result is None:
            rows.append((each.name, f"not run: {each.reason}", "–", "–"))
            continue
        share = result["weight_roofline_fraction"]
        percent = "–" if share is None else f"{100 * share:.1f}%"
        rows.append((each.name, f"{result['ms']:.2f}", f"{result['tokens_per_second']:,.0f}", percent))
    return table(["implementation", "ms a cycle", "tokens/s", "of the weight roofline"], rows)
