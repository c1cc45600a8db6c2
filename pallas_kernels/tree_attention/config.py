"""Sizes of the Mosaic GPU tree-attention kernel."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """How one call is cut up. Units: keys, thread blocks, warpgroups."""

    block: int = 128  # keys per step of the softmax, a multiple of 64
    stages: int = 2  # steps of keys and values in flight
    consumers: int = 2  # warpgroups that compute, 64 rows each, over the same keys
    splits: int = 1  # thread blocks that share the keys of a row tile
    merge: str = "cluster"  # the splits form a cluster and merge in it; "kernel": a second kernel merges
    schedule: str = "turns"
