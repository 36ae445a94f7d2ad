"""`smcjax bench cycle --compare`: ours, ours without GPU kernels, and the PyTorch baseline, one after the other.

Each runs in a process of its own, because a process keeps the GPU memory that it has taken.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from smcjax.bench.record import ROOT
from smcjax.bench.roofline import cycle_phases
from smcjax.bench.shapes import SHAPES
from smcjax.decoders import Speculation
from smcjax.markdown import table
from smcjax.model.config import ModelConfig

BASELINE = ROOT / "scripts" / "benchmarks" / "torch_cycle.py"
OWN = (sys.executable, "-m", "smcjax")


@dataclasses.dataclass(frozen=True)
class Contender:
    """One row of the comparison: its result, or why there is none, and the machine of ours."""

    name: str
    result: dict[str, Any] | None
    reason: str = ""
    machine: dict[str, Any] | None = None


def contenders(
    own: Sequence[str], baseline: Sequence[str], speculation: Speculation, *, torch_python: str | None = None
) -> list[Contender]:
    """Runs all three. `own` are options of `smcjax bench cycle`, `baseline` those of the baseline's script.

    The baseline takes the shapes that ours took: these depend on the device, which this process leaves alone.
    Its roofline is that of a cycle of `speculation` in unquantised weights, at the bandwidth of ours.
    """
    ours = [*OWN, "bench", "cycle", *own, "--implementation"]
    ran = [_run("this package", [*ours, "auto"]), _run("this package, plain XLA", [*ours, "xla"])]
    name = "PyTorch, torch.compile and one CUDA graph"
    if torch_python is None and importlib.util.find_spec("torch") is None:
        return [*ran, Contender(name, None, "torch is not installed; name a Python that has it by --torch-python")]
    if not BASELINE.exists():
        why = f"{BASELINE} does not exist: the peer is part of the repository only"
        return [*ran, Contender(name, None, why)]
    took = next((each.result for each in ran if each.result is not None), None)
    if took is None:
        return [*ran, Contender(name, None, "neither of ours ran")]
    target, draft = SHAPES[took["target"]], SHAPES[took["draft"]]
    shapes = json.dumps({"target": baseline_shape(target), "draft": baseline_shape(draft)})
    done = _run(name, [torch_python or sys.executable, str(BASELINE), *baseline], shapes)
    if done.result is None:
        return [*ran, done]
    phases = cycle_phases(target, draft, speculation, groups=took["groups"], context=took["context"])
    weight_bytes = sum(phase.times * phase.weight_bytes for phase in phases)
    roofline = weight_bytes / took["bandwidth"] * 1e3
    bound = {"weight_bytes": weight_bytes, "bandwidth": took["bandwidth"], "weight_roofline_ms": roofline}
    share = {"weight_roofline_fraction": roofline / done.result["ms"]}
    return [*ran, dataclasses.replace(done, result={**done.result, **bound, **share})]


def baseline_shape(config: ModelConfig) -> dict[str, Any]:
    """The baseline's `Shape`: what it must know of a model."""
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")
    fields = {name: getattr(config, name) for name in (*names, "tie_embeddings", "rms_norm_eps", "dtype")}
    return {**fields, "rope_frequencies": config.layer(0).rope.frequencies(config.head_dim).tolist()}


def _run(name: str, command: Sequence[str], given: str = "") -> Contender:
    """The only row of the record that the command saves. Its output is left out, and its stderr is ours."""
    print(f"{name} …", file=sys.stderr, flush=True)
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path}
    with tempfile.TemporaryDirectory() as directory:
        saved = Path(directory) / "record.json"
        ran = [*command, "--save", str(saved)]
        done = subprocess.run(ran, stdout=subprocess.DEVNULL, text=True, env=environment, input=given)
        if done.returncode != 0 or not saved.exists():
            return Contender(name, None, f"it ended with exit code {done.returncode}; its message is above")
        record = json.loads(saved.read_text())
    return Contender(name, record["rows"][0], machine=record["machine"])


def rows_of(ran: Sequence[Contender]) -> list[dict[str, Any]]:
    """The rows of the comparison's record."""
    return [{"contender": each.name, **(each.result or {"not_run": each.reason})} for each in ran]


def markdown(ran: Sequence[Contender]) -> str:
    """The comparison as a table."""
    rows: list[tuple[str, ...]] = []
    for each in ran:
        result = each.result
        if result is None:
            rows.append((each.name, f"not run: {each.reason}", "–", "–"))
            continue
        share = f"{100 * result['weight_roofline_fraction']:.1f}%"
        rows.append((each.name, f"{result['ms']:.2f}", f"{result['tokens_per_second']:,.0f}", share))
    return table(["implementation", "ms a cycle", "tokens/s", "of the weight roofline"], rows)
