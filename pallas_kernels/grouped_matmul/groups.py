"""Rows brought together by group: each group begins at a tile of its own, and no tile has rows of two groups.

Shape letters: A rows, X groups, R rows of a tile, T tiles at most, P = T * R padded rows.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Groups(NamedTuple):
    """Where the rows lie. Group x holds its rows in their own order, padded to whole tiles; groups without rows hold
    nothing.

    Attributes:
      place: [A] int32, the padded row of each row.
      source: [P] int32, the row that belongs at each padded row; 0 where none does.
      tile_group: [T] int32, the group of each tile; meaningless from `tiles` on.
      tiles: [1] int32, how many tiles have rows.
    """

    place: jax.Array
    source: jax.Array
    tile_group: jax.Array
    tiles: jax.Array

    @property
    def rows_per_tile(self) -> int:
        return self.source.shape[0] // self.tile_group.shape[0]


def tile_rows(rows: int, groups: int) -> int:
    """R for `rows` spread over `groups`: twice the mean, so that most groups are one tile and are read once.

    8 at least (TMA copies tiles of 8 rows). 64 at most: from there on a tile holds enough rows to be worth its weights.
    """
    size = 8
    while size < 64 and size * groups < 2 * rows:
        size *= 2
    return size


def most_tiles(rows: int, groups: int, tile: int) -> int:
    """T: one tile a group, and one more for every R rows beyond the first of each group."""
    return min(rows, groups) + max(0, rows - groups) // tile


def group_rows(group: jax.Array, num_groups: int, tile: int) -> Groups:
    """Lays rows out by group.

    Args:
      group: [A] int32 in 0 .. num_groups - 1, the group of each row.
      num_groups: X.
      tile: R, see `tile_rows`.
    """
    rows = group.shape[0]
    member = (group[:, None] == jnp.arange(num_groups, dtype=jnp.int32)[None, :]).astype(jnp.int32)  # [A, X]
    seen = jnp.cumsum(member, axis=0)
    last_tile = jnp.cumsum((seen[-1] + tile - 1) // tile)  # [X], one past each group's tiles
    first_tile = jnp.concatenate([jnp.zeros(1, jnp.int32), last_tile[:-1]])
    # Of each row, the padded row it would have in every group; its own is taken.
    places = first_tile[None, :] * tile + seen - 1
    place = jnp.take_along_axis(places, group[:, None], axis=1, mode="clip")[:, 0]
    count = most_tiles(rows, num_groups, tile)
    passed = last_tile[None, :] <= jnp.arange(count, dtype=jnp.int32)[:, None]
    tile_group = jnp.minimum(jnp.sum(passed, axis=1, dtype=jnp.int32), num_groups - 1)
    source = jnp.zeros(count * tile, jnp.int32).at[place].set(jnp.arange(rows, dtype=jnp.int32), unique_indices=True)
    return Groups(place=place, source=source, tile_group=tile_group, tiles=last_tile[-1:])
