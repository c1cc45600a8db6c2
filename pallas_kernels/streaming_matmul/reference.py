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


def gate(gate_up: jax.Array) -> jax.Array:
    """silu(gate) * up for [..., 2F] (gate first), [..., F]; in the dtype given."""
    half, up = jnp.split(gate_up, 2, axis=-1)
    return jax.nn.silu(half) * up
