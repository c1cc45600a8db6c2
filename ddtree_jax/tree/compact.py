"""Commit: keep what was computed at the accepted nodes.

A node sits at the position (root's position + depth), and siblings share a position, so keys of accepted nodes are
already rotated for the rows they move to: a commit is a copy of at most P rows.

Shape letters: B slots · N nodes, root included · P path length · M layers · K key/value heads · C cache
capacity · D head_dim.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def gather_path(x: jax.Array, path: jax.Array) -> jax.Array:
    """The rows of the path's nodes, in path order.

    Args:
      x: [B, N, ...] any dtype, one row per node.
      path: [B, P] int32 node indices (`Acceptance.path`).

    Returns:
      [B, P, ...] of x's dtype.

    Raises:
      ValueError: ranks or batch sizes that do not match.
    """
    if x.ndim < 2 or path.ndim != 2 or x.shape[0] != path.shape[0]:
        raise ValueError(f"expected x [B, N, ...] and path [B, P], got {x.shape} and {path.shape}")
    index = path.reshape(*path.shape, *(1,) * (x.ndim - 2))
    return jnp.take_along_axis(x, index, axis=1, mode="clip")


def gather_path_rows(tree_rows: jax.Array, path: jax.Array) -> jax.Array:
    """`gather_path` for keys or values.

    Args:
      tree_rows: [B, K, N, D] of the verified nodes.
      path: [B, P] int32 node indices (`Acceptance.path`).

    Returns:
      [B, K, P, D] of the same dtype.

    Raises:
      ValueError: ranks or batch sizes that do not match.
    """
    if tree_rows.ndim != 4 or path.ndim != 2 or path.shape[0] != tree_rows.shape[0]:
        raise ValueError(f"expected tree_rows [B, K, N, D] and path [B, P], got {tree_rows.shape} and {path.shape}")
    return jnp.take_along_axis(tree_rows, path[:, None, :, None], axis=2, mode="clip")


def write_rows(cache_rows: jax.Array, rows: jax.Array, lengths: jax.Array) -> jax.Array:
    """Appends rows to the keys or values of all layers, in one write.

    Always P rows are written, at rows `lengths[b]` .. `lengths[b] + P - 1` of slot b, so that shapes stay static. Rows
    past the accepted length repeat the last accepted node; they lie beyond the cache's new live length and the next
    commit overwrites them. The cache must therefore have P rows of slack, C >= lengths + P: a write past the end
    would be shifted back over live rows, silently.

    Args:
      cache_rows: [M, B, K, C, D] keys or values of the committed text in M layers.
      rows: [M, B, K, P, D] the same of the tokens to append; same dtype.
      lengths: [B] int32 live rows of the cache before.

    Returns:
      The new cache, [M, B, K, C, D]. Donate the old one to have it written in place.

    Raises:
      ValueError: shapes or dtypes that do not match, or P > C.
    """
    if cache_rows.ndim != 5 or rows.ndim != 5:
        raise ValueError(f"expected [M, B, K, C, D] and rows [M, B, K, P, D], got {cache_rows.shape} and {rows.shape}")
    layers, batch, heads, capacity, head_dim = cache_rows.shape
    if rows.shape != (layers, batch, heads, rows.shape[3], head_dim) or lengths.shape != (batch,):
        raise ValueError(f"cache_rows {cache_rows.shape} does not fit rows {rows.shape} and lengths {lengths.shape}")
    if cache_rows.dtype != rows.dtype:
        raise ValueError(f"cache_rows and rows must have one dtype, got {cache_rows.dtype}, {rows.dtype}")
    if rows.shape[3] > capacity:
        raise ValueError(f"{rows.shape[3]} rows do not fit a cache of {capacity}")

    def write(cache: jax.Array, new: jax.Array, length: jax.Array) -> jax.Array:
        start = jnp.zeros_like(length)
        return lax.dynamic_update_slice(cache, new, (start, start, length, start))

    if batch == 1:  # batched, it is a scatter, which checks bounds and reads the old rows in kernels of their own
        return write(cache_rows[:, 0], rows[:, 0], lengths[0])[:, None]
    return jax.vmap(write, in_axes=(1, 1, 0), out_axes=1)(cache_rows, rows, lengths)
