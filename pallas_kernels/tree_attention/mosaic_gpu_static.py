"""What is static about one call of the Mosaic GPU kernels."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp

from pallas_kernels.fused_norm import Heads
from pallas_kernels.tree_attention import packing
from pallas_kernels.tree_attention.config import Config

LOG2E = math.log2(math.e)
LOWEST = -1e30  # finite: the difference of two of these is a number


@dataclasses.dataclass(frozen=True)
class Static:
    """Everything static about one call."""

    plan: packing.RowPlan
    config: Config
    slots: int
    kv_heads: int
    head_dim: int
    dtype: jnp.dtype
    scale: float
    softcap: float | None
    windowed: bool
    page_rows: int | None  # None: the cache is [B, K, C, D]; else pages of so many rows
    interpreted: bool
    heads: Heads | None = None  # of the raw projection that the operand "q" is; None: queries and tree rows are apart

    @property
    def row_blocks(self) -> int:
        """Thread blocks along the rows of one key/value head."""
        return -(-self.plan.tiles // self.config.consumers)

    @property
    def tree_block(self) -> int:
        """Tree keys per step."""
        return min(self.config.block, 64 * -(-self.plan.nodes // 64))

    @property
    def tree_blocks(self) -> int:
        return -(-self.plan.nodes // self.tree_block)

    @property
    def pieces(self) -> int:
        """Copies that bring one block of keys: as many as the pages that hold it."""
        return 1 if self.page_rows is None else max(1, self.config.block // self.page_rows)

    @property
    def early_launch(self) -> bool:
        """Whether the kernels are launched while what they wait for finishes (programmatic dependent launch)."""
        return (self.config.splits > 1 or self.heads is not None) and not self.interpreted

    def in_cache(self, span: Span, j: jax.Array) -> jax.Array:
        """Whether block j is one of the cache, and not of the tree.

        Tree blocks come after them; the one of a raw projection comes before, so that its keys are normed while the
        computing warpgroups carry nothing yet.
        """
        return j < span.cache_blocks if self.heads is None else j >= span.first

    def first_partial(self, slot, head, tile):
        """Where the results of a tile's splits begin among all partial results."""
        tiles = self.row_blocks * self.config.consumers
        return ((slot * self.kv_heads + head) * tiles + tile) * self.config.splits


@dataclasses.dataclass(frozen=True)
class Span:
    """Run-time scalars: one thread block's blocks [begin, end) of the list of cache blocks, then tree blocks.

    Of a raw projection the list is the tree's block, numbered `first` - 1, then cache blocks.
    """

    begin: jax.Array
    end: jax.Array
    first: jax.Array  # cache block that some row may see
    whole: jax.Array  # cache blocks before this one are live throughout
    cache_blocks: jax.Array
    length: jax.Array
