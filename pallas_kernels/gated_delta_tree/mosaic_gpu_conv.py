"""The short convolution along a tree's paths on Hopper, and what follows it: one thread block a head and 64 tokens.

A tap takes one row for each token: of the window, or of an ancestor. That is a product with a matrix of ones and zeros,
which the tensor cores do exactly: each sum has one term that is not zero.

The thread block of a value head can also compute the head's decays and write strengths, as `mosaic_gpu_tree` reads
them.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gated_delta_tree.reference import LOWEST
from pallas_kernels.mosaic_gpu_layouts import COLUMN, MATRIX, ROW, ROWS, across, add_product, down, load, tiled

_COPIED = 8  # columns: the fewest that TMA copies of bfloat16, and only from a multiple of them on
_WINDOW_ROWS = 16  # of the window's tile: the least that wgmma multiplies with
L2_EPS = 1e-6


@dataclasses.dataclass(frozen=True)
class Static:
    """Everything static about one call."""

    slots: int
    nodes: int
    rows: int  # of the results: nodes, or more
    key_heads: int
    value_heads: int
    head_dim: int
    width: int  # F, columns of the projection
    taps: int
    gated: bool  # decays and write strengths too
    dtype: str
    interpreted: bool

    @property
    def channels(self) -> int:
        return self.heads * self.head_dim

    @property
    def tiles(self) -> int:
        return -(-self.nodes // ROWS)

    @property
    def heads(self) -> int:
        return 2 * self.key_heads + self.value_heads


def call(static: Static, interpret):
    """f(layer [1], projected [B, N, F], window [M, B, W - 1, C], rows [B, W - 1, tiles, 64], weight [C, W]) -> q, k, v.

    If gated also of A_log and dt_bias [Hv], and to the gates of `mosaic_gpu_tree`, [B, Hv, 3, tiles * 64] float32.
    """
    s = static
    block = tiled(s.head_dim, s.dtype)
    scratch = dict(
        # wgmma takes as many rows at a time as a tile has columns.
        window_s=plgpu.SMEM((_WINDOW_ROWS, s.head_dim), s.dtype, transforms=tiled(_WINDOW_ROWS, s.dtype)),
        # TMA reads whole tiles of a row, here of the projection.
        pass_s=plgpu.SMEM(
            (s.tiles, ROWS, s.head_dim), s.dtype, transforms=tiled(math.gcd(s.head_dim, s.width), s.dtype)
        ),
        out_s=plgpu.SMEM((ROWS, s.head_dim), s.dtype, transforms=block),
        weight_s=plgpu.SMEM((s.taps, s.head_dim), jnp.float32),
        ready=plgpu.Barrier(num_arrivals=1 + s.tiles),
    )
    if s.interpreted:
        scratch["p_s"] = plgpu.SMEM((ROWS, ROWS), s.dtype, transforms=tiled(ROWS, s.dtype))
    shapes = [
        jax.ShapeDtypeStruct((s.slots, s.rows, h, s.head_dim), s.dtype)
        for h in (s.key_heads, s.key_heads, s.value_heads)
    ]
    if s.gated:
        scratch["gates_s"] = plgpu.SMEM((2, ROWS, _COPIED), s.dtype)
        scratch["gates_ready"] = plgpu.Barrier(num_arrivals=2)
        shapes.append(jax.ShapeDtypeStruct((s.slots, s.value_heads, 3, s.tiles * ROWS), jnp.float32))
    return plgpu.kernel(
        functools.partial(_body, s),
        out_type=shapes,
        scratch_types=scratch,
        grid=(s.slots, s.tiles, s.heads),
        grid_names=("slot", "tile", "head"),
        kernel_name="tree_conv",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        interpret=interpret,
    )


def _body(s: Static, layer_g, projected_g, window_g, rows_g, weight_g, *refs, **scratch):
    decay_g, (q_g, k_g, v_g, *gates_g) = (refs[:2], refs[2:]) if s.gated else ((), refs)
    slot, tile, head = lax.axis_index("slot"), lax.axis_index("tile"), lax.axis_index("head")
    columns = pl.ds(head * s.head_dim, s.head_dim)
    window_s, pass_s, out_s, weight_s = (scratch[name] for name in ("window_s", "pass_s", "out_s", "weight_s"))
    ready = scratch["ready"]
    if not s.interpreted:
        plgpu.griddepcontrol_launch_dependents()
        plgpu.griddepcontrol_wait()
    if s.gated:
        own = functools.partial(_fetch_gates, s, projected_g, slot, tile, head - 2 * s.key_heads, scratch)
        pl.when(head >= 2 * s.key_heads)(own)
    plgpu.copy_gmem_to_smem(window_g.at[layer_g[0], slot, pl.ds(0, _WINDOW_ROWS), columns], window_s, ready)

    @pl.loop(0, s.tiles)
    def _(u):
        plgpu.copy_gmem_to_smem(projected_g.at[slot, pl.ds(u * ROWS, ROWS), columns], pass_s.at[u], ready)

    for t in range(s.taps):  # transposed on the way
        for first in range(0, s.head_dim, ROWS):
            channels = pl.ds(head * s.head_dim + first, ROWS)
            weight_s[t, first : first + ROWS] = load(weight_g.at[channels, t], COLUMN).astype(jnp.float32)
    plgpu.barrier_wait(ready)
    add = functools.partial(add_product, p_s=scratch.get("p_s"))
    own = plgpu.load(pass_s.at[tile], layout=MATRIX).astype(jnp.float32)
    total = own * down(load(weight_s.at[s.taps - 1], ROW), own.shape)
    for t in range(s.taps - 1):
        row = load(rows_g.at[slot, t, tile], COLUMN)
        tap = plgpu.layout_cast(jnp.zeros(own.shape, jnp.float32), MATRIX)
        tap = add(tap, _chosen(row, _WINDOW_ROWS, s.dtype), window_s)

        def block(u, tap, row=row):
            return add(tap, _chosen(row - (s.taps - 1 + u * ROWS), ROWS, s.dtype), pass_s.at[u])

        tap = lax.fori_loop(0, tile + 1, block, tap)  # ancestors come first: tiles past one's own hold none
        total = total + tap * down(load(weight_s.at[t], ROW), own.shape)
    mixed = (total / (1.0 + jnp.exp(-total))).astype(s.dtype)

    def send(value, target_g, target_head):
        out_s[...] = value
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_s, target_g.at[slot, pl.ds(tile * ROWS, ROWS), target_head])

    def unit(scale):
        wide = mixed.astype(jnp.float32)
        norm = lax.rsqrt(jnp.sum(wide * wide, axis=1) + L2_EPS) * scale
        return (wide * across(norm, wide.shape)).astype(s.dtype)

    keys, values = s.key_heads, 2 * s.key_heads
    pl.when(head < keys)(lambda: send(unit(s.head_dim**-0.5), q_g, head))
    pl.when((head >= keys) & (head < values))(lambda: send(unit(1.0), k_g, head - keys))
    pl.when(head >= values)(lambda: send(mixed, v_g, head - values))
    if s.gated:
        pl.when(head >= values)(lambda: _write_gates(s, slot, tile, head - values, *decay_g, *gates_g, scratch))
    plgpu.wait_smem_to_gmem(0)


def _gate_columns(s: Static, value_head) -> list:
    """Where the projection has a value head's write strength and its decay."""
    return [s.channels + i * s.value_heads + value_head for i in range(2)]


