"""A Gated DeltaNet mixer between its two projections: convolution, gates, recurrence, norm and output gate.

Shape letters: M recurrent layers, B slots, N nodes, W taps, C channels (queries, keys, values), Hk, Hv key and value
heads, Dk and Dv their dimensions, F columns of the projection: C, then Hv write strengths, Hv decays, Hv Dv output
gates, then anything.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import choice
from pallas_kernels.fused_norm.reference import rms_norm
from pallas_kernels.gated_delta_tree import conv, mosaic_gpu, mosaic_gpu_step, mosaic_gpu_tree
from pallas_kernels.gated_delta_tree.api import check_tree, gated_delta_tree


class MixerWeights(NamedTuple):
    """Parameters of one mixer.

    Attributes:
      conv: [C, W], the newest tap last, in the model's dtype.
      decay_rate_log, decay_bias: [Hv] float32 (`A_log`, `dt_bias`).
      norm: [Dv], in the model's dtype.
    """

    conv: jax.Array
    decay_rate_log: jax.Array
    decay_bias: jax.Array
    norm: jax.Array


def gated_delta_mixer(
    projected: jax.Array,  # [B, N, F]
    window: jax.Array,  # [M, B, W - 1, C]
    states: jax.Array,  # [M, B, Hv, Dk, Dv] float32
    rows: jax.Array,  # [B, N, W] int32
    ancestors: jax.Array,  # [B, N, ceil(N/32)] uint32
    weights: MixerWeights,
    *,
    heads: tuple[int, int],
    eps: float,
    layer: int,
    implementation: str | None = None,
) -> jax.Array:  # [B, N, Hv Dv]
    """`tree_conv`, `gates`, `gated_delta_tree` and `gated_norm` of one projection.

    Args:
      projected: queries, keys, values, write strengths, decays, output gates.
      window, rows: see `tree_conv`.
      states, ancestors: see `gated_delta_tree`.
      heads: (Hk, Hv).
      eps: of the norm.
      layer: which of the M layers.
      implementation: "xla", "mosaic_gpu", or None to choose: "mosaic_gpu" on a Hopper GPU where it can, else each of
        the four by itself. The GPU kernels, one for a single token and two for a tree, take what those of `tree_conv`
        and `gated_delta_tree` take; they have no gradient.

    Raises:
      ValueError: the arguments contradict each other.
      NotImplementedError: the implementation asked for cannot do this call; the message names what.
    """
    choice.check(implementation)
    dims = states.shape[3:]
    _check(projected, window, states, rows, ancestors, weights, heads, layer)
    obstacle = _unsupported(projected, rows, heads, dims)
    if choice.choose(implementation, obstacle) == "mosaic_gpu":
        return from_kernels(projected, window, states, rows, ancestors, weights, heads=heads, eps=eps, layer=layer)
    parts = dict(layer=layer, implementation=implementation)
    first, last = _output_gates(weights)
    q, k, v = conv.tree_conv(projected, window, rows, weights.conv, heads=heads, dims=dims, **parts)
    log_decay, beta = gates(projected[..., weights.conv.shape[0] : first], weights.decay_rate_log, weights.decay_bias)
    dtype = _recurrence_dtype(v.dtype)
    out = gated_delta_tree(q.astype(dtype), k.astype(dtype), v, log_decay, beta, states, ancestors, **parts)
    return gated_norm(out, projected[..., first:last], weights.norm, eps)


def _output_gates(weights: MixerWeights) -> tuple[int, int]:
    """The first column of the projection that holds one, and the first past them."""
    value_heads, value_dim = len(weights.decay_bias), len(weights.norm)
    first = weights.conv.shape[0] + 2 * value_heads
    return first, first + value_heads * value_dim


def gates(strength_decay: jax.Array, rate_log: jax.Array, bias: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Decays and write strengths.

    Args:
      strength_decay: [..., 2 Hv], both projections, write strengths first.
      rate_log, bias: [Hv], or [..., Hv] that broadcast to the result, float32.

    Returns:
      (log_decay, beta), [..., Hv] float32 each.
    """
    strength, decay = jnp.split(strength_decay.astype(jnp.float32), 2, axis=-1)
    rate_log, bias = (jnp.broadcast_to(x, decay.shape) for x in (rate_log, bias))
    return -jnp.exp(rate_log) * jax.nn.softplus(decay + bias), jax.nn.sigmoid(strength)


