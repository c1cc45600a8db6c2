"""Sizes of the linear-chain kernel and what was measured."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax.numpy as jnp

from pallas_kernels.mosaic_gpu_layouts import ROWS, copied_rows
from pallas_kernels.streaming_matmul.config import MULTIPROCESSORS, SHARED_BYTES, Shape, consumer_registers

MAX_ROWS = 128  # more are bound by arithmetic, where XLA is as good
REDUCTION_BYTES = 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chain:
    """What a chain computes: M rows through the products between one mixer and the next.

    Attributes:
      rows: M, 1..128.
      mixed: A, columns of the mixer's result.
      hidden: E, of the residual stream.
      intermediate: F, of the feed-forward block.
      projected: Q, rows of the next mixer's projection; 0 to end with the norm before it.
      dtype: of everything but partial sums, by name.
      eps, zero_centred: of both norms.
    """

    rows: int
    mixed: int
    hidden: int
    intermediate: int
    projected: int = 0
    dtype: str = "bfloat16"
    eps: float = 1e-6
    zero_centred: bool = False

    @property
    def shapes(self) -> dict[str, Shape]:
        """Of the products, in their order."""
        sizes = {
            "out": (self.hidden, self.mixed, 1),
            "gate_up": (self.intermediate, self.hidden, 2),
            "down": (self.hidden, self.intermediate, 1),
            "next": (self.projected, self.hidden, 1),
        }
        return {
            name: Shape(rows=self.rows, features=f, inputs=i, panels=p, dtype=self.dtype, out_dtype=self.dtype)
            for name, (f, i, p) in sizes.items()
            if f
        }

    @property
    def padded_rows(self) -> int:
        """Rows of what passes between the products: whole tiles of 8."""
        return copied_rows(self.rows)


@dataclasses.dataclass(frozen=True)
class Cut:
    """How one product is cut up: into tiles of so many columns (of each panel), and the inner dimension in splits."""

    tile: int
    splits: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """How a chain is cut up.

    Attributes:
      out, gate_up, down, next: the products.
      workers: thread blocks, one a multiprocessor: all of them must run at once.
      consumers: computing warpgroups, which share the row tiles of x evenly.
      block: inner columns of one step, a multiple of 64.
      weight_stages, x_stages: steps in flight.
    """

    out: Cut
    gate_up: Cut
    down: Cut
    next: Cut = Cut(tile=64, splits=1)
    workers: int = MULTIPROCESSORS
    consumers: int = 1
    block: int = 128
    weight_stages: int
    x_stages: int

    def cut(self, name: str) -> Cut:
        return getattr(self, name)

    def row_tiles(self, chain: Chain) -> int:
        """Tiles of 64 rows that each consumer holds."""
        return -(-_row_tiles(chain) // self.consumers)

    def x_rows(self, chain: Chain) -> int:
        """Rows of x in shared memory."""
        return ROWS * self.consumers * self.row_tiles(chain)

    def largest_tile(self, chain: Chain) -> int:
        return max(self.cut(name).tile for name in chain.shapes)

    @property
    def consumer_registers(self) -> int:
        return consumer_registers(self.consumers, producers=2)

    def result_dtype(self, chain: Chain, name: str) -> str:
        """Of what a product writes: partial sums in float32, or the result itself."""
        return "float32" if name in ("out", "down") or self.cut(name).splits > 1 else chain.dtype

    def stored_rows(self, chain: Chain) -> int:
        """Rows of what passes between the steps: those of one row tile that there are, or whole row tiles."""
        return chain.padded_rows if chain.rows <= ROWS else self.x_rows(chain)

    def shared_bytes(self, chain: Chain) -> int:
        """Shared memory of a thread block."""
        size = jnp.dtype(chain.dtype).itemsize
        weights = self.weight_stages * self.largest_tile(chain) * self.block * size
        x = self.x_stages * self.x_rows(chain) * self.block * size
        return weights + x + REDUCTION_BYTES

    def check(self, chain: Chain) -> None:
        """Raises ValueError where these sizes cannot cut up this chain."""

        def require(name: str, expected: str, ok: bool) -> None:
            if not ok:
                raise ValueError(f"{name} must be {expected} for {chain}, got {self}")

        require("hidden", "a multiple of 128", chain.hidden % 128 == 0)
        for name, shape in chain.shapes.items():
            cut, whole = self.cut(name), shape.inputs % self.block == 0
            require("block", f"a multiple of 64 that divides the inputs of {name}", self.block % 64 == 0 and whole)
            require(f"{name}.tile", "a multiple of 16, 16..256", cut.tile % 16 == 0 and 16 <= cut.tile <= 256)
            require(f"{name}.splits", "1..inputs / block", 1 <= cut.splits <= shape.inputs // self.block)
            require(f"{name}.tile", "such that columns come in eights", math.gcd(cut.tile, shape.features) % 8 == 0)
        require("gate_up.splits", "1", self.gate_up.splits == 1)
        require("consumers", "1..4, not more than tiles of 64 rows", 1 <= self.consumers <= _row_tiles(chain))
        require("stages", "2 or more", min(self.weight_stages, self.x_stages) >= 2)
        require("workers", "1 or more", self.workers >= 1)
        accumulators = self.row_tiles(chain) * max(s.panels * self.cut(n).tile for n, s in chain.shapes.items()) // 2
        require("tiles", "such that accumulators fit the registers", accumulators <= self.consumer_registers - 40)


def _row_tiles(chain: Chain) -> int:
    return -(-chain.rows // ROWS)


_BLOCK = 128
_TILES = range(16, 144 + 1, 16)
_ROUND_BYTES = 3e6  # what a further item of a thread block costs, in bytes of the memory's time
_PREFETCH_BYTES = 25e6  # what the memory could bring while thread blocks wait for each other


def _cut(chain: Chain, name: str, largest: int, stages: int, most_splits: int = 6) -> tuple[float, Cut]:
    """The best cut of one product into tiles of at most `largest` columns and so many splits, and its cost.

    In bytes, as if all time were that of reading memory: weights, with what is missing to the last round of thread
    blocks; a quarter of x, which comes from the level-2 cache; partial sums, which everybody waits for; and what the
    ring cannot hold of this product while the one before ends.
    """
    shape, size = chain.shapes[name], jnp.dtype(chain.dtype).itemsize
    found = [(float("inf"), Cut(tile=largest, splits=1))]
    for tile in (t for t in _TILES if t <= largest and math.gcd(t, shape.features) % 8 == 0):
        for splits in (1,) if name == "gate_up" else range(1, min(most_splits, shape.inputs // _BLOCK) + 1):
            tiles = -(-shape.features // tile)
            rounds = -(-tiles * splits // MULTIPROCESSORS)
            weights = rounds * MULTIPROCESSORS * shape.panels * tile * (shape.inputs / splits) * size
            whole = splits == 1 and name in ("gate_up", "next")
            x = tiles * shape.rows * shape.inputs * size
            sums = shape.rows * shape.features * (size if whole else 8 * splits)
            ring = min(stages * tile * _BLOCK, shape.panels * tile * shape.inputs // splits) * size * MULTIPROCESSORS
            missing = max(0.0, _PREFETCH_BYTES - ring) if name in ("gate_up", "next") else 0.0
            found.append((weights + x / 4 + sums + rounds * _ROUND_BYTES + missing, Cut(tile=tile, splits=splits)))
    return min(found, key=lambda cost_cut: cost_cut[0])


def candidates(chain: Chain) -> list[Config]:
    """A configuration for each largest tile and depth of x's ring that fit, best estimate first."""
    if chain.hidden % 128 or any(shape.inputs % _BLOCK for shape in chain.shapes.values()):
        return []
    found = []
    for largest in _TILES:
        for x_stages in (3, 4, 5):
            config = Config(
                **dict.fromkeys(chain.shapes, Cut(tile=largest, splits=1)),
                consumers=_row_tiles(chain), weight_stages=2, x_stages=x_stages,
            )  # fmt: skip
            slot = largest * _BLOCK * jnp.dtype(chain.dtype).itemsize
            stages = 2 + (SHARED_BYTES - config.shared_bytes(chain)) // slot
            cuts = {name: _cut(chain, name, largest, stages) for name in chain.shapes}
            cost = sum(cost for cost, _ in cuts.values()) + (5 - x_stages) * 2e6
            if stages >= 3 and cost < float("inf"):
                kept = {name: cut for name, (_, cut) in cuts.items()}
                if chain.projected and chain.rows <= ROWS:
                    # The chain takes 2 us longer, but attention then norms the queries itself: 4 us and a launch less.
                    kept["next"] = _cut(chain, "next", largest, stages, most_splits=1)[1]
                found.append((cost, dataclasses.replace(config, **kept, weight_stages=min(stages, 12))))
    return [config for _, config in sorted(found, key=lambda cost_config: cost_config[0])]


