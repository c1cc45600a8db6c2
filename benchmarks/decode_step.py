"""What a decoding round costs at the shapes of real models, part by part, beside the floor that the hardware sets.

  python -m benchmarks.decode_step --shape qwen3-8b
  python -m benchmarks.decode_step --shape qwen3-8b --contexts 1024 --nodes 64,128 --methods autoregressive,ddtree
  python -m benchmarks.decode_step --shape qwen3-8b --layers 4 --contexts 1024 --nodes 64        a quick look
  python -m benchmarks.decode_step --shape qwen3-8b --matmul auto                 with the streaming matmul kernel

Weights are random, at the real shapes, and made on the device; a sequence at a time (batch 1), temperature 0. Times are
milliseconds in a loop on the device with the context held at one length (`_rounds`). Each part is timed in a loop of
its own, so parts need not add up to the round: XLA fuses across their borders, or rereads what the cache has kept.

Floor: for draft, verification and commit, the bytes of every weight that each must read (the shared head counts twice)
and of the keys and values of the context over 4.39 TB/s, or the arithmetic over 790 TFLOP/s, whichever takes longer;
their sum. Tokens per second are a projection: the mean accepted length that the paper published for this target and
width, over our time of a round.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import json
import os
import time
from typing import Any

import jax

from benchmarks import _timing
from benchmarks._models import TARGETS, dflash_config, random_params
from benchmarks._rounds import Rounds, compile_part, time_part
from ddtree_jax.config import DecodeConfig, DrafterConfig, TargetConfig, default_taps
from ddtree_jax.decode.loop import DecodeLoop
from ddtree_jax.decode.plan import make_proposer
from ddtree_jax.models import layers
from ddtree_jax.models.abstract import abstract_params
from ddtree_jax.models.decoder import Decoder

METHODS = ("autoregressive", "dflash", "ddtree")

# Mean tokens a round on MATH-500 at temperature 0, arXiv 2604.12989: the chain from its Table 1, trees read off its
# figure of the budget (Qwen3-8B only). A budget of B counts nodes below the root; our N counts the root.
PUBLISHED = {
    "qwen3-8b": {"dflash": 7.79, 16: 8.61, 32: 9.27, 64: 9.75, 128: 10.20, 256: 10.43},
    "qwen3-4b": {"dflash": 7.72},
}

TIMED = ("autoregressive", "dflash", "ddtree")  # the first is what the others are compared with


@dataclasses.dataclass(frozen=True)
class Work:
    """What one pass of a model has to read and to compute."""

    bytes: float
    flop: float

    def __add__(self, other: Work) -> Work:
        return Work(self.bytes + other.bytes, self.flop + other.flop)

    @property
    def floor_ms(self) -> float:
        return _timing.floor_us(self.bytes, self.flop) / 1e3


def pass_work(config: TargetConfig | DrafterConfig, rows: int, context: int) -> Work:
    """Matrices and attention of one pass of `rows` tokens; a target's head included, its embedding not.

    A drafter's `fc` belongs to the commit and is left out. Of experts, those count that so many tokens are expected to
    choose if all are as likely. Recurrent layers read one state each.
    """
    c, itemsize = config, config.jax_dtype.itemsize
    leaves = jax.tree.leaves(abstract_params(c))
    if isinstance(c, DrafterConfig):
        outside = _features(c) * c.hidden_size
    else:
        outside = 0 if c.tie_embeddings else c.vocab_size * c.hidden_size
    dense = sum(x.size for x in leaves if len(x.shape) == 2) - outside
    experts, share, touched = 0, 0.0, 0.0
    if getattr(c, "moe", None):
        experts = sum(x.size for x in leaves if len(x.shape) == 3)
        share = c.moe.experts_per_token / c.moe.num_experts
        touched = 1 - (1 - share) ** rows
    windows = [w for i, w in enumerate(c.sliding_windows) if i not in getattr(c, "delta_layers", ())]
    seen = sum(context if w is None else min(context, w) for w in windows)
    keys_values = 2 * seen * c.num_kv_heads * c.head_dim * itemsize + state_bytes(c)
    attention = 4 * rows * (seen + rows * len(windows)) * c.num_heads * c.head_dim
    size_read, size_used = dense + experts * touched, dense + experts * share
    return Work(size_read * itemsize + keys_values, 2 * rows * size_used + attention)


def state_bytes(config: TargetConfig | DrafterConfig) -> int:
    """Float32 states of all recurrent layers of a sequence."""
    if isinstance(config, DrafterConfig) or not config.delta_layers:
        return 0
    d = config.delta
    return 4 * len(config.delta_layers) * d.num_value_heads * d.key_head_dim * d.value_head_dim


def _features(drafter: DrafterConfig) -> int:
    """Width of the target's features that the drafter takes in."""
    return len(drafter.target_layer_ids) * drafter.target_hidden_size


def matrix_work(config: TargetConfig | DrafterConfig, outputs: int, inputs: int, rows: int) -> Work:
    return Work(outputs * inputs * config.jax_dtype.itemsize, 2 * rows * outputs * inputs)


