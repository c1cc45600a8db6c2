"""Key/value caches of targets and drafters: plain pytrees, passed in and returned.

Shape letters: B slots, K key/value heads, C rows, D head_dim, N tokens of a pass, P rows committed at most.
"""

import flax.struct
import jax
import jax.numpy as jnp

from ddtree_jax.tree import move_path_rows

TreeKV = tuple[tuple[jax.Array, jax.Array], ...]  # per layer (keys, values), each [B, K, N, D]


@flax.struct.dataclass
class KVCache:
    """Keys and values of committed tokens only; a pass never writes here, only a commit does.

    Attributes:
      keys, values: one array a layer, [B, K, C, D], rotary embedding already applied to the keys.
      length: [B] int32, live rows of each slot. Rows at and past it are undefined.
    """

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]
    length: jax.Array

    @classmethod
    def empty(cls, *, num_layers: int, batch: int, num_kv_heads: int, rows: int, head_dim: int, dtype: jnp.dtype):
        """A cache of no live rows. Every array is its own buffer, so that all of them can be donated."""

        def make():
            return tuple(jnp.zeros((batch, num_kv_heads, rows, head_dim), dtype) for _ in range(num_layers))

        return cls(keys=make(), values=make(), length=jnp.zeros((batch,), jnp.int32))


def commit_path(cache: KVCache, tree_kv: TreeKV, path: jax.Array, count: jax.Array) -> KVCache:
    """Appends the rows of the accepted nodes.

    Args:
      cache: C must exceed every live length by at least P rows, so that no write is clamped.
      tree_kv: keys and values of the pass just verified.
      path: [B, P] int32, node indices in order of depth.
      count: [B] int32, how many entries of `path` are live (0 leaves a slot as it was).
    """
    keys = tuple(move_path_rows(c, t[0], path, cache.length) for c, t in zip(cache.keys, tree_kv, strict=True))
    values = tuple(move_path_rows(c, t[1], path, cache.length) for c, t in zip(cache.values, tree_kv, strict=True))
    return KVCache(keys=keys, values=values, length=cache.length + count)


def append_rows(cache: KVCache, rows: TreeKV, count: jax.Array) -> KVCache:
    """Appends consecutive rows [B, K, R, D]; `count` [B] of them are live, the rest lie past the new length."""

    def write(old, new):
        def one(c, t, n):
            zero = jnp.zeros_like(n)
            return jax.lax.dynamic_update_slice(c, t, (zero, n, zero))

        return jax.vmap(one)(old, new, cache.length)

    keys = tuple(write(c, t[0]) for c, t in zip(cache.keys, rows, strict=True))
    values = tuple(write(c, t[1]) for c, t in zip(cache.values, rows, strict=True))
    return KVCache(keys=keys, values=values, length=cache.length + count)