@functools.lru_cache
def choose(chain: Chain) -> Config | None:
    """The configuration for a chain, by a rule that was fitted to an H200; None if none fits it."""
    return next(iter(candidates(chain)), None)


# Where a whole round on an H200 was faster by this kernel than a product at a time, at every number of rows tried
# (`python -m benchmarks.decode_step --matmul chain`), in bfloat16: mixed, hidden, intermediate, projected.
MEASURED = {
    # Qwen3-8B and its DFlash drafter
    (4096, 4096, 12288, 6144),
    (4096, 4096, 12288, 0),
    # Qwen3.6-27B, into attention and into a recurrent layer, and its drafter
    (6144, 5120, 17408, 14336),
    (6144, 5120, 17408, 16480),
    (6144, 5120, 17408, 0),
    (4096, 5120, 17408, 6144),
    (4096, 5120, 17408, 0),
    # Qwen3.5-9B, like Qwen3-8B but for the projections: measured, though not beside a product at a time
    (4096, 4096, 12288, 10240),
    (4096, 4096, 12288, 12352),
}


def measured_faster(chain: Chain) -> bool:
    """Whether the kernel was measured to be faster than a product at a time."""
    sizes = chain.mixed, chain.hidden, chain.intermediate, chain.projected
    return chain.dtype == "bfloat16" and sizes in MEASURED