def _fetch_gates(s: Static, projected_g, slot, tile, value_head, scratch) -> None:
    """Brings the columns of a value head's write strengths and decays, and their neighbours."""
    for i, column in enumerate(_gate_columns(s, value_head)):
        columns = pl.ds(lax.div(column, _COPIED) * _COPIED, _COPIED)
        source = projected_g.at[slot, pl.ds(tile * ROWS, ROWS), columns]
        plgpu.copy_gmem_to_smem(source, scratch["gates_s"].at[i], scratch["gates_ready"])


def _write_gates(s: Static, slot, tile, value_head, rate_log_g, bias_g, gates_g, scratch) -> None:
    """Logarithm of the decay, and twice the write strength: see `mixer.gates`."""
    plgpu.barrier_wait(scratch["gates_ready"])
    place = plgpu.broadcasted_iota(jnp.int32, (ROWS, _COPIED), 1, layout=MATRIX)
    copied = (load(scratch["gates_s"].at[i], MATRIX).astype(jnp.float32) for i in range(2))
    strength, raw = (
        jnp.where(place == lax.rem(column, _COPIED), x, 0.0).sum(axis=1)
        for column, x in zip(_gate_columns(s, value_head), copied)
    )
    log_decay, beta = fast_gates(strength, raw, rate_log_g[value_head], bias_g[value_head])
    for i, gate in enumerate((log_decay, beta, beta)):
        gates_g[slot, value_head, i, pl.ds(tile * ROWS, ROWS)] = gate


def fast_gates(strength: jax.Array, raw_decay: jax.Array, rate_log, bias) -> tuple[jax.Array, jax.Array]:
    """`mixer.gates` of one value head: arrays in registers, float32, and two scalars."""
    raw_decay = raw_decay + bias
    softplus = jnp.maximum(raw_decay, 0.0) + jnp.log(1.0 + jnp.exp(-jnp.abs(raw_decay)))
    rate = jnp.exp(jnp.full(raw_decay.shape, rate_log, jnp.float32))
    return jnp.maximum(-rate * softplus, LOWEST), 1.0 / (1.0 + jnp.exp(-strength))


def _chosen(row: jax.Array, width: int, dtype) -> jax.Array:
    """[64, width]: one where a column's number is the row's."""
    shape = (ROWS, width)
    column = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=MATRIX)
    return jnp.where(column == across(row, shape), 1.0, 0.0).astype(dtype)
