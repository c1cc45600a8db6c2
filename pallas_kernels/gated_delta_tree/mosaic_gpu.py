"""What the Hopper kernels take."""

from __future__ import annotations

import jax
import jax.numpy as jnp

_DIM = 128
_WIDTHS = (16, 32, 64, 128, 256)
_LARGEST_GROUP = 4


def tree_unsupported(q: jax.Array, v: jax.Array) -> str | None:
    """Why the kernel cannot verify a tree of these queries and values, or None."""
    nodes, key_heads, dim = q.shape[1:]
    if q.dtype != jnp.bfloat16 or v.dtype != jnp.bfloat16:
        return f"queries of {q.dtype} and values of {v.dtype} (bfloat16 only)"
    if dim != _DIM or v.shape[3] != _DIM:
        return f"Dk = {dim} and Dv = {v.shape[3]} ({_DIM} only)"
    if nodes not in _WIDTHS:
        return f"{nodes} nodes ({_WIDTHS} only)"
    if v.shape[2] // key_heads > _LARGEST_GROUP:
        return f"{v.shape[2] // key_heads} value heads for one key head (at most {_LARGEST_GROUP})"
    return None


def replay_unsupported(k: jax.Array, v: jax.Array) -> str | None:
    """Why the kernel cannot commit rows of these keys and values, or None."""
    if k.shape[4] != _DIM or v.shape[4] != _DIM:
        return f"Dk = {k.shape[4]} and Dv = {v.shape[4]} ({_DIM} only)"
    return None
