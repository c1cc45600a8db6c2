"""The linear layers of a decode step: our streaming kernel beside XLA (cuBLAS or Triton) and the floor.

  python -m benchmarks.streaming_matmul                          every shape at 1, 16, 64, 128 and 256 rows
  python -m benchmarks.streaming_matmul --only qkv --rows 64     shapes whose name contains the text, some rows
  python -m benchmarks.streaming_matmul --sweep                  candidate configurations, best ones as a table

Times are microseconds of one product inside a device loop over as many weights as exceed the level-2 cache. A sum over
each row of the result feeds the next call, so that none can be dropped or overlap; what that takes is measured alone
("glue") and subtracted before the ratio to the floor is taken. The sums of the splits are part of our time.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
import json
import math
import os

import jax
import jax.numpy as jnp

from benchmarks import _timing
from pallas_kernels.streaming_matmul import api, config, reference
from pallas_kernels.streaming_matmul.config import Config, Shape

_LEVEL_2_BYTES = 60e6

# Name: (features of a panel, inner dimension, panels). Two panels are gate and up with SwiGLU.
LAYERS = {
    "qwen3-8b-qkv": (6144, 4096, 1),
    "qwen3-8b-o": (4096, 4096, 1),
    "qwen3-8b-gate_up": (12288, 4096, 2),
    "qwen3-8b-down": (4096, 12288, 1),
    "qwen3-8b-head": (151936, 4096, 1),
    "qwen3.6-27b-gate_up": (17408, 5120, 2),
    "qwen3.6-27b-down": (5120, 17408, 1),
    "tiny": (128, 256, 2),
}


def shape_of(name: str, rows: int) -> Shape:
    features, inputs, panels = LAYERS[name]
    out_dtype = "float32" if name.endswith("head") else "bfloat16"
    return Shape(rows=rows, features=features, inputs=inputs, panels=panels, out_dtype=out_dtype)


@functools.partial(jax.jit, static_argnums=(1, 2))
def draw(key: jax.Array, dims: tuple[int, ...], scale: float) -> jax.Array:
    return jax.random.normal(key, dims, jnp.bfloat16) * jnp.bfloat16(scale)


def make_weights(name: str) -> list[jax.Array]:
    """Weights of one layer, as often as exceeds the level-2 cache; the output has about unit variance."""
    features, inputs, panels = LAYERS[name]
    count = max(2, math.ceil(2.5 * _LEVEL_2_BYTES / shape_of(name, 1).weight_bytes)) if name != "tiny" else 2
    keys = jax.random.split(jax.random.key(0), count)
    return [draw(key, (panels * features, inputs), inputs**-0.5) for key in keys]


def xla_product(x: jax.Array, weight: jax.Array, shape: Shape) -> jax.Array:
    """What the models compute without the kernel."""
    if shape.out_dtype == "float32":
        return reference.matmul(x, weight)
    y = jnp.einsum("me,oe->mo", x, weight)
    return reference.gate(y) if shape.panels == 2 else y


def step(product, x: jax.Array, *operands: jax.Array) -> jax.Array:
    """The next x, which depends on every element of the product."""
    sums = jnp.sum(product(x, *operands).astype(jnp.float32), axis=-1, keepdims=True)
    return x + (sums * 1e-9).astype(x.dtype)


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way to compute a product."""

    name: str
    shape: Shape
    config: Config | None = None  # None: XLA

    def __call__(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        if self.config is None:
            return xla_product(x, weight, self.shape)
        return api.from_kernel(x, weight, self.shape, self.config, early_weights=True)


def variety(shape: Shape, limit: int) -> list[Config]:
    """The best candidates by the model, two at most of each kind, so that a wrong model does not hide the best."""
    kept, seen = [], {}
    for candidate in config.candidates(shape):
        kind = candidate.splits, candidate.cluster, candidate.block, candidate.consumers
        seen[kind] = seen.get(kind, 0) + 1
        if seen[kind] <= 2:
            kept.append(candidate)
    kept = kept[:limit]
    return kept + [dataclasses.replace(c, stagger=5) for c in kept[: -(-limit // 4)]]


def measure_all(name: str, rows: int, weights: list[jax.Array], variants: list[Variant]) -> list[dict]:
    """Compiles the variants (ours at once, in threads; XLA's alone, since it tunes on the GPU), then times each."""
    shape = shape_of(name, rows)
    x = draw(jax.random.key(1), (rows, shape.inputs), 1.0)
    sets = [(weight,) for weight in weights]
    floor_us = _timing.floor_us(shape.bytes, shape.flop)
    iterations = max(2, math.ceil(8_000 / (len(sets) * (5 + 1.5 * floor_us))))
    compile_step = functools.partial(_timing.compile_loop, carry=x, iterations=iterations)

    def compile_one(variant):
        try:
            return compile_step(functools.partial(step, variant), operand_sets=sets)
        except Exception as failure:  # one configuration that does not compile must not end the table
            return failure

    with _timing.alone():
        loops = {v: compile_one(v) for v in variants if v.config is None}
        ready = jnp.zeros((rows, shape.features), shape.out_dtype)
        ready_sets = [(ready + jnp.asarray(i, ready.dtype),) for i in range(len(sets))]
        glue = compile_step(functools.partial(step, lambda x, y: y), operand_sets=ready_sets)
    with concurrent.futures.ThreadPoolExecutor(max(1, (os.cpu_count() or 2) - 1)) as pool:
        ours = [v for v in variants if v.config is not None]
        loops |= dict(zip(ours, pool.map(compile_one, ours)))

    records = []
    with _timing.alone():
        glue_us = _timing.time_loop_us(glue, x, ready_sets, iterations)
        wanted = jax.jit(xla_product, static_argnums=2)(
            x.astype(jnp.float32), weights[0].astype(jnp.float32), dataclasses.replace(shape, out_dtype="bfloat16")
        )
        for variant in variants:
            record = dict(layer=name, rows=rows, implementation=variant.name)
            record |= dataclasses.asdict(variant.config) if variant.config else {}
            try:
                if isinstance(loops[variant], Exception):
                    raise loops[variant]
                us = _timing.time_loop_us(loops[variant], x, sets, iterations)
                got = jax.jit(variant)(x, weights[0]).astype(jnp.float32)
                error = jnp.linalg.norm(got - wanted) / jnp.linalg.norm(wanted)
            except Exception as failure:
                message = str(failure).strip().splitlines() or [""]
                print(json.dumps(record | dict(failed=f"{type(failure).__name__}: {message[0][:200]}")), flush=True)
                continue
            net = us - glue_us
            record |= dict(
                us=round(us, 2), glue_us=round(glue_us, 2), floor_us=round(floor_us, 2), ratio=round(net / floor_us, 3),
                gb_per_s=round(shape.bytes / net / 1e3), error=float(error),
            )  # fmt: skip
            records.append(record)
            fields = ("tile", "splits", "cluster", "consumers", "block", "stages", "stagger")
            sizes = " ".join(f"{field} {record[field]}" for field in fields if field in record)
            print(
                f"{name:>20} {rows:4d} {variant.name:<10} {net:8.1f} us (+{glue_us:5.1f})  floor {floor_us:6.1f}  "
                f"x{net / floor_us:5.2f}  {record['gb_per_s']:5d} GB/s  error {record['error']:.1e}  {sizes}",
                flush=True,
            )
            print(json.dumps(record), flush=True)
    return records


def table_entry(shape: Shape, chosen: Config | None) -> str:
    """A line of `config.MEASURED`; None where XLA is faster."""
    value = "None"
    if chosen is not None:
        fields = [f for f in dataclasses.fields(Config) if getattr(chosen, f.name) != f.default]
        value = "Config(" + ", ".join(f"{f.name}={getattr(chosen, f.name)}" for f in fields) + ")"
    return f"    ({shape.features}, {shape.inputs}, {shape.panels}, {shape.rows}): {value},"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="layers whose name contains this")
    parser.add_argument("--rows", default="1,16,64,128,256")
    parser.add_argument("--sweep", type=int, nargs="?", const=12, default=0, help="candidates a shape (default 12)")
    parser.add_argument("--skip-xla", action="store_true")
    parser.add_argument("--skip-ours", action="store_true", help="for machines without a Hopper GPU")
    args = parser.parse_args()
    device = jax.devices()[0].device_kind
    print(f"{device}, jax {jax.__version__}, XLA_FLAGS={os.environ.get('XLA_FLAGS', '')!r}", flush=True)
    best = []
    for name in LAYERS:
        if args.only not in name or (name == "tiny" and args.only != "tiny"):
            continue
        weights = make_weights(name)
        for rows in (int(r) for r in args.rows.split(",")):
            shape = shape_of(name, rows)
            variants = [] if args.skip_xla else [Variant("xla", shape)]
            if args.sweep:
                variants += [Variant(f"ours-{i}", shape, c) for i, c in enumerate(variety(shape, args.sweep))]
            elif not args.skip_ours:
                variants.append(Variant("ours", shape, config.choose(shape)))
            records = measure_all(name, rows, weights, variants)
            if args.sweep and records:
                fastest = min(records, key=lambda record: record["us"])
                chosen = next(v.config for v in variants if v.name == fastest["implementation"])
                best.append(f"{table_entry(shape, chosen)}  # {fastest['ratio']:.2f} of the floor")
                print(f"best: {best[-1].strip()}", flush=True)
        del weights
    if best:
        print("\nMEASURED = {\n" + "\n".join(best) + "\n}")


if __name__ == "__main__":
    main()
