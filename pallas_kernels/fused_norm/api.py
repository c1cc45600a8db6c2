"""Fused norms: the public functions and the choice of implementation.

Their GPU kernels take what the kernels of products leave (`PartialSums`), so that splits are added on the way, and let
the product after them read its weights early. Given an array, XLA computes them, fused with what is around them.

Shape letters: B slots, N tokens, E features, H query heads, K key/value heads, D head_dim, R rotated dimensions.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.fused_norm import mosaic_gpu_add, mosaic_gpu_heads, reference
from pallas_kernels.fused_norm.mosaic_gpu_heads import Heads
from pallas_kernels.streaming_matmul import PartialSums

_SHARED_BYTES = 200 * 1024


def add_rms_norm(
    x: jax.Array,  # [..., E]
    update: jax.Array | PartialSums,  # [..., E]
    weight: jax.Array,  # [E]
    *,
    eps: float,
    zero_centred: bool = False,
) -> tuple[jax.Array, jax.Array]:  # [..., E] twice
    """x + update, and `reference.rms_norm` of it.

    The GPU kernel runs if `update` is `PartialSums`, in bfloat16 or float16 and with E a multiple of 128; it has no
    gradient.

    Raises:
      ValueError: the arguments contradict each other.
    """
    _check_add(x, update, weight)
    if isinstance(update, PartialSums):
        if x.dtype.itemsize == 2 and x.shape[-1] % 128 == 0:
            rows = x.reshape(-1, x.shape[-1])
            results = mosaic_gpu_add.add_rms_norm(
                rows, update.parts, weight, eps=eps, zero_centred=zero_centred, interpret=update.interpret
            )
            return tuple(result.reshape(x.shape) for result in results)
        update = update.total()
    total = x + update
    return total, reference.rms_norm(total, weight, eps, zero_centred=zero_centred)


def qk_norm_rope(
    projected: jax.Array | PartialSums,  # [B, N, (H + 2K + gates) D]
    q_weight: jax.Array | None,  # [D]
    k_weight: jax.Array | None,  # [D]
    cos: jax.Array,  # [B, N, R / 2] float32
    sin: jax.Array,
    heads: Heads,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Cuts a fused projection into heads (queries, keys, values, gates), norms queries and keys, and rotates them.

    The GPU kernel runs if `projected` is `PartialSums`, in bfloat16 or float16; it has no gradient.

    Returns:
      queries [B, N, H, D], keys and values [B, K, N, D], gates [B, N, gates, D].

    Raises:
      ValueError: the arguments contradict each other.
    """
    check_heads(projected, q_weight, k_weight, cos, sin, heads)
    if isinstance(projected, PartialSums):
        parts = projected.by_slot()
        if _supported(parts, cos, projected.dtype, heads):
            q, k, v, *gate = mosaic_gpu_heads.qk_norm_rope(
                parts, q_weight, k_weight, cos, sin, heads=heads, nodes=cos.shape[1], dtype=projected.dtype,
                interpret=projected.interpret,
            )  # fmt: skip
            return q, k, v, gate[0] if gate else jnp.zeros((*q.shape[:2], 0, heads.head_dim), q.dtype)
        projected = projected.total()
    x = projected.reshape(*projected.shape[:-1], heads.count, heads.head_dim)
    ends = (heads.queries, heads.queries + heads.keys, heads.queries + 2 * heads.keys)
    q, k, v, gate = jnp.split(x, ends, axis=2)
    if heads.eps is not None:
        q = reference.rms_norm(q, q_weight, heads.eps, zero_centred=heads.zero_centred)
        k = reference.rms_norm(k, k_weight, heads.eps, zero_centred=heads.zero_centred)
    q, k = reference.apply_rope(q, cos, sin), reference.apply_rope(k, cos, sin)
    return q, k.swapaxes(1, 2), v.swapaxes(1, 2), gate


def _supported(parts: jax.Array, cos: jax.Array, dtype: str, heads: Heads) -> bool:
    """Whether the kernel can cut up and hold these heads."""
    half, itemsize = cos.shape[-1], jnp.dtype(dtype).itemsize
    size = mosaic_gpu_heads.shared_bytes(heads, parts.shape[0], parts.dtype.itemsize, 2 * half, itemsize)
    whole = heads.head_dim % 32 == 0 and half % 16 == 0 and half > 0 and heads.keys > 0
    return itemsize == 2 and whole and size <= _SHARED_BYTES


def _check_add(x, update, weight) -> None:
    """Raises ValueError where the arguments of `add_rms_norm` contradict each other."""
    if update.shape != x.shape or update.dtype != x.dtype:
        raise ValueError(f"update must be {x.shape} of {x.dtype} like x, got {update.shape} of {update.dtype}")
    _check_weight("weight", weight, x.shape[-1], x.dtype)


def check_heads(projected, q_weight, k_weight, cos, sin, heads: Heads) -> None:
    """Raises ValueError where the arguments of `qk_norm_rope` contradict each other."""
    shape, features = projected.shape, heads.count * heads.head_dim
    if len(shape) != 3 or shape[2] != features:
        raise ValueError(f"projected must be [B, N, {features}] for {heads}, got {shape}")
    for name, table in (("cos", cos), ("sin", sin)):
        if table.ndim != 3 or table.shape[:2] != shape[:2] or 2 * table.shape[2] > heads.head_dim:
            expected = f"[{shape[0]}, {shape[1]}, at most {heads.head_dim // 2}]"
            raise ValueError(f"{name} must be {expected} to fit projected, got {table.shape}")
        if table.shape != cos.shape or table.dtype != jnp.float32:
            raise ValueError(f"{name} must be float32 of the shape of cos, got {table.shape} of {table.dtype}")
    if heads.eps is not None:
        for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
            _check_weight(name, weight, heads.head_dim, projected.dtype)


def _check_weight(name: str, weight: jax.Array | None, size: int, dtype) -> None:
    if weight is None or weight.shape != (size,) or weight.dtype != dtype:
        found = "none" if weight is None else f"{weight.shape} of {weight.dtype}"
        raise ValueError(f"{name} must be [{size}] of {dtype}, got {found}")
