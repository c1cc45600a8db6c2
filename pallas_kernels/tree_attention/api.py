"""Tree attention: the public functions, their argument checks, and the choice of implementation.

Shape letters: B slots, N nodes, H query heads, K key/value heads, G = H/K, D head_dim, C cache capacity; for a paged
cache P pages, R rows of a page, M entries of a page table.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import choice
from pallas_kernels.tree_attention import config, mosaic_gpu, reference


def tree_attention(
    q: jax.Array,  # [B, N, H, D]
    k_cache: jax.Array,  # [B, K, C, D], or [M, B, K, C, D] with `layer`
    v_cache: jax.Array,  # the same
    lengths: jax.Array,  # [B] int32
    k_tree: jax.Array,  # [B, K, N, D]
    v_tree: jax.Array,  # [B, K, N, D]
    ancestors: jax.Array,  # [B, N, ceil(N/32)] uint32
    *,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    positions: jax.Array | None = None,  # [B, N] int32
    layer: int | None = None,
    implementation: str | None = None,
) -> jax.Array:  # [B, N, H, D]
    """One softmax over the live prefix rows and the tree keys that each node may see.

    Query head h reads key/value head h // G. Every node sees all of the first `lengths[b]` cache rows; node i sees tree
    key j where bit j % 32 of `ancestors[b, i, j // 32]` is set (a node's own bit must be set). The same call serves a
    draft tree, a chain, a drafter's bidirectional block (all bits set), a causal prefill chunk and one-token decoding
    (N = 1).

    The GPU kernel has no gradient (differentiate with implementation="xla") and runs on one device: over a mesh, call
    it inside `shard_map`.

    Args:
      q: queries of the nodes, float32, float16 or bfloat16.
      k_cache, v_cache: the context, rows 0 .. lengths[b]-1 live. Rows past that may hold anything, NaN included.
      lengths: live rows of each slot, int32, 0 .. C.
      k_tree, v_tree: keys and values of the nodes themselves. Rows that no node attends may hold anything.
      ancestors: the attention mask among nodes, packed.
      scale: factor on the scores, usually D ** -0.5.
      sliding_window: if given, a key is visible only where query position - key position < sliding_window. Cache row
        j has position j.
      softcap: if given, scores become softcap * tanh(scores * scale / softcap), before masking.
      positions: position of each node; default lengths[b] + popcount(ancestors[b, i]) - 1. Read only with
        `sliding_window`.
      layer: which of the M layers of one cache array is meant. The GPU kernel reads it where it lies, and all layers
        share one compiled kernel.
      implementation: "xla", "mosaic_gpu", or None to choose: "mosaic_gpu" on a Hopper GPU where it can, else "xla". The
        GPU kernel takes float16 and bfloat16, head_dim a multiple of 32 up to 256, and C a multiple of 8.

    Returns:
      The attention output in q's dtype. A node that sees no key at all yields zeros.

    Raises:
      ValueError: the arguments contradict each other.
      NotImplementedError: the implementation asked for cannot do this call; the message names what.
    """
    options = dict(sliding_window=sliding_window, softcap=softcap, implementation=implementation)
    check(q, k_cache, v_cache, lengths, k_tree, v_tree, ancestors, positions, layer, **options)
    rest = (lengths, k_tree, v_tree, ancestors)
    options = dict(scale=scale, sliding_window=sliding_window, softcap=softcap, positions=positions)
    kv_heads, capacity = k_cache.shape[-3], k_cache.shape[-2]
    if choice.choose(implementation, mosaic_gpu.unsupported(q, None, capacity, scale)) == "xla":
        if layer is not None:
            k_cache, v_cache = k_cache[layer], v_cache[layer]
        return reference.tree_attention(q, k_cache, v_cache, *rest, **options)
    sizes = config.choose(q.shape, kv_heads, capacity)
    return mosaic_gpu.tree_attention(q, k_cache, v_cache, *rest, **options, layer=layer, config=sizes)


def paged_tree_attention(
    q: jax.Array,  # [B, N, H, D]
    k_pages: jax.Array,  # [P, K, R, D]
    v_pages: jax.Array,  # [P, K, R, D]
    page_table: jax.Array,  # [B, M] int32
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
    """`tree_attention` over a cache of pages: row j of slot b lies in page `page_table[b, j // R]`, at j % R.

    Entries of the page table past a slot's length are never followed, and rows past the length may hold anything. The
    arguments, the result and the errors are otherwise those of `tree_attention`; 0 <= lengths <= M * R. The GPU kernel
    takes pages of 16, 32, 64 or 128 rows; the "xla" implementation takes any and gathers them first.
    """
    _check_options(sliding_window, softcap, implementation)
    _check_pages(q, k_pages, v_pages, page_table)
    slots, entries = page_table.shape
    kv_heads, page_rows, head_dim = k_pages.shape[1:]
    contiguous = jax.ShapeDtypeStruct((slots, kv_heads, entries * page_rows, head_dim), k_pages.dtype)
    _check_arrays(q, contiguous, contiguous, lengths, k_tree, v_tree, ancestors, positions)
    options = dict(scale=scale, sliding_window=sliding_window, softcap=softcap, positions=positions)
    if choice.choose(implementation, mosaic_gpu.unsupported(q, page_rows, page_rows, scale)) == "xla":
        k_cache, v_cache = (_gather(pages, page_table, lengths) for pages in (k_pages, v_pages))
        return reference.tree_attention(q, k_cache, v_cache, lengths, k_tree, v_tree, ancestors, **options)
    sizes = config.choose(q.shape, kv_heads, entries * page_rows)
    arguments = (q, k_pages, v_pages, lengths, k_tree, v_tree, ancestors)
    return mosaic_gpu.tree_attention(*arguments, **options, page_table=page_table, config=sizes)


def _gather(pages: jax.Array, page_table: jax.Array, lengths: jax.Array) -> jax.Array:
    """Pages [P, K, R, D] in the order of the table: [B, K, M * R, D]. Entries past the length read page 0."""
    slots, entries = page_table.shape
    kv_heads, rows, head_dim = pages.shape[1:]
    used = jnp.arange(entries, dtype=jnp.int32)[None, :] * rows < lengths[:, None]
    taken = pages[jnp.where(used, page_table, 0)]  # [B, M, K, R, D]
    return taken.transpose(0, 2, 1, 3, 4).reshape(slots, kv_heads, entries * rows, head_dim)


def _of_layer(k_cache, v_cache, layer: int):
    """Shapes of one layer of both caches. Raises ValueError where there is no such layer."""
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache.ndim != 5 or not 0 <= layer < cache.shape[0]:
            raise ValueError(f"layer {layer} needs a {name} [M, B, K, C, D] with M > {layer}, got {cache.shape}")
    return tuple(jax.ShapeDtypeStruct(cache.shape[1:], cache.dtype) for cache in (k_cache, v_cache))


def check(q, k_cache, v_cache, lengths, k_tree, v_tree, ancestors, positions, layer, **options) -> None:
    """Raises ValueError where arguments of `tree_attention` contradict each other."""
    _check_options(**options)
    one_layer = (k_cache, v_cache) if layer is None else _of_layer(k_cache, v_cache, layer)
    _check_arrays(q, *one_layer, lengths, k_tree, v_tree, ancestors, positions)


def _check_options(sliding_window, softcap, implementation):
    """Raises ValueError for options out of range."""
    choice.check(implementation)
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"sliding_window must be at least 1, got {sliding_window}")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap must be positive, got {softcap}")


def _check_pages(q, k_pages, v_pages, page_table):
    """Raises ValueError where pages and their table contradict each other or the queries."""
    if k_pages.ndim != 4:
        raise ValueError(f"k_pages must be [P, K, R, D], got shape {k_pages.shape}")
    if v_pages.shape != k_pages.shape:
        raise ValueError(f"v_pages must have k_pages' shape {k_pages.shape}, got {v_pages.shape}")
    if page_table.ndim != 2 or page_table.shape[0] != q.shape[0]:
        raise ValueError(f"page_table must be [B, M] with B = {q.shape[0]}, got {page_table.shape}")
    if page_table.dtype != jnp.int32:
        raise ValueError(f"page_table must be int32, got {page_table.dtype}")
    if v_pages.dtype != k_pages.dtype:
        raise ValueError(f"v_pages must have k_pages' dtype {k_pages.dtype}, got {v_pages.dtype}")


def _check_arrays(q, k_cache, v_cache, lengths, k_tree, v_tree, ancestors, positions):
    """Raises ValueError where shapes or dtypes contradict each other."""
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
    dtypes = dict(
        k_cache=q.dtype, v_cache=q.dtype, k_tree=q.dtype, v_tree=q.dtype, lengths=jnp.int32, ancestors=jnp.uint32
    )
    if positions is not None:
        dtypes["positions"] = jnp.int32
    for name, dtype in dtypes.items():
        if wanted[name][0].dtype != dtype:
            like = " like q" if dtype == q.dtype else ""
            raise ValueError(f"{name} must be {jnp.dtype(dtype).name}{like}, got {wanted[name][0].dtype}")
