"""Caches of targets and drafters: plain pytrees, passed in and returned.

An attention layer keeps keys and values of every committed token, a recurrent layer one state (`models.recurrent`);
`empty`, `append_rows`, `path_rows` and `commit_rows` hide the difference from the decode loop.

Shape letters: M attention layers, B slots, K key/value heads, C rows, D head_dim, N tokens of a pass, P rows committed
at most.
"""

from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp

from ddtree_jax.config import DraftConfig, TargetConfig
from ddtree_jax.models import recurrent
from ddtree_jax.models.recurrent import RecurrentRows, RecurrentState, RecurrentWeights
from ddtree_jax.tree import gather_path, gather_path_rows, write_rows

# What a pass leaves of its tokens, by layer: (keys, values), each [B, K, N, D], or the rows of a recurrent layer.
TreeKV = tuple[tuple[jax.Array, jax.Array] | RecurrentRows, ...]


@flax.struct.dataclass
class KVCache:
    """Keys and values, and recurrent states, of committed tokens only; a pass never writes here, only a commit does.

    Attributes:
      keys, values: of all M attention layers, [M, B, K, C, D], rotary embedding already applied to the keys. One array,
        so that one write commits all layers.
      length: [B] int32, live rows of each slot. Rows at and past it are undefined.
      recurrent: state of the recurrent layers of a hybrid target; None where there are none.
    """

    keys: jax.Array
    values: jax.Array
    length: jax.Array
    recurrent: RecurrentState | None = None

    @classmethod
    def empty(cls, config: TargetConfig | DraftConfig, *, batch: int, rows: int) -> "KVCache":
        """A cache of no live rows for a model. Every array is its own buffer, so that all of them can be donated."""
        delta_layers = config.delta_layers if isinstance(config, TargetConfig) else ()

        layers = config.num_layers - len(delta_layers)
        shape = (layers, batch, config.num_kv_heads, rows, config.head_dim)
        keys, values = jnp.zeros(shape, config.jax_dtype), jnp.zeros(shape, config.jax_dtype)
        state = None
        if delta_layers:
            state = RecurrentState.empty(config.delta, layers=len(delta_layers), batch=batch, dtype=config.jax_dtype)
        return cls(keys=keys, values=values, length=jnp.zeros((batch,), jnp.int32), recurrent=state)


def put_slots(cache: KVCache, new: KVCache, where: jax.Array) -> KVCache:
    """`cache` with the slots of `new` at slots `where` [R] int32; an entry past the end is dropped."""

    def put(old: jax.Array, fresh: jax.Array) -> jax.Array:  # slots come after layers
        return old.at[:, where].set(fresh, mode="drop")

    layers = jax.tree.map(put, cache.replace(length=None), new.replace(length=None))
    return layers.replace(length=cache.length.at[where].set(new.length, mode="drop"))


@flax.struct.dataclass
class PathRows:
    """What a commit appends: of consecutive tokens, or of the nodes of a path.

    Attributes:
      keys, values: of all attention layers, [M, B, K, P, D]: two arrays to carry about, however many layers.
      recurrent: of the recurrent layers.
    """

    keys: jax.Array
    values: jax.Array
    recurrent: tuple[RecurrentRows, ...]

    @classmethod
    def of(cls, rows: TreeKV) -> "PathRows":
        kv = [r for r in rows if not isinstance(r, RecurrentRows)]
        return cls(
            keys=jnp.stack([k for k, _ in kv]),
            values=jnp.stack([v for _, v in kv]),
            recurrent=tuple(r for r in rows if isinstance(r, RecurrentRows)),
        )


def path_rows(tree_kv: TreeKV, path: jax.Array) -> PathRows:
    """What a pass leaves of the nodes of `path` [B, P] int32, in path order."""

    def of_path(rows):
        if isinstance(rows, RecurrentRows):
            return rows.replace(inputs=gather_path(rows.inputs, path))
        return tuple(gather_path_rows(x, path) for x in rows)

    return PathRows.of(tuple(of_path(rows) for rows in tree_kv))


def commit_rows(cache: KVCache, rows: PathRows, count: jax.Array, weights: RecurrentWeights | None = None) -> KVCache:
    """Appends the first `count` [B] of a path's P rows (0 leaves a slot as it was).

    All P rows of keys and values are written: C must exceed every live length by at least P, so that no write is
    clamped. Recurrent states are moved token by token (`recurrent.replay`), with `Decoder.commit_weights`.
    """
    return _append(cache, rows, count, weights, recurrent.replay)


def append_rows(cache: KVCache, rows: TreeKV, count: jax.Array, weights: RecurrentWeights | None = None) -> KVCache:
    """Appends the rows of consecutive tokens; `count` [B] of them are live, the rest lie past the new length.

    `weights` as in `commit_rows`.
    """
    return _append(cache, PathRows.of(rows), count, weights, recurrent.append)


def _append(
    cache: KVCache, rows: PathRows, count: jax.Array, weights: RecurrentWeights | None, recurrence: Callable
) -> KVCache:
    state = cache.recurrent
    return KVCache(
        keys=write_rows(cache.keys, rows.keys, cache.length),
        values=write_rows(cache.values, rows.values, cache.length),
        length=cache.length + count,
        recurrent=recurrence(state, rows.recurrent, weights, count) if rows.recurrent else None,
    )