def round_work(target: TargetConfig, drafter: DrafterConfig, method: str, nodes: int, context: int) -> dict[str, Work]:
    """Work of the parts that read weights."""
    verify = pass_work(target, nodes, context)
    replay = Work(2 * state_bytes(target), 0)  # read and written once
    if method == "autoregressive":
        return {"verify": verify} | ({"accept+commit": replay} if target.delta_layers else {})
    head = matrix_work(target, target.vocab_size, target.hidden_size, drafter.depth)
    draft = pass_work(drafter, drafter.block_size, context) + head
    commit = matrix_work(drafter, drafter.hidden_size, _features(drafter), drafter.depth + 1)
    return {"draft": draft, "verify": verify, "accept+commit": commit + replay}


def variants(methods: list[str], nodes: list[int], depth: int) -> list[tuple[str, int]]:
    """(method, N) in the order of the table."""
    widths = {"autoregressive": [1], "dflash": [depth + 1], "ddtree": nodes}
    return [(method, n) for method in methods for n in widths[method]]


def run_context(args, target, drafter, params: Any, context: int, records: list[dict]) -> None:
    """Compiles every part of every variant at one context, several at a time, then measures and prints each variant."""
    decoder, jobs = Decoder(target), []
    for method, nodes in variants(args.methods, args.nodes, drafter.depth):
        config = DecodeConfig(method=method, num_nodes=nodes)
        loop = DecodeLoop(decoder, make_proposer(config, decoder, drafter), sample=False, chunk=1)
        parts = Rounds(loop, context).parts()
        jobs += [(method, nodes, part) for part in (parts[:1] if args.round_only else parts)]
    began = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        runs = list(pool.map(lambda job: compile_part(job[2], params), jobs))
    print(f"# context {context}: {len(jobs)} loops compiled in {time.perf_counter() - began:.0f} s", flush=True)
    base = None
    for method, nodes in variants(args.methods, args.nodes, drafter.depth):
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
        complete = args.layers is None  # a projection only for the whole model
        key = "dflash" if method == "dflash" else nodes
        accepted = PUBLISHED.get(args.shape, {}).get(key) if complete else None
    return dict(
        shape=args.shape, layers=target.num_layers, context=context, method=method, nodes=nodes,
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


def shortened(shape: str, num_layers: int | None) -> tuple[TargetConfig, DrafterConfig]:
    """The configs of a shape, cut to some layers for a quick look."""
    target, drafter = TARGETS[shape], dflash_config(shape)
    if num_layers is None:
        return target, drafter
    taps = default_taps(num_layers, min(len(drafter.target_layer_ids), max(1, num_layers - 3)))
    moe = target.moe and dataclasses.replace(target.moe, sparse=target.moe.sparse[:num_layers])
    target = dataclasses.replace(
        target, num_layers=num_layers, sliding_windows=(None,) * num_layers, moe=moe,
        delta_layers=tuple(i for i in target.delta_layers if i < num_layers),
    )  # fmt: skip
    return target, dataclasses.replace(drafter, target_num_layers=num_layers, target_layer_ids=taps)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    def numbers(text: str) -> list[int]:
        return [int(n) for n in text.split(",")]

    def methods(text: str) -> list[str]:
        unknown = set(text.split(",")) - set(TIMED)
        if unknown:
            raise argparse.ArgumentTypeError(f"unknown methods {sorted(unknown)}; known: {', '.join(TIMED)}")
        return [method for method in TIMED if method in text.split(",")]  # autoregressive first: others refer to it

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=TARGETS, default="qwen3-8b")
    parser.add_argument("--contexts", type=numbers, default=[1024, 8192, 32768], help="committed tokens")
    parser.add_argument("--methods", type=methods, default=list(TIMED))
    parser.add_argument("--nodes", type=numbers, default=[16, 32, 64, 128, 256], help="widths of ddtree, root included")
    parser.add_argument("--layers", type=int, help="cut the target to so many layers")
    parser.add_argument(
        "--matmul", choices=("xla", "mosaic_gpu", "auto"), default="xla", help="for products of few rows"
    )
    parser.add_argument("--round-only", action="store_true", help="leave out the parts: a third of the compile time")
    parser.add_argument("--seconds", type=float, default=0.15, help="about how long one timed loop runs")
    parser.add_argument("--jobs", type=int, default=min(8, os.cpu_count() or 1), help="compilations at a time")
    parser.add_argument("--json", help="append the records to this file, one JSON object a line")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> list[dict]:
    args = parse(arguments)
    layers.MATMUL = None if args.matmul == "auto" else args.matmul
    target, drafter = shortened(args.shape, args.layers)
    device = jax.devices()[0].device_kind
    print(f"# {device}, jax {jax.__version__}, XLA_FLAGS={os.environ.get('XLA_FLAGS', '')!r}, matmul {args.matmul}")
    params = jax.block_until_ready({"target": random_params(target), "drafter": random_params(drafter)})
    size = sum(x.nbytes for x in jax.tree.leaves(params)) / 1e9
    sizes = f"{target.num_layers} layers, drafter of {drafter.num_layers} layers and {drafter.block_size} slots"
    print(f"# {args.shape}, {sizes}, {size:.1f} GB of random weights; milliseconds", flush=True)
    print(HEADER, flush=True)
    records: list[dict] = []
    for context in args.contexts:
        run_context(args, target, drafter, params, context, records)
    return records


if __name__ == "__main__":
    main()
