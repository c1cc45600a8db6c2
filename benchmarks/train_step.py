"""How long does a training step take, and how much of the machine's peak is that?

Random weights at the shape of a real target; no files are needed. Prints one line a shape and, with --json, the same as
JSON lines.

    python -m benchmarks.train_step                      # SmolLM2-135M, a drafter of 3 layers, blocks of 16
    python -m benchmarks.train_step --shape qwen3-8b --batch-size 4 --sequence-length 3072 --anchors 512 --layers 5
"""

import argparse
import json
import time

import jax
import numpy as np

from benchmarks._models import TARGETS, random_params
from ddtree_jax.train.config import TrainConfig
from ddtree_jax.train.data import Document, pack
from ddtree_jax.train.evaluate import score_rows
from ddtree_jax.train.flops import PEAK_FLOPS, step_flops
from ddtree_jax.train.step import Models, features_of, init_state, to_device, train_step


def seconds_of(call, repeats: int) -> float:
    """Mean wall time of `call`, which returns arrays, after one call that compiles."""
    jax.block_until_ready(call())
    began = time.perf_counter()
    for _ in range(repeats):
        out = call()
    jax.block_until_ready(out)
    return (time.perf_counter() - began) / repeats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=TARGETS, default="smollm2-135m")
    parser.add_argument("--sequence-length", type=int, default=512)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--anchors", type=int, default=128)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--loss", default="decay")
    parser.add_argument("--head-rows", type=int, default=4096)
    parser.add_argument("--attention-mib", type=int, default=2048)
    parser.add_argument("--remat", action="store_true")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()

    target = TARGETS[args.shape]
    config = TrainConfig(
        mask_token_id=target.vocab_size - 1, num_layers=args.layers, block_size=args.block_size, loss=args.loss,
        sequence_length=args.sequence_length, batch_size=args.batch_size, anchors=args.anchors,
        head_rows=args.head_rows, attention_mib=args.attention_mib, remat=args.remat,
        num_taps=min(5, max(1, target.num_layers - 3)),
    )  # fmt: skip
    models, params = Models.of(config, target), random_params(target)
    tokens = np.random.default_rng(0).integers(0, target.vocab_size - 1, args.sequence_length, dtype=np.int32)
    rows = pack([Document(tokens, args.sequence_length // 4)] * args.batch_size, args.sequence_length)
    batch, state = to_device(rows), init_state(models, params, 1000)

    began = time.perf_counter()
    state, sums = train_step(models, state, params, batch)
    jax.block_until_ready(sums)
    compile_seconds = time.perf_counter() - began

    def step():
        nonlocal state
        state, sums = train_step(models, state, params, batch)
        return sums

    seconds = seconds_of(step, args.steps)
    features = seconds_of(lambda: features_of(models, params, batch), args.steps)
    scoring = seconds_of(lambda: score_rows(models, state.params, params, batch)[0], max(1, args.steps // 5))
    stats = jax.devices()[0].memory_stats() or {}
    row = {
        **{k: v for k, v in vars(args).items() if k != "json"}, "device": jax.devices()[0].device_kind,
        "milliseconds": 1e3 * seconds, "target_milliseconds": 1e3 * features, "evaluation_milliseconds": 1e3 * scoring,
        "tokens_per_second": args.batch_size * args.sequence_length / seconds,
        "blocks_per_second": args.batch_size * args.anchors / seconds,
        "tflops_per_step": step_flops(models) / 1e12, "share_of_peak": step_flops(models) / seconds / PEAK_FLOPS,
        "peak_gib": stats.get("peak_bytes_in_use", 0) / 2**30, "compile_seconds": compile_seconds,
        "drafter_parameters": sum(x.size for x in jax.tree.leaves(state.params)),
    }  # fmt: skip
    if args.json:
        print(json.dumps(row))
        return
    print(
        f"{args.shape}: drafter of {args.layers} layers, {row['drafter_parameters'] / 1e6:.1f} M parameters, "
        f"{args.batch_size} x {args.sequence_length} tokens, {args.anchors} blocks of {args.block_size} a row"
    )
    print(
        f"step {row['milliseconds']:.1f} ms (target {row['target_milliseconds']:.1f} ms): "
        f"{row['tokens_per_second']:.0f} tokens/s, {row['blocks_per_second']:.0f} blocks/s, "
        f"{row['tflops_per_step']:.2f} TFLOP, {100 * row['share_of_peak']:.1f} % of {PEAK_FLOPS / 1e12:.0f} TFLOP/s; "
        f"{row['peak_gib']:.1f} GiB, compiled in {compile_seconds:.0f} s"
    )
    print(f"evaluation of every position: {row['evaluation_milliseconds']:.0f} ms a batch")


if __name__ == "__main__":
    main()
