"""`python -m ddtree_jax`: generate, and what is measured and trained from the command line."""

import argparse
import sys
from collections.abc import Sequence

from ddtree_jax import __version__
from ddtree_jax.commands import evaluate, generate, prompts, static_tree
from ddtree_jax.train import cli as train

COMMANDS = {
    "generate": (generate, "decode prompts"),
    "evaluate": (evaluate, "compare methods and widths on prompt files"),
    "prompts": (prompts, "let the target write prompts to train on"),
    "static-tree": (static_tree, "find the best static tree for a drafter"),
    "train": (train, "train a DFlash drafter for a target"),
}


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Shows a default where there is one to show."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or action.default is False or action.default == []:
            return action.help
        return super()._get_help_string(action)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ddtree_jax", description="Exact speculative decoding with draft trees.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (module, summary) in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary, formatter_class=_Help)
        module.add_arguments(command)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a subcommand. Bad input ends with one line on stderr and exit code 2."""
    args = build_parser().parse_args(argv)
    try:
        return COMMANDS[args.command][0].main(args)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        named = error.filename and error.strerror
        print(f"error: {error.filename}: {error.strerror}" if named else f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
