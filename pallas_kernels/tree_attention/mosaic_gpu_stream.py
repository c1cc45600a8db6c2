"""The streaming warpgroup: brings blocks of keys and values into the ring, and cleans those that have dead rows."""

from __future__ import annotations

from collections.abc import Iterator

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic_gpu_layouts import MATRIX, ROWS, load
from pallas_kernels.tree_attention.mosaic_gpu_static import Span, Static


def produce(static: Static, span: Span, slot, head, operands: dict, ring, barriers: dict) -> None:
    """Streams the span's blocks through the ring.

    Args:
      operands: "k" and "v" [B, K, C, D], of several layers [M * B, K, C, D] with "first_slot" [1], or pages
        [P, K, R, D] with "table" [B, M]; but for a raw projection, "k_tree" and "v_tree" [B, K, N, D].
      ring: keys and values in shared memory, [stages, block, D] each.
    """
    plgpu.set_max_registers(40, action="decrease")
    stages, steps = static.config.stages, span.end - span.begin
    cache_slot = slot + operands["first_slot"][0] if "first_slot" in operands else slot

    def await_free(name, i):
        @pl.when(i >= stages)
        def _():
            plgpu.barrier_wait(barriers[name].at[lax.rem(i, stages)])

    def copy(i, sources, v_barrier):
        place = lax.rem(i, stages)
        await_free("k_free", i)
        for rows, target in sources("k", ring[0].at[place]):
            plgpu.copy_gmem_to_smem(rows, target, barriers["k_ready"].at[place])
        await_free("v_free", i)
        for rows, target in sources("v", ring[1].at[place]):
            plgpu.copy_gmem_to_smem(rows, target, barriers[v_barrier].at[place])

    def fetch(i):
        j = span.begin + i

        def cache(name, target):
            return _cache_rows(static, span, cache_slot, head, j, operands[name], operands.get("table"), target)

        def tree(name, target):
            return _tree_rows(static, span, slot, head, j, operands[f"{name}_tree"], target)

        pl.when(static.in_cache(span, j) & (j < span.whole))(lambda: copy(i, cache, "v_ready"))
        pl.when(static.in_cache(span, j) & (j >= span.whole))(lambda: copy(i, cache, "v_raw"))
        if static.heads is None:  # or a computing warpgroup brings the tree's block
            pl.when(j >= span.cache_blocks)(lambda: copy(i, tree, "v_raw"))

    # Cleaning lags behind, so that the next copy is under way meanwhile: where the tree comes first, all that fit.
    lag = 1 if static.heads is None else stages - 1

    def step(i, _):
        pl.when(i < steps)(lambda: fetch(i))
        j = span.begin + i - lag
        dead_rows = (j >= span.whole) | (j < span.first)
        pl.when((i >= lag) & dead_rows)(lambda: _clean(static, span, i - lag, ring[1], barriers))

    lax.fori_loop(0, steps + lag, step, None)

    def drain(i, _):  # every completion of a barrier must be awaited before the barrier goes
        plgpu.barrier_wait(barriers["k_free"].at[lax.rem(i, stages)])
        plgpu.barrier_wait(barriers["v_free"].at[lax.rem(i, stages)])

    lax.fori_loop(jnp.maximum(steps - stages, 0), steps, drain, None)


def _cache_rows(static, span, slot, head, j, ref, table_g, target) -> Iterator:
    """Pairs (rows of the cache, their place in shared memory) of block j; rows past the array's end arrive as zeros."""
    block, page_rows = static.config.block, static.page_rows
    if page_rows is None:
        yield ref.at[slot, head, pl.ds(j * block, block)], target
        return
    last = lax.div(span.length - 1, page_rows)  # entries past this one may point anywhere; their rows are masked
    if page_rows > block:
        per_page = page_rows // block
        page = table_g[slot, jnp.minimum(lax.div(j, per_page), last)]
        yield ref.at[page, head, pl.ds(lax.rem(j, per_page) * block, block)], target
        return
    for piece in range(static.pieces):
        page = table_g[slot, jnp.minimum(j * static.pieces + piece, last)]
        yield ref.at[page, head], target.at[pl.ds(piece * page_rows, page_rows)]


def _tree_rows(static, span, slot, head, j, ref, target) -> Iterator:
    """The same for a block of tree rows, in as many pieces as the barriers count for a block of the cache."""
    size = static.tree_block // static.pieces
    for piece in range(static.pieces):
        first_row = (j - span.cache_blocks) * static.tree_block + piece * size
        yield ref.at[slot, head, pl.ds(first_row, size)], target.at[pl.ds(piece * size, size)]


def _clean(static, span, i, v_s, barriers) -> None:
    """Zeroes what is not finite among the values of dead cache rows and of tree rows, then hands the block on.

    A weight of zero times NaN would be NaN.
    """
    place, j = lax.rem(i, static.config.stages), span.begin + i
    in_cache = static.in_cache(span, j)
    live_rows = jnp.where(in_cache, span.length - j * static.config.block, 0)
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
        else:  # a block of tree rows ends before
            pl.when(in_cache)(lambda row=row: clean_rows(row))
    plgpu.commit_smem()
    for _ in range(static.pieces):
        plgpu.barrier_arrive(barriers["v_ready"].at[place])
