"""Sizes of the streaming matmul kernel, their choice by a cost model, and what was measured better than the model."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import jax.numpy as jnp

from pallas_kernels.mosaic_gpu_layouts import ROWS, swizzle_bytes

MAX_ROWS = 256
MULTIPROCESSORS = 132
SHARED_BYTES = 227 * 1024 - 1024  # of one thread block, less barriers
_REGISTERS = 512  # of one multiprocessor, per thread of a warpgroup
PRODUCER_REGISTERS = 40


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """One product: M rows times `panels` weight matrices of F rows each, one above the other.

    Attributes:
      rows: M, 1..256.
      features: F, output columns.
      inputs: E, the inner dimension.
      panels: 1, or 2 for silu(x @ gate.T) * (x @ up.T).
      dtype: of x and the weights, by name.
      out_dtype: of the result, by name.
      argmax: of each row only the column of the largest is wanted, of one panel; `out_dtype` says nothing then.
    """

    rows: int
    features: int
    inputs: int
    panels: int = 1
    dtype: str = "bfloat16"
    out_dtype: str = "bfloat16"
    argmax: bool = False

    @property
    def weight_bytes(self) -> int:
        return self.panels * self.features * self.inputs * jnp.dtype(self.dtype).itemsize

    @property
    def bytes(self) -> int:
        """Weights, x and the result, each moved once."""
        x_bytes = self.rows * self.inputs * jnp.dtype(self.dtype).itemsize
        row_bytes = 4 if self.argmax else self.features * jnp.dtype(self.out_dtype).itemsize
        return self.weight_bytes + x_bytes + self.rows * row_bytes

    @property
    def flop(self) -> int:
        return 2 * self.rows * self.panels * self.features * self.inputs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """How one product is cut up.

    Attributes:
      tile: output columns of a thread block, a multiple of 16 up to 256 (of each panel, if there are two).
      splits: thread blocks that share the inner dimension of a tile.
      cluster: thread blocks, 1 or 2, that share each block of x by multicast. (An H200 does not run 33 clusters of 4.)
      consumers: computing warpgroups; they share the row tiles of x evenly.
      block: inner columns of one step of the ring, a multiple of 64.
      stages: steps in flight.
      limit: thread blocks launched at most; each then takes several tiles.
      stagger: inner blocks by which each thread block starts further on (and wraps around), so that not all of them
        read the same columns of the weights, which may lie in few memory channels, at a time; 0 for none.
    """

    tile: int
    splits: int
    cluster: int
    consumers: int
    block: int
    stages: int
    limit: int = MULTIPROCESSORS
    stagger: int = 0

    def row_tiles(self, shape: Shape) -> int:
        """Tiles of 64 rows that each consumer holds."""
        return -(-_row_tiles(shape) // self.consumers)

    def copied_rows(self, shape: Shape) -> int:
        """Rows of x that are brought into the ring: whole tiles of 8, as many for each thread block of a cluster."""
        step = 8 * self.cluster
        return min(-(-shape.rows // step) * step, ROWS * self.consumers * self.row_tiles(shape))

    def tiles(self, shape: Shape) -> int:
        return -(-shape.features // self.tile)

    def groups(self, shape: Shape) -> int:
        return -(-self.tiles(shape) // self.cluster)

    def workers(self, shape: Shape) -> int:
        """Thread blocks or clusters launched: as many as run at once, or as there is work for."""
        return min(self.limit // self.cluster, self.groups(shape) * self.splits)

    def blocks(self, shape: Shape) -> int:
        return shape.inputs // self.block

    def check(self, shape: Shape) -> None:
        """Raises ValueError where these sizes cannot cut up this product."""

        def require(name: str, expected: str, ok: bool) -> None:
            if not ok:
                raise ValueError(f"{name} must be {expected} for {shape}, got {self}")

        require("tile", "a multiple of 16, 16..256", self.tile % 16 == 0 and 16 <= self.tile <= 256)
        require("block", "a multiple of 64 that divides E", self.block % 64 == 0 and shape.inputs % self.block == 0)
        require("splits", "1..E / block", 1 <= self.splits <= max(1, shape.inputs // self.block))
        require("splits", "1, of one panel,", not shape.argmax or self.splits == shape.panels == 1)
        require("cluster", "1 or 2", self.cluster in (1, 2))
        require("consumers", "1..4, not more than tiles of 64 rows", 1 <= self.consumers <= _row_tiles(shape))
        require("stages", "2 or more", self.stages >= 2)
        require("limit", "cluster or more", self.limit >= self.cluster)
        require("stagger", "0 or more", self.stagger >= 0)
        require("tile", "such that results are whole tiles of a write", _writes_whole_tiles(shape, self))

    @property
    def consumer_registers(self) -> int:
        return consumer_registers(self.consumers, producers=1)


def consumer_registers(consumers: int, producers: int) -> int:
    """Registers of a consumer's thread: what the producers leave, in steps of 8.

    A launch gives every thread the same number, in steps of 8; only what it gave can be shared out anew, and a
    warpgroup that asks for more waits for ever.
    """
    warpgroups = consumers + producers
    given = _REGISTERS // warpgroups // 8 * 8 * warpgroups
    return min(232, (given - producers * PRODUCER_REGISTERS) // consumers // 8 * 8)


def _row_tiles(shape: Shape) -> int:
    return -(-shape.rows // ROWS)


def epilogue_columns(shape: Shape, config: Config) -> int:
    """Columns of a tile that pass through shared memory at a time: at most 28 KiB a consumer, rows of 32 bytes."""
    size = jnp.dtype(shape.out_dtype if config.splits == 1 else "float32").itemsize
    parts = (n for n in range(1, config.tile) if config.tile * size % (32 * n) == 0)
    return next(config.tile // n for n in parts if ROWS * config.tile // n * size <= 28 * 1024)


def _writes_whole_tiles(shape: Shape, config: Config) -> bool:
    """Whether the result's columns are a multiple of those that a write to it is tiled by."""
    if shape.argmax:  # no columns are written
        return True
    itemsize = jnp.dtype(shape.out_dtype if config.splits == 1 else "float32").itemsize
    return shape.features % (swizzle_bytes(epilogue_columns(shape, config), itemsize) // itemsize) == 0


def shared_bytes(shape: Shape, config: Config, stages: int) -> int:
    """Shared memory of a thread block with so many stages."""
    x_rows = ROWS * config.consumers * config.row_tiles(shape)
    stage = (x_rows + shape.panels * config.tile) * config.block * jnp.dtype(shape.dtype).itemsize
    if shape.argmax:  # a float32 and an int32 a row
        staging = 8
    else:
        size = jnp.dtype(shape.out_dtype if config.splits == 1 else "float32").itemsize
        staging = epilogue_columns(shape, config) * size
    return stages * stage + config.consumers * ROWS * staging


def candidates(shape: Shape) -> list[Config]:
    """Every configuration that fits shared memory and registers and is not plainly wasteful, best estimate first."""
    found = []
    tiles = [t for t in range(32, 257, 16) if t * shape.panels <= 256]
    rows = _row_tiles(shape)
    shares = (1,) if shape.argmax else (1, 2, 3, 4, 6, 8)
    for tile, splits, cluster, block in itertools.product(tiles, shares, (1, 2), (64, 128)):
        for consumers in {min(rows, 2), min(rows, 3), rows}:
            config = Config(tile=tile, splits=splits, cluster=cluster, consumers=consumers, block=block, stages=1)
            accumulators = config.row_tiles(shape) * shape.panels * tile // 2  # registers of each thread
            blocks = shape.inputs // block
            if shape.inputs % block or blocks < 2 * splits or accumulators > config.consumer_registers - 40:
                continue
            if not _writes_whole_tiles(shape, config):
                continue
            stages = 1
            while stages < min(12, blocks) and shared_bytes(shape, config, stages + 1) <= SHARED_BYTES:
                stages += 1
            if stages >= 3:
                found.append(dataclasses.replace(config, stages=stages))
    return sorted(found, key=lambda config: estimate_us(shape, config))


def estimate_us(shape: Shape, config: Config) -> float:
    """What a product takes, in microseconds: the slowest of the paths that data take, a start, and the partial sums.

    The rates are a model of an H200 (4.39 TB/s of memory and 790 TFLOP/s measured; level-2 cache and the port of a
    multiprocessor estimated), meant to order configurations, not to predict times.
    """
    size = jnp.dtype(shape.dtype).itemsize
    tiles, workers = config.tiles(shape), config.workers(shape)
    items = config.groups(shape) * config.splits
    most = -(-items // workers)  # items of the busiest worker
    inner = -(-config.blocks(shape) // config.splits) * config.block
    padded = ROWS * config.consumers * config.row_tiles(shape)
    weight_item, x_item = shape.panels * config.tile * inner * size, shape.rows * inner * size
    running = workers * config.cluster
    memory = shape.weight_bytes / 4.3e6 * max(1.0, 100 / running)
    level2 = (shape.weight_bytes + tiles * config.splits * x_item / config.cluster) / 6.0e6
    port = most * (weight_item + config.copied_rows(shape) * inner * size) / 80e3
    balance = most * weight_item * running / 4.3e6  # if every multiprocessor gets an even share of the memory
    arithmetic = most * running * 2 * padded * shape.panels * config.tile * inner / 750e6
    # A deep ring hides latency; short steps cost barriers.
    depth = config.stages * (padded + shape.panels * config.tile) * config.block * size
    shallow = 1.0 + max(0.0, 0.15 * (1 - depth / 120e3)) + (0.02 if config.block == 64 else 0.0)
    partial = 0.0
    if config.splits > 1:
        partial = 2 * config.splits * shape.panels * shape.rows * shape.features * 4 / 5e6
    return 2.5 + shallow * max(memory, level2, port, 0.95 * balance, arithmetic) + partial


# Best of `python -m benchmarks.layer_chain --sweep` on an H200 (heads: of `benchmarks.streaming_matmul`), None where
# XLA was faster. Keys: (features, inputs, panels, rows), where a number of rows stands for itself and those down to the
# next key.
MEASURED: dict[tuple[int, int, int, int], Config | None] = {
    # Qwen3-8B, and its DFlash drafter
    (6144, 4096, 1, 1): Config(tile=48, splits=1, cluster=1, consumers=1, block=128, stages=7),
    (6144, 4096, 1, 16): Config(tile=48, splits=1, cluster=2, consumers=1, block=128, stages=7),
    (6144, 4096, 1, 64): Config(tile=48, splits=1, cluster=2, consumers=1, block=128, stages=7),
    (6144, 4096, 1, 128): Config(tile=128, splits=2, cluster=2, consumers=2, block=64, stages=6),
    (4096, 4096, 1, 1): Config(tile=32, splits=1, cluster=1, consumers=1, block=128, stages=9),
    (4096, 4096, 1, 16): Config(tile=64, splits=2, cluster=2, consumers=1, block=128, stages=6),
    (4096, 4096, 1, 64): Config(tile=96, splits=3, cluster=2, consumers=1, block=128, stages=5),
    (4096, 4096, 1, 128): Config(tile=112, splits=3, cluster=2, consumers=2, block=64, stages=5),
    (12288, 4096, 2, 1): Config(tile=48, splits=1, cluster=2, consumers=1, block=128, stages=5, stagger=5),
    (12288, 4096, 2, 16): Config(tile=32, splits=1, cluster=2, consumers=1, block=128, stages=6, stagger=5),
    (12288, 4096, 2, 64): Config(tile=96, splits=1, cluster=1, consumers=1, block=128, stages=3, stagger=5),
    (12288, 4096, 2, 128): Config(tile=112, splits=1, cluster=2, consumers=2, block=64, stages=4),
    (4096, 12288, 1, 1): Config(tile=64, splits=2, cluster=2, consumers=1, block=128, stages=6),
    (4096, 12288, 1, 16): Config(tile=64, splits=2, cluster=2, consumers=1, block=128, stages=6),
    (4096, 12288, 1, 64): Config(tile=64, splits=2, cluster=2, consumers=1, block=128, stages=6),
    (4096, 12288, 1, 128): Config(tile=144, splits=4, cluster=2, consumers=2, block=64, stages=5),
    (151936, 4096, 1, 64): Config(tile=192, splits=1, cluster=1, consumers=1, block=128, stages=3),
    (151936, 4096, 1, 128): None,
    # Qwen3.6-27B; one row as measured for 16
    (14336, 5120, 1, 1): Config(tile=128, splits=1, cluster=1, consumers=1, block=128, stages=4),
    (14336, 5120, 1, 16): Config(tile=112, splits=1, cluster=1, consumers=1, block=128, stages=4),
    (14336, 5120, 1, 64): Config(tile=112, splits=1, cluster=2, consumers=1, block=128, stages=4, stagger=5),
    (16480, 5120, 1, 1): Config(tile=32, splits=1, cluster=2, consumers=1, block=128, stages=9),
    (16480, 5120, 1, 16): Config(tile=32, splits=1, cluster=2, consumers=1, block=128, stages=9),
    (16480, 5120, 1, 64): Config(tile=176, splits=1, cluster=2, consumers=1, block=128, stages=3),
    (5120, 6144, 1, 1): Config(tile=80, splits=2, cluster=1, consumers=1, block=128, stages=5),
    (5120, 6144, 1, 16): Config(tile=80, splits=2, cluster=2, consumers=1, block=128, stages=5),
    (5120, 6144, 1, 64): Config(tile=80, splits=2, cluster=2, consumers=1, block=128, stages=5),
    (17408, 5120, 2, 1): Config(tile=48, splits=1, cluster=1, consumers=1, block=128, stages=5),
    (17408, 5120, 2, 16): Config(tile=48, splits=1, cluster=1, consumers=1, block=128, stages=5),
    (17408, 5120, 2, 64): Config(tile=48, splits=1, cluster=2, consumers=1, block=128, stages=5, stagger=5),
    (5120, 17408, 1, 1): Config(tile=80, splits=2, cluster=1, consumers=1, block=128, stages=5, stagger=5),
    (5120, 17408, 1, 16): Config(tile=80, splits=2, cluster=1, consumers=1, block=128, stages=5, stagger=5),
    (5120, 17408, 1, 64): Config(tile=80, splits=2, cluster=2, consumers=1, block=128, stages=5),
}
# The same for an argmax (`python -m benchmarks.streaming_matmul --argmax --shape qwen3-8b`). With fewer rows there is
# little to write, and the product's own choice stands.
MEASURED_ARGMAX: dict[tuple[int, int, int, int], Config | None] = {
    # Qwen3-8B
    (151936, 4096, 1, 64): Config(tile=192, splits=1, cluster=1, consumers=1, block=128, stages=3),
    (151936, 4096, 1, 128): Config(tile=192, splits=1, cluster=2, consumers=2, block=64, stages=5, stagger=5),
    # Qwen3.6-27B
    (248320, 5120, 1, 64): Config(tile=96, splits=1, cluster=2, consumers=1, block=128, stages=5),
    (248320, 5120, 1, 128): Config(tile=160, splits=1, cluster=2, consumers=2, block=128, stages=3, stagger=5),
}
_MEASURED_ROWS = (1, 16, 64, 128, 256)


def _key(shape: Shape) -> tuple[int, int, int, int]:
    rows = next(m for m in _MEASURED_ROWS if shape.rows <= m)
    return shape.features, shape.inputs, shape.panels, rows


def measured_faster(shape: Shape) -> bool:
    """Whether the kernel was measured to be faster than XLA; a whole step with unmeasured sizes was not."""
    return _measured(shape) is not None


def _measured(shape: Shape) -> Config | None:
    """Sizes were measured with 16-bit results (but for heads): a float32 one takes more shared memory."""
    config = (MEASURED_ARGMAX if shape.argmax else MEASURED).get(_key(shape))
    return config if config and shared_bytes(shape, config, config.stages) <= SHARED_BYTES else None


@functools.lru_cache
def choose(shape: Shape) -> Config | None:
    """The configuration for a product, or None if no configuration fits it."""
    return _measured(shape) or next(iter(candidates(shape)), None)
