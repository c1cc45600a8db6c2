"""The linear layers of a decoder layer as a decode step chains them, with the norms between, attention left out.

  python -m benchmarks.layer_chain --shape qwen3-8b --rows 64              the sizes in use, ours and XLA's
  python -m benchmarks.layer_chain --shape qwen3-8b --rows 64 --sweep      other sizes for one product at a time
  python -m benchmarks.layer_chain --shape qwen3.6-27b --mixer delta       of the recurrent layers

Products by the streaming kernel read weights while the kernel before them ends, so a product by itself
(`streaming_matmul`) does not tell what it costs in a layer: sizes are chosen here. Times are microseconds of a layer in
a loop on the device; its weights do not fit in the level-2 cache. The sweep tries other sizes of one product at a time
and prints the best as lines of `config.MEASURED`.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
import os

import jax
import jax.numpy as jnp

from benchmarks import _timing
from benchmarks._models import TARGETS, normal
from benchmarks.streaming_matmul import table_entry
from ddtree_jax.config import TargetConfig
from ddtree_jax.models.decoder import projected_heads
from ddtree_jax.models.layers import swiglu, total
from pallas_kernels.fused_norm import add_rms_norm, qk_norm_rope
from pallas_kernels.streaming_matmul import api, config, partial_sums
from pallas_kernels.streaming_matmul.config import Config, Shape

Sizes = dict[str, Config | None]  # of each product; None: XLA
_UNROLLED = 6  # layers a turn of the loop, so that the host launches turns faster than the GPU takes them


def shapes(target: TargetConfig, mixer: str, rows: int) -> dict[str, Shape]:
    """The products of a layer."""
    hidden, inner = target.hidden_size, target.num_heads * target.head_dim
    sizes = {"qkv": (target.qkv_heads * target.head_dim, hidden, 1), "o": (hidden, inner, 1)}
    if mixer == "delta":
        d = target.delta
        sizes = {
            "in": (d.projected_channels, hidden, 1),
            "out": (hidden, d.value_size, 1),
        }
    sizes |= {
        "gate_up": (target.intermediate_size, hidden, 2),
        "down": (hidden, target.intermediate_size, 1),
    }
    return {n: Shape(rows=rows, features=f, inputs=i, panels=p) for n, (f, i, p) in sizes.items()}


def make_weights(target: TargetConfig, mixer: str) -> dict[str, jax.Array]:
    made = {
        name: normal(jax.random.key(i), (s.panels * s.features, s.inputs), jnp.bfloat16, s.inputs**-0.5)
        for i, (name, s) in enumerate(shapes(target, mixer, 1).items())
    }
    ones = functools.partial(jnp.ones, dtype=jnp.bfloat16)
    return made | dict(norm=ones(target.hidden_size), head_norm=ones(target.head_dim))


def layer(target: TargetConfig, rows: int, sizes: Sizes, carry, weights) -> tuple[jax.Array, jax.Array]:
    """One layer: (residual stream, its norm) [1, M, E] each -> the same."""
    stream, normed = carry
    eps, zero_centred = target.rms_norm_eps, target.zero_centred_norms
    table = jnp.ones((1, rows, (target.rotary_dim or target.head_dim) // 2), jnp.float32)

    def product(name, x):
        if sizes[name] is None:
            return jnp.einsum("bme,oe->bmo", x, weights[name])
        return partial_sums(x, weights[name], config=sizes[name], early_weights=True)

    if "qkv" in sizes:
        norms = [weights["head_norm"]] * 2
        mixed = jax.lax.optimization_barrier(
            qk_norm_rope(product("qkv", normed), *norms, table, table, projected_heads(target))
        )
        update = product("o", mixed[0].reshape(1, rows, -1))
    else:
        gates = total(product("in", normed))[..., -target.delta.value_size :]
        update = product("out", jax.nn.silu(gates))
    stream, normed = add_rms_norm(stream, update, weights["norm"], eps=eps, zero_centred=zero_centred)
    if sizes["gate_up"] is None:
        hidden = swiglu(product("gate_up", normed))
    else:
        options = dict(implementation="mosaic_gpu", early_weights=True, config=sizes["gate_up"])
        hidden = api.streaming_swiglu(normed, weights["gate_up"], **options)
    return add_rms_norm(stream, product("down", hidden), weights["norm"], eps=eps, zero_centred=zero_centred)


def compile_chain(target: TargetConfig, rows: int, sizes: Sizes, weights, turns: int):
    """Compiles `turns` layers one after the other, or returns why that failed."""
    carry = (jnp.ones((1, rows, target.hidden_size), jnp.bfloat16),) * 2
    step = functools.partial(layer, target, rows, sizes)
    try:
        return _timing.compile_loop(step, carry, [(weights,)] * _UNROLLED, turns)
    except Exception as failure:  # one configuration that does not compile must not end the table
        return failure


def measure(target, rows: int, weights, variants: list[Sizes], turns: int = 20) -> list[float]:
    """Microseconds of a layer with each of the sizes; infinite where they fail, with a line that says why."""
    compile_one = functools.partial(compile_chain, target, rows, weights=weights, turns=turns)
    tuned = [i for i, sizes in enumerate(variants) if None in sizes.values()]
    with _timing.alone():  # XLA tunes its products on the GPU
        runs = {i: compile_one(variants[i]) for i in tuned}
    with concurrent.futures.ThreadPoolExecutor(max(1, (os.cpu_count() or 2) // 2)) as pool:
        rest = [i for i in range(len(variants)) if i not in runs]
        runs |= dict(zip(rest, pool.map(compile_one, [variants[i] for i in rest])))
    carry = (normal(jax.random.key(1), (1, rows, target.hidden_size), jnp.bfloat16, 1.0),) * 2
    times = []
    with _timing.alone():
        for i in range(len(variants)):
            try:
                if isinstance(runs[i], Exception):
                    raise runs[i]
                times.append(_timing.time_loop_us(runs[i], carry, [(weights,)] * _UNROLLED, turns))
            except Exception as failure:
                message = str(failure).strip().splitlines() or [""]
                print(f"# failed: {variants[i]}: {type(failure).__name__}: {message[0][:200]}", flush=True)
                times.append(float("inf"))
    return times


def variety(shape: Shape, limit: int) -> list[Config]:
    """The best cuts by the model, each by itself and for clusters of two, the first two also with a stagger."""
    cuts: dict[tuple[int, int], list[Config]] = {}
    for candidate in config.candidates(shape):
        cuts.setdefault((candidate.tile, candidate.splits), []).append(candidate)
    kept = []
    for i, same in enumerate(list(cuts.values())[:limit]):
        firsts = {c.cluster: c for c in reversed(same)}  # the best of each cluster
        kept += firsts.values()
        kept += [dataclasses.replace(same[0], stagger=5)] if i < 2 else []
    return kept


def sweep(target, rows: int, weights, products: dict[str, Shape], base: Sizes, limit: int) -> Sizes:
    """The sizes with which each product alone is best, the others as in `base`; every figure is printed."""
    options = {name: list(dict.fromkeys([base[name], *variety(shape, limit)])) for name, shape in products.items()}
    flat = [(name, option) for name, found in options.items() for option in found]
    times = measure(target, rows, weights, [base | {name: option} for name, option in flat])
    best = dict(base)
    for name, shape in products.items():
        found = sorted((us, i) for i, ((n, _), us) in enumerate(zip(flat, times)) if n == name)
        for us, i in found:
            print(
                f"{name:>8} {rows:4d} rows {us:8.1f} us a layer  {table_entry(shape, flat[i][1]).strip()}", flush=True
            )
        best[name] = flat[found[0][1]][1]
    return best


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=TARGETS, default="qwen3-8b")
    parser.add_argument("--mixer", choices=("attention", "delta"), default="attention")
    parser.add_argument("--rows", default="1,16,64,128,256")
    parser.add_argument("--sweep", type=int, nargs="?", const=5, default=0, help="cuts a product (default 5)")
    parser.add_argument("--products", help="sweep only these, by comma")
    parser.add_argument("--variants", default="xla,ours,in use", help="what to time beside the sweep")
    args = parser.parse_args(arguments)
    target = TARGETS[args.shape]
    weights = make_weights(target, args.mixer)
    lines = []
    for rows in (int(r) for r in args.rows.split(",")):
        products = shapes(target, args.mixer, rows)
        ours: Sizes = {name: config.choose(shape) for name, shape in products.items()}
        used = {name: size if config.measured_faster(products[name]) else None for name, size in ours.items()}
        xla: Sizes = dict.fromkeys(products)
        floor = sum(_timing.floor_us(s.weight_bytes, s.flop) for s in products.values())
        variants = {"xla": xla, "ours": ours, "in use": used}
        variants = {name: sizes for name, sizes in variants.items() if name in args.variants.split(",")}
        if args.sweep:
            swept = {n: s for n, s in products.items() if not args.products or n in args.products.split(",")}
            best = sweep(target, rows, weights, swept, ours, args.sweep)
            lines += [table_entry(shape, best[name]) for name, shape in swept.items()]
            variants["best"] = best
        for name, us in zip(variants, measure(target, rows, weights, list(variants.values()))):
            print(f"{args.shape} {rows:4d} rows {name:<7} {us:8.1f} us a layer, floor {floor:.1f}, x{us / floor:.2f}")
    if lines:
        print("\n".join(lines))


if __name__ == "__main__":
    main()
