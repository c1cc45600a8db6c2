"""The gated delta rule on Hopper: what the Pallas Mosaic GPU kernels take, and how their operands are laid out."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gated_delta_tree import mosaic_gpu_replay, mosaic_gpu_tree
from pallas_kernels.gated_delta_tree.reference import LOWEST

_DIM = 128
WIDTHS = (16, 32, 64, 128, 256)  # nodes are padded to one of these
_LARGEST_GROUP = 4


def tree(
    q: jax.Array,  # [B, N, Hk, Dk]
    k: jax.Array,  # [B, N, Hk, Dk]
    v: jax.Array,  # [B, N, Hv, Dv]
    log_decay: jax.Array,  # [B, N, Hv]
    beta: jax.Array,  # [B, N, Hv]
    states: jax.Array,  # [M, B, Hv, Dk, Dv]
    ancestors: jax.Array,  # [B, N, W] uint32
    *,
    layer: int,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> jax.Array:  # [B, N, Hv, Dv]
    """See `pallas_kernels.gated_delta_tree`; the arguments are taken as checked and supported (`tree_unsupported`)."""
    # The layer is a run-time value and the call is jitted, so that all layers of a model trace and compile one kernel.
    return _tree(q, k, v, log_decay, beta, states, ancestors, jnp.array([layer], jnp.int32), interpret=interpret)


@functools.partial(jax.jit, static_argnames="interpret")
def _tree(q, k, v, log_decay, beta, states, ancestors, layer, *, interpret):
    given, live_nodes = q.shape[1], log_decay.shape[1]
    nodes = next(width for width in WIDTHS if width >= live_nodes)
    if given > nodes:
        q, k, v = (x[:, :nodes] for x in (q, k, v))
    elif given < nodes:
        q, k, v = (jnp.pad(x, ((0, 0), (0, nodes - given), (0, 0), (0, 0))) for x in (q, k, v))
    static = tree_static(q, v)
    gates = jnp.stack([jnp.maximum(log_decay, LOWEST), beta, beta], axis=1).transpose(0, 3, 1, 2)
    gates = jnp.pad(gates, ((0, 0), (0, 0), (0, 0), (0, static.rows - live_nodes)))
    out = mosaic_gpu_tree.call(static, interpret)(layer, q, k, v, gates, tree_words(ancestors, static.rows), states)
    return out[:, :live_nodes]


def tree_static(q: jax.Array, v: jax.Array, norm: mosaic_gpu_tree.Norm | None = None) -> mosaic_gpu_tree.Static:
    """Of a call with queries and values of one of `WIDTHS` nodes."""
    (slots, nodes, key_heads, key_dim), (value_heads, value_dim) = q.shape, v.shape[2:]
    return mosaic_gpu_tree.Static(
        slots=slots, nodes=nodes, value_heads=value_heads, group=value_heads // key_heads, key_dim=key_dim,
        value_dim=value_dim, norm=norm,
    )  # fmt: skip


def replay(
    k: jax.Array,  # [M, B, P, Hk, Dk]
    v: jax.Array,  # [M, B, P, Hv, Dv]
    log_decay: jax.Array,  # [M, B, P, Hv]
    beta: jax.Array,  # [M, B, P, Hv]
    states: jax.Array,  # [M, B, Hv, Dk, Dv]
    count: jax.Array,  # [B] int32
    *,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> jax.Array:  # [M, B, Hv, Dk, Dv]
    """See `pallas_kernels.gated_delta_tree`; arguments are taken as checked and supported (`replay_unsupported`)."""
    spare = -k.shape[2] % 4  # TMA copies multiples of 16 bytes
    k, v, log_decay, beta = (
        jnp.pad(x, ((0, 0), (0, 0), (0, spare), *[(0, 0)] * (x.ndim - 3))) for x in (k, v, log_decay, beta)
    )
    rows, key_heads = k.shape[2:4]
    gates = jnp.stack([jnp.exp(log_decay), beta], axis=2).transpose(0, 1, 4, 2, 3)
    updated = jax.new_ref(states)
    kernel = mosaic_gpu_replay.call(states.shape, v.shape[3] // key_heads, rows, v.dtype, interpret)
    kernel(k, v, gates, count, updated)
    return jax.freeze(updated)


def tree_words(ancestors: jax.Array, rows: int) -> jax.Array:
    """[B, N, W] uint32 -> [B, rows / 32, rows] int32: the bits of one word for all nodes at a time, padding cleared.

    Depends on the tree alone, so that one XLA computation makes it once for all layers.
    """
    nodes, words = ancestors.shape[1:]
    seen = jnp.sum(lax.population_count(ancestors), axis=-1, dtype=jnp.uint32)
    alive = (seen > 1) | (jnp.arange(nodes) == 0)[None, :]  # a node that sees only itself is the root or padding
    bits = lax.bitcast_convert_type(jnp.where(alive[..., None], ancestors, jnp.uint32(0)), jnp.int32)
    return jnp.pad(bits, ((0, 0), (0, rows - nodes), (0, rows // 32 - words))).transpose(0, 2, 1)


def tree_unsupported(q: jax.Array, v: jax.Array, nodes: int) -> str | None:
    """Why the kernel cannot verify a tree of these queries and values, or None."""
    key_heads, dim = q.shape[2:]
    if q.dtype != jnp.bfloat16 or v.dtype != jnp.bfloat16:
        return f"queries of {q.dtype} and values of {v.dtype} (bfloat16 only)"
    if dim != _DIM or v.shape[3] != _DIM:
        return f"Dk = {dim} and Dv = {v.shape[3]} ({_DIM} only)"
    if nodes > WIDTHS[-1]:
        return f"{nodes} nodes (at most {WIDTHS[-1]})"
    if v.shape[2] // key_heads > _LARGEST_GROUP:
        return f"{v.shape[2] // key_heads} value heads for one key head (at most {_LARGEST_GROUP})"
    return None


def replay_unsupported(k: jax.Array, v: jax.Array) -> str | None:
    """Why the kernel cannot commit rows of these keys and values, or None."""
    if k.shape[4] != _DIM or v.shape[4] != _DIM:
        return f"Dk = {k.shape[4]} and Dv = {v.shape[4]} ({_DIM} only)"
    if k.shape[2] > mosaic_gpu_replay.MOST_ROWS:
        return f"{k.shape[2]} rows (at most {mosaic_gpu_replay.MOST_ROWS}; gated_delta_fold takes more)"
    if v.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        return f"values of {v.dtype} (float32, bfloat16 and float16 only)"
    return None
