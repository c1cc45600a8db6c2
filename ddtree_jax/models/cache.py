"""Key/value caches of targets and drafters: plain pytrees, passed in and returned.

Shape letters: B slots, K key/value heads, C rows, D head_dim, N tokens of a pass, P rows committed at most.
"""

import flax.struct
import jax
import jax.numpy as jnp

from ddtree_jax.config import DrafterConfig, TargetConfig
from ddtree_jax.tree import move_path_rows, write_rows

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
    def empty(cls, config: TargetConfig | DrafterConfig, *, batch: int, rows: int) -> "KVCache":
        """A cache of no live rows for a model. Every array is its own buffer, so that all of them can be donated."""

        def make():
            shape = (batch, config.num_kv_heads, rows, config.head_dim)
            return tuple(jnp.zeros(shape, config.jax_dtype) for _ in range(config.num_layers))

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
    keys = tuple(write_rows(c, t[0], cache.length) for c, t in zip(cache.keys, rows, strict=True))
    values = tuple(write_rows(c, t[1], cache.length) for c, t in zip(cache.values, rows, strict=True))
    return KVCache(keys=keys, values=values, length=cache.length + count)
