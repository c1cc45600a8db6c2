"""What benchmarks have in common: their arguments, and the part of a round that these name."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks._models import DRAFTER_KINDS, TARGETS, models
from benchmarks._rounds import Part, Rounds
from benchmarks._variants import decode_config
from ddtree_jax.config import METHODS, DraftConfig, TargetConfig
from ddtree_jax.decode.loop import DecodeLoop
from ddtree_jax.decode.plan import make_proposer
from ddtree_jax.models import layers
from ddtree_jax.models.decoder import Decoder


def numbers(text: str) -> list[int]:
    """The value of an argument such as "16,64"."""
    return [int(n) for n in text.split(",")]


def add_part_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", choices=TARGETS, default="qwen3-8b")
    parser.add_argument("--context", type=int, default=1024, help="committed tokens")
    parser.add_argument("--method", choices=METHODS, default="ddtree")
    parser.add_argument("--drafter", choices=DRAFTER_KINDS, default="dflash")
    parser.add_argument("--nodes", type=int, default=64, help="width of a tree, root included")
    parser.add_argument("--part", default="round", help="round, draft, build, verify or accept+commit")
    parser.add_argument("--layers", type=int, help="cut the target to so many layers")
    parser.add_argument("--matmul", choices=("xla", "mosaic_gpu", "chain", "auto"), default="auto")
    parser.add_argument("--hlo", help="write the optimised program to this file")


def chosen_part(
    parser: argparse.ArgumentParser, args: argparse.Namespace
) -> tuple[TargetConfig, DraftConfig, Part, str]:
    """Target, drafter, the part and a line that says which; sets `layers.MATMUL`. Wrong arguments end the program."""
    if args.context < 1:
        parser.error(f"--context must be 1 or more, found {args.context}")
    if args.hlo and not Path(args.hlo).absolute().parent.is_dir():
        parser.error(f"--hlo: no such folder: {Path(args.hlo).parent}")
    layers.MATMUL = None if args.matmul == "auto" else args.matmul
    try:
        target, drafter = models(args.shape, args.drafter, args.layers)
        decoder = Decoder(target)
        proposer = make_proposer(decode_config(args.method, args.nodes, drafter), decoder, drafter)
    except ValueError as error:
        parser.error(str(error))
    rounds = Rounds(DecodeLoop(decoder, proposer, sample=False, chunk=1), args.context)
    found = {part.name: part for part in rounds.parts()}
    if args.part not in found:
        parser.error(f"--part must be one of {', '.join(found)} for {args.method}, got {args.part}")
    title = f"# {args.shape}, {args.method}, N = {args.nodes}, context {args.context}, {args.part}"
    return target, drafter, found[args.part], title
