"""`smcjax doctor`: a line a finding, JSON last where asked for, 1 where nothing could be generated."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import pytest

from smcjax import device
from smcjax.cli.commands import doctor
from smcjax.cli.commands.doctor import Finding
from smcjax.device import KNOWN, Device
from smcjax.model.files import hub
from smcjax.pallas import dispatch
from tests.checkpoints import Pair
from tests.cli.conftest import Command, Result
from tests.lazily import Patch

CHECKS = doctor.CHECKS
FIELDS = {"label", "value", "ok", "hint", "fatal"}


def patch(monkeypatch: pytest.MonkeyPatch, *checks: Callable[[], Finding]) -> None:
    monkeypatch.setattr(doctor, "CHECKS", checks)


def assert_broken(result: Result, label: str) -> None:
    """Exit code 1, one sentence."""
    assert result.code == 1
    assert len(result.err.splitlines()) == 1
    assert result.err.startswith(f"smcjax: error: {label}: ")
    assert result.err.endswith(".\n")
    assert not result.err.endswith("..\n")
    assert ".;" not in result.err
    assert any(line.startswith(f"FAIL  {label} ") for line in result.out.splitlines())


def test_this_machine_can_generate(smcjax: Command) -> None:
    result = smcjax("doctor")
    assert result.code == 0
    assert "smcjax: error" not in result.err
    lines = result.out.splitlines()
    assert len(lines) == len(CHECKS)
    assert all(line.startswith(("ok    ", "note  ")) for line in lines)
    for word in (
        "versions",
        "jax ",
        "host",
        "devices",
        "kernels",
        "donated buffers",
        "compilation cache",
        "bundled models",
    ):
        assert word in result.out


def test_json_is_the_last_line_and_says_the_same(smcjax: Command) -> None:
    result = smcjax("doctor", "--json")
    assert result.code == 0
    *lines, last = result.out.splitlines()
    findings = json.loads(last)
    assert len(findings) == len(lines) == len(CHECKS)
    for line, finding in zip(lines, findings, strict=True):
        assert finding.keys() == FIELDS
        assert finding["label"] in line
        assert finding["value"] in line
        assert finding["hint"] in line
        assert line.startswith("ok  " if finding["ok"] else "note")
        assert finding["ok"] or finding["hint"]


@pytest.mark.parametrize(
    ("error", "value"),
    [
        (RuntimeError("no\n  CUDA driver."), "RuntimeError: no CUDA driver"),
        (ImportError(""), "ImportError"),
        (KeyError("x"), "KeyError: 'x'"),
        (AssertionError("x" * 10_000), "AssertionError: " + "x" * 184),
    ],
)
@pytest.mark.parametrize("as_json", [True, False])
def test_a_check_that_breaks_is_a_failure(
    smcjax: Command, monkeypatch: pytest.MonkeyPatch, error: Exception, value: str, as_json: bool
) -> None:
    def _some_check() -> Finding:
        raise error

    patch(monkeypatch, _some_check, lambda: Finding("after", "still examined"))
    result = smcjax("doctor", *["--json"] * as_json)
    assert_broken(result, "some check")
    assert result.err == f"smcjax: error: some check: {value}; uv sync --reinstall.\n"
    assert "still examined" in result.out
    if as_json:
        first, second = json.loads(result.out.splitlines()[-1])
        assert first == {
            "label": "some check", "value": value, "ok": False, "hint": "uv sync --reinstall", "fatal": True,
        }  # fmt: skip
        assert second["ok"]


def test_of_two_failures_the_first_is_told(smcjax: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    patch(
        monkeypatch,
        lambda: Finding("slow", "copied", ok=False, hint="slower"),
        lambda: Finding("first", "gone", ok=False, hint="mend it", fatal=True),
        lambda: Finding("second", "gone", ok=False, hint="mend it", fatal=True),
    )
    result = smcjax("doctor")
    assert_broken(result, "first")
    assert result.out.splitlines()[0] == "note  slow    copied  (slower)"


def test_a_note_is_no_failure(smcjax: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    patch(monkeypatch, lambda: Finding("speed", "low", ok=False, hint="slower"))
    result = smcjax("doctor")
    assert (result.code, result.out, result.err) == (0, "note  speed  low  (slower)\n", "")


@pytest.mark.parametrize("missing", ["pair", "weights"])
def test_a_missing_bundled_pair(smcjax: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, missing: str) -> None:
    if missing == "weights":
        for name in ("target", "draft"):
            (tmp_path / name).mkdir()
            shutil.copy(hub.bundled_model(name) / "config.json", tmp_path / name)
    monkeypatch.setattr(hub, "bundled_model", lambda name: tmp_path / name)
    result = smcjax("doctor", "--json")
    assert_broken(result, "bundled models")
    assert str(tmp_path / "target") in result.err
    *others, pair = json.loads(result.out.splitlines()[-1])
    assert (pair["ok"], pair["fatal"]) == (False, True)
    assert not any(finding["fatal"] for finding in others)


@pytest.fixture
def cache_directory() -> Iterator[Callable[[Path], None]]:
    """Sets JAX's compilation cache directory, for the test only."""
    before = jax.config.jax_compilation_cache_dir
    yield lambda path: jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_compilation_cache_dir", before)


