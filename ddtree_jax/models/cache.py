"""Caches of targets and drafters: plain pytrees, passed in and returned.

An attention layer keeps keys and values of every committed token, a recurrent layer one state (`models.recurrent`);
`empty`, `append_rows` and `commit_path` hide the difference from the decode loop.

Shape letters: B slots, K key/value heads, C rows, D head_dim, N tokens of a pass, P rows committed at most.
"""

import flax.struct
import jax
import jax.numpy as jnp

from ddtree_jax.config import DraftConfig, TargetConfig
from ddtree_jax.models import recurrent
from ddtree_jax.models.recurrent import RecurrentRows, RecurrentState
from ddtree_jax.tree import move_path_rows, write_rows

# What a pass leaves of each layer: (keys, values), each [B, K, N, D], or the rows of a recurrent layer.
TreeKV = tuple[tuple[jax.Array, jax.Array] | RecurrentRows, ...]


@flax.struct.dataclass
class KVCache:
    """Keys and values, and recurrent states, of committed tokens only; a pass never writes here, only a commit does.

    Attributes:
      keys, values: one array an attention layer, [B, K, C, D], rotary embedding already applied to the keys.
      length: [B] int32, live rows of each slot. Rows at and past it are undefined.
      recurrent: state of the recurrent layers of a hybrid target; None where there are none.
    """

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]
    length: jax.Array
    recurrent: RecurrentState | None = None

    @classmethod
    def empty(cls, config: TargetConfig | DraftConfig, *, batch: int, rows: int) -> "KVCache":
        """A cache of no live rows for a model. Every array is its own buffer, so that all of them can be donated."""
        delta_layers = config.delta_layers if isinstance(config, TargetConfig) else ()

        def make():
            shape = (batch, config.num_kv_heads, rows, config.head_dim)
            return tuple(jnp.zeros(shape, config.jax_dtype) for _ in range(config.num_layers - len(delta_layers)))

        state = None
        if delta_layers:
            state = RecurrentState.empty(config.delta, layers=len(delta_layers), batch=batch, dtype=config.jax_dtype)
        return cls(keys=make(), values=make(), length=jnp.zeros((batch,), jnp.int32), recurrent=state)


def _by_kind(rows: TreeKV) -> tuple[list[tuple[jax.Array, jax.Array]], list[RecurrentRows]]:
    """The rows of attention layers and of recurrent layers, each in order."""
    recurrent_rows = [r for r in rows if isinstance(r, RecurrentRows)]
    return [r for r in rows if not isinstance(r, RecurrentRows)], recurrent_rows


def commit_path(cache: KVCache, tree_kv: TreeKV, path: jax.Array, count: jax.Array) -> KVCache:
    """Appends the rows of the accepted nodes.

    Args:
      cache: C must exceed every live length by at least P rows, so that no write is clamped.
      tree_kv: what the pass just verified leaves of each layer.
      path: [B, P] int32, node indices in order of depth.
      count: [B] int32, how many entries of `path` are live (0 leaves a slot as it was).
    """
    kv, rows = _by_kind(tree_kv)
    keys = tuple(move_path_rows(c, t[0], path, cache.length) for c, t in zip(cache.keys, kv, strict=True))
    values = tuple(move_path_rows(c, t[1], path, cache.length) for c, t in zip(cache.values, kv, strict=True))
    state = recurrent.append_path(cache.recurrent, rows, path, count) if rows else None
    return KVCache(keys=keys, values=values, length=cache.length + count, recurrent=state)


def append_rows(cache: KVCache, rows: TreeKV, count: jax.Array) -> KVCache:
    """Appends the rows of consecutive tokens; `count` [B] of them are live, the rest lie past the new length."""
    kv, recurrent_rows = _by_kind(rows)
    keys = tuple(write_rows(c, t[0], cache.length) for c, t in zip(cache.keys, kv, strict=True))
    values = tuple(write_rows(c, t[1], cache.length) for c, t in zip(cache.values, kv, strict=True))
    state = recurrent.append(cache.recurrent, recurrent_rows, count) if recurrent_rows else None
    return KVCache(keys=keys, values=values, length=cache.length + count, recurrent=state)
