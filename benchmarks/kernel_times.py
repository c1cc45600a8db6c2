"""Which GPU kernels a decoding round spends its time in: calls and microseconds of each, from the profiler.

  python -m benchmarks.kernel_times --shape qwen3-8b --method ddtree --nodes 64
  python -m benchmarks.kernel_times --shape qwen3-8b --method ddtree --nodes 64 --part verify --hlo verify.txt

The rounds are those of `decode_step`. Numbers at the end of a kernel's name are dropped, so that the layers of a model
fall together. "Between" is the time in which the GPU ran nothing: launches that came too late, and the profiler's own
cost.
"""

from __future__ import annotations

import argparse
import collections
import glob
import re
import tempfile
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks._models import random_params
from benchmarks._parts import add_part_arguments, chosen_part
from benchmarks._rounds import compile_part


def kernel_events(folder: str) -> list[tuple[str, int, int]]:
    """(name, start, duration) in nanoseconds of every kernel and copy on a GPU, in order of their start.

    Raises:
      ValueError: the trace in `folder` holds no event of a GPU.
    """
    (path,) = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
    planes = [
        plane for plane in jax.profiler.ProfileData.from_file(path).planes if plane.name.startswith("/device:GPU")
    ]
    lines = [line for plane in planes for line in plane.lines if line.name.startswith("Stream")]
    events = [(e.name, int(e.start_ns), int(e.duration_ns)) for line in lines for e in line.events]
    if not events:
        raise ValueError(f"{path} holds no event of a GPU; planes: {[plane.name for plane in planes]}")
    return sorted(events, key=lambda event: event[1])


def table(events: list[tuple[str, int, int]], turns: int) -> list[str]:
    """Lines of the table, the largest total first; all figures of one turn."""
    total, calls = collections.Counter(), collections.Counter()
    busy, end = 0, events[0][1]
    for name, start, duration in events:
        kind = re.sub(r"(_\d+)+$", "", name)
        total[kind] += duration
        calls[kind] += 1
        busy += max(0, start + duration - max(start, end))
        end = max(end, start + duration)
    whole = end - events[0][1]
    lines = [f"{'us':>9} {'calls':>7} {'us a call':>10}  kernel"]
    for kind, nanoseconds in total.most_common():
        each = nanoseconds / calls[kind] / 1e3
        lines.append(f"{nanoseconds / turns / 1e3:9.1f} {calls[kind] / turns:7.1f} {each:10.2f}  {kind[:100]}")
    lines.append(f"{(whole - busy) / turns / 1e3:9.1f} {'':7} {'':10}  (between)")
    lines.append(f"{whole / turns / 1e3:9.1f} {len(events) / turns:7.1f} {'':10}  (all)")
    return lines


def profile(run, params: Any, part, turns: int) -> list[tuple[str, int, int]]:
    """Events of one call of `turns` turns, after a call that warms up."""
    fixed, carry = jax.block_until_ready(part.make())
    carry = jax.block_until_ready(run(params, fixed, carry, jnp.int32(turns)))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(run(params, fixed, carry, jnp.int32(turns)))
        return kernel_events(folder)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_part_arguments(parser)
    parser.add_argument("--turns", type=int, default=10)
    args = parser.parse_args(arguments)
    target, drafter, part, title = chosen_part(parser, args)
    params = jax.block_until_ready({"target": random_params(target), "drafter": random_params(drafter)})
    run = compile_part(part, params)
    if args.hlo:
        with open(args.hlo, "w", encoding="utf-8") as file:
            file.write(run.as_text())
    print(f"{title}; of one turn")
    print("\n".join(table(profile(run, params, part, args.turns), args.turns)))


if __name__ == "__main__":
    main()
