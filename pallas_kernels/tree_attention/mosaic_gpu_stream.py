"""The streaming warpgroup: brings blocks of keys and values into the ring, and cleans the values of blocks with dead rows."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.tree_attention.mosaic_gpu_static import MATRIX, ROWS, Span, Static, load


def produce(static: Static, span: Span, slot, head, cache, tree, table_g, ring, barriers) -> None:
    """Streams the span's blocks through the ring.

    Args:
      cache: keys and values, [B, K, C, D] each, or pages [P, K, R, D] with `table_g` [B, M].
      tree: keys and values, [B, K, N, D] each.
      ring: keys and values in shared memory, [stages, block, D] each.
    """
    plgpu.set_max_registers(40, action="decrease")
    stages, steps = static.config.stages, span.end - span.begin

    def fetch(i):
        place, j = lax.rem(i, stages), span.begin + i

        def copy(refs, v_barrier):
            for name, ref, in_ring, ready in zip("kv", refs, ring, (barriers["k_ready"], v_barrier)):

                @pl.when(i >= stages)
                def _():
                    plgpu.barrier_wait(barriers[f"{name}_free"].at[place])

                _copy_block(static, span, slot, head, j, ref, table_g, in_ring.at[place], ready.at[place])

        pl.when(j < span.whole)(lambda: copy(cache, barriers["v_ready"]))
        pl.when((j >= span.whole) & (j < span.cache_blocks))(lambda: copy(cache, barriers["v_raw"]))

        @pl.when(j >= span.cache_blocks)
        def _():
            copy([_Tree(ref) for ref in tree], barriers["v_raw"])

    def step(i, _):
        # Cleaning lags one block behind, so that the next copy is under way meanwhile.
        pl.when(i < steps)(lambda: fetch(i))
        pl.when((i > 0) & (span.begin + i > span.whole))(lambda: _clean(static, span, i - 1, ring[1], barriers))

    lax.fori_loop(0, steps + 1, step, None)

    def drain(i, _):
        plgpu.barrier_wait(barriers["k_free"].at[lax.rem(i, stages)])
        plgpu.barrier_wait(barriers["v_free"].at[lax.rem(i, stages)])

    lax.fori_loop(jnp.maximum(steps - stages, 0), steps, drain, None)


class _Tree:
    """Marks a reference [B, K, N, D] as holding tree rows, which have no page table."""

    def __init__(self, ref):
        self.ref = ref


def _copy_block(static, span, slot, head, j, ref, table_g, target, ready):
    """Starts the copies of block j's rows; rows past the end of an array arrive as zeros."""
    pieces = static.pieces
    if isinstance(ref, _Tree):
        size = static.tree_block // pieces
        for piece in range(pieces):
            first_row = (j - span.cache_blocks) * static.tree_block + piece * size
            rows = ref.ref.at[slot, head, pl.ds(first_row, size)]
            plgpu.copy_gmem_to_smem(rows, target.at[pl.ds(piece * size, size)], ready)
        return
    block = static.config.block
    if static.page_rows is None:
        plgpu.copy_gmem_to_smem(ref.at[slot, head, pl.ds(j * block, block)], target, ready)
        return
    size = block // pieces
    for piece in range(pieces):
        entry, offset = j * pieces + piece, 0
        if static.page_rows > block:
            blocks_per_page = static.page_rows // block
            entry, offset = lax.div(j, blocks_per_page), lax.rem(j, blocks_per_page) * block
        # Entries past the length may hold anything: read some page instead, its rows are masked.
        entry = jnp.minimum(entry, lax.div(span.length - 1, static.page_rows))
        rows = ref.at[table_g[slot, entry], head, pl.ds(offset, size)]
        plgpu.copy_gmem_to_smem(rows, target.at[pl.ds(piece * size, size)], ready)


def _clean(static, span, i, v_s, barriers):
    """Zeroes what is not finite among the values of dead cache rows and of tree rows, then hands the block on.

    A weight of zero times NaN would be NaN.
    """
    place, j = lax.rem(i, static.config.stages), span.begin + i
    live_rows = jnp.where(j < span.cache_blocks, span.length - j * static.config.block, 0)
    width = min(64, static.head_dim & -static.head_dim)
    highest = float(jnp.finfo(static.dtype).max)

    def clean_rows(row):
        for column in range(0, static.head_dim, width):
            part = v_s.at[place, pl.ds(row, ROWS), pl.ds(column, width)]
            v = load(part, MATRIX).astype(jnp.float32)
            rows = plgpu.broadcasted_iota(jnp.int32, (ROWS, width), 0, layout=MATRIX) + row
            # As integers: booleans of two comparisons do not combine under this lowering.
            keep = (rows < live_rows).astype(jnp.int32) | (jnp.abs(v) <= highest).astype(jnp.int32)
            part[...] = jnp.where(keep == 1, v, 0.0).astype(static.dtype)

    plgpu.barrier_wait(barriers["v_raw"].at[place])
    for row in range(0, static.config.block, ROWS):
        if row < static.tree_block:
            clean_rows(row)
        else:
            pl.when(j < span.cache_blocks)(lambda row=row: clean_rows(row))
    plgpu.commit_smem()
    for _ in range(static.pieces):
        plgpu.barrier_arrive(barriers["v_ready"].at[place])
