"""Attention as its kernel leaves it, for a kernel that merges the splits of the context while it reads them."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.tree_attention.packing import RowPlan


@dataclasses.dataclass(frozen=True)
class MergePlan:
    """What is static about merging.

    Attributes:
      rows: of tiles.
      tile_stride: tiles of a key/value head among the partial results.
      splits: of the context.
      slots: B.
      nodes: N.
      kv_heads: K.
      head_dim: D.
    """

    rows: RowPlan
    tile_stride: int
    splits: int
    slots: int
    nodes: int
    kv_heads: int
    head_dim: int

    @property
    def features(self) -> int:
        """H * D."""
        return self.kv_heads * self.rows.group * self.head_dim

    @property
    def live_rows(self) -> int:
        """Rows of a tile that stand for a head."""
        return min(self.rows.heads_per_tile, self.rows.group) * self.rows.nodes_per_tile

    @property
    def whole_tiles(self) -> bool:
        """Whether tiles end where heads and slots do, but for rows past the end of everything."""
        plan = self.rows
        nodes = self.slots == 1 or self.nodes % plan.nodes_per_tile == 0
        return nodes and (plan.head_tiles == 1 or plan.group % plan.heads_per_tile == 0)


@dataclasses.dataclass(frozen=True)
class SplitAttention:
    """Results of `tree_attention(merge=False)`.

    Attributes:
      parts: [P, 64, D], each row divided by the sum of its weights, by slot, key/value head, tile and split.
      sums: [P, 64] float32, logarithms (base 2) of those sums.
      plan: what the partial results stand for.
    """

    parts: jax.Array
    sums: jax.Array
    plan: MergePlan

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the attention, (B, N, H, D)."""
        plan = self.plan
        return plan.slots, plan.nodes, plan.kv_heads * plan.rows.group, plan.head_dim

    @property
    def dtype(self) -> jnp.dtype:
        return self.parts.dtype
