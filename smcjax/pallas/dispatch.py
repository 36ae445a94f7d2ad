"""The choice between an operation's kernels and its reference, made where the operation is called and nowhere else.

    attention = Op(attention_reference)                       # plain XLA, which takes everything
    attention.register(Kernel(runs_mosaic, attention_mosaic, supports))
    attention(q, keys, values)                                # the first kernel that takes these arguments here

`implementations("xla")` and its like say for a whole trace which kernels come into question. The choice is part of
`jax.jit`'s cache key, so one function traced under two of them is compiled twice.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.metadata
import importlib.util
from collections.abc import Callable

import jax

from smcjax.device import HOPPER, Device, this_device

IMPLEMENTATIONS = ("auto", "mosaic", "triton", "xla")
JAX_TRITON = "0.3"  # launches have the arguments of this version; those of 0.4.1 JAX 0.12 cannot trace
MIN_TRITON_CAPABILITY = 80  # tensor cores that multiply bfloat16, and copies to shared memory that nothing waits for

_chosen = jax.make_user_context("auto")


def implementations(name: str) -> contextlib.AbstractContextManager[None]:
    """Returns a context within which `name` says which implementations operations take.

    "auto": the kernels made for JAX's default device; "mosaic": the Hopper kernels whatever the device, as for lowering
    them where no GPU is; "triton": the Triton kernels, on a Hopper GPU too; "xla": references alone. Raises ValueError
    for another name.
    """
    if name not in IMPLEMENTATIONS:
        raise ValueError(f"implementation must be one of {', '.join(IMPLEMENTATIONS)}, got {name!r}.")
    return _chosen(name)


def kernel_device() -> Device | None:
    """The device whose kernels come into question now; None where references alone do."""
    if _chosen.value == "xla":
        return None
    if _chosen.value == "mosaic":
        return HOPPER
    device = this_device()
    return HOPPER if _chosen.value == "triton" and device.platform != "gpu" else device


def is_hopper(device: Device) -> bool:
    """True for Hopper GPUs with as many multiprocessors as an H100 SXM.

    Mosaic kernels have as many blocks, some of which wait for each other: with fewer they would wait for ever.
    """
    return device.arch == HOPPER.arch and device.multiprocessors >= HOPPER.multiprocessors


def runs_mosaic(device: Device) -> bool:
    """True where Mosaic kernels come into question for `device`."""
    return is_hopper(device) and _chosen.value != "triton"


def runs_triton(device: Device) -> bool:
    """True where Triton kernels come into question for `device`, and no Mosaic kernels do."""
    return runs_triton_beside_mosaic(device) and not runs_mosaic(device)


def runs_triton_beside_mosaic(device: Device) -> bool:
    """True where Triton kernels come into question, on Hopper also for what no Mosaic kernel takes.

    "auto" has them only where jax-triton is installed (the extra `triton`).
    """
    if _chosen.value == "mosaic":
        return False
    return device.capability >= MIN_TRITON_CAPABILITY and (_chosen.value == "triton" or has_triton())


@functools.cache
def has_triton() -> bool:
    """True where Triton is installed, and the version of its bridge to JAX that launches go by.

    Neither is imported before a kernel runs.
    """
    try:
        version = importlib.metadata.version("jax-triton")
    except importlib.metadata.PackageNotFoundError:
        return False
    return version.startswith(f"{JAX_TRITON}.") and importlib.util.find_spec("triton") is not None


def check_runs_here(argument: str, name: str) -> None:
    """Raises ValueError where the kernels that `argument` names by `name` cannot run on JAX's default device."""
    device = this_device()
    lacks = None
    if name == "mosaic" and not is_hopper(device):
        lacks = f"a Hopper GPU with {HOPPER.multiprocessors} multiprocessors"
    elif name == "triton" and device.capability < MIN_TRITON_CAPABILITY:
        lacks = f"an NVIDIA GPU of compute capability {MIN_TRITON_CAPABILITY / 10} or more"
    if lacks:
        found = device.kind or device.platform
        raise ValueError(f"{argument} {name} needs {lacks} and the default device is {found}; use auto or xla.")
    if name == "triton" and not has_triton():
        raise ValueError(
            f"{argument} triton needs jax-triton {JAX_TRITON}, which is not installed; add the extra `triton`."
        )


def active_implementation() -> str:
    """Names what operations take now: "mosaic" or "triton" where such kernels come into question, else "xla".

    This is for what depends on no single operation, such as a report or a compiler's option. Whether a kernel takes
    some arguments is asked of the operation.
    """
    device = kernel_device()
    if device is None:
        return "xla"
    return "mosaic" if runs_mosaic(device) else "triton" if runs_triton(device) else "xla"


@dataclasses.dataclass(frozen=True)
class Kernel[**P, R]:
    """One way to compute an operation on some devices.

    Attributes:
        runs_on: true for the devices that it is made for.
        run: computes the operation for arguments that `supports` accepts.
        supports: true for arguments that `run` computes exactly as the reference means it: a list of what is known
            to work, so that shapes which its tests do not cover are refused.
    """

    runs_on: Callable[[Device], bool]
    run: Callable[P, R]
    supports: Callable[P, bool]


class Op[**P, R]:
    """An operation: a reference that takes every valid argument, and kernels that each take some."""

    def __init__(self, reference: Callable[P, R]) -> None:
        self.reference = reference
        self._kernels: list[Kernel[P, R]] = []

    def register(self, kernel: Kernel[P, R], *, first: bool = False) -> None:
        """Adds a kernel, which comes after those that were added before it, or as the `first`."""
        self._kernels.insert(0 if first else len(self._kernels), kernel)

    def kernel_for(self, *args: P.args, **kwargs: P.kwargs) -> Kernel[P, R] | None:
        """The kernel that these arguments would run in now; None where the reference computes them."""
        device = kernel_device()
        if device is None:
            return None
        fitting = (kernel for kernel in self._kernels if kernel.runs_on(device) and kernel.supports(*args, **kwargs))
        return next(fitting, None)

    def has_kernel(self) -> bool:
        """True where a kernel of this operation comes into question now, for some arguments."""
        device = kernel_device()
        return device is not None and any(kernel.runs_on(device) for kernel in self._kernels)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Computes the operation by `kernel_for`'s kernel, or by the reference."""
        kernel = self.kernel_for(*args, **kwargs)
        return (self.reference if kernel is None else kernel.run)(*args, **kwargs)
