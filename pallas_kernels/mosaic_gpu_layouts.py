"""Layouts in registers and in shared memory that the Mosaic GPU kernels share."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

ROWS = 64  # of one Hopper wgmma
MATRIX = plgpu.Layout.WGMMA
COLUMN = plgpu.Layout.WGMMA.reduce(1)  # one value per row
ROW = plgpu.Layout.WGMMA.reduce(0)  # one value per column


def copied_rows(rows: int) -> int:
    """Rows of an array that TMA can copy in tiles of 8: one smaller tile, or whole ones."""
    return rows if rows <= 8 else -(-rows // 8) * 8


def swizzle_bytes(columns: int, itemsize: int) -> int:
    """The widest swizzle of shared memory that rows of so many columns are a multiple of."""
    return next(width for width in (128, 64, 32) if columns * itemsize % width == 0)


def tiled(columns: int, dtype) -> tuple:
    """The shared-memory layout that TMA writes and wgmma reads: tiles of 8 rows, the widest swizzle that fits."""
    size = jnp.dtype(dtype).itemsize
    swizzle = swizzle_bytes(columns, size)
    return plgpu.TilingTransform((8, swizzle // size)), plgpu.SwizzleTransform(swizzle)


def across(column: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Spreads one value per row [64] over the columns of a matrix."""
    return lax.broadcast_in_dim(column, shape, (0,))


def down(row: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Spreads one value per column over the rows of a matrix."""
    return lax.broadcast_in_dim(row, shape, (1,))


def load(ref, layout) -> jax.Array:
    return plgpu.load(ref, layout=layout, optimized=False)


def add_product(acc: jax.Array, p: jax.Array, v, *, p_s=None) -> jax.Array:
    """acc [64, D] float32 + p [64, keys] in registers @ v [keys, D] in shared memory.

    Args:
      p_s: shared memory for p, for the interpreter, which knows neither operands in registers nor preset accumulators.
    """
    if p_s is not None:
        p_s = p_s.at[:, pl.ds(0, p.shape[1])]
        p_s[...] = p
        plgpu.commit_smem()

        def product(ref):
            plgpu.wgmma(ref, p_s, v)
            return ref[...]

        return acc + pl.run_scoped(product, plgpu.ACC(acc.shape, jnp.float32))
    return pl.run_state(lambda ref: plgpu.wgmma(ref, p, v))(plgpu.ACC.init(acc))
