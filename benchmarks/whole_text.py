"""What a whole text takes, call after call as `generate` makes them, and what `num_nodes="auto"` adds to it.

  python -m benchmarks.whole_text --shape smollm2-135m
  python -m benchmarks.whole_text --shape qwen3-8b --tokens 80 --nodes 64,128

Beside its rounds a text has a prompt, a call, and the first rounds of a CUDA graph, which is written anew where arrays
lie elsewhere than for the text before. So the same texts are timed twice: with the arrays of each text gone before the
next are made, as in `generate`, and with them still there ("moved"). "auto N" is the loop of several widths with a
table of costs that makes it take N; "auto, changing" takes another width at each look.

Weights are random, so nearly every round commits one token. Milliseconds, medians; batch 1, temperature 0.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
import itertools
import os
import statistics
import time
from collections.abc import Callable

import jax
import numpy as np

from benchmarks._models import TARGETS, models, random_params
from benchmarks._parts import numbers
from benchmarks._variants import decode_config
from ddtree_jax.config import DecodeConfig
from ddtree_jax.decode import run as device
from ddtree_jax.decode.plan import Plan, make_plan
from ddtree_jax.decode.state import DecodeState
from ddtree_jax.decode.width import RoundCosts
from ddtree_jax.loading import Drafter, Target
from ddtree_jax.prepare import inputs

_DEAR = 100.0


@dataclasses.dataclass(frozen=True)
class Text:
    """A decode, ready to be called.

    Attributes:
      name: of the row.
      plan: static shapes.
      prompt: token ids.
      costs: by which a loop of several widths chooses.
    """

    name: str
    plan: Plan
    prompt: list[int]
    costs: RoundCosts | None

    def arguments(self, target: Target, drafter: Drafter) -> tuple:
        """Of `device.run`, all on the device. Where widths are chosen, the first is at once."""
        *args, state = inputs(target, drafter, self.plan, [self.prompt], 0, 0.0, self.costs)
        return *args, state if state.choice is None else state.replace(choice=state.choice.due())

    def compiled(self, target: Target, drafter: Drafter) -> Callable:
        return device.executable(device.run, self.plan.loop, *self.arguments(target, drafter))[0]


def changing_costs(widths: tuple[int, ...], plan: Plan, prompt: int) -> RoundCosts:
    """A table by which one width after the other is taken, another at each look of a text that follows a prompt of so
    many tokens at one token a round."""
    look_every = plan.loop.look_every
    contexts = np.arange(prompt % look_every, plan.cache_rows, look_every)
    cheap = (np.arange(len(contexts)) % len(widths))[:, None] == np.arange(len(widths))
    return RoundCosts(contexts.astype(np.float32), np.where(cheap, 1, _DEAR).astype(np.float32))


def time_texts(
    call: Callable, make_arguments: Callable[[], tuple], count: int, *, moved: bool
) -> tuple[list[float], DecodeState]:
    """Milliseconds of each of `count` texts, and the last state without caches, on the host."""
    times, held = [], None
    for _ in range(count):
        arguments = jax.block_until_ready(make_arguments())
        held = arguments if moved else None
        began = time.perf_counter()
        state = call(*arguments)
        state = jax.device_get(state.results())
        times.append(1e3 * (time.perf_counter() - began))
        del arguments
    del held
    return times, state


def main(arguments: list[str] | None = None) -> list[dict]:
    """Prints and returns the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=TARGETS, default="smollm2-135m")
    parser.add_argument("--layers", type=int, help="cut the target to so many layers")
    parser.add_argument("--prompt", type=int, default=100, help="tokens of the prompt")
    parser.add_argument("--tokens", type=int, default=40, help="new tokens of a text")
    parser.add_argument("--nodes", type=numbers, default=list(DecodeConfig().widths), help="widths, rising")
    parser.add_argument("--texts", type=int, default=8, help="texts timed of each row, after two that warm up")
    parser.add_argument("--jobs", type=int, default=min(8, os.cpu_count() or 1), help="compilations at a time")
    args = parser.parse_args(arguments)
    if min(args.prompt, args.texts, args.jobs) < 1 or args.tokens < 2:
        parser.error("--prompt, --texts and --jobs must be 1 or more and --tokens 2 or more")
    widths = tuple(args.nodes)
    try:
        target, drafter = models(args.shape, num_layers=args.layers)

        def plan(nodes: int | str) -> Plan:
            config = dataclasses.replace(
                decode_config("ddtree", widths[-1], drafter), num_nodes=nodes, widths=widths, batch_size=1,
                max_new_tokens=args.tokens, stop_token_ids=(),
            )  # fmt: skip
            return make_plan(config, target, drafter, [args.prompt])

        auto, fixed = plan("auto"), [plan(n) for n in widths]
    except ValueError as error:
        parser.error(str(error))
    prompt = np.random.default_rng(0).integers(1, target.vocab_size, args.prompt).tolist()
    changing = changing_costs(widths, auto, args.prompt)
    texts = [Text(f"N = {n}", p, prompt, None) for n, p in zip(widths, fixed)]
    costs = [RoundCosts.all_but(i, len(widths), changing.contexts) for i in range(len(widths))]
    texts += [Text(f"auto {n}", auto, prompt, held) for n, held in zip(widths, costs)]
    texts.append(Text("auto, changing", auto, prompt, changing))

    pair = Target(target, random_params(target)), Drafter(drafter, random_params(drafter))
    jax.block_until_ready([model.params for model in pair])
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:  # all of auto share one program
        list(pool.map(lambda text: text.compiled(*pair), texts[: len(widths) + 1]))
    kind = jax.devices()[0].device_kind
    print(f"# {args.shape}, prompt of {args.prompt}, {args.tokens} new tokens, {kind}; ms of a text")
    print(f"{'':16} {'ms':>8} {'moved':>8} {'rounds':>7} {'changes':>8} {'ms a round':>11}")
    rows = []
    for text in texts:
        call, arguments_of = text.compiled(*pair), functools.partial(text.arguments, *pair)
        time_texts(call, arguments_of, 2, moved=False)
        times, state = time_texts(call, arguments_of, args.texts, moved=False)
        moved, _ = time_texts(call, arguments_of, args.texts, moved=True)
        rounds = int(state.rounds[0])
        taken = state.widths[0, :rounds].tolist() if state.widths is not None else []
        row = {
            "name": text.name, "ms": statistics.median(times), "moved": statistics.median(moved), "rounds": rounds,
            "changes": sum(a != b for a, b in itertools.pairwise(taken)), "widths": taken,
        }  # fmt: skip
        rows.append(row)
        both = f"{row['ms']:8.2f} {row['moved']:8.2f}"
        print(f"{text.name:16} {both} {rounds:7d} {row['changes']:8d} {row['ms'] / rounds:11.3f}")
    return rows


if __name__ == "__main__":
    main()
