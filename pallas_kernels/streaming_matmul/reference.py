"""The products in plain XLA: runs on any device and in any float dtype; the oracle and the fallback of the kernel."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def matmul(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x [M, E] times weight [O, E] transposed, [M, O] float32. Float32 operands are multiplied as such (no TF32)."""
    if x.dtype == jnp.float32:
        return jnp.einsum("me,oe->mo", x, weight, precision=lax.Precision.HIGHEST)

    def wide(x, weight):  # XLA's CPU backend has no half x half = float32 product for every layout
        return jnp.einsum("me,oe->mo", x.astype(jnp.float32), weight.astype(jnp.float32))

    def narrow(x, weight):
        return jnp.einsum("me,oe->mo", x, weight, preferred_element_type=jnp.float32)

    return lax.platform_dependent(x, weight, cpu=wide, default=narrow)


def argmax(x: jax.Array, weight: jax.Array) -> jax.Array:
    """The column of the largest of each row of `matmul`, [M] int32."""
    return jnp.argmax(matmul(x, weight), axis=-1).astype(jnp.int32)


def first_of_largest(values: jax.Array, columns: jax.Array) -> jax.Array:
    """From values [P, M] and their columns [P, M] int32 to the columns of the largest [M]; of equal ones the least.

    NaN counts as the largest of all, as for `jnp.argmax`.
    """

    def larger(a, b):
        (x, i), (y, j) = a, b
        x_nan, y_nan = x != x, y != y
        takes_x = (x > y) | (x_nan & ~y_nan) | (((x == y) | (x_nan & y_nan)) & (i < j))
        return lax.select(takes_x, x, y), lax.select(takes_x, i, j)

    least = jnp.float32(-jnp.inf), jnp.int32(jnp.iinfo(jnp.int32).max)
    return lax.reduce((values, columns), least, larger, (0,))[1]


def gate(gate_up: jax.Array) -> jax.Array:
    """silu(gate) * up for [..., 2F] (gate first), [..., F]; in the dtype given."""
    half, up = jnp.split(gate_up, 2, axis=-1)
    return jax.nn.silu(half) * up
