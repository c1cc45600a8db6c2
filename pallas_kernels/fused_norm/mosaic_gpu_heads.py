"""Norm and rotary embedding of queries and keys on Hopper: one thread block a head and 64 tokens."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic_gpu_layouts import MATRIX, ROW, ROWS, across, copied_rows, down, load, tiled


@dataclasses.dataclass(frozen=True)
class Heads:
    """What the heads of a fused projection are, in its order.

    Attributes:
      queries: H.
      keys: K, as many values.
      gates: H or 0.
      head_dim: D.
      eps: of the norm; None for no norm.
      zero_centred: see `rms_norm`.
    """

    queries: int
    keys: int
    gates: int
    head_dim: int
    eps: float | None
    zero_centred: bool

    @property
    def count(self) -> int:
        return self.queries + 2 * self.keys + self.gates


def shared_bytes(heads: Heads, splits: int, itemsize: int, rotary_dim: int, out_itemsize: int) -> int:
    """Shared memory of a thread block."""
    return ROWS * (heads.head_dim * (splits * itemsize + out_itemsize) + rotary_dim * 4)


@functools.partial(jax.jit, static_argnames=("heads", "nodes", "dtype", "interpret"))
def qk_norm_rope(
    parts: jax.Array,  # [S, B, N or more, heads * D] float32, or `dtype`
    q_weight: jax.Array | None,  # [D]
    k_weight: jax.Array | None,  # [D]
    cos: jax.Array,  # [B, N, R / 2] float32
    sin: jax.Array,
    *,
    heads: Heads,
    nodes: int,
    dtype: str,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> tuple[jax.Array, ...]:  # [B, N, H, D], [B, K, N, D] twice, [B, N, gates, D] if there are any
    """See `pallas_kernels.fused_norm.qk_norm_rope`; the arguments are taken as checked and supported."""
    splits, slots = parts.shape[:2]
    padded = copied_rows(nodes)
    if padded != nodes:
        spare = padded - nodes
        cos, sin = (jnp.pad(table, ((0, 0), (0, spare), (0, 0))) for table in (cos, sin))
        if parts.shape[2] < padded:
            parts = jnp.pad(parts, ((0, 0), (0, 0), (0, spare), (0, 0)))
    head_dim, half = heads.head_dim, cos.shape[-1]
    operands = dict(parts=parts, cos=cos, sin=sin)
    if heads.eps is not None:
        operands |= dict(q_weight=q_weight, k_weight=k_weight)
    shapes = [(slots, padded, heads.queries, head_dim)] + 2 * [(slots, heads.keys, padded, head_dim)]
    shapes += [(slots, padded, heads.gates, head_dim)] if heads.gates else []
    results = plgpu.kernel(
        functools.partial(_body, heads, splits, dtype, interpret is not None, tuple(operands)),
        out_type=[jax.ShapeDtypeStruct(shape, dtype) for shape in shapes],
        scratch_types=dict(
            parts_s=plgpu.SMEM((splits, ROWS, head_dim), parts.dtype, transforms=tiled(head_dim, parts.dtype)),
            table_s=plgpu.SMEM((2, ROWS, half), jnp.float32, transforms=tiled(half, jnp.float32)),
            # Written in halves, so a half is a whole number of its tiles.
            out_s=plgpu.SMEM((ROWS, head_dim), dtype, transforms=tiled(math.gcd(half, head_dim), dtype)),
            ready=plgpu.Barrier(num_arrivals=splits + 2),
        ),
        grid=(slots, -(-padded // ROWS), heads.count),
        grid_names=("slot", "tile", "head"),
        kernel_name="qk_norm_rope",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        interpret=interpret,
    )(*operands.values())
    if padded == nodes:
        return tuple(results)
    q, k, v, *gate = results
    return q[:, :nodes], k[:, :, :nodes], v[:, :, :nodes], *(g[:, :nodes] for g in gate)


def _body(heads: Heads, splits: int, dtype, interpreted: bool, names: tuple[str, ...], *refs, **scratch):
    operands, results = dict(zip(names, refs)), refs[len(names) :]
    slot, head = lax.axis_index("slot"), lax.axis_index("head")
    rows = pl.ds(lax.axis_index("tile") * ROWS, ROWS)
    columns = pl.ds(head * heads.head_dim, heads.head_dim)
    if not interpreted:
        plgpu.griddepcontrol_launch_dependents()
        plgpu.griddepcontrol_wait()
    ready, out_s = scratch["ready"], scratch["out_s"]
    for s in range(splits):
        plgpu.copy_gmem_to_smem(operands["parts"].at[s, slot, rows, columns], scratch["parts_s"].at[s], ready)
    for i, name in enumerate(("cos", "sin")):
        plgpu.copy_gmem_to_smem(operands[name].at[slot, rows], scratch["table_s"].at[i], ready)
    plgpu.barrier_wait(ready)
    parts = [plgpu.load(scratch["parts_s"].at[s], layout=MATRIX) for s in range(splits)]
    x = functools.reduce(jnp.add, parts).astype(dtype)

    def rotate(weight_g):
        cos, sin = (plgpu.load(scratch["table_s"].at[i], layout=MATRIX) for i in range(2))
        column = 0
        for part in norm_rotate(x, None if weight_g is None else load(weight_g, ROW), cos, sin, heads):
            out_s[:, column : column + part.shape[1]] = part
            column += part.shape[1]

    keys, values, gates = heads.queries, heads.queries + heads.keys, heads.queries + 2 * heads.keys

    @pl.when(head < keys)
    def _():
        rotate(operands.get("q_weight"))
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_s, results[0].at[slot, rows, head])

    @pl.when((head >= keys) & (head < values))
    def _():
        rotate(operands.get("k_weight"))
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_s, results[1].at[slot, head - keys, rows])

    @pl.when(head >= values)
    def _():
        out_s[...] = x
        plgpu.commit_smem()

        @pl.when(head < gates)
        def _():
            plgpu.copy_smem_to_gmem(out_s, results[2].at[slot, head - values, rows])

        if heads.gates:

            @pl.when(head >= gates)
            def _():
                plgpu.copy_smem_to_gmem(out_s, results[3].at[slot, rows, head - gates])

    plgpu.wait_smem_to_gmem(0)


def norm_rotate(
    x: jax.Array, weight: jax.Array | None, cos: jax.Array, sin: jax.Array, heads: Heads
) -> tuple[jax.Array, ...]:
    """One head of 64 tokens, normed (but for no weight) and rotated, in registers.

    Args:
      x: [64, D].
      weight: [D].
      cos, sin: [64, R / 2] float32, of each row's position.

    Returns:
      The result in parts, side by side: both halves of the rotated columns, then the others if there are any.
    """
    y = x if weight is None else _norm(x, weight, heads)
    half = cos.shape[-1]
    first, second = y[:, :half].astype(jnp.float32), y[:, half : 2 * half].astype(jnp.float32)
    rotated = (first * cos - second * sin).astype(x.dtype), (second * cos + first * sin).astype(x.dtype)
    return rotated if 2 * half == heads.head_dim else (*rotated, y[:, 2 * half :])


def _norm(x: jax.Array, weight: jax.Array, heads: Heads) -> jax.Array:
    """RMSNorm of each row of x [64, D]."""
    wide = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.sum(wide * wide, axis=1) * (1.0 / heads.head_dim) + heads.eps)
    wide = wide * across(scale, x.shape)
    if heads.zero_centred:
        return (wide * (1.0 + down(weight.astype(jnp.float32), x.shape))).astype(x.dtype)
    return wide.astype(x.dtype) * down(weight, x.shape)
