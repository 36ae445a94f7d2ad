"""Tiny runs of the baselines in PyTorch, which has an environment of its own: `TORCH_PYTHON` names its Python."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from smcjax.bench.compare import BASELINE, baseline_shape
from smcjax.bench.shapes import SHAPES
from tests.gguf_files import write_gguf
from tests.model.hf_oracle import make_config, random_weights

ROOT = Path(__file__).parents[2]
TORCH = os.environ.get("TORCH_PYTHON", "")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not TORCH, reason="TORCH_PYTHON names no Python that has torch")]


def output(*command: str, given: str = "") -> list[str]:
    """Runs a command in the repository's root, which must succeed, and returns its lines."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, input=given, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_cycle_beside_ours(tmp_path: Path) -> None:
    saved = tmp_path / "compare.json"
    command = [sys.executable, "-m", "smcjax", "bench", "cycle", "--compare", "--torch-python", TORCH]
    sizes = ["--target-shape", "tiny-target", "--draft-shape", "tiny-draft", "-N", "2", "-K", "2", "--context", "8"]
    run = ["--max-model-len", "48", "--windows", "1", "--cycles", "3", "--bandwidth", "10"]
    output(*command, *sizes, *run, "--save", str(saved))
    ours, xla, baseline = json.loads(saved.read_text())["rows"]
    for key in ("groups", "n_particles", "gamma", "context", "max_model_len", "weight_bytes", "weight_roofline_ms"):
        assert ours[key] == xla[key] == baseline[key]
    assert baseline["weight_roofline_fraction"] * baseline["ms"] == pytest.approx(baseline["weight_roofline_ms"])
    assert baseline["implementation"].startswith("torch 2.")


def test_the_target_alone_in_eager_mode(tmp_path: Path) -> None:
    shapes = json.dumps({name: baseline_shape(SHAPES[f"tiny-{name}"]) for name in ("target", "draft")})
    command = [str(BASELINE), "--decoding", "autoregressive", "--mode", "eager", "--attention", "matmul"]
    saved = tmp_path / "alone.json"
    output(TORCH, *command, "--context", "8", "--max-model-len", "48", "--save", str(saved), given=shapes)
    (baseline,) = json.loads(saved.read_text())["rows"]
    assert (baseline["n_particles"], baseline["gamma"]) == (1, 0)
    assert baseline["tokens_per_second"] == pytest.approx(1e3 / baseline["ms"])


def test_generation_of_a_gguf_file(tmp_path: Path) -> None:
    config = make_config("llama", vocab_size=49_024, num_hidden_layers=1)  # prompts have tokens up to 49,000
    path = tmp_path / "model.gguf"
    write_gguf(path, config, random_weights(config), Kind.F32, lambda writer: writer.add_vocab_size(49_024))
    seconds = output(
        TORCH, "scripts/benchmarks/torch_generate.py", str(path), "float32", given="1 request\n16 requests\n"
    )
    assert len(seconds) == 2
    assert all(float(each) > 0 for each in seconds)


def test_verification_and_packing() -> None:
    case = {"rows": 3, "gamma": 4, "alpha": 0.9, "dim": 8}
    lines = output(TORCH, "-m", "studies.verification.torch_eager", given=json.dumps([case, {**case, "dim": 0}]))
    both, scan = (json.loads(line.removeprefix("RESULT ")) for line in lines if line.startswith("RESULT "))
    assert list(both) == ["scan", "pack", "verify"]
    assert list(scan) == ["scan"]
    assert all(times["host, p95"] >= times["host"] > 0 for times in both.values())


@pytest.mark.parametrize("wrong", ["pack", "scan"])
def test_a_wrong_result_is_not_timed(wrong: str) -> None:
    code = f"""
from studies.verification import torch_eager
right = torch_eager.{wrong}
def {wrong}(*given):
    got = right(*given)
    return got.roll(1, 0) if isinstance(got, torch_eager.torch.Tensor) else (got[0] + 1, *got[1:])
torch_eager.{wrong} = {wrong}
try:
    torch_eager.measured({{"rows": 3, "gamma": 4, "alpha": 0.9, "dim": 8}}, torch_eager.torch.device("cpu"))
except AssertionError as error:
    print(error)
"""
    assert output(TORCH, "-c", code) == [f"{wrong}: result 0 is not the oracle's"]


@pytest.mark.parametrize("directory", ["eagle3", "gemma"])
def test_goldens_are_what_their_script_makes(directory: str, tmp_path: Path) -> None:
    """To the last figures of f32, which depend on the processor."""
    output(TORCH, f"scripts/goldens/make_{directory.rstrip('3')}_goldens.py", str(tmp_path))
    for made in tmp_path.iterdir():
        kept = ROOT / "tests" / "data" / directory / made.name
        if made.suffix != ".npz":
            assert made.read_bytes() == kept.read_bytes()
            continue
        with np.load(made) as new, np.load(kept) as old:
            assert new.files == old.files
            for name in new.files:
                np.testing.assert_allclose(new[name], old[name], rtol=1e-5, atol=1e-5, err_msg=name)
