"""The gated delta rule of Qwen3.5/3.6: verification of a tree (one layer) and commit of a path (all layers).

  python -m benchmarks.gated_delta_tree                the table: our kernels beside XLA, and the floor
  python -m benchmarks.gated_delta_tree --only 27b     shapes whose name contains the text
  python -m benchmarks.gated_delta_tree --skip-xla     our kernels only

Times are microseconds of one call inside a device loop; each call of the verification reads the state of another layer,
and all layers together exceed the level-2 cache. The floor is that of memory or of arithmetic, whichever takes longer:
for the verification one read of the state, the operands and the output; for the commit one read and one write of all
states. Errors are relative to float32. Needs a Hopper GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import _timing
from benchmarks.tree_attention import random_tree
from pallas_kernels.gated_delta_tree import gated_delta_replay, gated_delta_tree

_LEVEL_2_BYTES = 60e6
_DIM = 128


@dataclasses.dataclass(frozen=True)
class Model:
    """The recurrent layers of one model, B slots; Dk = Dv = 128."""

    name: str
    layers: int
    value_heads: int
    key_heads: int = 16
    slots: int = 1

    @property
    def state_bytes(self) -> int:
        """Of one layer, all slots."""
        return 4 * self.slots * self.value_heads * _DIM * _DIM

    def verify_floor_us(self, nodes: int) -> float:
        heads = 2 * self.key_heads + 2 * self.value_heads  # q and k, v and the output
        grams = 2 * self.key_heads * 2 * nodes**2 * _DIM
        # Products with the state, the triangular solve and the product with the scores (half of it above the diagonal).
        rest = self.value_heads * (2 * 2 * nodes * _DIM**2 + 2 * nodes**2 * _DIM)
        return _timing.floor_us(self.state_bytes + 2 * self.slots * nodes * heads * _DIM, self.slots * (grams + rest))

    def replay_floor_us(self) -> float:
        return _timing.floor_us(2 * self.layers * self.state_bytes, 0)


MODELS = (
    Model("qwen3.6-27b", layers=48, value_heads=48),
    Model("qwen3.5-9b", layers=24, value_heads=32),
    Model("qwen3.5-4b", layers=24, value_heads=32),
    Model("qwen3.6-27b-b4", layers=48, value_heads=48, slots=4),
)
WIDTHS = (16, 32, 64, 128, 256)
COUNTS = (1, 4, 8, 16)  # rows of a commit, of 16


def draw(model: Model, lead: tuple[int, ...], dtype, seed: int = 0) -> tuple[jax.Array, ...]:
    """q and k [*lead, Hk, 128], v [*lead, Hv, 128], log_decay and beta [*lead, Hv]."""
    keys = jax.random.split(jax.random.key(seed), 5)

    def unit(key):
        x = jax.random.normal(key, (*lead, model.key_heads, _DIM), jnp.float32)
        return x / jnp.linalg.norm(x, axis=-1, keepdims=True)

    gates = (*lead, model.value_heads)
    v = jax.random.normal(keys[2], (*gates, _DIM), jnp.float32)
    log_decay = -jnp.exp(jax.random.uniform(keys[3], gates, jnp.float32, -7.0, 1.0))
    beta = jax.nn.sigmoid(jax.random.normal(keys[4], gates, jnp.float32))
    q, k = unit(keys[0]) * jnp.float32(_DIM**-0.5), unit(keys[1])
    return q.astype(dtype), k.astype(dtype), v.astype(jnp.bfloat16), log_decay, beta


def draw_states(model: Model, layers: int, seed: int) -> jax.Array:
    shape = (layers, model.slots, model.value_heads, _DIM, _DIM)
    return 0.3 * jax.random.normal(jax.random.key(seed), shape, jnp.float32)


def verify(model: Model, nodes: int, implementation: str) -> dict:
    """Times one layer's verification; the output of a call is the values of the next."""
    q, k, v, log_decay, beta = draw(model, (model.slots, nodes), jnp.bfloat16)
    words = random_tree(np.random.default_rng(0), nodes)
    ancestors = jnp.asarray(np.broadcast_to(words, (model.slots, *words.shape)))
    count = math.ceil(2.5 * _LEVEL_2_BYTES / model.state_bytes)
    sets = [(q, k, log_decay, beta, draw_states(model, 1, 1 + i), ancestors) for i in range(count)]

    def call(v, q, k, log_decay, beta, states, ancestors, implementation=implementation):
        return gated_delta_tree(q, k, v, log_decay, beta, states, ancestors, layer=0, implementation=implementation)

    wide = [x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x for x in (v, *sets[0])]
    wanted = jax.jit(functools.partial(call, implementation="xla"))(*wide)
    difference = jax.jit(call)(v, *sets[0]).astype(jnp.float32) - wanted
    error = float(jnp.linalg.norm(difference.ravel()) / jnp.linalg.norm(wanted.ravel()))
    iterations = max(2, math.ceil(10_000 / (count * 20)))
    us = _timing.time_loop_us(_timing.compile_loop(call, v, sets, iterations), v, sets, iterations)
    return dict(us=us, floor_us=model.verify_floor_us(nodes), error=error)


def replay(model: Model, rows: int, implementation: str) -> dict:
    """Times the commit of `rows` of 16 rows to all layers; the states of a call are those of the next."""
    _, k, v, log_decay, beta = draw(model, (model.layers, model.slots, 16), jnp.float32)
    states, counts = draw_states(model, model.layers, 1), jnp.full((model.slots,), rows, jnp.int32)

    def call(states, *operands, implementation=implementation):
        *rest, counts = operands
        return gated_delta_replay(*rest, states, counts, implementation=implementation)

    operands = (k, v, log_decay, beta, counts)
    wanted = jax.jit(functools.partial(call, implementation="xla"))(states, *operands)
    difference = jax.jit(call)(states, *operands) - wanted
    error = float(jnp.linalg.norm(difference.ravel()) / jnp.linalg.norm(wanted.ravel()))
    loop = _timing.compile_loop(call, states, [operands], 50)
    return dict(us=_timing.time_loop_us(loop, states, [operands], 50), floor_us=model.replay_floor_us(), error=error)


def report(kind: str, shape: str, implementation: str, measure) -> None:
    """Measures, and prints a row and a JSON line; a failure is printed and passed over."""
    record = dict(kind=kind, shape=shape, implementation=implementation)
    try:
        with _timing.alone():
            record |= measure()
    except Exception as failure:  # what does not compile must not end the table
        message = str(failure).strip().splitlines() or [""]
        print(json.dumps(record | dict(failed=f"{type(failure).__name__}: {message[0][:200]}")), flush=True)
        return
    record["ratio"] = record["us"] / record["floor_us"]
    times = f"{record['us']:9.2f} us  floor {record['floor_us']:7.2f}  x{record['ratio']:6.2f}"
    print(f"{kind:>7} {shape:>20} {implementation:<10} {times}  error {record['error']:.1e}", flush=True)
    print(json.dumps({key: round(x, 9) if isinstance(x, float) else x for key, x in record.items()}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="shapes whose name contains this")
    parser.add_argument("--skip-xla", action="store_true")
    arguments = parser.parse_args()
    implementations = ("mosaic_gpu",) if arguments.skip_xla else ("mosaic_gpu", "xla")
    for model in MODELS:
        for kind, function, sizes in (("verify", verify, WIDTHS), ("replay", replay, COUNTS)):
            for size in sizes:
                shape = f"{model.name}-{size}"
                for implementation in implementations if arguments.only in shape else ():
                    report(kind, shape, implementation, functools.partial(function, model, size, implementation))


if __name__ == "__main__":
    main()
