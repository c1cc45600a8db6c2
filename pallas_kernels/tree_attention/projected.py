"""Tree attention from the fused projection that queries, keys and values are cut from: the public function.

Shape letters: B slots, N nodes, H query heads, K key/value heads, D head_dim, R rotated dimensions, C cache capacity.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import choice
from pallas_kernels.fused_norm import Heads, qk_norm_rope
from pallas_kernels.fused_norm.api import check_heads
from pallas_kernels.streaming_matmul import PartialSums
from pallas_kernels.tree_attention import api, config, mosaic_gpu, mosaic_gpu_projected


def projected_tree_attention(
    projected: jax.Array | PartialSums,  # [B, N, (H + 2K + gates) D]
    q_weight: jax.Array | None,  # [D]
    k_weight: jax.Array | None,  # [D]
    cos: jax.Array,  # [B, N, R / 2] float32
    sin: jax.Array,
    heads: Heads,
    k_cache: jax.Array,  # [B, K, C, D], or [M, B, K, C, D] with `layer`
    v_cache: jax.Array,  # the same
    lengths: jax.Array,  # [B] int32
    ancestors: jax.Array,  # [B, N, ceil(N/32)] uint32
    *,
    scale: float,
    sliding_window: int | None = None,
    positions: jax.Array | None = None,  # [B, N] int32
    layer: int | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """`qk_norm_rope`, then `tree_attention` of what it yields.

    On a Hopper GPU both are one kernel where `projected` is `PartialSums` of one part in float16 or bfloat16, R is a
    multiple of 32 and the tree fits one block of keys (64 nodes always do, up to 128 where `config.choose` makes blocks
    of so many); elsewhere they run one after the other. The one kernel rounds where the two do.

    Args:
      projected, q_weight, k_weight, cos, sin, heads: see `qk_norm_rope`. Of the projection's dtype are the weights and
        the cache.
      k_cache, v_cache, lengths, ancestors, scale, sliding_window, positions, layer: see `tree_attention`.
      implementation: of the attention, see `tree_attention`.

    Returns:
      The attention output [B, N, H, D], keys (normed and rotated) and values [B, K, N, D], gates [B, N, gates, D], all
      in the projection's dtype. The kernel leaves values and gates where they lie in the projection.

    Raises:
      ValueError: the arguments contradict each other.
      NotImplementedError: the implementation asked for cannot do this call; the message names what.
    """
    options = dict(scale=scale, sliding_window=sliding_window, positions=positions, layer=layer)
    check_heads(projected, q_weight, k_weight, cos, sin, heads)
    if k_cache.ndim < 4 or k_cache.shape[-3] != heads.keys:
        raise ValueError(f"k_cache must have {heads.keys} heads to fit {heads}, got shape {k_cache.shape}")
    (slots, nodes), dtype = projected.shape[:2], jnp.dtype(projected.dtype)
    q = jax.ShapeDtypeStruct((slots, nodes, heads.queries, heads.head_dim), dtype)
    rows = jax.ShapeDtypeStruct((slots, heads.keys, nodes, heads.head_dim), dtype)
    api.check(
        q, k_cache, v_cache, lengths, rows, rows, ancestors, positions, layer, sliding_window=sliding_window,
        softcap=None, implementation=implementation,
    )  # fmt: skip
    sizes = _one_kernel(projected, q, cos, heads, k_cache, scale, implementation)
    if sizes is None:
        q, k, v, gate = qk_norm_rope(projected, q_weight, k_weight, cos, sin, heads)
        rest = (lengths, k, v, ancestors)
        return api.tree_attention(q, k_cache, v_cache, *rest, **options, implementation=implementation), k, v, gate
    raw = projected.by_slot()[0]
    out, k = mosaic_gpu_projected.projected_tree_attention(
        raw, q_weight, k_weight, cos, sin, k_cache, v_cache, lengths, ancestors, heads=heads, **options, config=sizes,
        interpret=projected.interpret,
    )  # fmt: skip
    x = raw[:, :nodes].reshape(slots, nodes, heads.count, heads.head_dim)
    values, gates = heads.queries + heads.keys, heads.queries + 2 * heads.keys
    return out, k, x[:, :, values:gates].swapaxes(1, 2), x[:, :, gates:]


def _one_kernel(projected, q, cos, heads: Heads, k_cache, scale: float, implementation) -> config.Config | None:
    """Sizes of the kernel that does all of a call, or None where there is none."""
    if not isinstance(projected, PartialSums) or projected.parts.shape[0] != 1:
        return None
    capacity = k_cache.shape[-2]
    if mosaic_gpu.unsupported(q, None, capacity, scale) or choice.choose(implementation, None) == "xla":
        return None
    sizes = config.choose(q.shape, heads.keys, capacity)
    return sizes if mosaic_gpu_projected.supported(projected.parts, cos, sizes) else None
