"""Records: what a benchmark measured beside what makes it again, as one JSON file that `--save FILE` writes.

    {"command": "smcjax bench table",          without --save, and without keys
     "commit": "40be22a…", "dirty": false,     of the checkout; null where there is none
     "date": "2026-11-25",
     "machine": {"device": "NVIDIA H200", "devices": 1, "bandwidth": 4.8e12, "jax": "0.11.2"},
     "rows": [{…}]}                            one for each line of the table, with raw windows where there are such

`bandwidth` is the data sheet's, bytes/s, and null where it is not known. `machine` is null where nothing ran here.
`scripts/benchmarks/results/` keeps the records whose figures the pages show.
"""

from __future__ import annotations

import datetime
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

import smcjax
from smcjax.device import on_cpu, this_device
from smcjax.files import write_atomically

ROOT = Path(smcjax.__file__).parents[1]
UNSAID = ("--save", "--api-key")  # options that say nothing of what is measured, with their values


def save(path: str | os.PathLike[str], rows: Sequence[Mapping[str, Any]], machine: Mapping[str, Any] | None) -> None:
    """Writes the record of this process's command; `machine` as `this_machine` describes it."""
    record = {
        "command": command_line(sys.argv),
        "commit": commit(),
        "dirty": dirty(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": machine,
        "rows": rows,
    }
    write_atomically(path, (json.dumps(record, indent=1, ensure_ascii=False) + "\n").encode())


def this_machine(devices: int = 1) -> dict[str, Any]:
    """Describes what ran: JAX's default device, how many of it, the data sheet's bandwidth of each, and JAX."""
    device = f"{_processor()}, {os.cpu_count()} cores" if on_cpu() else jax.devices()[0].device_kind
    return {
        "device": device,
        "devices": devices,
        "bandwidth": this_device().bandwidth or None,
        "jax": jax.__version__,
    }


def command_line(argv: Sequence[str]) -> str:
    """The command as a reader would type it in the checkout's root."""
    ours = Path(argv[0]).name in ("smcjax", "__main__.py")
    said = ["smcjax"] if ours else ["python", os.path.relpath(argv[0], ROOT)]
    rest = iter(argv[1:])
    for word in rest:
        if word in UNSAID:
            next(rest, None)
        elif not word.startswith(tuple(f"{option}=" for option in UNSAID)):
            said.append(word)
    return shlex.join(said)


def commit() -> str | None:
    """The commit of the checkout that this package is run from; None where it is installed otherwise."""
    return _git("rev-parse", "--short=12", "HEAD") or None


def dirty() -> bool | None:
    """True where tracked files of the checkout are not those of its commit; None where there is none."""
    found = _git("status", "--porcelain", "--untracked-files=no")
    return None if found is None else found != ""


def _git(*arguments: str) -> str | None:
    if not (ROOT / "pyproject.toml").is_file():
        return None
    try:
        ran = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return ran.stdout.strip() if ran.returncode == 0 else None


def _processor() -> str:
    """The processor's name, as Linux says it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "a CPU")
