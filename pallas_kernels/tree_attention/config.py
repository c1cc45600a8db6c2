"""Sizes of the Mosaic GPU tree-attention kernel, and their choice by a model fitted to measurements on an H200."""

from __future__ import annotations

import dataclasses

from pallas_kernels.tree_attention import packing

_MULTIPROCESSORS = 132
_SHARED_BYTES = 227 * 1024 - 2048  # of one thread block, less barriers and small buffers


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """How one call is cut up. Units: keys, thread blocks, warpgroups."""

    block: int  # keys per step of the softmax, a multiple of 64
    stages: int  # steps of keys and values in flight
    consumers: int  # computing warpgroups, 64 rows each, over the same keys: 1 or 2
    splits: int  # thread blocks that share the keys of a row tile


def choose(q_shape: tuple[int, ...], kv_heads: int, capacity: int) -> Config:
    """The configuration for queries [B, N, H, D] over `kv_heads` caches of `capacity` rows.

    The capacity stands for the length, known only at run time; a shorter prefix leaves some splits with less to do.
    """
    slots, nodes, heads, head_dim = q_shape
    tiles = packing.plan_rows(nodes, heads // kv_heads).tiles
    # Two tiles of wide heads leave room for two stages only: better two thread blocks with a deeper ring each.
    consumers = 1 if tiles == 1 or (tiles == 2 and head_dim > 128) else 2
    # Wide blocks pay once the steps are many.
    many = capacity >= 16384 if consumers == 1 else capacity > 1024 or tiles > 8
    block = 128 if head_dim <= 128 and many else 64
    blocks = -(-capacity // block) + -(-nodes // block)
    row_blocks = slots * kv_heads * -(-tiles // consumers)

    def cost(splits: int) -> float:
        return _estimate_us(splits, blocks, row_blocks, block, consumers, head_dim)

    room = (_SHARED_BYTES - consumers * packing.TILE * head_dim * 2) // (4 * block * head_dim)
    # One warpgroup is fed from memory and wants all the room; with two, a deeper ring only delays the first block.
    stages = min(room, 8 if consumers == 1 else 256 // block)
    return Config(block=block, stages=stages, consumers=consumers, splits=min(range(1, min(32, blocks) + 1), key=cost))


def _estimate_us(splits: int, blocks: int, row_blocks: int, block: int, consumers: int, head_dim: int) -> float:
    """What a call takes, in microseconds: waves of thread blocks, each a start and its steps; then the merge.

    The constants are rounded from timings of one H200: 1.5 us for 128 rows over 128 keys at head_dim 128, 6 us from
    launch to the first step and from the last one to the end, 3 us for the merging kernel and 3 TB/s for what passes
    through it.
    """
    step = 1.5 * (block / 128) * (head_dim / 128) * (1.0 if block == 128 else 1.3 if consumers == 2 else 1.2)
    waves = -(-row_blocks * splits // _MULTIPROCESSORS)
    main = waves * (6.0 + step * -(-blocks // splits))
    if splits == 1:
        return main
    partial_bytes = row_blocks * splits * consumers * packing.TILE * head_dim * 2
    return main + 3.0 + 2 * partial_bytes / 3e6
