"""Adding to the residual stream and normalising it, on Hopper: one thread block a row."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

_THREADS = 128  # of a warpgroup


def vector(features: int) -> int:
    """Neighbouring elements that a thread holds: 8 where the row allows it."""
    return math.gcd(8, features // _THREADS)


@functools.partial(jax.jit, static_argnames=("eps", "zero_centred", "interpret"))
def add_rms_norm(
    x: jax.Array,  # [M, E]
    parts: jax.Array,  # [S, M or more, E] float32, or x's dtype
    weight: jax.Array,  # [E]
    *,
    eps: float,
    zero_centred: bool,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> tuple[jax.Array, jax.Array]:  # [M, E] twice
    """See `pallas_kernels.fused_norm.add_rms_norm`; the arguments are taken as checked and supported."""
    return plgpu.kernel(
        functools.partial(_body, parts.shape[0], eps, zero_centred, interpret is not None),
        out_type=[jax.ShapeDtypeStruct(x.shape, x.dtype)] * 2,
        grid=(x.shape[0],),
        grid_names=("row",),
        kernel_name="add_rms_norm",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=1024),
        interpret=interpret,
    )(x, parts, weight)


def _body(splits: int, eps: float, zero_centred: bool, interpreted: bool, x_g, parts_g, weight_g, sum_g, normed_g):
    row, features = lax.axis_index("row"), x_g.shape[-1]
    layout = plgpu.Layout.WG_STRIDED((features,), vec_size=vector(features))
    load = functools.partial(plgpu.load, layout=layout, optimized=False)
    if not interpreted:  # the next kernel may start to read its weights now; ours were there before this launch
        plgpu.griddepcontrol_launch_dependents()
    weight = load(weight_g)
    if not interpreted:
        plgpu.griddepcontrol_wait()
    total = functools.reduce(jnp.add, [load(parts_g.at[s, row]) for s in range(splits)])
    stream = load(x_g.at[row]) + total.astype(x_g.dtype)
    sum_g[row] = stream
    normed_g[row] = normed(stream, weight, eps=eps, zero_centred=zero_centred)


def normed(row: jax.Array, weight: jax.Array, *, eps: float, zero_centred: bool) -> jax.Array:
    """`reference.rms_norm` of one row [E] in the registers of a warpgroup."""
    wide = row.astype(jnp.float32)
    scale = lax.rsqrt(jnp.sum(wide * wide) * (1.0 / row.size) + eps)
    if zero_centred:
        return (wide * scale * (1.0 + weight.astype(jnp.float32))).astype(row.dtype)
    return (wide * scale).astype(row.dtype) * weight
