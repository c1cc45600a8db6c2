"""The short causal convolution of Gated DeltaNet along the paths of a tree, and the norms after it.

Shape letters: M recurrent layers, B slots, N nodes, W taps, C channels (queries, keys, values), Hk, Hv key and value
heads, Dk and Dv their dimensions.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels import choice
from pallas_kernels.gated_delta_tree import mosaic_gpu_conv
from pallas_kernels.gated_delta_tree.mosaic_gpu import WIDTHS
from pallas_kernels.mosaic_gpu_layouts import copied_rows


def tree_conv(
    projected: jax.Array,  # [B, N, C or more]
    window: jax.Array,  # [M, B, W - 1, C]
    rows: jax.Array,  # [B, N, W] int32
    weight: jax.Array,  # [C, W]
    *,
    heads: tuple[int, int],
    dims: tuple[int, int],
    layer: int,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # [B, N', Hk, Dk] twice, [B, N', Hv, Dv]
    """What `gated_delta_tree` takes of a projection: convolved, gated by SiLU, queries and keys of length one.

    Args:
      projected: queries, keys and values before the convolution, then anything.
      window: the last inputs of all layers' convolutions, oldest first.
      rows: what each node's taps read, oldest first, the node itself last: rows of the window, then W - 1 + node.
      weight: of the depthwise convolution, the newest tap last.
      heads, dims: (Hk, Hv) and (Dk, Dv).
      layer: which of the M windows to read.
      implementation: "xla", "mosaic_gpu", or None to choose: "mosaic_gpu" on a Hopper GPU where it can, else "xla". The
        GPU kernel takes bfloat16, Dk = Dv of 64 or 128, up to 256 nodes and of more than 8 a multiple of 8.

    Returns:
      Queries (times Dk ** -0.5), keys, values. The GPU kernel gives all in bfloat16 and N' >= N nodes, those past N
      undefined; "xla" gives queries and keys in float32 and N' = N. With the kernel a projection that is not finite
      spoils all nodes of its slot.

    Raises:
      ValueError: the arguments contradict each other.
      NotImplementedError: the implementation asked for cannot do this call; the message names what.
    """
    choice.check(implementation)
    check(projected, window, rows, weight, heads, dims, layer)
    obstacle = unsupported(projected, rows, dims)
    if choice.choose(implementation, obstacle) == "mosaic_gpu":
        return from_kernel(projected, window, rows, weight, jnp.array([layer], jnp.int32), heads=heads, dims=dims)
    channels = weight.shape[0]
    return conv_heads(conv_taps(window[layer], projected[..., :channels], rows), weight, heads=heads, dims=dims)


def conv_heads(
    taps: Sequence[jax.Array], weight: jax.Array, *, heads: tuple[int, int], dims: tuple[int, int]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`tree_conv` in XLA, of taps [B, N, C] each, oldest first."""
    mixed = short_conv(taps, [weight[None, None, :, t] for t in range(weight.shape[1])])
    q, k, v = jnp.split(mixed, (heads[0] * dims[0], 2 * heads[0] * dims[0]), axis=-1)
    q, k = (unit(x.reshape(*x.shape[:-1], heads[0], dims[0])) for x in (q, k))
    return q * dims[0] ** -0.5, k, v.reshape(*v.shape[:-1], heads[1], dims[1])


# Jitted, and the layer a run-time value, so that the layers of a model share one kernel.
@functools.partial(jax.jit, static_argnames=("heads", "dims", "interpret"))
def from_kernel(
    projected, window, rows, weight, layer, decay_weights=(), *, heads, dims, interpret=None
) -> tuple[jax.Array, ...]:
    """The kernel's results; the arguments are taken as checked and supported.

    `decay_weights`, A_log and dt_bias [Hv], ask for the gates too: see `mosaic_gpu_conv.call`.
    """
    slots, nodes, width = projected.shape
    static = mosaic_gpu_conv.Static(
        slots=slots,
        nodes=nodes,
        rows=next(w for w in WIDTHS if w >= nodes),
        key_heads=heads[0],
        value_heads=heads[1],
        head_dim=dims[0],
        width=width,
        taps=weight.shape[1],
        gated=bool(decay_weights),
        dtype=projected.dtype.name,
        interpreted=interpret is not None,
    )
    tiled = static.tiles * mosaic_gpu_conv.ROWS
    others = jnp.pad(rows[..., :-1], ((0, 0), (0, tiled - nodes), (0, 0)))
    others = others.transpose(0, 2, 1).reshape(slots, static.taps - 1, static.tiles, mosaic_gpu_conv.ROWS)
    return tuple(mosaic_gpu_conv.call(static, interpret)(layer, projected, window, others, weight, *decay_weights))


