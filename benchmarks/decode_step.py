"""What a decoding round costs at the shapes of real models, part by part, beside the floor that the hardware sets.

  python -m benchmarks.decode_step --shape qwen3-8b
  python -m benchmarks.decode_step --shape qwen3-8b --contexts 1024 --nodes 64,128 --methods autoregressive,ddtree
  python -m benchmarks.decode_step --shape qwen3-8b --layers 4 --contexts 1024 --nodes 64        a quick look
  python -m benchmarks.decode_step --shape qwen3-8b --matmul xla                  linear layers by XLA alone
  python -m benchmarks.decode_step --shape qwen3-8b --drafter eagle3 --nodes 64   its chain, static and dynamic tree
  python -m benchmarks.decode_step --shape qwen3-8b --methods autoregressive,lookup,lookup_tree,static_tree --nodes 64

Weights are random, at the real shapes, and made on the device; a sequence at a time (batch 1), temperature 0. Times are
milliseconds in a loop on the device with the context held at one length (`_rounds`). Each part is timed in a loop of
its own, so parts need not add up to the round: XLA fuses across their borders, or rereads what the cache has kept. Of a
drafter that runs once a depth (EAGLE-3, MTP) and of a look-up the draft includes the tree.

Floor (`_floor`): for draft, verification and commit, the bytes of every weight that each must read (the shared head
counts twice, a drafter that runs once a depth once a step) and of the keys and values of the context over 4.39 TB/s, or
the arithmetic over 790 TFLOP/s, whichever takes longer; their sum. Tokens per second are a projection: the mean
accepted length that the paper published for this target and width, over our time of a round.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import time
from typing import Any

import jax

from benchmarks import _timing
from benchmarks._floor import Work, round_work
from benchmarks._models import DRAFTER_KINDS, TARGETS, models, random_params
from benchmarks._parts import numbers
from benchmarks._rounds import Rounds, compile_part, time_part
from benchmarks._variants import decode_config, variants
from ddtree_jax.config import METHODS, possible_methods
from ddtree_jax.decode.loop import DecodeLoop
from ddtree_jax.decode.plan import make_proposer
from ddtree_jax.models import layers
from ddtree_jax.models.decoder import Decoder

# Mean tokens a round on MATH-500 at temperature 0, arXiv 2604.12989: the chain from its Table 1, trees read off its
# figure of the budget (Qwen3-8B only). A budget of B counts nodes below the root; our N counts the root.
PUBLISHED = {
    "qwen3-8b": {"dflash": 7.79, 16: 8.61, 32: 9.27, 64: 9.75, 128: 10.20, 256: 10.43},
    "qwen3-4b": {"dflash": 7.72},
}

# Timed unless the caller says otherwise; the first is what the others are compared with.
_BLOCK, _STEP = ("autoregressive", "dflash", "ddtree"), ("autoregressive", "best_path", "static_tree", "eagle2")
DEFAULT_METHODS = {"dflash": _BLOCK, "dflash2": _BLOCK, "eagle3": _STEP, "mtp": _STEP}


def run_context(args, target, drafter, params: Any, context: int, records: list[dict]) -> None:
    """Compiles every part of every variant at one context, several at a time, then measures and prints each variant."""
    decoder, jobs = Decoder(target), []
    for method, nodes in variants(args.methods, args.nodes, drafter):
        proposer = make_proposer(decode_config(method, nodes, drafter), decoder, drafter)
        loop = DecodeLoop(decoder, proposer, sample=False, chunk=1)
        parts = Rounds(loop, context).parts()
        jobs += [(method, nodes, part) for part in (parts[:1] if args.round_only else parts)]
    began = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        runs = list(pool.map(lambda job: compile_part(job[2], params), jobs))
    print(f"# context {context}: {len(jobs)} loops compiled in {time.perf_counter() - began:.0f} s", flush=True)
    base = None
    for method, nodes in variants(args.methods, args.nodes, drafter):
        times = {}
        with _timing.alone():
            for (m, n, part), run in zip(jobs, runs):
                if (m, n) == (method, nodes):
                    times[part.name] = time_part(part, run, params, seconds=args.seconds)
        record = summary(args, target, drafter, method, nodes, context, times, base)
        base = base or (record["round_ms"] if method == "autoregressive" else None)
        records.append(record)
        print(row(record), flush=True)
        if args.json:
            with open(args.json, "a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")


def summary(args, target, drafter, method, nodes, context, times: dict[str, float], base: float | None) -> dict:
    """One record of the JSON lines; times in ms."""
    work = round_work(target, drafter, method, nodes, context)
    whole = sum(work.values(), Work(0, 0))
    floor = sum(part.floor_ms for part in work.values())
    milliseconds = times["round"]
    if method == "autoregressive":
        accepted, base = 1.0, milliseconds
    else:
        # A projection only for the whole model, and for what was published.
        known = args.layers is None and args.drafter == "dflash" and method in ("dflash", "ddtree")
        accepted = PUBLISHED.get(args.shape, {}).get("dflash" if method == "dflash" else nodes) if known else None
    return dict(
        shape=args.shape, layers=target.num_layers, drafter=args.drafter if METHODS[method].needs_drafter else None,
        context=context, method=method, nodes=nodes,
        matmul=str(layers.MATMUL), device=jax.devices()[0].device_kind, xla_flags=os.environ.get("XLA_FLAGS", ""),
        round_ms=milliseconds, parts_ms={name: ms for name, ms in times.items() if name != "round"}, floor_ms=floor,
        ratio_to_floor=milliseconds / floor, gb_per_s=whole.bytes / milliseconds / 1e6,
        tflop_per_s=whole.flop / milliseconds / 1e9, ratio_to_autoregressive=milliseconds / base if base else None,
        published_tokens_per_round=accepted,
        projected_tokens_per_s=accepted / milliseconds * 1e3 if accepted else None,
    )  # fmt: skip


_PARTS = ("draft", "build", "verify", "accept+commit")
HEADER = (
    f"{'context':>7} {'method':<14} {'N':>4} {'round ms':>9} "
    + " ".join(f"{name:>13}" for name in _PARTS)
    + f" {'floor':>7} {'x floor':>7} {'x AR':>6} {'GB/s':>6} {'tokens/s (projected)':>21}"
)


def row(record: dict) -> str:
    parts = " ".join(f"{record['parts_ms'][n]:13.3f}" if n in record["parts_ms"] else f"{'-':>13}" for n in _PARTS)
    relative, projected = record["ratio_to_autoregressive"], record["projected_tokens_per_s"]
    accepted = record["published_tokens_per_round"]
    return (
        f"{record['context']:7d} {record['method']:<14} {record['nodes']:4d} {record['round_ms']:9.3f} {parts} "
        f"{record['floor_ms']:7.3f} {record['ratio_to_floor']:7.2f} "
        f"{f'{relative:6.2f}' if relative else '     -'} {record['gb_per_s']:6.0f} "
        + (f"{projected:10.0f} (at {accepted:5.2f})" if projected else f"{'-':>21}")
    )


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=TARGETS, default="qwen3-8b")
    parser.add_argument("--contexts", type=numbers, default=[1024, 8192, 32768], help="committed tokens")
    parser.add_argument(
        "--drafter", choices=DRAFTER_KINDS, default="dflash", help="its kind, at the geometry published for the shape"
    )
    parser.add_argument("--methods", help="those that the drafter allows, and those without one; by default most")
    parser.add_argument(
        "--nodes", type=numbers, default=[16, 32, 64, 128, 256],
        help="widths of ddtree, eagle2, static_tree and lookup_tree, root included",
    )  # fmt: skip
    parser.add_argument("--layers", type=int, help="cut the target to so many layers")
    parser.add_argument(
        "--matmul", choices=("xla", "mosaic_gpu", "chain", "auto"), default="auto", help="for products of few rows"
    )
    parser.add_argument("--round-only", action="store_true", help="leave out the parts: a third of the compile time")
    parser.add_argument("--seconds", type=float, default=0.15, help="about how long one timed loop runs")
    parser.add_argument("--jobs", type=int, default=min(8, os.cpu_count() or 1), help="compilations at a time")
    parser.add_argument("--json", help="append the records to this file, one JSON object a line")
    args = parser.parse_args(arguments)
    try:
        possible = possible_methods(models(args.shape, args.drafter, args.layers)[1])
    except ValueError as error:
        parser.error(f"--drafter {args.drafter} --shape {args.shape}: {error}")
    chosen = args.methods.split(",") if args.methods else DEFAULT_METHODS[args.drafter]
    if unknown := set(chosen) - set(possible):
        parser.error(f"--methods: {sorted(unknown)} with --drafter {args.drafter}; possible: {', '.join(possible)}")
    args.methods = [method for method in possible if method in chosen]  # autoregressive first: others refer to it
    return args


def main(arguments: list[str] | None = None) -> list[dict]:
    args = parse(arguments)
    layers.MATMUL = None if args.matmul == "auto" else args.matmul
    target, drafter = models(args.shape, args.drafter, args.layers)
    device = jax.devices()[0].device_kind
    print(f"# {device}, jax {jax.__version__}, XLA_FLAGS={os.environ.get('XLA_FLAGS', '')!r}, matmul {args.matmul}")
    params = jax.block_until_ready({"target": random_params(target), "drafter": random_params(drafter)})
    size = sum(x.nbytes for x in jax.tree.leaves(params)) / 1e9
    sizes = f"{target.num_layers} layers, {args.drafter} of {drafter.num_layers} layers and depth {drafter.depth}"
    print(f"# {args.shape}, {sizes}, {size:.1f} GB of random weights; milliseconds", flush=True)
    print(HEADER, flush=True)
    records: list[dict] = []
    for context in args.contexts:
        run_context(args, target, drafter, params, context, records)
    return records


if __name__ == "__main__":
    main()
