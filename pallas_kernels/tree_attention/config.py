"""Sizes of the Mosaic GPU tree-attention kernel."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """How one call is cut up. Units: keys, thread blocks, warpgroups."""

    block: int = 128  # keys per step of the softmax, a multiple of 64
    stages: int = 2  # steps of keys and values in flight
    consumers: int = 2  # computing warpgroups, 64 rows each, over the same keys: 1 or 2
    splits: int = 1  # thread blocks that share the keys of a row tile
    merge: str = "cluster"  # the splits form a cluster and merge in it; "kernel": a second kernel merges
    registers: int = 232  # of a computing thread; 120 with one consumer lets two thread blocks share a multiprocessor
    early_merge: bool = False  # launch the merging kernel while the last splits finish (programmatic dependent launch)


def choose(q_shape: tuple[int, ...], kv_heads: int, capacity: int) -> Config:
    """The configuration for queries [B, N, H, D] over `kv_heads` caches of `capacity` rows."""
    return Config(block=64, stages=2, consumers=1, splits=1)
