"""The plan of the device's memory: weights, workspace, KV pages, scratch. Host arithmetic, done before it is taken."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
from collections.abc import Sequence
from pathlib import Path

import jax

from smcjax.decoders import Decoding
from smcjax.device import on_cpu
from smcjax.engine.schedule.page_budget import Footprint
from smcjax.model.config import ModelConfig
from smcjax.model.params import param_shapes
from smcjax.model.quantize import quantize_params
from smcjax.quantization import QUANTIZATIONS

GPU_MEMORY_UTILIZATION = 0.85  # share of a GPU that weights and KV may take
CPU_KV_BYTES = 1 << 30  # default share of host memory; a GPU's share is a fraction of what the device has
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


def require_devices() -> None:
    """Raises RuntimeError, in one sentence, where JAX finds no device to run on."""
    try:
        jax.devices()
    except Exception as error:  # JAX gives an AssertionError where a named platform has no plugin
        requested = os.environ.get("JAX_PLATFORMS")
        given = (
            f"JAX_PLATFORMS is {requested!r} and JAX has no such device here" if requested else "JAX has no device here"
        )
        raise RuntimeError(
            f"{given} ({str(error).strip() or type(error).__name__}); for an NVIDIA GPU use 'uv run --extra cuda13 "
            "smcjax …' (or cuda12), or leave JAX_PLATFORMS unset."
        ) from None


def gpu_memory() -> int | None:
    """Bytes that JAX may allocate on the default device, None where that is the host's memory."""
    stats = jax.devices()[0].memory_stats() or {}
    return int(stats["bytes_limit"]) if "bytes_limit" in stats else None


def device_memory() -> int:
    """Bytes of the memory that programs run in: the GPU's, or the host's as far as its container allows."""
    limit = gpu_memory()
    if limit is not None:
        return limit
    limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError):  # no cgroup, or its limit is "max"
        limit = min(limit, int(_CGROUP_LIMIT.read_text()))
    return limit


def memory_of_each(devices: int) -> int:
    """Bytes of the memory of each of several devices: of the host's, where that is theirs, an equal part."""
    return device_memory() if gpu_memory() is not None else device_memory() // devices


def weight_bytes(config: ModelConfig, quantization: str | None = None) -> int:
    """Bytes of a model's weights as the engine keeps them: in `config.dtype` or quantised, on a CPU in float32."""
    shapes = param_shapes(config, "float32" if on_cpu() else config.dtype)
    if quantization is not None and not on_cpu():
        shapes = jax.eval_shape(functools.partial(quantize_params, kind=QUANTIZATIONS[quantization]), shapes)
    leaves = jax.tree.leaves(shapes)
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)


def require_room_for_weights(weights: dict[str, int], mend: str, devices: int = 1) -> None:
    """Raises ValueError, ending in `mend`, where the weights alone (bytes by name) exceed the device's memory.

    Of several `devices` each has to hold so many.
    """
    memory = memory_of_each(devices)
    if sum(weights.values()) > memory:
        each = ", ".join(f"{name} {size / 1e9:.1f}" for name, size in weights.items())
        where = "the device has" if devices == 1 else f"each of {devices} devices has"
        held = "take" if devices == 1 else "take on each device"
        raise ValueError(
            f"the weights of these models {held} {sum(weights.values()) / 1e9:.1f} GB ({each}) and {where} "
            f"{memory / 1e9:.1f} GB; {mend}."
        )


