"""Whose measurements a profile holds: names of this device and of models, short enough to be kept in a file."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import platform
from typing import Any

import jax
import numpy as np

from smcjax.device import this_device
from smcjax.engine.load.loading import Models

SAMPLE = 16  # numbers of an array that tell it from another one of its shape


def device_name() -> str:
    """The default device's kind; of a CPU, which all have one name, its architecture and cores."""
    device = this_device()
    if device.platform == "cpu":
        return f"cpu, {platform.machine()}, {os.cpu_count()} cores"
    return device.kind or device.platform


def fingerprint(config: Any, params: Any) -> str:
    """16 hexadecimal digits that differ where the config, a shape, a dtype or an array's first numbers do.

    The weights are those on the device, so it also differs where they are kept otherwise (dtype, quantisation). The
    vocabulary's size is left out: beside a draft a target's padding is cut.
    """
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    vocabulary = fields.pop("vocab_size", None)
    digest = hashlib.sha256(repr(fields).encode())
    for leaf in jax.tree.leaves(params):
        shape = tuple("V" if size == vocabulary else size for size in leaf.shape)
        digest.update(f"{shape}{leaf.dtype}".encode())
        digest.update(np.asarray(leaf[(0,) * (leaf.ndim - 1)][:SAMPLE]).tobytes())
    return digest.hexdigest()[:16]


@dataclasses.dataclass(frozen=True)
class Fingerprints:
    """The devices' name, and the target's and the draft's fingerprints; None where nothing drafts."""

    device: str
    model: str
    draft: str | None


def fingerprints(models: Models) -> Fingerprints:
    """Makes the fingerprints of loaded models on the default device, or on those that hold them together.

    Of two devices of which one drafts they are one's: decoders that a profile chooses among do not overlap, and each
    device runs those as if alone.
    """
    proposer, name = models.proposer, device_name()
    if models.parallel is not None:
        name = f"{models.parallel.size} × {name}{' that divide the draft' if models.draft_divided else ''}"
    draft = None if proposer is None else fingerprint(proposer, models.draft_params)
    return Fingerprints(name, fingerprint(models.target, models.target_params), draft)
