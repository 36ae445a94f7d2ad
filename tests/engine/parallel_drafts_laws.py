"""Which drafts several devices divide unless they are told: those that were measured to be quicker so.

Run by `test_parallel.py` in a process of its own, for XLA is told the number of devices when it starts.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import pytest

from smcjax.bench.shapes import SHAPES
from smcjax.engine.load.loading import load_models
from smcjax.engine.run.sharded_programs import ShardedPrograms
from smcjax.model.config import LayerSpec
from smcjax.model.parallel import bytes_on_one, devices_of_host
from tests.checkpoints import write_model
from tests.engine.parallel_laws import TARGET_SHAPE

DRAFT = SHAPES["llama-3.2-1b"]


def test_two_devices_divide_what_the_persistent_step_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    two, four = (ShardedPrograms(devices_of_host(size), SHAPES["llama-3.1-8b"]) for size in (2, 4))
    assert not two.divides(DRAFT, "bfloat16", "auto"), "a CPU has no peers"
    monkeypatch.setattr(ShardedPrograms, "has_peers", lambda sharded, implementation: implementation == "auto")
    assert two.divides(DRAFT, "bfloat16", "auto")
    assert not two.divides(DRAFT, "bfloat16", "xla"), "no kernels"
    assert not two.divides(DRAFT, "float32", "auto"), "plain layers"
    assert not two.divides(DRAFT.with_layers([LayerSpec(post_norms=True)]), "bfloat16", "auto"), "no plain Llama"
    assert not two.divides(dataclasses.replace(DRAFT, intermediate_size=8191), "bfloat16", "auto"), "no two halves"
    assert not four.divides(DRAFT, "bfloat16", "auto"), "not measured"


@pytest.mark.parametrize(
    ("given", "divided"),
    [
        ({}, True),
        ({"implementation": "xla"}, False),
        ({"draft_quantization": "int8"}, False),
        ({"draft_divided": False}, False),
        ({"draft_divided": True, "implementation": "xla"}, True),
    ],
)
def test_a_draft_is_loaded_as_was_chosen(
    given: dict[str, Any], divided: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An argument goes before the choice; of int8 matrices the persistent step sums nothing over devices."""
    pair = [write_model(tmp_path / name, 272, seed, **TARGET_SHAPE) for seed, name in enumerate(("target", "draft"))]
    monkeypatch.setattr(
        ShardedPrograms, "divides", lambda sharded, draft, dtype, implementation: implementation == "auto"
    )
    models = load_models(*pair, needs_draft=True, dtype="float32", parallel=devices_of_host(2), **given)
    assert models.draft_divided is divided
    layers = models.draft_params.layers  # of the draft, whose embedding and LM head each device has whole
    assert models.draft is not None
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(layers))
    assert (bytes_on_one(layers) < 0.6 * whole) is divided