def check(projected, window, rows, weight, heads, dims, layer: int) -> None:
    """Raises ValueError where the arguments of `tree_conv` contradict each other."""
    channels = 2 * heads[0] * dims[0] + heads[1] * dims[1]
    if projected.ndim != 3 or projected.shape[2] < channels:
        raise ValueError(f"projected must be [B, N, {channels} or more] for these heads, got {projected.shape}")
    (batch, nodes), taps = projected.shape[:2], rows.shape[-1]
    expected = {
        "rows": (rows, (batch, nodes, taps), jnp.int32),
        "weight": (weight, (channels, taps), projected.dtype),
        "window": (window, (window.shape[0], batch, taps - 1, channels), projected.dtype),
    }
    for name, (array, shape, dtype) in expected.items():
        if array.shape != shape or array.dtype != dtype:
            wanted = f"{shape} of {jnp.dtype(dtype).name}"
            raise ValueError(f"{name} must be {wanted} to fit projected and rows, got {array.shape} of {array.dtype}")
    if not 0 <= layer < window.shape[0]:
        raise ValueError(f"layer must be one of the {window.shape[0]} of window, got {layer}")


def unsupported(projected: jax.Array, rows: jax.Array, dims: tuple[int, int]) -> str | None:
    """Why the kernel cannot do a call, or None."""
    nodes, width = projected.shape[1:]
    if projected.dtype != jnp.bfloat16:
        return f"projections of {projected.dtype} (bfloat16 only)"
    if dims[0] != dims[1] or dims[0] not in (64, 128):
        return f"Dk = {dims[0]} and Dv = {dims[1]} (equal, 64 or 128)"
    if nodes > WIDTHS[-1] or nodes != copied_rows(nodes):
        return f"{nodes} nodes (up to 8, or a multiple of 8 up to {WIDTHS[-1]})"
    if width % 32:
        return f"projections of {width} columns (multiples of 32 only)"
    if not 2 <= rows.shape[2] <= 9:
        return f"{rows.shape[2]} taps (2 to 9)"
    return None


def conv_taps(window: jax.Array, inputs: jax.Array, rows: jax.Array) -> list[jax.Array]:
    """The inputs that each token's convolution reads.

    Args:
      window: [B, W - 1, C] of the committed text.
      inputs: [B, N, C] of the pass.
      rows: [B, N, W], see `tree_conv`.

    Returns:
      W arrays [B, N, C], oldest first.
    """
    line = jnp.concatenate([window, inputs], axis=1)
    return [jnp.take_along_axis(line, rows[..., t, None], axis=1, mode="clip") for t in range(rows.shape[2])]


def short_conv(taps: Sequence[jax.Array], weights: Sequence[jax.Array]) -> jax.Array:
    """The causal depthwise convolution and its SiLU, in float32.

    Args:
      taps: W arrays [..., R, C], oldest first.
      weights: one for each tap, [..., 1, C], of the rank of a tap.

    Returns:
      [..., R, C] in the dtype of the taps.
    """
    total = sum(tap.astype(jnp.float32) * w.astype(jnp.float32) for tap, w in zip(taps, weights, strict=True))
    return jax.nn.silu(total).astype(taps[0].dtype)


def unit(x: jax.Array) -> jax.Array:
    """x / |x| over the last axis, in float32."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + mosaic_gpu_conv.L2_EPS)
