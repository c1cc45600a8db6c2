"""Command line: `python -m convert target SRC OUT`, `python -m convert drafter SRC OUT --target TARGET`."""

import argparse
import signal
import sys
import warnings

from convert.errors import ConversionError, ConversionWarning
from convert.hf_config import DTYPES
from convert.run import convert_drafter, convert_target
from ddtree_jax.checkpoint import CheckpointError


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m convert", description="Convert published checkpoints.")
    kinds = parser.add_subparsers(dest="kind", required=True)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("src", metavar="SRC", help="Hugging Face folder, hub id (owner/name), or .gguf file (targets)")
    common.add_argument("out", metavar="OUT", help="checkpoint folder to write")
    common.add_argument(
        "--dtype",
        choices=DTYPES,
        help="of the parameters; default: as in SRC (GGUF: bfloat16), for a drafter as its target",
    )
    common.add_argument("--revision", help="branch, tag or commit of a hub id")
    common.add_argument("--overwrite", action="store_true", help="replace a checkpoint of the same kind at OUT")
    kinds.add_parser("target", parents=[common], help="Llama or a dense Qwen2.5 to Qwen3.6, with its tokenizer")
    drafter = kinds.add_parser(
        "drafter",
        parents=[common],
        help="DFlash drafter in any of its formats, EAGLE-3, or the prediction layer in a Qwen3.5 target",
    )
    drafter.add_argument("--target", required=True, help="the converted target that it drafts for")
    drafter.add_argument(
        "--sample-from-anchor", action="store_true",
        help="SRC has the slot layout of DSpark/DeepSpec: slot i predicts the position after it",
    )  # fmt: skip
    drafter.add_argument(
        "--taps", type=_integers, metavar="I,J,K",
        help="EAGLE-3: zero-based blocks of the target whose output it reads, where its config leaves that open",
    )  # fmt: skip
    return parser


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def main(argv: list[str] | None = None) -> int:
    """Runs the command line. Returns the exit code: 0, or 2 after one line on standard error."""
    args = _parser().parse_args(argv)
    with warnings.catch_warnings():
        warnings.simplefilter("always", ConversionWarning)
        warnings.showwarning = lambda message, *_, **__: print(f"warning: {message}", file=sys.stderr)
        return _run(args)


def _run(args: argparse.Namespace) -> int:
    options = dict(dtype=args.dtype, overwrite=args.overwrite, revision=args.revision, progress=True)
    try:
        if args.kind == "target":
            config = convert_target(args.src, args.out, **options)
        else:
            options |= dict(sample_from_anchor=args.sample_from_anchor, taps=args.taps)
            config = convert_drafter(args.src, args.out, target=args.target, **options)
    except (ConversionError, CheckpointError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        return 130
    print(f"{args.out}: {args.kind}, {config.num_layers} layers, hidden size {config.hidden_size}, {config.dtype}")
    return 0


if __name__ == "__main__":
    # A polite kill ends like Ctrl-C, so that the unfinished checkpoint is removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
