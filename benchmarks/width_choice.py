"""What choosing a width costs: a round of DDTree at a fixed width, and one that chooses the same width every time.

  python -m benchmarks.width_choice --shape smollm2-135m
  XLA_FLAGS=--xla_gpu_enable_command_buffer=+CONDITIONAL,+WHILE python -m benchmarks.width_choice

The chosen width is the one that a table of costs makes cheap; everything else is the loop that `num_nodes="auto"` runs:
the widest tree built every eighth round, and branches taken on the device. Weights are random; milliseconds of a round
in a loop on the device (`_rounds`).
"""

from __future__ import annotations

import argparse
import concurrent.futures
import os

import jax
import jax.numpy as jnp

from benchmarks._models import TARGETS, models, random_params
from benchmarks._parts import numbers
from benchmarks._rounds import Rounds, compile_part, time_part
from benchmarks._variants import decode_config
from ddtree_jax.config import DecodeConfig
from ddtree_jax.decode.loop import DecodeLoop
from ddtree_jax.decode.plan import check_config, make_proposer
from ddtree_jax.decode.width import RoundCosts
from ddtree_jax.models.decoder import Decoder

_PROHIBITIVE = 1e9


def main(arguments: list[str] | None = None) -> list[tuple[int, float, float]]:
    """Prints and returns (width, ms at the fixed width, ms where it is chosen)."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=TARGETS, default="smollm2-135m")
    parser.add_argument("--context", type=int, default=1024, help="committed tokens")
    parser.add_argument("--layers", type=int, help="cut the target to so many layers")
    parser.add_argument("--widths", type=numbers, default=list(DecodeConfig().widths), help="rising")
    parser.add_argument("--seconds", type=float, default=0.15, help="about how long one timed loop runs")
    parser.add_argument("--jobs", type=int, default=min(8, os.cpu_count() or 1), help="compilations at a time")
    args = parser.parse_args(arguments)
    widths = tuple(args.widths)
    try:
        target, drafter = models(args.shape, num_layers=args.layers)
        check_config(DecodeConfig(method="ddtree", num_nodes="auto", widths=widths), target, drafter)
    except ValueError as error:
        parser.error(str(error))
    if args.context < 1 or args.jobs < 1:
        parser.error(f"--context and --jobs must be 1 or more, found {args.context} and {args.jobs}")
    decoder = Decoder(target)

    def rounds(nodes: int, widths: tuple[int, ...] = (), chosen: int | None = None):
        proposer = make_proposer(decode_config("ddtree", nodes, drafter), decoder, drafter)
        loop, costs = DecodeLoop(decoder, proposer, sample=False, chunk=1, widths=widths), None
        if widths:
            seconds = jnp.where(jnp.array(widths) == chosen, 1.0, _PROHIBITIVE)[None].astype(jnp.float32)
            costs = RoundCosts(jnp.zeros((1,), jnp.float32), seconds)
        return Rounds(loop, args.context, costs).parts()[0]

    params = jax.block_until_ready({"target": random_params(target), "drafter": random_params(drafter)})
    parts = [rounds(n) for n in widths] + [rounds(widths[-1], widths, n) for n in widths]
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        runs = list(pool.map(lambda part: compile_part(part, params), parts))
    times = [time_part(part, run, params, seconds=args.seconds) for part, run in zip(parts, runs)]
    print(f"# {args.shape}, context {args.context}, XLA_FLAGS={os.environ.get('XLA_FLAGS', '')!r}; ms of a round")
    print(f"{'N':>4} {'fixed':>8} {'chosen':>8}")
    table = list(zip(widths, times, times[len(widths) :]))
    for n, fixed, chosen in table:
        print(f"{n:4d} {fixed:8.3f} {chosen:8.3f}")
    return table


if __name__ == "__main__":
    main()
