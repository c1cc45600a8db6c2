"""What the streaming kernel keeps for an argmax: of each row the largest product so far, and its column.

So the product itself, 39 MB for 64 rows of a head of 151936, never touches memory. Each thread block writes what it
found among its tiles, and XLA compares the thread blocks.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic_gpu_layouts import COLUMN, MATRIX, ROWS, across
from pallas_kernels.streaming_matmul.config import Config, Shape

Found = tuple[jax.Array, jax.Array]  # of 64 rows: the largest, [64] float32; its column, [64] int32


def results(shape: Shape, config: Config) -> list[jax.ShapeDtypeStruct]:
    """Of each thread block and row the largest and its column; whole tiles of 64 rows, as they are written."""
    dims = config.workers(shape) * config.cluster, ROWS * config.consumers * config.row_tiles(shape)
    return [jax.ShapeDtypeStruct(dims, jnp.float32), jax.ShapeDtypeStruct(dims, jnp.int32)]


def staging(config: Config) -> dict:
    dims = config.consumers, ROWS
    return dict(largest_s=plgpu.SMEM(dims, jnp.float32), column_s=plgpu.SMEM(dims, jnp.int32))


def nothing() -> Found:
    """Before the first tile: less than any value of any column."""
    found = jnp.full((ROWS,), -jnp.inf, jnp.float32), jnp.full((ROWS,), jnp.iinfo(jnp.int32).max, jnp.int32)
    return tuple(plgpu.layout_cast(x, COLUMN) for x in found)


def better(found: Found, value: jax.Array, first_column, features: int) -> Found:
    """What is found with one more tile, value [64, tile] float32, whose columns come after those seen.

    NaN is above all, and of equal ones the first counts, as for `jnp.argmax`. Columns past the last are nobody's: they
    hold zeros (or NaN, where x is not finite), or the last tile again.
    """
    columns = plgpu.broadcasted_iota(jnp.int32, value.shape, 1, layout=MATRIX) + first_column
    value = jnp.where(columns < features, value, -jnp.inf)
    largest = value.max(axis=1)
    end = jnp.iinfo(jnp.int32).max

    def first(hit):
        return jnp.where(hit, columns, end).min(axis=1)

    # Found apart from the largest: whether a maximum keeps NaN differs between the GPU and the interpreter.
    nan = first(value != value)
    column = jnp.where(nan < end, nan, first(value == across(largest, value.shape)))
    largest = jnp.where(nan < end, jnp.nan, largest)

    seen, seen_column = found
    # As integers: booleans of two comparisons do not combine under this lowering.
    takes = (largest > seen).astype(jnp.int32) | ((nan < end).astype(jnp.int32) & (seen == seen).astype(jnp.int32))
    # Of equal ones the new column is less only than that of `nothing`, which a row of -inf equals.
    tied = jnp.where(largest == seen, jnp.minimum(column, seen_column), seen_column)
    return jnp.where(takes == 1, largest, seen), jnp.where(takes == 1, column, tied)


def write(found: Found, block, wg, row, results, scratch) -> None:
    """Writes what thread block `block` found in 64 rows from `row` on."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    staged = [scratch[name].at[wg] for name in ("largest_s", "column_s")]
    for source, values in zip(staged, found, strict=True):
        source[...] = values
    plgpu.commit_smem()
    for source, target in zip(staged, results, strict=True):
        plgpu.copy_smem_to_gmem(source, target.at[block, pl.ds(row, ROWS)])
