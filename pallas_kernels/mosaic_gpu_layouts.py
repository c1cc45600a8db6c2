"""Layouts in registers and in shared memory that the Mosaic GPU kernels share."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

ROWS = 64  # of one Hopper wgmma
MATRIX = plgpu.Layout.WGMMA
COLUMN = plgpu.Layout.WGMMA.reduce(1)  # one value per row
ROW = plgpu.Layout.WGMMA.reduce(0)  # one value per column


def tiled(columns: int, dtype) -> tuple:
    """The shared-memory layout that TMA writes and wgmma reads: tiles of 8 rows, the widest swizzle that fits."""
    size = jnp.dtype(dtype).itemsize
    swizzle = next(width for width in (128, 64, 32) if columns * size % width == 0)
    return plgpu.TilingTransform((8, swizzle // size)), plgpu.SwizzleTransform(swizzle)


def across(column: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Spreads one value per row [64] over the columns of a matrix."""
    return lax.broadcast_in_dim(column, shape, (0,))


def down(row: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Spreads one value per column over the rows of a matrix."""
    return lax.broadcast_in_dim(row, shape, (1,))


def load(ref, layout) -> jax.Array:
    return plgpu.load(ref, layout=layout, optimized=False)
