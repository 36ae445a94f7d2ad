"""Private parts of JAX are named in one module, and those that tests alone replace in another."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from smcjax.pallas.mosaic.compat import fa, plgpu

ROOT = Path(__file__).parents[3]
COMPAT = "smcjax/pallas/mosaic/compat.py"
OF_TESTS = "tests/interpreted.py"


def private_parts(source: str) -> Iterator[str]:
    """The private modules and attributes of JAX that a module names."""
    of_jax = set()  # names that the module has from JAX
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            paths = {alias.asname or alias.name.split(".")[0]: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            paths = {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        else:
            continue
        ours = {name: path for name, path in paths.items() if path.split(".")[0] in ("jax", "jaxlib")}
        of_jax |= ours.keys()
        yield from (path for path in ours.values() if "._" in path)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            base = node.value
            while isinstance(base, ast.Attribute):
                base = base.value
            if isinstance(base, ast.Name) and base.id in of_jax:
                yield ast.unparse(node)


@pytest.mark.parametrize("package", ["smcjax", "scripts", "studies", "tests"])
def test_one_module_names_private_parts_of_jax(package: str) -> None:
    paths = sorted((ROOT / package).rglob("*.py"))
    named = {path.relative_to(ROOT).as_posix(): set(private_parts(path.read_text())) for path in paths}
    assert {path: parts for path, parts in named.items() if parts and path not in (COMPAT, OF_TESTS)} == {}


def test_the_version_of_ptxas_is_read_once() -> None:
    """All conversions from and to few bits that are lowered share one reading."""
    if fa.mgpu_lib is None:
        pytest.skip("needs JAX's plugin for CUDA")

    def kernel(source: Any, target: Any) -> None:
        target[...] = source[...].astype(jnp.int8).astype(jnp.int32)

    x = jax.ShapeDtypeStruct((128,), jnp.int32)
    jax.jit(plgpu.kernel(kernel, out_type=x)).trace(x).lower(lowering_platforms=("cuda",))
    asked = fa.mgpu_lib._mosaic_gpu_ext._get_ptxas_isa_version.cache_info()
    assert asked.misses == 1
    assert asked.hits > 0


def test_private_parts_are_seen() -> None:
    """Negative control, by that module and by other spellings."""
    assert "jax._src.lib.mlir.dialects.llvm" in set(private_parts((ROOT / COMPAT).read_text()))
    assert "dialect_lowering._lowerings" in set(private_parts((ROOT / COMPAT).read_text()))
    assert list(private_parts("import jax\njax._src.core.trace_ctx")) == ["jax._src"]
    assert list(private_parts("import jax._src.core as core")) == ["jax._src.core"]
    assert not list(private_parts("import jax\nself._jax = jax.__version__"))
