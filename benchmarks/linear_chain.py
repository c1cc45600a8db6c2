"""The kernel that runs all products between two mixers: its time, and where it goes.

  python -m benchmarks.linear_chain --shape qwen3-8b --rows 1,16,64,128
  python -m benchmarks.linear_chain --shape qwen3.6-27b --mixer delta --rows 64 --trace
  python -m benchmarks.linear_chain --shape qwen3-4b --rows 64 --sweep 8    sizes beside those that the rule takes
  python -m benchmarks.linear_chain --rows 64 --sizes 96x3,96,96x3,48:7:3:128                     sizes of one's own

Times are microseconds of one chain in a loop on the device, each fed with the residual stream of the one before;
weights do not fit in the level-2 cache. Sizes are tile and splits of the products in their order, stages of the weights
and of x, and inner columns of a step; what does not compile is said and left out. `--trace` prints when the kernel's
phases begin and end by the clocks of the multiprocessors: least, median and greatest over all thread blocks, in
thousands of cycles from the first.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import functools
import glob
import json
import os
import statistics
import sys
import tempfile
from unittest import mock

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from benchmarks import _timing, layer_chain
from benchmarks._models import TARGETS, normal
from benchmarks._parts import numbers
from ddtree_jax.config import TargetConfig
from pallas_kernels.linear_chain import Turns, api, mosaic_gpu
from pallas_kernels.linear_chain.config import MAX_ROWS, Chain, Config, Cut, candidates
from pallas_kernels.mosaic_gpu_layouts import ROWS

_PRODUCTS = ("out", "gate_up", "down", "next")
_UNROLLED = 6  # chains a turn of the loop, so that the host launches turns faster than the GPU takes them


def make_chain(target: TargetConfig, mixer: str, rows: int) -> Chain:
    """The chain from a mixer to the next of its kind."""
    products = layer_chain.shapes(target, mixer, rows)
    entry, out = (products["qkv"], products["o"]) if mixer == "attention" else (products["in"], products["out"])
    return Chain(
        rows=rows, mixed=out.inputs, hidden=target.hidden_size, intermediate=target.intermediate_size,
        projected=entry.features, eps=target.rms_norm_eps, zero_centred=target.zero_centred_norms,
    )  # fmt: skip


def make_operands(chain: Chain) -> dict[str, jax.Array]:
    """All but the residual stream; weights of random numbers, norms of ones."""
    keys = iter(jax.random.split(jax.random.key(0), 8))
    dtype = jnp.dtype(chain.dtype)
    made = {
        f"{name}_weight": normal(next(keys), (s.panels * s.features, s.inputs), dtype, s.inputs**-0.5)
        for name, s in chain.shapes.items()
    }
    norms = dict.fromkeys(("norm_weight", "next_norm_weight"), jnp.ones(chain.hidden, dtype))
    return made | norms | dict(mixed=normal(next(keys), (chain.padded_rows, chain.mixed), dtype, 1.0))


def chained(chain: Chain, config: Config, stream: jax.Array, operands: dict[str, jax.Array]) -> jax.Array:
    """The residual stream [M, E] after `_UNROLLED` chains."""
    turns = Turns()
    for _ in range(_UNROLLED):
        stream = turns.run(operands | dict(stream=stream), chain=chain, config=config)["total"]
    return stream


def parse_sizes(text: str) -> dict:
    """The fields of a `Config` but for its consumers, from "96x3,96,96x3,48:7:3:128"."""
    try:
        cuts, weight_stages, x_stages, block = text.split(":")
        sizes = [[int(n) for n in cut.split("x")] for cut in cuts.split(",")]
        found = {name: Cut(*cut, *[1] * (2 - len(cut))) for name, cut in zip(_PRODUCTS, sizes, strict=True)}
        return found | dict(weight_stages=int(weight_stages), x_stages=int(x_stages), block=int(block))
    except (ValueError, TypeError):
        message = f"expected like 96x3,96,96x3,48:7:3:128 ({', '.join(_PRODUCTS)}), found {text!r}"
        raise argparse.ArgumentTypeError(message) from None


def _rows(text: str) -> list[int]:
    found = numbers(text)
    if not all(1 <= n <= MAX_ROWS for n in found):
        raise argparse.ArgumentTypeError(f"expected rows of 1..{MAX_ROWS}, found {text!r}")
    return found


def measure_us(chain: Chain, sizes: list[Config], operands: dict[str, jax.Array], turns: int = 30) -> list[float]:
    """Microseconds of one chain with each of the sizes, infinity for one that does not compile."""
    stream = normal(jax.random.key(1), (chain.rows, chain.hidden), jnp.dtype(chain.dtype), 1.0)

    def compile_one(config: Config):
        try:
            return _timing.compile_loop(functools.partial(chained, chain, config), stream, [(operands,)], turns)
        except (jax.errors.JaxRuntimeError, ValueError) as error:
            print(f"# {config}: {str(error).splitlines()[0]}", file=sys.stderr)
            return None

    with concurrent.futures.ThreadPoolExecutor(max(1, (os.cpu_count() or 2) // 2)) as pool:
        loops = list(pool.map(compile_one, sizes))
    with _timing.alone():
        return [
            _timing.time_loop_us(loop, stream, [(operands,)], turns) / _UNROLLED if loop else float("inf")
            for loop in loops
        ]


def _has_cpu() -> bool:
    try:
        return bool(jax.local_devices(backend="cpu"))
    except RuntimeError:
        return False


def trace(chain: Chain, config: Config, operands: dict[str, jax.Array]) -> list[str]:
    """Lines of when the phases of one launch began and ended, after some that warm up."""
    stream = normal(jax.random.key(1), (chain.rows, chain.hidden), jnp.dtype(chain.dtype), 1.0)
    counters, turn = mosaic_gpu.new_counters(), jnp.zeros((1,), jnp.int32)
    with tempfile.TemporaryDirectory() as folder:
        options = functools.partial(plgpu.CompilerParams, profile_space=24, profile_dir=folder)
        with mock.patch.object(plgpu, "CompilerParams", options):
            run = jax.jit(functools.partial(mosaic_gpu.run.__wrapped__, chain=chain, config=config))
            for _ in range(4):
                jax.block_until_ready(run(operands | dict(stream=stream), counters, turn))
        jax.effects_barrier()
        with open(max(glob.glob(f"{folder}/*.json")), encoding="utf-8") as file:
            return phases(json.load(file)["traceEvents"])


def phases(events: list[dict]) -> list[str]:
    """A line for each name among the begin and end events of a Chrome trace, in order of their median begin."""
    first = min(event["ts"] for event in events if event["ph"] == "B")
    open_at: dict[tuple, float] = {}
    spans = collections.defaultdict(lambda: ([], []))
    for event in events:
        key = event["pid"], event["tid"], event["name"]
        if event["ph"] == "B":
            open_at[key] = event["ts"]
        elif event["ph"] == "E" and key in open_at:
            begins, ends = spans[event["name"]]
            begins.append(open_at.pop(key) - first)
            ends.append(event["ts"] - first)

    def range_of(times: list[float]) -> str:
        return f"{min(times):7.2f} {statistics.median(times):7.2f} {max(times):7.2f}"

    ordered = sorted(spans.items(), key=lambda span: statistics.median(span[1][0]))
    return [f"{name:<26} begins {range_of(b)}   ends {range_of(e)}" for name, (b, e) in ordered]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=TARGETS, default="qwen3-8b")
    parser.add_argument("--mixer", choices=("attention", "delta"), default="attention")
    parser.add_argument("--rows", type=_rows, default="1,16,64,128")
    parser.add_argument("--sweep", type=int, default=1, help="how many of the sizes that fit, the likeliest first")
    parser.add_argument("--sizes", action="append", type=parse_sizes, help="time these too; may be given often")
    parser.add_argument("--trace", action="store_true", help="print when the phases of one launch begin and end")
    args = parser.parse_args(arguments)
    if args.trace and not _has_cpu():
        parser.error("--trace hands the clocks to a callback on the CPU: JAX_PLATFORMS must name cpu too, as cuda,cpu")
    for rows in args.rows:
        chain = make_chain(TARGETS[args.shape], args.mixer, rows)
        sizes = candidates(chain)[: args.sweep]
        consumers = -(-rows // ROWS)
        sizes += [Config(consumers=consumers, **own) for own in args.sizes or ()] if sizes else []
        if obstacle := api.unsupported(chain, sizes[0] if sizes else None):
            parser.error(f"--shape {args.shape}: the kernel cannot do {obstacle}")
        operands = make_operands(chain)
        floor = sum(_timing.floor_us(s.weight_bytes, s.flop) for s in chain.shapes.values())
        for us, config in sorted(zip(measure_us(chain, sizes, operands), sizes), key=lambda timed: timed[0]):
            if us == float("inf"):  # said before
                continue
            print(f"{args.shape} {rows:4d} rows {us:8.1f} us a chain, floor {floor:.1f}, x{us / floor:.2f}  {config}")
        if args.trace:
            print("\n".join(trace(chain, sizes[0], operands)))


if __name__ == "__main__":
    main()
