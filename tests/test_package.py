"""The package's top level: everything that it promises is there, imported when asked for."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

import smcjax
from smcjax import CheckpointError
from smcjax.model.files.hub import bundled_model


@pytest.mark.parametrize("name", smcjax.__all__)
def test_public_names(name: str) -> None:
    assert getattr(smcjax, name).__name__ == name
    assert name in dir(smcjax)


def test_unknown_names() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Rejected'"):
        _ = smcjax.Rejected


def test_the_functional_layer_needs_no_import_of_its_own() -> None:
    code = (
        "import sys, smcjax; assert 'jax' not in sys.modules\n"
        "print(smcjax.smc.resample.__name__, smcjax.model.forward.__name__, smcjax.kv.PagePool.__name__)\n"
        "print(smcjax.pallas.implementations.__name__)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert result.stdout.split() == ["resample", "forward", "PagePool", "implementations"]


def test_type_checkers_read_the_annotations() -> None:
    assert Path(smcjax.__file__).with_name("py.typed").is_file()


def test_what_a_user_chooses_needs_no_jax() -> None:
    code = (
        "import sys; from smcjax import SMC, Autoregressive, CheckpointError, Rejection, SamplingParams\n"
        "chosen = SMC(gamma=4), Rejection(), Autoregressive(), SamplingParams(max_tokens=9)\n"
        "print(sorted({'jax', 'numpy', 'transformers'} & sys.modules.keys()))\n"
        "from smcjax import autoregressive, rejection, smc\n"
        "assert (smc.SMC, rejection.Rejection, autoregressive.Autoregressive) == (SMC, Rejection, Autoregressive)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert result.stdout == "[]\n"


def test_a_cpu_imports_no_kernel_language() -> None:
    """Nor what reads forms of answers; Mosaic and MLIR, a second's work, the last line but one asks for."""
    code = """if True:
        import sys
        from smcjax import LLM
        from smcjax.pallas.mosaic import compat
        pallas, dialects = "jax.experimental.pallas", "jaxlib.mlir.dialects."
        heavy = {pallas, "jax.experimental.mosaic.gpu", "jax.extend", dialects + "llvm", dialects + "nvvm"}
        later = {"tqdm", "smcjax.structured.automaton_child", "smcjax.structured.json_schema"}
        print(sorted((heavy | later) & sys.modules.keys()))
        compat.plgpu.Layout, compat.llvm.inline_asm, compat.nvvm.shfl_sync, compat.ir.Value
        print(len(heavy & sys.modules.keys()))
    """
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert result.stdout == "[]\n5\n"


def test_an_llm_imports_two_packages_beside_jax() -> None:
    """Names are counted rather than seconds, which a loaded machine stretches: the modules here take a quarter of one.

    `tqdm` in the end is the negative control.
    """
    code = """if True:
        import sys, jax
        found = lambda: {name.partition(".")[0] for name in sys.modules} - sys.stdlib_module_names
        before = found()
        from smcjax import LLM
        print(sorted(found() - before))
        import tqdm
        print("tqdm" in found() - before)
    """
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert result.stdout == "['jaxtyping', 'safetensors', 'smcjax']\nTrue\n"


def test_the_distribution_is_not_the_strangers_of_that_name() -> None:
    """On PyPI `smcjax` is somebody else's: nothing that we say may fetch it."""
    assert metadata.version("smc-sd-jax") == smcjax.__version__
    assert {script.name for script in metadata.distribution("smc-sd-jax").entry_points} == {"smcjax"}
    advice = re.compile(r"install (-\S+ )*smcjax\b|smcjax\[|--with smcjax\b|pypi\.org/project/smcjax", re.IGNORECASE)
    for control in ("pip install -U smcjax", "install smcjax[cuda13]", "Reinstall smcjax"):
        assert advice.search(control)
    root = Path(smcjax.__file__).parents[1]
    files = [path for name in ("smcjax", "scripts", "studies", "docs") for path in (root / name).rglob("*.[pm][yd]")]
    assert len(files) > 100
    for path in [*files, root / "README.md", root / "pyproject.toml"]:
        assert not advice.search(path.read_text()), path


def test_the_package_needs_nothing_beside_it() -> None:
    """Studies, scripts and tests are no part of the wheel."""
    beside = re.compile(r"^\s*(from|import) (studies|scripts|tests)\b", re.MULTILINE)
    assert beside.search("import jax\n    from studies.verification import bulk")  # a control
    for path in Path(smcjax.__file__).parent.rglob("*.py"):
        assert not beside.search(path.read_text()), path


def test_each_module_of_sparse_attention_can_be_the_first_imported() -> None:
    """It imports models, which import its options alone, and those import no model."""
    package = Path(smcjax.__file__).parent
    imported = re.compile(r"^\s*(?:from|import) smcjax\.sparse\.(\w+)", re.MULTILINE)
    for path in (package / "model").rglob("*.py"):
        assert set(imported.findall(path.read_text())) <= {"verification"}, path
    assert imported.findall("import jax\n    from smcjax.sparse.nsa import NSA") == ["nsa"]  # a control
    assert "smcjax.model" not in (package / "sparse" / "verification.py").read_text()


def test_as_a_module() -> None:
    command = [sys.executable, "-m", "smcjax", "--version"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert result.stdout == f"smcjax {smcjax.__version__}\n"


def test_the_wheel_is_small(tmp_path: Path) -> None:
    """The recall pair, which would double it, is a distribution of its own."""
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path)]
    subprocess.run(command, cwd=Path(smcjax.__file__).parents[1], capture_output=True, timeout=120, check=True)
    (wheel,) = tmp_path.iterdir()
    assert wheel.stat().st_size <= 16 * 2**20
    assert {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()} == {
        "smcjax",
        f"smc_sd_jax-{smcjax.__version__}.dist-info",
    }


def test_the_recall_pair_says_how_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (bundled_model("recall/target") / "model.safetensors").is_file()
    monkeypatch.setitem(sys.modules, "smcjax_recall", None)
    with pytest.raises(CheckpointError, match=r"needs smc-sd-jax-recall.*'uv run --group recall smcjax"):
        bundled_model("recall/target")
