"""`python -m ddtree_jax prompts`: a file of prompts that the target writes itself, to train a drafter on."""

import argparse
import sys
import time
from pathlib import Path

import jax

from ddtree_jax.files import write_whole
from ddtree_jax.loading import load_target
from ddtree_jax.train.progress import ProgressLine
from ddtree_jax.train.selfprompt import PromptFilter, prompt_lines, write_prompts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--target", required=True, help="checkpoint of the target; it needs a chat template")
    add("--out", required=True, metavar="FILE.jsonl", help="file to write; it must not exist yet")
    add("--count", type=int, default=10000, help="prompts to draw; those that repeat or have no end are dropped")
    apart = "prompts to keep apart, such as those of an evaluation: one that shares 8 words in a row is dropped"
    add("--exclude", nargs="+", default=[], metavar="FILE.jsonl", help=apart)
    add("--temperature", type=float, default=1.0, help="of the draws; above 0")
    add("--max-tokens", type=int, default=160, help="longest prompt in tokens")
    add("--seed", type=int, default=0, help="of the draws")
    add("--slots", type=int, default=256, help="prompts drawn at a time on each device")
    add("--minutes", type=float, default=0.0, help="time limit; 0: none")
    add("--quiet", action="store_true", help="show no progress")


def main(args: argparse.Namespace) -> int:
    out = Path(args.out)
    for name, low in (("count", 1), ("max_tokens", 1), ("slots", 1), ("seed", 0), ("minutes", 0)):
        if getattr(args, name) < low:
            raise ValueError(f"--{name.replace('_', '-')} must be {low} or more; found {getattr(args, name)}")
    if not 1e-3 <= args.temperature <= 1e3:
        raise ValueError(f"--temperature must be 0.001..1000, or all prompts would be one; found {args.temperature}")
    if out.exists():
        raise ValueError(f"{out}: exists already; name another file")
    out.parent.mkdir(parents=True, exist_ok=True)  # before the work, not after it
    allowed = PromptFilter.without(args.exclude)
    target = load_target(args.target)
    deadline = time.monotonic() + 60 * args.minutes if args.minutes else None
    found: list[tuple[int, str]] = []
    with ProgressLine("prompts", args.count, quiet=args.quiet) as progress:
        for some in write_prompts(
            target, args.count, allowed, temperature=args.temperature, max_tokens=args.max_tokens, seed=args.seed,
            slots=args.slots, devices=jax.local_device_count(), deadline=deadline,
        ):  # fmt: skip
            found += some
            progress.update(len(found))
    if not found:
        raise ValueError(f"{args.target}: none of {args.count} draws is a prompt of at most {args.max_tokens} tokens")
    write_whole(out, prompt_lines(sorted(found)).encode())
    if not args.quiet:
        print(f"{out}: {len(found)} prompts from {args.count} draws", file=sys.stderr)
    return 0
