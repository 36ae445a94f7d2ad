"""Memory beside pages: what is counted is what the kernel's launch is given."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from smcjax.model.config import LayerSpec, ModelConfig
from smcjax.model.view import BatchView
from smcjax.pallas.dispatch import implementations
from smcjax.sparse import nsa
from smcjax.sparse.groups import rows_routed
from smcjax.sparse.scratch import stored_scores_bytes
from smcjax.sparse.verification import SparseVerification
from tests.helpers import tiny_config

REQUESTS, COLUMNS, PAGES, PAGE = 2, 9, 15, 128


def config_of(heads: int = 32, kind: Any = None, **changes: Any) -> ModelConfig:
    sizes: dict[str, Any] = {"num_heads": heads, "num_kv_heads": 8, "head_dim": 128, "dtype": "bfloat16"}
    return dataclasses.replace(tiny_config(), **sizes | changes, layers=(LayerSpec(attention=kind or nsa.NSA()),))


def counted(config: ModelConfig, size: int, page: int = PAGE) -> int:
    shape = {"requests": REQUESTS, "queries": COLUMNS, "max_model_len": PAGES * PAGE, "page_size": page}
    return stored_scores_bytes(config, SparseVerification("merged", size), **shape)


def arrays(jaxpr: Any) -> Iterator[Any]:
    """Shapes of all that the equations of a program give or make, within other programs too."""
    for equation in jaxpr.eqns:
        yield from (variable.aval for variable in equation.outvars)
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from arrays(inner)


@pytest.mark.parametrize(("heads", "size"), [(32, 9), (32, 64), (40, 4), (8, 2)])
def test_scores_are_those_of_the_launch(heads: int, size: int) -> None:
    """Cases have groups of one tile and of several, heads that are padded, and more places than queries."""
    config = config_of(heads)
    kind: Any = config.layer(0).attention
    numbers = [
        jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((REQUESTS, COLUMNS), (REQUESTS, PAGES), (REQUESTS,))
    ]
    of_tokens, table, of_rows = numbers
    sparse = SparseVerification("merged", size)
    view: Any = BatchView(of_tokens, of_tokens, table, of_tokens, of_rows, of_rows, sparse=sparse, page_size=PAGE)
    q: Any = jax.ShapeDtypeStruct((REQUESTS, COLUMNS, heads, 128), jnp.bfloat16)
    compressed: Any = (jax.ShapeDtypeStruct((40, PAGE // kind.kernel_stride, 8, 128), jnp.bfloat16),) * 2
    with implementations("mosaic"):
        traced = jax.make_jaxpr(lambda *given: rows_routed(kind, *given))(q, compressed, view, of_tokens)
        found = {
            x.shape for x in arrays(traced.jaxpr) if getattr(x, "dtype", None) == jnp.float16 and len(x.shape) == 4
        }
        slots = PAGES * PAGE // kind.kernel_stride
        groups = REQUESTS * -(-COLUMNS // min(size, COLUMNS))
        (kept,) = (shape for shape in found if shape[:2] == (groups, 8) and shape[2] % 64 == 0 and shape[3] == slots)
        assert counted(config, size) == 2 * kept[0] * kept[1] * kept[2] * kept[3]


def test_nothing_is_kept_where_no_kernel_ranks() -> None:
    with implementations("xla"):
        assert counted(config_of(), 9) == 0
    with implementations("mosaic"):
        assert counted(config_of(), 9) == 2 * 2 * 8 * 64 * 120
        assert counted(config_of(kind=tiny_config().layer(0).attention), 9) == 0
        assert counted(config_of(dtype="float32"), 9) == 0
        assert counted(config_of(), 9, page=64) == 0, "pages of four compressed tokens"
        assert stored_scores_bytes(config_of(), None, requests=1, queries=9, max_model_len=64, page_size=PAGE) == 0