def test_the_compilation_cache(
    smcjax: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache_directory: Callable[[Path], None]
) -> None:
    """Made where it can be; where not, every start compiles, which is slow but no failure."""
    patch(monkeypatch, doctor._compilation_cache)
    cache_directory(tmp_path / "new" / "xla")
    assert smcjax("doctor").out == f"ok    compilation cache  {tmp_path / 'new' / 'xla'}\n"
    assert (tmp_path / "new" / "xla").is_dir()
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "xla"):
        cache_directory(path)
        result = smcjax("doctor")
        assert (result.code, result.err) == (0, "")
        assert result.out == f"note  compilation cache  {path}  (not writable: every start compiles)\n"


def test_an_idle_gpu_is_noted(smcjax: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    patch(monkeypatch, doctor._devices)
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    result = smcjax("doctor")
    assert result.code == 0
    assert result.out.startswith("note  devices")
    assert "uv run --extra cuda13 smcjax" in result.out


def test_both_cuda_plugins_are_noted(smcjax: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    patch(monkeypatch, doctor._devices)
    monkeypatch.setattr(doctor, "_installed", lambda distribution: distribution == "jax-cuda12-plugin")
    assert smcjax("doctor").out.startswith("ok    devices")
    monkeypatch.setattr(doctor, "_installed", lambda distribution: True)
    result = smcjax("doctor")
    assert (result.code, result.err) == (0, "")
    assert "jax-cuda12-plugin and jax-cuda13-plugin are both installed" in result.out


@pytest.mark.parametrize("argv", [["doctor", "now"], ["doctor", "--js"]])
def test_wrong_usage_is_2(smcjax: Command, argv: list[str]) -> None:
    result = smcjax(*argv)
    assert (result.code, result.out) == (2, "")
    assert len(result.err.splitlines()) == 1
    assert argv[-1] in result.err


def test_the_memory_of_a_pair_is_said_before_it_is_loaded(smcjax: Command, pair: Pair) -> None:
    """By the config alone, a line a decoder: KV goes by the particles."""
    (Path(pair.target) / "model.safetensors").rename(Path(pair.target) / "elsewhere")
    decoders = ("SMC(n_particles=8)", "SMC(n_particles=16)", "Rejection(gamma=4)")
    asked = ("--model", pair.target, "--draft-model", pair.draft, "--max-model-len", "64")
    result = smcjax("doctor", *asked, "--decoding", *decoders, "--json")
    (Path(pair.target) / "elsewhere").rename(Path(pair.target) / "model.safetensors")
    assert result.code == 0, result.err
    found = json.loads(result.out.splitlines()[-1])[len(CHECKS) :]
    assert [one["label"] for one in found] == [
        *("memory, SMC, N=8, K=8, control 0.1", "memory, SMC, N=16, K=8, control 0.1", "memory, rejection, K=4")
    ]
    assert all("KV of a request of 64 tokens" in one["value"] and "; room for " in one["value"] for one in found)
    refused = smcjax("doctor", "--draft-model", pair.draft)
    assert (refused.code, refused.err.count("--draft-model is given and --model is not")) == (2, 1)


@pytest.mark.parametrize(
    ("kind", "installed", "value", "hint"),
    [
        ("NVIDIA H200", False, "Pallas (Mosaic GPU), for capability 9.0", ""),
        ("NVIDIA L4", True, "Triton, for capability 8.9", ""),
        ("NVIDIA L4", False, "none, plain XLA, on capability 8.9", "add the extra `triton`: its kernels run here"),
        (None, True, "none, plain XLA, on cpu: Pallas needs a Hopper GPU", ""),
    ],
)
def test_kernels_are_named_with_the_reason(
    patch_programs: Patch, kind: str | None, installed: bool, value: str, hint: str
) -> None:
    found = Device("cpu") if kind is None else KNOWN[kind]
    for module in (device, dispatch):
        patch_programs(module, "this_device", lambda: found)
    patch_programs(dispatch, "has_triton", lambda: installed)
    finding = doctor._kernels()
    assert finding.value.startswith(value)
    assert (finding.hint, finding.ok) == (hint, not hint)
