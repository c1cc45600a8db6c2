"""Tree attention of one layer: our kernel beside XLA, cuDNN with a mask, and the floor that the hardware sets.

  python -m benchmarks.tree_attention                 the table of the documentation
  python -m benchmarks.tree_attention --sweep         every configuration that fits, for each shape
  python -m benchmarks.tree_attention --only 64x8192  shapes whose name contains the text

Times are microseconds of one call inside a device loop, over as many caches as exceed the level-2 cache.
Needs a Hopper GPU. cuDNN gets its operands (one joined sequence, a boolean mask) ready-made.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import _timing
from pallas_kernels.tree_attention import masks, mosaic_gpu, packing, reference, tree_attention
from pallas_kernels.tree_attention.config import Config

_LEVEL_2_BYTES = 60e6


@dataclasses.dataclass(frozen=True)
class Shape:
    """One call: B slots, N nodes, H query heads, K key/value heads, D head_dim, context length."""

    nodes: int
    context: int
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    slots: int = 1
    target_us: float | None = None

    @property
    def name(self) -> str:
        slots = f"b{self.slots}-" if self.slots > 1 else ""
        return f"{slots}h{self.heads}k{self.kv_heads}d{self.head_dim}-{self.nodes}x{self.context}"

    @property
    def bytes(self) -> int:
        kv = 2 * self.kv_heads * (self.context + self.nodes) * self.head_dim
        return 2 * self.slots * (kv + 2 * self.nodes * self.heads * self.head_dim)

    @property
    def flop(self) -> int:
        return 4 * self.slots * self.heads * self.nodes * (self.context + self.nodes) * self.head_dim

    @property
    def floor_us(self) -> float:
        return _timing.floor_us(self.bytes, self.flop)


SHAPES = (
    Shape(1, 8192),
    Shape(1, 32768, target_us=41),
    Shape(16, 1024),
    Shape(16, 8192, target_us=13),
    Shape(64, 1024, target_us=9),
    Shape(64, 8192, target_us=20),
    Shape(64, 32768, target_us=75),
    Shape(128, 8192, target_us=40),
    Shape(256, 1024),
    Shape(256, 8192, target_us=75),
    Shape(256, 32768, target_us=280),
    Shape(16, 8192, heads=24, kv_heads=4, head_dim=256),
    Shape(64, 8192, heads=24, kv_heads=4, head_dim=256),
    Shape(64, 32768, heads=24, kv_heads=4, head_dim=256),
    Shape(256, 8192, heads=24, kv_heads=4, head_dim=256),
    Shape(64, 8192, slots=4),
)


def random_tree(rng: np.random.Generator, nodes: int) -> np.ndarray:
    """Ancestor words [N, ceil(N/32)] uint32 of a random tree."""
    sees = np.eye(nodes, dtype=bool)
    for i in range(1, nodes):
        sees[i] |= sees[rng.integers(max(0, i - 8), i)]
    padded = np.pad(sees, ((0, 0), (0, -nodes % 32)))
    return np.packbits(padded, axis=1, bitorder="little").view(np.uint32)


def make_operands(shape: Shape, count: int, seed: int = 0):
    """q, and `count` sets of (k_cache, v_cache, lengths, k_tree, v_tree, ancestors)."""
    rng = np.random.default_rng(seed)
    b, n, k, d = shape.slots, shape.nodes, shape.kv_heads, shape.head_dim
    keys = jax.random.split(jax.random.key(seed), 1 + 4 * count)

    def draw(key, *dims):
        return jax.random.normal(key, dims, jnp.bfloat16)

    ancestors = jnp.asarray(np.broadcast_to(random_tree(rng, n), (b, n, -(-n // 32))))
    lengths = jnp.full((b,), shape.context, jnp.int32)
    sets = []
    for i in range(count):
        k_cache, v_cache = (draw(key, b, k, shape.context, d) for key in keys[1 + 4 * i : 3 + 4 * i])
        k_tree, v_tree = (draw(key, b, k, n, d) for key in keys[3 + 4 * i : 5 + 4 * i])
        sets.append((k_cache, v_cache, lengths, k_tree, v_tree, ancestors))
    return draw(keys[0], b, n, shape.heads, d), sets


def candidates(shape: Shape) -> list[Config]:
    """Configurations that fit in shared memory and about fill the GPU."""
    tiles = packing.plan_rows(shape.nodes, shape.heads // shape.kv_heads).tiles
    found = []
    for consumers, block, splits in itertools.product((1, 2), (64, 128), (1, 2, 3, 4, 5, 6, 8, 11, 16, 32)):
        row_blocks = shape.slots * shape.kv_heads * -(-tiles // consumers)
        if consumers > tiles or not 60 <= row_blocks * splits <= 264:
            continue
        free = 225 * 1024 - consumers * 64 * shape.head_dim * 2
        stages = min(free // (4 * block * shape.head_dim), 8)
        if stages >= 2:
            found.append(Config(consumers=consumers, block=block, splits=splits, stages=stages))
    return found


@jax.jit
def join(k_cache, v_cache, lengths, k_tree, v_tree, ancestors):
    """Operands for cuDNN: keys and values [B, C + N, K, D] in one sequence, and their mask [B, 1, N, C + N] bool."""
    nodes, context = k_tree.shape[2], k_cache.shape[2]
    prefix = jnp.arange(context)[None, :] < lengths[:, None]
    prefix = jnp.broadcast_to(prefix[:, None, :], (len(lengths), nodes, context))
    mask = jnp.concatenate([prefix, masks.unpack_bits(ancestors, nodes)], axis=-1)[:, None]
    keys, values = (
        jnp.concatenate(pair, axis=2).transpose(0, 2, 1, 3) for pair in ((k_cache, k_tree), (v_cache, v_tree))
    )
    return keys, values, mask


def wanted_output(q, operands, scale: float) -> jax.Array:
    """The float32 reference on one set of operands."""
    wide = [x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x for x in (q, *operands)]
    return jax.jit(lambda *a: reference.tree_attention(*a, scale=scale))(*wide)


def measure(shape: Shape, name: str, call, q, sets, wanted=None) -> None:
    """Times one implementation and prints it as a row and as a JSON line; failures are printed and passed over."""
    record = dict(shape=shape.name, implementation=name)
    iterations = max(2, math.ceil(10_000 / (len(sets) * (3 + 2 * shape.floor_us))))
    try:
        loop = _timing.compile_loop(call, q, sets, iterations)
        with _timing.alone():
            if wanted is not None:
                difference = jax.jit(call)(q, *sets[0]).astype(jnp.float32) - wanted
                record["error"] = float(jnp.linalg.norm(difference.ravel()) / jnp.linalg.norm(wanted.ravel()))
            us = _timing.time_loop_us(loop, q, sets, iterations)
    except Exception as failure:  # a configuration that does not compile must not end the table
        message = str(failure).strip().splitlines() or [""]
        print(json.dumps(record | dict(failed=f"{type(failure).__name__}: {message[0][:200]}")), flush=True)
        return
    record |= dict(
        us=round(us, 2),
        floor_us=round(shape.floor_us, 2),
        ratio=round(us / shape.floor_us, 2),
        gb_per_s=round(shape.bytes / us / 1e3),
        tflop_per_s=round(shape.flop / us / 1e6, 1),
        target_us=shape.target_us,
    )
    rates = f"{record['gb_per_s']:6.0f} GB/s {record['tflop_per_s']:6.1f} TFLOP/s"
    times = f"{us:9.2f} us  floor {shape.floor_us:7.2f}  x{record['ratio']:5.2f}"
    print(f"{shape.name:>22} {name:<48} {times}  {rates}  error {record.get('error', math.nan):.1e}", flush=True)
    print(json.dumps(record), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sweep", action="store_true", help="every configuration that fits, ours only")
    parser.add_argument("--only", default="", help="shapes whose name contains this")
    parser.add_argument("--skip-baselines", action="store_true")
    arguments = parser.parse_args()
    for shape in SHAPES:
        if arguments.only in shape.name:
            run(shape, sweep=arguments.sweep, baselines=not arguments.skip_baselines)


def run(shape: Shape, *, sweep: bool, baselines: bool) -> None:
    """Measures one shape: every candidate of ours, or the default beside the baselines."""
    scale = shape.head_dim**-0.5
    count = max(2, math.ceil(2.5 * _LEVEL_2_BYTES / shape.bytes))
    with _timing.alone():
        q, sets = make_operands(shape, count)
        wanted = jax.block_until_ready(wanted_output(q, sets[0], scale))
    if sweep:
        for config in candidates(shape):
            label = " ".join(f"{k}={v}" for k, v in dataclasses.asdict(config).items())
            call = functools.partial(mosaic_gpu.tree_attention, scale=scale, config=config)
            measure(shape, label, call, q, sets, wanted)
        return
    for name in ("mosaic_gpu", "xla") if baselines else ("mosaic_gpu",):
        call = functools.partial(tree_attention, scale=scale, implementation=name)
        measure(shape, name, call, q, sets, wanted)
    if baselines:
        with _timing.alone():
            joined = jax.block_until_ready([join(*operands) for operands in sets])

        def cudnn(q, keys, values, mask):
            return jax.nn.dot_product_attention(q, keys, values, mask=mask, scale=scale, implementation="cudnn")

        measure(shape, "cudnn", cudnn, q, joined, wanted)


if __name__ == "__main__":
    main()