@dataclasses.dataclass(frozen=True)
class Budget:
    """Bytes of the device's memory that are taken for as long as an engine lives, and that are left as scratch."""

    device: int
    weights: dict[str, int]  # by model
    kv: int
    num_pages: int
    page_size: int
    workspace: int = 0  # of devices that write into each other's memory
    scores: int = 0  # of the scratch, at least: what kernels keep to rank blocks of sparse attention

    @property
    def left(self) -> int:
        """Bytes left to the temporaries of programs; negative where the others do not fit."""
        return self.device - sum(self.weights.values()) - self.workspace - self.kv

    def __str__(self) -> str:
        weights = " + ".join(f"{name} {size / 2**30:.2f}" for name, size in self.weights.items())
        workspace = f", workspace {self.workspace / 2**30:.2f}" if self.workspace else ""
        scores = f", of which scores of blocks need {self.scores / 2**30:.2f}" if self.scores else ""
        return (
            f"Memory, GiB of {self.device / 2**30:.2f}: weights {weights}{workspace}, KV {self.kv / 2**30:.2f} "
            f"({self.num_pages} pages of {self.page_size} tokens), left for scratch {self.left / 2**30:.2f}{scores}."
        )


@dataclasses.dataclass(frozen=True)
class Need:
    """Bytes of a device's memory that a decoder of a pair needs, known before anything is loaded."""

    weights: int
    request: int  # KV of a request of `max_model_len` tokens whose rows diverge right after its first one

    def requests(self, memory: int, utilization: float = GPU_MEMORY_UTILIZATION) -> int:
        """The number of such requests that this share of so much memory has room for beside the weights."""
        return max(0, int(memory * utilization) - self.weights) // self.request


def memory_needed(
    models: Sequence[tuple[ModelConfig, str | None]], decoding: Decoding, max_model_len: int, page_size: int
) -> Need:
    """Returns the memory that the decoder needs for models, each with its quantisation, in their configs' dtype."""
    pages = Footprint.of(decoding, page_size).worst_case(1, max_model_len)
    weights = sum(weight_bytes(config, quantization) for config, quantization in models)
    return Need(weights, pages * sum(config.page_bytes(page_size) for config, _ in models))


def choose_num_pages(
    num_pages: int | float | None,
    *,
    page_bytes: int,
    largest_request: int,
    max_num_seqs: int,
    weight_bytes: int,
    gpu_memory_utilization: float,
    devices: int = 1,
    workspace_bytes: int = 0,
    scores_bytes: int = 0,
    rows_argument: str | None = None,
) -> int:
    """Pages to allocate, the trash page included: `num_pages`, or room for `max_num_seqs` of the largest request.

    `largest_request` is a request's worst case in pages. What is chosen here stays within what weights and workspace
    leave of the given share of a GPU's memory, of which a `num_pages` that is a float takes that share, or within 1 GiB
    of a host's unless one request needs more.
    Bytes are those of one device of several. Pages leave `scores_bytes` of the whole GPU: scratch that is known of.
    `rows_argument` is the decoder's.
    Raises ValueError where pages do not fit the device beside them, or not even one largest request does.
    """
    held = weight_bytes + workspace_bytes
    free = memory_of_each(devices) - held
    if num_pages is not None and not isinstance(num_pages, float):
        if num_pages * page_bytes > free:
            raise ValueError(
                f"num_pages must be at most {max(free, 0) // page_bytes} beside the weights in this device's memory, "
                f"got {num_pages}; lower it."
            )
        return num_pages
    gpu = gpu_memory()
    if gpu is None:
        available = min(free, max(CPU_KV_BYTES // devices, page_bytes * (largest_request + 1)))
    else:
        share = 1.0 if num_pages is None else num_pages
        available = int(share * (min(int(gpu * gpu_memory_utilization), gpu - scores_bytes) - held))
    affordable = available // page_bytes - 1
    if affordable < largest_request:
        fewer = "max_model_len" if rows_argument is None else f"max_model_len or {rows_argument}"
        raise ValueError(
            f"one request of max_model_len tokens may need {largest_request} KV pages "
            f"({largest_request * page_bytes / 2**30:.2f} GiB) and only {max(affordable, 0)} fit beside the weights; "
            f"lower {fewer}, or set num_pages for shorter requests."
        )
    return 1 + min(affordable, largest_request * max_num_seqs)


def buckets(max_num_seqs: int) -> list[int]:
    """Batch sizes that programs exist for: powers of two below `max_num_seqs`, and itself."""
    return [*(1 << power for power in range((max_num_seqs - 1).bit_length())), max_num_seqs]
