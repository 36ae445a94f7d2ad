"""Files from which an interrupted training goes on: arrays in safetensors, settings in their header, never pickled.

Each file is there as a whole or not at all.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from smcjax.files import write_atomically


def write_arrays(path: Path, arrays: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
    """Writes arrays by name, and `facts`, which JSON can hold."""
    host = {name: np.asarray(jax.device_get(array), order="C") for name, array in arrays.items()}
    write_atomically(path, save(host, metadata={"facts": json.dumps(facts)}))


def read_arrays(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]] | None:
    """Returns arrays and facts of a file of `write_arrays`, None where there is none; ValueError for other files."""
    if not path.exists():
        return None
    try:
        with safe_open(path, "numpy") as file:
            names = file.keys()
            return {name: file.get_tensor(name) for name in names}, json.loads(file.metadata()["facts"])
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} cannot be gone on from ({error}); remove it to begin anew.") from None


def require_same(path: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raises ValueError, naming the first setting that differs, where a file was written under others."""
    for name in {**before, **now}:
        if before.get(name) != now.get(name):
            raise ValueError(
                f"{name} is {now.get(name)!r} and was {before.get(name)!r} in the training that {path.parent.parent} "
                "holds; give it as it was, or name another output."
            )


def leaves_by_number(tree: Any) -> dict[str, Any]:
    """The leaves of a tree under their numbers."""
    return {f"{number:06d}": leaf for number, leaf in enumerate(jax.tree.leaves(tree))}


def tree_like(tree: Any, arrays: Mapping[str, np.ndarray], path: Path) -> Any:
    """The tree whose leaves `leaves_by_number` named. Raises ValueError where they are not those of `tree`'s shapes."""
    wanted, treedef = jax.tree.flatten(tree)
    found = [arrays.get(f"{number:06d}") for number in range(len(wanted))]
    if len(arrays) != len(wanted) or any(
        one is None or one.shape != leaf.shape or one.dtype != leaf.dtype
        for one, leaf in zip(found, wanted, strict=True)
    ):
        raise ValueError(f"{path} holds weights of another model; remove it to begin anew.")
    return jax.tree.unflatten(treedef, found)
