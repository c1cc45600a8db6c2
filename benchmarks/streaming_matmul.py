"""The linear layers of a decode step: our streaming kernel beside XLA (cuBLAS or Triton) and the floor.

  python -m benchmarks.streaming_matmul                          every shape at 1, 16, 64, 128 and 256 rows
  python -m benchmarks.streaming_matmul --only qkv --rows 64     shapes whose name contains the text, some rows
  python -m benchmarks.streaming_matmul --sweep                  candidate configurations, best ones as a table
  python -m benchmarks.streaming_matmul --argmax --shape qwen3.6-27b      greedy draws from the head of a model

Times are microseconds of one product inside a device loop over as many weights as exceed the level-2 cache. A sum over
each row of the result feeds the next call, so that none can be dropped or overlap; what that takes is measured alone
("glue") and subtracted before the ratio to the floor is taken. The sums of the splits are part of our time.

Draws (`--argmax`) are XLA's product and argmax ("xla"), the streaming kernel's product and XLA's argmax ("matmul"), and
the kernel that keeps only the largest ("argmax"), with the sizes of the table and candidates. Their floor is that of
the weights, x and the tokens; "error" is by how much a drawn token's logit is less than the largest.
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
from benchmarks._models import TARGETS
from benchmarks._parts import numbers
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


def head_of(name: str, rows: int) -> Shape:
    """A greedy draw from the head of a model."""
    target = TARGETS[name]
    return Shape(rows=rows, features=target.vocab_size, inputs=target.hidden_size, argmax=True)


def make_weights(name: str, shape: Shape) -> list[jax.Array]:
    """Weights of one layer, as often as exceeds the level-2 cache; the output has about unit variance."""
    count = 2 if name.startswith("tiny") else max(2, math.ceil(2.5 * _LEVEL_2_BYTES / shape.weight_bytes))
    keys = jax.random.split(jax.random.key(0), count)
    return [draw(key, (shape.panels * shape.features, shape.inputs), shape.inputs**-0.5) for key in keys]


def xla_product(x: jax.Array, weight: jax.Array, shape: Shape) -> jax.Array:
    """What the models compute without the kernel."""
    if shape.out_dtype == "float32":
        return reference.matmul(x, weight)
    y = jnp.einsum("me,oe->mo", x, weight)
    return reference.gate(y) if shape.panels == 2 else y


def step(product, x: jax.Array, *operands: jax.Array) -> jax.Array:
    """The next x, which depends on every element of the product, or on the tokens drawn."""
    y = product(x, *operands).astype(jnp.float32)
    sums = jnp.sum(y.reshape(len(x), -1), axis=-1, keepdims=True)
    return x + (sums * 1e-9).astype(x.dtype)


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way to compute a product, or to draw from it."""

    name: str
    shape: Shape
    config: Config | None = None  # None: XLA
    then_argmax: bool = False  # by XLA

    def __call__(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        if self.config is None:
            y = xla_product(x, weight, self.shape)
        else:
            compute = api.argmax_from_kernel if self.shape.argmax else api.from_kernel
            y = compute(x, weight, self.shape, self.config, early_weights=True)
        return jnp.argmax(y, axis=-1).astype(jnp.int32) if self.then_argmax else y


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


def draws(shape: Shape, candidates: int) -> list[Variant]:
    """Ways to draw from a head; by a kernel none with 0 candidates."""
    product = dataclasses.replace(shape, argmax=False, out_dtype="float32")
    found = [Variant("xla", product, then_argmax=True)]
    if candidates and (sizes := config.choose(product)):
        found.append(Variant("matmul", product, sizes, then_argmax=True))
    if candidates and (sizes := config.choose(shape)):
        each = dict.fromkeys([sizes, *variety(shape, candidates)])
        found += [Variant(f"argmax-{i}", shape, c) for i, c in enumerate(each)]
    return found


def error_of(got: jax.Array, x: jax.Array, weight: jax.Array, shape: Shape) -> float:
    """The relative error of a product; of tokens drawn, by how much their logits are less than the largest, at most."""
    out_dtype = "float32" if shape.argmax else "bfloat16"
    wanted = jax.jit(xla_product, static_argnums=2)(
        x.astype(jnp.float32), weight.astype(jnp.float32), dataclasses.replace(shape, out_dtype=out_dtype)
    )
    if shape.argmax:
        return float(jnp.max(jnp.max(wanted, axis=1) - jnp.take_along_axis(wanted, got[:, None], axis=1)[:, 0]))
    return float(jnp.linalg.norm(got.astype(jnp.float32) - wanted) / jnp.linalg.norm(wanted))


def measure_all(name: str, shape: Shape, weights: list[jax.Array], variants: list[Variant]) -> list[dict]:
    """Compiles the variants (ours at once, in threads; XLA's alone, since it tunes on the GPU), then times each."""
    rows = shape.rows
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
        ready = jnp.zeros((rows,), jnp.int32) if shape.argmax else jnp.zeros((rows, shape.features), shape.out_dtype)
        ready_sets = [(ready + jnp.asarray(i, ready.dtype),) for i in range(len(sets))]
        glue = compile_step(functools.partial(step, lambda x, y: y), operand_sets=ready_sets)
    with concurrent.futures.ThreadPoolExecutor(max(1, (os.cpu_count() or 2) - 1)) as pool:
        ours = [v for v in variants if v.config is not None]
        loops |= dict(zip(ours, pool.map(compile_one, ours)))

    records = []
    with _timing.alone():
        glue_us = _timing.time_loop_us(glue, x, ready_sets, iterations)
        for variant in variants:
            record = dict(layer=name, rows=rows, implementation=variant.name)
            record |= dataclasses.asdict(variant.config) if variant.config else {}
            try:
                if isinstance(loops[variant], Exception):
                    raise loops[variant]
                us = _timing.time_loop_us(loops[variant], x, sets, iterations)
                error = error_of(jax.jit(variant)(x, weights[0]), x, weights[0], shape)
            except Exception as failure:
                message = str(failure).strip().splitlines() or [""]
                print(json.dumps(record | dict(failed=f"{type(failure).__name__}: {message[0][:200]}")), flush=True)
                continue
            net = us - glue_us
            record |= dict(
                us=round(us, 2), glue_us=round(glue_us, 2), floor_us=round(floor_us, 2), ratio=round(net / floor_us, 3),
                gb_per_s=round(shape.bytes / net / 1e3), error=error,
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


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="layers whose name contains this")
    parser.add_argument("--rows", help="default 1,16,64,128,256; of draws the first four")
    parser.add_argument("--sweep", type=int, nargs="?", const=12, default=0, help="candidates a shape (default 12)")
    parser.add_argument("--argmax", action="store_true", help="draw from a head; candidates by --sweep (default 6)")
    parser.add_argument("--shape", choices=TARGETS, default="qwen3-8b", help="whose head")
    parser.add_argument("--skip-xla", action="store_true")
    parser.add_argument("--skip-ours", action="store_true", help="for machines without a Hopper GPU")
    args = parser.parse_args(arguments)
    device = jax.devices()[0].device_kind
    print(f"{device}, jax {jax.__version__}, XLA_FLAGS={os.environ.get('XLA_FLAGS', '')!r}", flush=True)
    best = []
    rows_each = numbers(args.rows or ("1,16,64,128" if args.argmax else "1,16,64,128,256"))
    names = [n for n in LAYERS if args.only in n and (n != "tiny" or args.only == "tiny")]
    for name in [f"{args.shape}-head"] if args.argmax else names:
        shape_with = functools.partial(head_of, args.shape) if args.argmax else functools.partial(shape_of, name)
        weights = make_weights(name, shape_with(1))
        for shape in map(shape_with, rows_each):
            if args.argmax:
                variants = draws(shape, 0 if args.skip_ours else args.sweep or 6)[args.skip_xla :]
            else:
                variants = [] if args.skip_xla else [Variant("xla", shape)]
                if args.sweep:
                    variants += [Variant(f"ours-{i}", shape, c) for i, c in enumerate(variety(shape, args.sweep))]
                elif not args.skip_ours:
                    variants.append(Variant("ours", shape, config.choose(shape)))
            records = measure_all(name, shape, weights, variants)
            if (args.sweep or args.argmax) and records:
                fastest = min(records, key=lambda record: record["us"])
                chosen = next(v for v in variants if v.name == fastest["implementation"])
                chosen = chosen.config if chosen.shape == shape else None
                best.append(f"{table_entry(shape, chosen)}  # {fastest['ratio']:.2f} of the floor")
                print(f"best: {best[-1].strip()}", flush=True)
        del weights
    if best:
        print(f"\nMEASURED{'_ARGMAX' * args.argmax} = {{\n" + "\n".join(best) + "\n}")


if __name__ == "__main__":
    main()
