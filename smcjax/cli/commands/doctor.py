"""`smcjax doctor`: what this machine can do, and what keeps it from doing more."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import platform
import shutil
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

from smcjax import __version__
from smcjax.cli.failures import jax_settings
from smcjax.cli.options import QUANTIZATIONS, one_decoder
from smcjax.cli.parser import whole
from smcjax.decoders import SMC


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line of the report. What is not `ok` comes with a hint; `fatal` means that nothing can be generated."""

    label: str
    value: str
    ok: bool = True
    hint: str = ""
    fatal: bool = False


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser("doctor", help="what this machine can do", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON line last")
    group = parser.add_argument_group("memory of a pair, by its config.json alone")
    group.add_argument("--model", metavar="MODEL", help="target, as of generate; its weights need not be here")
    group.add_argument("--draft-model", metavar="MODEL", help="draft (none)")
    group.add_argument(
        "--decoding",
        type=one_decoder,
        nargs="+",
        default=(SMC(),),
        metavar="DECODER",
        help="as 'SMC(n_particles=16)' 'SMC(n_particles=32)' (smc)",
    )
    group.add_argument("--max-model-len", type=whole(2, 1 << 20), default=2048, metavar="T", help="(2048)")
    group.add_argument("--quantization", choices=QUANTIZATIONS, help="the target's (none)")
    group.add_argument("--draft-quantization", choices=QUANTIZATIONS, help="the draft's (none)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints every finding; 0 if text can be generated here, else 1."""
    if args.model is None and args.draft_model is not None:
        raise ValueError("--draft-model is given and --model is not; give both, or neither.")
    findings = [_examined(check) for check in CHECKS]
    if args.model is not None:
        findings += _memory(args)
    width = max(len(finding.label) for finding in findings)
    for finding in findings:
        mark = "ok" if finding.ok else "FAIL" if finding.fatal else "note"
        print(f"{mark:<4}  {finding.label:<{width}}  {finding.value}" + (f"  ({finding.hint})" if finding.hint else ""))
    if args.json:
        print(json.dumps([dataclasses.asdict(finding) for finding in findings]))
    broken = [finding for finding in findings if finding.fatal and not finding.ok]
    if broken:
        print(f"smcjax: error: {broken[0].label}: {broken[0].value}; {broken[0].hint}.", file=sys.stderr)
    return 1 if broken else 0


def _examined(check: Callable[[], Finding]) -> Finding:
    """A check's finding, also where the check itself breaks."""
    try:
        return check()
    except Exception as error:  # whatever is wrong with this machine, the other checks still say something
        text = " ".join(f"{type(error).__name__}: {error}".split())[:200].rstrip(".: ")
        label = check.__name__.strip("_").replace("_", " ")
        settings = jax_settings()
        hint = f"unset {settings}" if settings else "uv sync --reinstall"
        return Finding(label, text, ok=False, hint=hint, fatal=True)


def _versions() -> Finding:
    packages = ("jax", "jaxlib", "numpy", "transformers", "safetensors")
    return Finding(
        "versions",
        f"smcjax {__version__}, python {platform.python_version()}, "
        + ", ".join(f"{package} {metadata.version(package)}" for package in packages),
    )


def _host() -> Finding:
    pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return Finding("host", f"{platform.machine()}, {os.cpu_count()} cores, {pages * size / 2**30:.0f} GiB")


def _devices() -> Finding:
    import jax

    from smcjax.engine.run.memory import require_devices

    try:
        require_devices()
    except RuntimeError as error:
        said, _, mend = str(error).rstrip(".").rpartition("; ")
        return Finding("devices", said, ok=False, hint=mend, fatal=True)
    both = [name for name in ("jax-cuda12-plugin", "jax-cuda13-plugin") if _installed(name)]
    if len(both) == 2:
        said = f"{' and '.join(both)} are both installed, and JAX takes one"
        return Finding("devices", said, ok=False, hint="uninstall the one that your driver is not for")
    names = []
    for device in jax.devices():
        limit = (device.memory_stats() or {}).get("bytes_limit")
        names.append(device.device_kind + (f" ({limit / 2**30:.0f} GiB for JAX)" if limit else ""))
    has_gpu = Path("/dev/nvidia0").exists() or shutil.which("nvidia-smi") is not None
    if has_gpu and jax.default_backend() == "cpu":
        hint = "a GPU is here: uv run --extra cuda13 smcjax …, or cuda12"
        return Finding("devices", ", ".join(names), ok=False, hint=hint)
    return Finding("devices", f"{jax.default_backend()}: {', '.join(names)}")


def _installed(distribution: str) -> bool:
    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True


def _kernels() -> Finding:
    from smcjax.device import this_device
    from smcjax.pallas.dispatch import MIN_TRITON_CAPABILITY, active_implementation, has_triton

    device = this_device()
    of = f"capability {device.capability / 10}" if device.capability else device.platform
    found = {"mosaic": "Pallas (Mosaic GPU)", "triton": "Triton"}.get(active_implementation())
    if found:
        return Finding("kernels", f"{found}, for {of}")
    if device.capability >= MIN_TRITON_CAPABILITY and not has_triton():
        return Finding(
            "kernels", f"none, plain XLA, on {of}", ok=False, hint="add the extra `triton`: its kernels run here"
        )
    needs = f"Pallas needs a Hopper GPU with 132 multiprocessors, Triton capability {MIN_TRITON_CAPABILITY / 10}"
    return Finding("kernels", f"none, plain XLA, on {of}: {needs}")


def _donation() -> Finding:
    """Finds out if a donated buffer is reused: the cycle updates KV in place."""
    import jax
    import jax.numpy as jnp

    x = jnp.arange(1 << 16, dtype=jnp.float32)
    before = x.unsafe_buffer_pointer()
    after = jax.jit(lambda x: x + 1, donate_argnums=0)(x).block_until_ready()
    reused = after.unsafe_buffer_pointer() == before
    return Finding(
        "donated buffers", "reused in place" if reused else "copied", ok=reused, hint="" if reused else "slower"
    )


def _compilation_cache() -> Finding:
    import jax

    from smcjax.engine.run.programs import enable_compilation_cache

    enable_compilation_cache()
    if jax.config.jax_compilation_cache_dir is None:
        return Finding("compilation cache", "none", ok=False, hint="no place for it: every start compiles")
    directory = Path(jax.config.jax_compilation_cache_dir)
    with contextlib.suppress(OSError):  # a read-only home: slower, but no reason to generate nothing
        directory.mkdir(parents=True, exist_ok=True)
    ok = directory.is_dir() and os.access(directory, os.W_OK)
    return Finding("compilation cache", str(directory), ok=ok, hint="" if ok else "not writable: every start compiles")


def _bundled_models() -> Finding:
    from smcjax.model.files.checkpoint import load_config
    from smcjax.model.files.hub import bundled_model

    sizes = []
    for name in ("target", "draft", "smc_draft"):
        directory = bundled_model(name)
        load_config(directory)
        sizes.append(f"{name} {(directory / 'model.safetensors').stat().st_size / 2**20:.1f} MiB")
    return Finding("bundled models", ", ".join(sizes))


def _memory(args: argparse.Namespace) -> list[Finding]:
    """Says what each decoder of the pair needs of this device, and for how many requests there is room."""
    from smcjax.engine.load.loading import DEFAULT_PAGE_SIZE
    from smcjax.engine.run.memory import device_memory, memory_needed
    from smcjax.model.files.checkpoint import load_config, weights_dtype

    named = [(args.model, args.quantization), (args.draft_model, args.draft_quantization)]
    dtype = weights_dtype("auto").name
    pair = [(dataclasses.replace(load_config(path), dtype=dtype), kind) for path, kind in named if path is not None]
    memory, found = device_memory(), []
    for decoding in args.decoding:
        models = pair if decoding.drafts else pair[:1]
        need = memory_needed(models, decoding, args.max_model_len, DEFAULT_PAGE_SIZE)
        room = need.requests(memory)
        said = (
            f"weights {need.weights / 2**30:.2f} GiB, KV of a request of {args.max_model_len:,} tokens "
            f"{need.request / 2**30:.2f} GiB at most; room for {room:,} of {memory / 2**30:.0f} GiB"
        )
        hint = "" if room else "lower --max-model-len or the particles, or quantise"
        found.append(Finding(f"memory, {decoding}", said, ok=room > 0, hint=hint))
    return found


CHECKS = (_versions, _host, _devices, _kernels, _donation, _compilation_cache, _bundled_models)
