"""How products with weights are computed, and what random keys are."""

from __future__ import annotations

import contextlib
import contextvars
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

KEYS = "threefry2x32"  # the random keys of all that is made here, whatever JAX_DEFAULT_PRNG_IMPL says

Form = tuple[jax.lax.Precision, jax.lax.Precision]  # asked of the two operands


class Product(NamedTuple):
    """x · Wᵀ by its shapes and dtypes: what XLA chooses an algorithm by, unless it adds a bias within."""

    rows: int  # of x
    outputs: int
    inputs: int
    dtype: str  # of both operands, or of the weights where these are converted within
    result: str
    added: bool = False  # to another array, within the product


_forms: contextvars.ContextVar[Mapping[Product, Form]] = contextvars.ContextVar("forms", default={})  # noqa: B039


def product_precision(dtype: Any) -> jax.lax.Precision | None:
    """float32 products in full float32, which GPUs would else round to TF32; None (the default) for other dtypes."""
    return jax.lax.Precision.HIGHEST if jnp.dtype(dtype) == jnp.float32 else None


@contextlib.contextmanager
def product_forms(forms: Mapping[Product, Form]) -> Iterator[None]:
    """Products that are traced within take these forms.

    Precision is asked of float32 operands only, so a form of a bfloat16 product says the same; but XLA chooses an
    algorithm for each by itself (`smcjax.engine.product_choice`), which may add up in another order.
    """
    token = _forms.set(forms)
    try:
        yield
    finally:
        _forms.reset(token)


def form_of(what: Product, usual: Any = None) -> Any:
    """The form that this product is to take; who traces within `product_forms` sees that it was asked for."""
    return _forms.get().get(what, usual)


def product(
    x: Float[Array, "*shape I"],
    weight: Float[Array, "O I"],
    result: Any = None,
    *,
    add_to: Float[Array, "*shape O"] | None = None,
) -> Float[Array, "*shape O"]:
    """weight · x, accumulated in f32, in the dtype `result` (None: that of x); plus `add_to`, of that dtype.

    A GPU adds within the product's kernel.
    """
    *shape, inputs = x.shape
    dtype, out = jnp.dtype(x.dtype), jnp.dtype(x.dtype if result is None else result)
    precision = product_precision(dtype)
    what = Product(math.prod(shape), weight.shape[0], inputs, dtype.name, out.name, add_to is not None)
    contracted = (((x.ndim - 1,), (1,)), ((), ()))
    y = jax.lax.dot_general(
        x,
        weight,
        contracted,
        precision=form_of(what, precision),
        preferred_element_type=None if result is None else out,
    )
    return y if add_to is None else add_to + y


def key_of(seed: Any) -> jax.Array:
    """The random key of a seed, whichever kind of keys JAX makes by default.

    Draws by other kinds than threefry depend on what is drawn beside them.
    """
    return jax.random.key(seed, impl=KEYS)


def key_from(words: jax.Array) -> jax.Array:
    """Keys [...] from their words [..., 2] uint32."""
    return jax.random.wrap_key_data(words, impl=KEYS)


def words_of(keys: jax.Array) -> jax.Array:
    """The words [..., 2] uint32 of keys [...], for kernels. Raises ValueError for keys of another kind."""
    kind = str(jax.random.key_impl(keys))
    if kind != KEYS:
        raise ValueError(f"keys are {kind!r} and GPU kernels know {KEYS!r} only; use jax.random.key(…, impl={KEYS!r}).")
    return jax.random.key_data(keys)
