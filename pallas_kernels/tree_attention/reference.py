"""Tree attention in plain XLA: runs on any device and in any float dtype; the oracle and the fallback of the kernels.

Scores and softmax are float32. The queries of a key/value head are contracted as one group, so keys and values are
never repeated. The whole score matrix [B, K, G, N, C + N] is materialised: correct everywhere, fast nowhere.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.tree_attention import masks

# Finite, so that a row without any visible key gives exp(0) and not NaN; such rows are zeroed through their weights.
_MASKED = -1e30


def tree_attention(
    q: jax.Array,  # [B, N, H, D]
    k_cache: jax.Array,  # [B, K, C, D]
    v_cache: jax.Array,  # [B, K, C, D]
    lengths: jax.Array,  # [B] int32
    k_tree: jax.Array,  # [B, K, N, D]
    v_tree: jax.Array,  # [B, K, N, D]
    ancestors: jax.Array,  # [B, N, W] uint32
    *,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    positions: jax.Array | None = None,  # [B, N] int32
) -> jax.Array:  # [B, N, H, D]
    """See `pallas_kernels.tree_attention.tree_attention`; the arguments are taken as checked."""
    batch, nodes, heads, head_dim = q.shape
    kv_heads, capacity = k_cache.shape[1:3]
    grouped = q.reshape(batch, nodes, kv_heads, heads // kv_heads, head_dim)
    if positions is None:
        positions = masks.node_positions(lengths, ancestors)

    column = lax.broadcasted_iota(jnp.int32, (batch, capacity), 1)
    live = column < lengths[:, None]  # [B, C]
    prefix_visible = jnp.broadcast_to(live[:, None, :], (batch, nodes, capacity))
    if sliding_window is not None:
        prefix_visible &= positions[:, :, None] - column[:, None, :] < sliding_window
    tree_visible = masks.tree_mask(ancestors, positions, sliding_window)

    def scores(keys, visible):  # [B, K, T, D], [B, N, T] -> [B, K, G, N, T]
        s = _einsum("bnkgd,bktd->bkgnt", grouped, keys) * jnp.float32(scale)
        if softcap is not None:
            s = jnp.float32(softcap) * jnp.tanh(s / jnp.float32(softcap))
        return jnp.where(visible[:, None, None], s, jnp.float32(_MASKED))

    s_prefix, s_tree = scores(k_cache, prefix_visible), scores(k_tree, tree_visible)
    top = jnp.max(s_tree, axis=-1, keepdims=True)
    if capacity:
        top = jnp.maximum(top, jnp.max(s_prefix, axis=-1, keepdims=True))
    p_prefix = jnp.where(prefix_visible[:, None, None], jnp.exp(s_prefix - top), jnp.float32(0))
    p_tree = jnp.where(tree_visible[:, None, None], jnp.exp(s_tree - top), jnp.float32(0))
    total = jnp.sum(p_prefix, axis=-1) + jnp.sum(p_tree, axis=-1)  # [B, K, G, N]

    # 0 * NaN is NaN: dead rows are cleared before the product. A padding node attends itself, so that among tree rows
    # only finiteness tells.
    v_live = jnp.where(live[:, None, :, None], v_cache, jnp.zeros((), v_cache.dtype))
    attended = jnp.any(tree_visible, axis=1)[:, None, :, None] & jnp.isfinite(v_tree)
    v_nodes = jnp.where(attended, v_tree, jnp.zeros((), v_tree.dtype))
    out = _einsum("bkgnt,bktd->bnkgd", p_prefix.astype(q.dtype), v_live)
    out += _einsum("bkgnt,bktd->bnkgd", p_tree.astype(q.dtype), v_nodes)
    out /= jnp.where(total > 0, total, jnp.float32(1)).transpose(0, 3, 1, 2)[..., None]
    return out.reshape(batch, nodes, heads, head_dim).astype(q.dtype)


def _einsum(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """Contraction accumulated in float32; float32 operands are multiplied as such (no TF32)."""
    if a.dtype == jnp.float32:
        return jnp.einsum(spec, a, b, precision=lax.Precision.HIGHEST)

    def wide(a, b):  # XLA's CPU backend has no half x half = float32 product for every layout
        return jnp.einsum(spec, a.astype(jnp.float32), b.astype(jnp.float32))

    def narrow(a, b):
        return jnp.einsum(spec, a, b, preferred_element_type=jnp.float32)

    return lax.platform_dependent(a, b, cpu=wide, default=narrow)
