"""Gated delta rule over trees: the public functions, their argument checks, and the choice of implementation.

Shape letters: M recurrent layers, B slots, N nodes, P rows of a commit, Hk key heads, Hv value heads, Dk and Dv their
dimensions. Value head h reads key head h // (Hv / Hk).

The recurrence (Gated DeltaNet, arXiv:2412.06464), per value head with state S [Dk, Dv]:

    S' = exp(log_decay) S;   u = beta (v - S'^T k);   S = S' + k u^T;   output = S^T q
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import choice
from pallas_kernels.gated_delta_tree import mosaic_gpu, reference


def gated_delta_tree(
    q: jax.Array,  # [B, N or more, Hk, Dk]
    k: jax.Array,  # [B, N or more, Hk, Dk]
    v: jax.Array,  # [B, N or more, Hv, Dv]
    log_decay: jax.Array,  # [B, N, Hv] float32
    beta: jax.Array,  # [B, N, Hv] float32
    states: jax.Array,  # [M, B, Hv, Dk, Dv] float32
    ancestors: jax.Array,  # [B, N, ceil(N/32)] uint32
    *,
    layer: int,
    implementation: str | None = None,
) -> jax.Array:  # [B, N, Hv, Dv]
    """The recurrence run along every path of a tree: each node's output, with one read of the state and no write.

    Node 0, the root, continues `states[layer]`; every other node the state that its parent leaves. All nodes are
    computed at once, in the masked WY form (`reference`). Bit j % 32 of `ancestors[b, i, j // 32]` says that node j is
    node i or an ancestor of it; ancestors come before their descendants, and the root is an ancestor of all. The same
    call serves a draft tree, a chain, and one-token decoding (N = 1). States are read only; commit with
    `gated_delta_replay`.

    The GPU kernel has no gradient and runs on one device: over a mesh, call it inside `shard_map`.

    Args:
      q: queries, float32 or bfloat16, L2-normalised and multiplied by Dk ** -0.5. Of q, k and v nodes past N are not
        looked at (`tree_conv` leaves some).
      k: keys in q's dtype, L2-normalised.
      v: values, any float dtype.
      log_decay: logarithm of each node's decay, at most 0; -inf forgets the state.
      beta: write strength of each node, 0 .. 2.
      states: the committed states of all recurrent layers.
      ancestors: packed bits. A padding node sees only itself and no node sees it; all else about it may be anything,
        NaN included, and its output is undefined.
      layer: which of the M states to read.
      implementation: "xla", "mosaic_gpu", or None to choose: "mosaic_gpu" on a Hopper GPU where it can, else "xla". The
        GPU kernel takes bfloat16, Dk = Dv = 128, N up to 256 (padded to 16, 32, 64, 128 or 256), and up to 4 value
        heads a key head.

    Returns:
      The outputs in v's dtype. "xla" computes in float32 throughout.

    Raises:
      ValueError: the arguments contradict each other.
      NotImplementedError: the implementation asked for cannot do this call; the message names what.
    """
    choice.check(implementation)
    check_tree(q, k, v, log_decay, beta, states, ancestors, layer)
    arguments = (q, k, v, log_decay, beta, states, ancestors)
    if choice.choose(implementation, mosaic_gpu.tree_unsupported(q, v, log_decay.shape[1])) == "xla":
        arguments = (*(x[:, : log_decay.shape[1]] for x in (q, k, v)), *arguments[3:])
        return reference.tree(*arguments, layer=layer)
    return mosaic_gpu.tree(*arguments, layer=layer)


def gated_delta_replay(
    k: jax.Array,  # [M, B, P, Hk, Dk] float32
    v: jax.Array,  # [M, B, P, Hv, Dv]
    log_decay: jax.Array,  # [M, B, P, Hv] float32
    beta: jax.Array,  # [M, B, P, Hv] float32
    states: jax.Array,  # [M, B, Hv, Dk, Dv] float32
    count: jax.Array,  # [B] int32
    *,
    implementation: str | None = None,
) -> jax.Array:  # [M, B, Hv, Dk, Dv]
    """Commits the first `count[b]` rows of every slot to the states of all layers, one row after the other.

    Sequential and in float32: a state committed from the WY form, or from rounded operands, drifts as text grows. Rows
    at and past the count leave the state's bits as they are and may hold anything, NaN included.

    Args:
      k, v, log_decay, beta: of the accepted path, in order; as in `gated_delta_tree`, with keys not rounded.
      states: the states before; donate them, and the GPU kernel writes in place.
      count: rows to commit of each slot, 0 .. P.
      implementation: as in `gated_delta_tree`. The GPU kernel takes Dk = Dv = 128.

    Returns:
      The states after.

    Raises: as `gated_delta_tree`.
    """
    choice.check(implementation)
    _check_rows(k, v, log_decay, beta, states, count)
    arguments = (k, v, log_decay, beta, states, count)
    if choice.choose(implementation, mosaic_gpu.replay_unsupported(k, v)) == "xla":
        return reference.replay(*arguments)
    return mosaic_gpu.replay(*arguments)


def gated_delta_fold(
    k: jax.Array,  # [M, B, P, Hk, Dk] float32
    v: jax.Array,  # [M, B, P, Hv, Dv]
    log_decay: jax.Array,  # [M, B, P, Hv] float32
    beta: jax.Array,  # [M, B, P, Hv] float32
    states: jax.Array,  # [M, B, Hv, Dk, Dv] float32
    count: jax.Array,  # [B] int32
) -> jax.Array:  # [M, B, Hv, Dk, Dv]
    """`gated_delta_replay` for many rows, such as those of a prompt: in float32 WY form, 64 rows at a time.

    The same arguments and errors; the result differs by rounding only.
    """
    _check_rows(k, v, log_decay, beta, states, count)
    return reference.fold(k, v, log_decay, beta, states, count)


def check_tree(q, k, v, log_decay, beta, states, ancestors, layer):
    """Raises ValueError where the arguments of `gated_delta_tree` contradict each other."""
    if q.ndim != 4:
        raise ValueError(f"q must be [B, N, Hk, Dk], got shape {q.shape}")
    if v.ndim != 4:
        raise ValueError(f"v must be [B, N, Hv, Dv], got shape {v.shape}")
    if states.ndim != 5:
        raise ValueError(f"states must be [M, B, Hv, Dk, Dv], got shape {states.shape}")
    if log_decay.ndim != 3:
        raise ValueError(f"log_decay must be [B, N, Hv], got shape {log_decay.shape}")
    (batch, given, key_heads, key_dim), (value_heads, value_dim), layers = q.shape, v.shape[2:], states.shape[0]
    nodes = log_decay.shape[1]
    if nodes < 1:
        raise ValueError("a tree has at least one node, got N = 0")
    if given < nodes:
        raise ValueError(f"q must hold the {nodes} nodes of log_decay, got shape {q.shape}")
    _check_heads(key_heads, value_heads)
    if not 0 <= layer < layers:
        raise ValueError(f"layer must be one of the {layers} of states, got {layer}")
    if q.dtype not in (jnp.float32, jnp.bfloat16):
        raise ValueError(f"q must be float32 or bfloat16, got {q.dtype}")
    wanted = {
        "k": (k, (batch, given, key_heads, key_dim), q.dtype),
        "v": (v, (batch, given, value_heads, value_dim), None),
        "log_decay": (log_decay, (batch, nodes, value_heads), jnp.float32),
        "beta": (beta, (batch, nodes, value_heads), jnp.float32),
        "states": (states, (layers, batch, value_heads, key_dim, value_dim), jnp.float32),
        "ancestors": (ancestors, (batch, nodes, -(-nodes // 32)), jnp.uint32),
    }
    _check_arrays(wanted, f"q {q.shape} and v {v.shape}")


def _check_rows(k, v, log_decay, beta, states, count):
    """Raises ValueError where the arguments of a commit contradict each other."""
    if k.ndim != 5:
        raise ValueError(f"k must be [M, B, P, Hk, Dk], got shape {k.shape}")
    if v.ndim != 5:
        raise ValueError(f"v must be [M, B, P, Hv, Dv], got shape {v.shape}")
    (layers, batch, rows, key_heads, key_dim), (value_heads, value_dim) = k.shape, v.shape[3:]
    if rows < 1:
        raise ValueError("a commit has room for at least one row, got P = 0")
    _check_heads(key_heads, value_heads)
    wanted = {
        "k": (k, k.shape, jnp.float32),
        "v": (v, (layers, batch, rows, value_heads, value_dim), None),
        "log_decay": (log_decay, (layers, batch, rows, value_heads), jnp.float32),
        "beta": (beta, (layers, batch, rows, value_heads), jnp.float32),
        "states": (states, (layers, batch, value_heads, key_dim, value_dim), jnp.float32),
        "count": (count, (batch,), jnp.int32),
    }
    _check_arrays(wanted, f"k {k.shape} and v {v.shape}")


def _check_heads(key_heads: int, value_heads: int) -> None:
    if key_heads < 1 or value_heads % key_heads:
        raise ValueError(f"value heads ({value_heads}) must be a multiple of key heads ({key_heads})")


def _check_arrays(wanted: dict, like: str) -> None:
    """Raises ValueError where an array has not its shape and dtype (None: any float dtype)."""
    for name, (array, shape, dtype) in wanted.items():
        if array.shape != shape:
            raise ValueError(f"{name} must have shape {shape} to fit {like}, got {array.shape}")
        if dtype is None and not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(f"{name} must be floating point, got {array.dtype}")
        if dtype is not None and array.dtype != dtype:
            raise ValueError(f"{name} must be {jnp.dtype(dtype).name}, got {array.dtype}")
