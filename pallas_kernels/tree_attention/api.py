"""Tree attention: the public function, its argument checks, and the choice of implementation.

Shape letters: B slots, N nodes, H query heads, K key/value heads, G = H/K, D head_dim, C cache capacity.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.tree_attention import reference

IMPLEMENTATIONS = ("xla", "mosaic_gpu")


def tree_attention(
    q: jax.Array,  # [B, N, H, D]
    k_cache: jax.Array,  # [B, K, C, D]
    v_cache: jax.Array,  # [B, K, C, D]
    lengths: jax.Array,  # [B] int32
    k_tree: jax.Array,  # [B, K, N, D]
    v_tree: jax.Array,  # [B, K, N, D]
    ancestors: jax.Array,  # [B, N, ceil(N/32)] uint32
    *,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    positions: jax.Array | None = None,  # [B, N] int32
    implementation: str | None = None,
) -> jax.Array:  # [B, N, H, D]
    """One softmax over the live prefix rows and the tree keys that each node may see.

    Query head h reads key/value head h // G. Every node sees all of the first `lengths[b]` cache rows; node i sees tree key j
    where bit j % 32 of `ancestors[b, i, j // 32]` is set (a node's own bit must be set). The same call serves a draft tree, a
    chain, a drafter's bidirectional block (all bits set), a causal prefill chunk and one-token decoding (N = 1).

    Args:
      q: queries of the nodes, float32, float16 or bfloat16.
      k_cache, v_cache: the context, rows 0 .. lengths[b]-1 live. Rows past that may hold anything, NaN included.
      lengths: live rows of each slot, int32, 0 .. C.
      k_tree, v_tree: keys and values of the nodes themselves. Rows that no node attends may hold anything.
      ancestors: the attention mask among nodes, packed.
      scale: factor on the scores, usually D ** -0.5.
      sliding_window: if given, a key is visible only where (query position - key position) < sliding_window. Cache row j has
        position j.
      softcap: if given, scores become softcap * tanh(scores * scale / softcap), before masking.
      positions: position of each node; default lengths[b] + popcount(ancestors[b, i]) - 1. Read only with `sliding_window`.
      implementation: "xla", "mosaic_gpu", or None to choose: "mosaic_gpu" on a Hopper GPU where it can, else "xla".

    Returns:
      The attention output in q's dtype. A node that sees no key at all yields zeros.

    Raises:
      ValueError: the arguments contradict each other.
      NotImplementedError: the implementation asked for cannot do this call; the message names what.
    """
    _check(q, k_cache, v_cache, lengths, k_tree, v_tree, ancestors, sliding_window, softcap, positions, implementation)
    arguments = (q, k_cache, v_cache, lengths, k_tree, v_tree, ancestors)
    options = dict(scale=scale, sliding_window=sliding_window, softcap=softcap, positions=positions)
    if implementation == "xla":
        return reference.tree_attention(*arguments, **options)
    if implementation == "mosaic_gpu":
        raise NotImplementedError("mosaic_gpu: not built yet")
    return reference.tree_attention(*arguments, **options)


def _check(q, k_cache, v_cache, lengths, k_tree, v_tree, ancestors, sliding_window, softcap, positions, implementation):
    """Raises ValueError where shapes, dtypes or options contradict each other."""
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation must be None or one of {IMPLEMENTATIONS}, got {implementation!r}")
    if q.ndim != 4:
        raise ValueError(f"q must be [B, N, H, D], got shape {q.shape}")
    if k_cache.ndim != 4:
        raise ValueError(f"k_cache must be [B, K, C, D], got shape {k_cache.shape}")
    batch, nodes, heads, head_dim = q.shape
    kv_heads, capacity = k_cache.shape[1:3]
    if nodes < 1:
        raise ValueError("a tree has at least one node, got N = 0")
    if kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"query heads ({heads}) must be a multiple of key/value heads ({kv_heads})")
    wanted = {
        "k_cache": (k_cache, (batch, kv_heads, capacity, head_dim)),
        "v_cache": (v_cache, (batch, kv_heads, capacity, head_dim)),
        "lengths": (lengths, (batch,)),
        "k_tree": (k_tree, (batch, kv_heads, nodes, head_dim)),
        "v_tree": (v_tree, (batch, kv_heads, nodes, head_dim)),
        "ancestors": (ancestors, (batch, nodes, -(-nodes // 32))),
    }
    if positions is not None:
        wanted["positions"] = (positions, (batch, nodes))
    for name, (array, shape) in wanted.items():
        if array.shape != shape:
            raise ValueError(f"{name} must have shape {shape} to fit q {q.shape}, got {array.shape}")
    if not jnp.issubdtype(q.dtype, jnp.floating):
        raise ValueError(f"q must be floating point, got {q.dtype}")
    for name in ("k_cache", "v_cache", "k_tree", "v_tree"):
        if wanted[name][0].dtype != q.dtype:
            raise ValueError(f"{name} must have q's dtype {q.dtype}, got {wanted[name][0].dtype}")
    if lengths.dtype != jnp.int32:
        raise ValueError(f"lengths must be int32, got {lengths.dtype}")
    if ancestors.dtype != jnp.uint32:
        raise ValueError(f"ancestors must be uint32, got {ancestors.dtype}")
    if positions is not None and positions.dtype != jnp.int32:
        raise ValueError(f"positions must be int32, got {positions.dtype}")
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"sliding_window must be at least 1, got {sliding_window}")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap must be positive, got {softcap}")
