"""Compressed tokens that kernels make and write: those of XLA's way, from pages whose unused slots are NaN."""

from __future__ import annotations

import dataclasses
import functools
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from smcjax.kv import TRASH, LayerCache
from smcjax.model.attention import Projection
from smcjax.model.config import Rope
from smcjax.model.decoder import rope_angles
from smcjax.model.view import BatchView
from smcjax.pallas.dispatch import Kernel, Op, implementations, runs_mosaic
from smcjax.pallas.sparse.compress import (
    CompressionUpdate,
    supports_compression_update,
    update_compressed,
    update_compressed_mosaic,
)
from smcjax.sparse import compression_update
from smcjax.sparse.nsa import NSA

INTERPRET = plgpu.InterpretGPUParams()
SMALL = {"kernel_size": 8, "kernel_stride": 4, "block_size": 8, "window": 8, "num_blocks": 3}
SHORT = SMALL | {"kernel_size": 4}


class Case(NamedTuple):
    """Rows whose first new tokens stand at `starts`, each of `columns`; of the last row nothing is written."""

    kind: NSA
    starts: tuple[int, ...]
    columns: int = 3
    page_size: int = 8
    heads: int = 1
    dim: int = 64
    table: int = 3  # pages of a row

    @property
    def config(self) -> Any:
        return SimpleNamespace(hidden_size=64, num_heads=self.heads, num_kv_heads=self.heads, head_dim=self.dim)

    @property
    def view(self) -> BatchView:
        rows, size = len(self.starts), self.page_size
        table = 1 + np.random.default_rng(3).permutation(rows * self.table).reshape(rows, -1)
        positions = np.array(self.starts)[:, None] + np.arange(self.columns)
        written = np.take_along_axis(table, positions // size, axis=1)
        written[-1] = TRASH
        ends = np.where(written[:, -1] == TRASH, 0, positions[:, -1] + 1)
        numbers = (jnp.asarray(x, jnp.int32) for x in (positions, positions, table, written, ends, ends))
        return BatchView(*numbers, page_size=size)

    def drawn(self, seed: int = 0) -> tuple[LayerCache, Projection]:
        """Pages with NaN where no row has a token yet, and a projection that has weights and angles alone."""
        rng, view = np.random.default_rng(seed), self.view

        def normal(shape: tuple[int, ...], scale: float = 1.0) -> jax.Array:
            return jnp.asarray(rng.standard_normal(shape) * scale, jnp.bfloat16)

        cache = {}
        for name, array in self.kind.cache(self.config).arrays.items():
            entries = array.entries(self.page_size)
            pages = np.array(normal((1 + len(self.starts) * self.table, entries, self.heads, self.dim)))
            slots = np.arange(entries) * array.stride
            for row, length in zip(np.asarray(view.block_table), np.array(self.starts) + self.columns, strict=True):
                for place, page in enumerate(row):
                    pages[page, place * self.page_size + slots >= length] = np.nan
            cache[name] = jnp.asarray(pages)
        shapes = self.kind.param_shapes(self.config, jnp.bfloat16)
        weights = {name: normal(of.shape, of.shape[-1] ** -0.5) for name, of in shapes.items()}
        angles = functools.partial(rope_angles, Rope(100.0), self.dim)
        qkv = jnp.zeros((*view.positions.shape, 3 * self.heads, self.dim), jnp.bfloat16)
        return cache, Projection(qkv, *angles(view.positions), self.heads, None, None, qkv[..., 0, :], weights, angles)


CASES = {
    "mlp": Case(NSA(**SMALL), (9, 13), heads=2),
    "two chunks": Case(NSA(kv="shared", **SHORT), (4, 4, 5, 6, 4, 8, 5, 6, 3, 7, 3), 1),  # the first completes nothing
    "two of a row": Case(NSA(**SHORT), (6, 0), 5, heads=2),
    # A warp's columns are of several positions.
    "six of each": Case(
        NSA(kv="shared", **SMALL | {"kernel_size": 6, "kernel_stride": 2}), (4, 8), 4, page_size=2, table=6
    ),
}


def counted(patch_programs: Any, **how: Any) -> list[None]:
    """A list that grows with every call of the kernels, which then run so."""
    calls: list[None] = []
    counting = Op(update_compressed.reference)

    def counted(*args: Any) -> Any:
        calls.append(None)
        return update_compressed_mosaic(*args, **how)

    counting.register(Kernel(runs_mosaic, counted, supports_compression_update))
    patch_programs(compression_update, "update_compressed", counting)
    return calls


def by_kernels(case: Case, patch_programs: Any, cache: LayerCache, projection: Projection) -> LayerCache:
    calls = counted(patch_programs, interpret=INTERPRET)
    with implementations("mosaic"):
        made = case.kind.update_compressed(projection, cache, case.view)
    assert len(calls) == 1
    return made


def by_xla(case: Case, cache: LayerCache, *projections: Projection) -> list[LayerCache]:
    """The pages that each of these projections makes, in one program."""
    with implementations("xla"):
        return jax.jit(lambda cache: [case.kind.update_compressed(each, cache, case.view) for each in projections])(
            cache
        )


def away(a: LayerCache, b: LayerCache) -> float:
    """The largest difference of compressed tokens, those of the trash page left out; NaN is NaN's like."""
    found = 0.0
    for name in compression_update.COMPRESSED:
        one, other = (np.asarray(x[name], np.float32)[1:] for x in (a, b))
        np.testing.assert_array_equal(np.isnan(one), np.isnan(other))
        found = max(found, float(np.nanmax(np.abs(one - other))))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["two chunks", "two of a row", "six of each"])
