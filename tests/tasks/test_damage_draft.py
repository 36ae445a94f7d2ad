"""The damaged draft: a directory that loads, whose matrices have the noise that was asked for, and nothing else."""

from __future__ import annotations

import sys
from pathlib import Path

import damage_draft
import jax
import numpy as np
import pytest

from smcjax.model import load_checkpoint
from smcjax.model.files.hub import bundled_model
from smcjax.tokenizer.tokenizer import Tokenizer


def written(directory: Path, monkeypatch: pytest.MonkeyPatch, noise: float) -> list[np.ndarray]:
    """The leaves of the draft that the script writes."""
    monkeypatch.setattr(sys, "argv", ["damage_draft.py", str(directory), "--noise", str(noise)])
    damage_draft.main()
    assert Tokenizer.load(directory) is not None
    return leaves(directory)


def leaves(directory: Path) -> list[np.ndarray]:
    return [np.asarray(leaf, np.float32) for leaf in jax.tree.leaves(load_checkpoint(directory)[1])]


def test_matrices_of_layers_alone_have_noise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = leaves(bundled_model("draft"))
    same = written(tmp_path / "same", monkeypatch, 0.0)
    assert all(np.array_equal(one, other) for one, other in zip(before, same, strict=True)), "control: no noise"
    after = written(tmp_path / "damaged", monkeypatch, 0.1)
    changed = [(one, other) for one, other in zip(before, after, strict=True) if not np.array_equal(one, other)]
    assert 0 < len(changed) < len(before), "embeddings and norms stay"
    for one, other in changed:
        assert one.ndim == 2
        assert abs(np.std(other - one) / np.std(one) - 0.1) < 0.01


def test_a_noise_below_zero_is_refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["damage_draft.py", "nowhere", "--noise", "-1"])
    with pytest.raises(SystemExit):
        damage_draft.main()
    assert "--noise must be a number of at least 0, got -1.0." in capsys.readouterr().err
