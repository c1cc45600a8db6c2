"""Packed ancestor bits: unpacking, positions, and the sliding window folded into them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def unpack_bits(words: jax.Array, count: int) -> jax.Array:
    """[..., W] uint32 -> [..., count] bool; element j is bit j % 32 of word j // 32."""
    shifts = lax.broadcasted_iota(jnp.uint32, (*words.shape, 32), words.ndim)
    bits = lax.shift_right_logical(jnp.broadcast_to(words[..., None], shifts.shape), shifts) & jnp.uint32(1)
    return bits.reshape(*words.shape[:-1], words.shape[-1] * 32)[..., :count] == 1


def pack_bits(bits: jax.Array) -> jax.Array:
    """[..., count] bool -> [..., ceil(count/32)] uint32, the inverse of `unpack_bits`; spare bits are zero."""
    count = bits.shape[-1]
    words = -(-count // 32)
    padding = [(0, 0)] * (bits.ndim - 1) + [(0, words * 32 - count)]
    grouped = jnp.pad(bits, padding).reshape(*bits.shape[:-1], words, 32).astype(jnp.uint32)
    shifts = lax.broadcasted_iota(jnp.uint32, grouped.shape, grouped.ndim - 1)
    return jnp.sum(lax.shift_left(grouped, shifts), axis=-1, dtype=jnp.uint32)


def node_positions(lengths: jax.Array, ancestors: jax.Array) -> jax.Array:
    """Positions [B, N] int32 of tree nodes: the length [B], then a step for each ancestor in [B, N, W]."""
    depth = jnp.sum(lax.population_count(ancestors), axis=-1, dtype=jnp.uint32).astype(jnp.int32) - 1
    return lengths[:, None] + depth


def tree_mask(ancestors: jax.Array, positions: jax.Array, sliding_window: int | None) -> jax.Array:
    """Which tree keys each node sees: [B, N, N] bool, from ancestors [B, N, W] and positions [B, N]."""
    visible = unpack_bits(ancestors, ancestors.shape[1])
    if sliding_window is not None:
        visible &= positions[:, :, None] - positions[:, None, :] < sliding_window
    return visible
