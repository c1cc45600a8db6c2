"""How query rows are packed into tiles of 64, and the masks in that order. Plain jnp: no kernel here.

One tile holds `nodes_per_tile` nodes for `heads_per_tile` query heads of the same key/value head; row r of a tile is
head r // nodes_per_tile, node r % nodes_per_tile. So each head's rows are one TMA copy straight out of q [B, N, H, D]
(and back), with no transpose before or after the kernel. Rows past N or past the group are computed and dropped.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.tree_attention import masks

TILE = 64  # rows of one Hopper wgmma


@dataclasses.dataclass(frozen=True)
class RowPlan:
    """Tiles of 64 rows for one key/value head of one slot."""

    nodes: int  # N
    group: int  # G
    nodes_per_tile: int  # 8, 16, 32 or 64

    @property
    def heads_per_tile(self) -> int:
        return TILE // self.nodes_per_tile

    @property
    def node_tiles(self) -> int:
        return -(-self.nodes // self.nodes_per_tile)

    @property
    def head_tiles(self) -> int:
        return -(-self.group // self.heads_per_tile)

    @property
    def tiles(self) -> int:
        """Tile t holds node tile t // head_tiles and head tile t % head_tiles."""
        return self.node_tiles * self.head_tiles


def plan_rows(nodes: int, group: int) -> RowPlan:
    """The plan with the fewest tiles; among equals the one with the fewest copies."""
    plans = [RowPlan(nodes, group, size) for size in (64, 32, 16, 8)]
    return min(plans, key=lambda plan: (plan.tiles, plan.heads_per_tile))


def row_words(
    ancestors: jax.Array,  # [B, N, W] uint32
    positions: jax.Array | None,  # [B, N] int32, with sliding_window
    sliding_window: int | None,
    plan: RowPlan,
    key_slots: int,
) -> jax.Array:  # [B, node_tiles, key_slots/32, 64] int32
    """Tree masks in tile order, one word of 32 keys at a time; keys N .. key_slots-1 are masked.

    Depends on the tree alone, so that one XLA computation builds it once for all layers.
    """
    if sliding_window is not None:
        ancestors = masks.pack_bits(masks.tree_mask(ancestors, positions, sliding_window))
    batch, nodes, words = ancestors.shape
    spare = plan.node_tiles * plan.nodes_per_tile - nodes
    padded = jnp.pad(lax.bitcast_convert_type(ancestors, jnp.int32), ((0, 0), (0, spare), (0, key_slots // 32 - words)))
    tiled = padded.reshape(batch, plan.node_tiles, plan.nodes_per_tile, key_slots // 32).transpose(0, 1, 3, 2)
    return jnp.tile(tiled, (1, 1, 1, plan.heads_per_tile))


def row_values(values: jax.Array, plan: RowPlan) -> jax.Array:
    """Numbers of each node, [B, N, ...] -> [B, node_tiles, 64, ...], in tile order (0 for rows past N)."""
    batch, nodes, *rest = values.shape
    unpadded = [(0, 0)] * len(rest)
    padded = jnp.pad(values, ((0, 0), (0, plan.node_tiles * plan.nodes_per_tile - nodes), *unpadded))
    tiled = padded.reshape(batch, plan.node_tiles, plan.nodes_per_tile, *rest)
    return jnp.tile(tiled, (1, 1, plan.heads_per_tile, *(1 for _ in rest)))
