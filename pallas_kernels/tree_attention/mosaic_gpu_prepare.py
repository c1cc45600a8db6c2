"""Norm and rotary embedding of what a raw projection holds, in place in shared memory, before the first product."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.fused_norm.mosaic_gpu_heads import norm_rotate
from pallas_kernels.mosaic_gpu_layouts import MATRIX, ROW, ROWS, load
from pallas_kernels.tree_attention.mosaic_gpu_static import Static


def fetch_tree(static: Static, slot, head, operands: dict, ring, scratch) -> None:
    """Brings the tree's block, raw keys and values, to the first place of the ring.

    The streaming warpgroup, which does so with finished ones, has no registers left for it.
    """
    rows, heads = pl.ds(0, static.tree_block), static.heads
    raw = operands["q"].at[slot, rows]
    plgpu.copy_gmem_to_smem(raw.at[:, heads.queries + head], ring[0].at[0, rows], scratch["k_raw"])
    plgpu.copy_gmem_to_smem(raw.at[:, heads.queries + heads.keys + head], ring[1].at[0, rows], scratch["v_raw"].at[0])


def prepare_queries(static: Static, slot, node_tile, q_s, operands: dict, ready) -> None:
    """Waits for the queries of a tile [64, D] and makes them what the scores are computed of."""
    _prepare(static, q_s, operands.get("q_weight"), operands["tables"].at[slot, node_tile], ready)
    plgpu.commit_smem()


def prepare_keys(static: Static, slot, head, k_s, operands: dict, keys_g, scratch) -> None:
    """The same for the tree's block of keys, the first of the ring; hands it on, and writes it out for a commit.

    Thread blocks that hold other rows over the same keys do the same work; only the first writes.

    Args:
      k_s: the block's place in the ring, [block, D].
      keys_g: [B, K, N, D].
    """
    first_table = 0 if static.plan.nodes_per_tile == ROWS else static.plan.node_tiles
    for tile in range(static.tree_block // ROWS):
        ready = scratch["k_raw"] if tile == 0 else None
        tables_g = operands["tables"].at[slot, first_table + tile]
        _prepare(static, k_s.at[pl.ds(tile * ROWS, ROWS)], operands.get("k_weight"), tables_g, ready)
    plgpu.commit_smem()
    plgpu.barrier_arrive(scratch["k_ready"].at[0])

    @pl.when(lax.axis_index("rows") == 0)
    def _():
        rows = pl.ds(0, static.tree_block)
        plgpu.copy_smem_to_gmem(k_s.at[rows], keys_g.at[slot, head, rows])


def _prepare(static: Static, tile, weight_g, tables_g, ready) -> None:
    """Norms and rotates one head of 64 tokens.

    Args:
      tile: the head in shared memory, [64, D].
      tables_g: cosines and sines of its rows, [2, 64, R / 2].
      ready: barrier of its arrival, if it has not been awaited.
    """
    weight = None if weight_g is None else load(weight_g, ROW)  # what is read here overlaps the wait
    cos, sin = (load(tables_g.at[i], MATRIX) for i in range(2))
    if ready is not None:
        plgpu.barrier_wait(ready)
    x = plgpu.load(tile, layout=MATRIX)
    tile[...] = jnp.concatenate(norm_rotate(x, weight, cos, sin, static.heads), axis=1)
