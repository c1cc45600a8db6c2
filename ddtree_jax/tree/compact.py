"""Commit: keep what was computed at the accepted nodes.

A node sits at the position (root's position + depth), and siblings share a position, so keys of accepted nodes are
already rotated for the rows they move to: a commit is a copy of at most P rows.

Shape letters: B slots · N nodes, root included · P path length · K key/value heads · C cache capacity · D head_dim.
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


def move_path_rows(cache_rows: jax.Array, tree_rows: jax.Array, path: jax.Array, lengths: jax.Array) -> jax.Array:
    """Appends the path's rows of the tree's own buffer to the cache.

    Always P rows are written, at rows `lengths[b]` .. `lengths[b] + P - 1` of slot b, so that shapes stay static. Rows
    past the accepted length repeat the last accepted node; they lie beyond the cache's new live length and the next
    commit overwrites them. The cache must therefore have P rows of slack, C >= lengths + P: a write past the end
    would be shifted back over live rows, silently.

    Args:
      cache_rows: [B, K, C, D] keys or values of the committed text.
      tree_rows: [B, K, N, D] the same of the verified nodes; same dtype.
      path: [B, P] int32 node indices (`Acceptance.path`).
      lengths: [B] int32 live rows of the cache before this commit.

    Returns:
      The new cache, [B, K, C, D]. Donate the old one to have it written in place.

    Raises:
      ValueError: shapes or dtypes that do not match, or P > C.
    """
    if cache_rows.ndim != 4 or tree_rows.ndim != 4 or path.ndim != 2:
        raise ValueError(
            "expected cache_rows [B, K, C, D], tree_rows [B, K, N, D] and path [B, P], "
            f"got {cache_rows.shape}, {tree_rows.shape} and {path.shape}"
        )
    batch, heads, capacity, head_dim = cache_rows.shape
    expected = (batch, heads, tree_rows.shape[2], head_dim)
    if tree_rows.shape != expected or path.shape[0] != batch or lengths.shape != (batch,):
        raise ValueError(
            f"cache_rows {cache_rows.shape} does not fit tree_rows {tree_rows.shape}, path {path.shape} "
            f"and lengths {lengths.shape}"
        )
    if cache_rows.dtype != tree_rows.dtype:
        raise ValueError(f"cache_rows and tree_rows must have one dtype, got {cache_rows.dtype}, {tree_rows.dtype}")
    if path.shape[1] > capacity:
        raise ValueError(f"a path of {path.shape[1]} rows does not fit a cache of {capacity}")
    rows = jnp.take_along_axis(tree_rows, path[:, None, :, None], axis=2, mode="clip")  # [B, K, P, D]
    return write_rows(cache_rows, rows, lengths)


def write_rows(cache_rows: jax.Array, rows: jax.Array, lengths: jax.Array) -> jax.Array:
    """Writes rows [B, K, P, D] into cache_rows [B, K, C, D] from row `lengths[b]` on; needs C >= lengths + P."""

    def write(cache: jax.Array, new: jax.Array, length: jax.Array) -> jax.Array:
        start = jnp.zeros_like(length)
        return lax.dynamic_update_slice(cache, new, (start, length, start))

    return jax.vmap(write)(cache_rows, rows, lengths)