def test_kernels_update_as_xla_does(name: str, patch_programs: Any) -> None:
    """The trash page stays. Controls are seen: positions' vectors and keys' rotation that are another's, and products
    that lack a warp's columns.
    """
    case = CASES[name]
    cache, projection = case.drawn()
    assert projection.weights is not None
    got = by_kernels(case, patch_programs, cache, projection)
    least = 2**-7  # a number of bfloat16 below 4 and its neighbour
    for array in compression_update.COMPRESSED:
        np.testing.assert_array_equal(*(np.asarray(x[array][TRASH], np.float32) for x in (got, cache)))
    if name != "two of a row":
        (want,) = by_xla(case, cache, projection)
        assert away(want, cache) > 0.3
        assert away(got, want) <= least
        return
    moved = {of: jnp.roll(projection.weights[of], 1, axis=1) for of in ("position_k", "position_v")}
    late = dataclasses.replace(projection, weights={**projection.weights, **moved})
    columns = projection.weights["position_k"].shape[1] * case.dim
    less = {
        name: of.at[..., columns - 32 :].set(0) for name, of in projection.weights.items() if of.shape[-1] == columns
    }
    lacking = dataclasses.replace(projection, weights={**projection.weights, **less})
    turned = dataclasses.replace(projection, angles=functools.partial(rope_angles, Rope(7.0), case.dim))
    want, of_late, of_turned, of_lacking = by_xla(case, cache, projection, late, turned, lacking)
    assert away(got, want) <= least
    assert len(less) == 2
    assert min(away(want, of_late), away(want, of_lacking)) > 4 * least
    assert away(want, of_turned) > 4 * least


def test_supports_what_fits() -> None:
    """Few tokens, of φ that multiplies by a matrix, of bfloat16, in heads of 64 or 128."""

    def takes(case: Case, number: int = 8, **changed: Any) -> bool:
        cache, projection = case.drawn()
        weights = {name: of for name, of in (projection.weights or {}).items() if name.startswith(("phi", "position"))}
        weights |= {name: of.astype(changed.get(name, of.dtype)) for name, of in weights.items()}
        names = case.kind.source("keys"), case.kind.source("values"), *compression_update.COMPRESSED
        pools = [cache[name] for name in names]
        update = CompressionUpdate(jnp.zeros((number, case.kind.kernel_size), jnp.int32), None, None, None, None)
        return supports_compression_update(case.kind.phi, weights, pools[:2], pools[2:], update)

    assert takes(CASES["mlp"])
    assert takes(CASES["mlp"], 16)
    assert takes(CASES["six of each"])
    assert takes(CASES["mlp"]._replace(dim=128))
    assert not takes(CASES["mlp"], 17)
    assert not takes(CASES["mlp"], phi_v_in=jnp.float32)
    assert not takes(CASES["mlp"]._replace(dim=32))
    small: Any = SMALL | {"kernel_size": 1, "kernel_stride": 1}
    assert not takes(CASES["mlp"]._replace(kind=NSA(**small)))


@pytest.mark.parametrize(("requests", "kv"), [(1, "shared"), (16, "per_branch")])
def test_lowers_for_cuda(requests: int, kv: str) -> None:
    """One launch and no scatter, at an 8B model's shapes."""
    case = Case(NSA(kv=kv), (4000,) * requests, 9, 128, 8, 128, 32)
    projection = case._replace(starts=(9,), table=1).drawn()[1]
    arrays = case.kind.cache(case.config).arrays
    cache = {
        name: jax.ShapeDtypeStruct((1 + requests * 32, of.entries(128), of.heads, of.dim), jnp.bfloat16)
        for name, of in arrays.items()
    }
    view = case.view

    def run(cache: Any, weights: Any) -> Any:
        return case.kind.update_compressed(dataclasses.replace(projection, weights=weights), cache, view)

    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), projection.weights)
    with implementations("mosaic"):
        text = jax.jit(run, donate_argnums=0).trace(cache, shapes).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu_v2") == 1
    assert "scatter" not in text


@pytest.mark.gpu
@pytest.mark.parametrize("kv", ["per_branch", "shared"])
@pytest.mark.parametrize("requests", [1, 3, 8, 16])
def test_updates_as_xla_does_on_a_gpu(requests: int, kv: str, patch_programs: Any) -> None:
    """At an 8B model's shapes; some requests complete a token. Each time the same bits."""
    calls = counted(patch_programs)
    starts = tuple(int(at) for at in 1000 + 105 * np.arange(requests - 1))
    case = Case(NSA(kv=kv), (1015, *starts), 9, 128, 8, 128, 24)  # of a row alone nothing is written
    case = case if requests > 1 else case._replace(starts=(1015, 1000))
    cache, projection = case.drawn()
    is_complete = case.kind.new_compressed_tokens(case.view)[1]
    assert 0 < int(is_complete.sum()) < is_complete.size

    @functools.partial(jax.jit, static_argnums=0)
    def run(name: str, cache: LayerCache, weights: Any) -> LayerCache:
        with implementations(name):
            return case.kind.update_compressed(dataclasses.replace(projection, weights=weights), cache, case.view)

    got, want = (run(name, cache, projection.weights) for name in ("auto", "xla"))
    assert len(calls) == 1
    assert away(want, cache) > 0.3
    assert away(got, want) <= 2**-7
    assert all(away(run("auto", cache, projection.weights), got) == 0 for _ in range(20))
