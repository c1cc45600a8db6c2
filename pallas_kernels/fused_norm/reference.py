"""Norms and rotary embedding in plain XLA: any device, any float dtype, differentiable; the oracle of the kernels."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def rms_norm(x: jax.Array, weight: jax.Array, eps: float, *, zero_centred: bool = False) -> jax.Array:
    """RMSNorm over the last axis, in the order of Llama and Qwen: normalise in float32, cast to x's dtype, weigh.

    Zero-centred (Qwen3.5, Qwen3-Next): multiply by 1 + weight, in float32, and cast last.
    """
    x32 = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    weight = jnp.broadcast_to(weight, x.shape)
    if zero_centred:
        return (x32 * scale * (1 + weight.astype(jnp.float32))).astype(x.dtype)
    return (x32 * scale).astype(x.dtype) * weight


def apply_rope(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates the first half of each head against the second (NeoX order), in float32.

    Args:
      x: [B, N, heads, D].
      cos, sin: [B, N, R / 2] float32 with R <= D; dimensions R.. pass through.

    Returns:
      [B, N, heads, D] in x's dtype.
    """
    half = cos.shape[-1]
    cos, sin = cos[:, :, None, :], sin[:, :, None, :]
    first = x[..., :half].astype(jnp.float32)
    second = x[..., half : 2 * half].astype(jnp.float32)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
    return rotated if 2 * half == x.shape[-1] else jnp.concatenate([rotated, x[..., 2 * half :]], axis=-1)