def gated_norm(out: jax.Array, gate: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """RMSNorm of the recurrence's outputs [..., Hv, Dv], times the SiLU of their gates: both as [..., Hv Dv]."""
    gate = jax.nn.silu(gate.reshape(out.shape).astype(jnp.float32))
    return (rms_norm(out, weight, eps).astype(jnp.float32) * gate).astype(out.dtype).reshape(*out.shape[:-2], -1)


def from_kernels(
    projected, window, states, rows, ancestors, weights: MixerWeights, *, heads, eps, layer: int, interpret=None
) -> jax.Array:
    """`gated_delta_mixer` by the kernels; the arguments are taken as checked and supported."""
    layer = jnp.array([layer], jnp.int32)  # a run-time value, so that the layers of a model share their kernels
    if projected.shape[1] == 1:
        return _step(projected, window, states, layer, weights, heads=heads, eps=eps, interpret=interpret)
    decay_weights = (weights.decay_rate_log, weights.decay_bias)
    q, k, v, own_gates = conv.from_kernel(
        projected, window, rows, weights.conv, layer, decay_weights, heads=heads, dims=states.shape[3:],
        interpret=interpret,
    )  # fmt: skip
    return _tree(q, k, v, own_gates, states, ancestors, layer, projected, weights, eps=eps, interpret=interpret)


@functools.partial(jax.jit, static_argnames=("heads", "eps", "interpret"))
def _step(projected, window, states, layer, weights: MixerWeights, *, heads, eps, interpret):
    static = mosaic_gpu_step.Static(
        slots=projected.shape[0], key_heads=heads[0], value_heads=heads[1], taps=weights.conv.shape[1], eps=eps,
        dtype=projected.dtype.name,
    )  # fmt: skip
    return mosaic_gpu_step.call(static, interpret)(layer, projected, window, *weights, states)


@functools.partial(jax.jit, static_argnames=("eps", "interpret"))
def _tree(q, k, v, own_gates, states, ancestors, layer, projected, weights: MixerWeights, *, eps, interpret):
    (slots, nodes, width), (first, last) = projected.shape, _output_gates(weights)
    # The interpreter knows no thread blocks that send each other what they have.
    norm = None if interpret is not None else mosaic_gpu_tree.Norm(eps=eps, width=width, gates=first)
    static = mosaic_gpu.tree_static(q, v, norm)
    operands = (layer, q, k, v, own_gates, mosaic_gpu.tree_words(ancestors, static.rows), states)
    if norm is None:
        out = mosaic_gpu_tree.call(static, interpret)(*operands)[:, :nodes]
        return gated_norm(out, projected[..., first:last], weights.norm, eps)
    out = mosaic_gpu_tree.call(static, interpret)(*operands, projected, weights.norm)
    return out[:, :nodes].reshape(slots, nodes, last - first)


def _check(projected, window, states, rows, ancestors, weights: MixerWeights, heads: tuple[int, int], layer) -> None:
    """Raises ValueError where the arguments contradict each other."""
    if states.ndim != 5:
        raise ValueError(f"states must be [M, B, Hv, Dk, Dv], got shape {states.shape}")
    dims = states.shape[3:]
    channels, values = 2 * heads[0] * dims[0] + heads[1] * dims[1], heads[1] * dims[1]
    columns = channels + 2 * heads[1] + values
    if projected.ndim != 3 or projected.shape[2] < columns:
        wanted = f"[B, N, {columns} or more]"
        raise ValueError(f"projected must be {wanted} for these heads and states, got {projected.shape}")
    expected = {
        "decay_rate_log": (weights.decay_rate_log, (heads[1],), jnp.float32),
        "decay_bias": (weights.decay_bias, (heads[1],), jnp.float32),
        "norm": (weights.norm, (dims[1],), projected.dtype),
    }
    for name, (array, shape, dtype) in expected.items():
        if array.shape != shape or array.dtype != dtype:
            wanted = f"{shape} of {jnp.dtype(dtype).name}"
            raise ValueError(f"{name} must be {wanted} to fit heads and projected, got {array.shape} of {array.dtype}")
    conv.check(projected, window, rows, weights.conv, heads, dims, layer)
    q, v = _heads(projected, heads, dims)
    gate = jax.ShapeDtypeStruct((*projected.shape[:2], heads[1]), jnp.float32)
    check_tree(q, q, v, gate, gate, states, ancestors, layer)


def _heads(projected, heads, dims) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """Shapes of the queries, or keys, and of the values that a projection holds, as the recurrence takes them."""
    dtype = _recurrence_dtype(projected.dtype)
    return tuple(jax.ShapeDtypeStruct((*projected.shape[:2], h, d), dtype) for h, d in zip(heads, dims))


def _recurrence_dtype(dtype) -> jnp.dtype:
    """Of queries and keys, for values of `dtype`."""
    return dtype if dtype == jnp.bfloat16 else jnp.dtype(jnp.float32)


def _unsupported(projected, rows, heads, dims) -> str | None:
    """Why the kernels cannot do a call, or None."""
    nodes = projected.shape[1]
    if nodes > 1 and heads[1] % 8:
        return f"{heads[1]} value heads (multiples of 8 only, but for one token)"
    return conv.unsupported(projected, rows, dims) or mosaic_gpu.tree_unsupported(
        *_heads(projected, heads, dims), nodes
    )
