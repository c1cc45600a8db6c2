"""Options that commands share: how each method drafts."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from ddtree_jax.config import AUTO, METHODS, DecodeConfig
from ddtree_jax.tree import PRESETS

_WITH_WIDTH = tuple(name for name, method in METHODS.items() if method.has_width)
# The methods that an option of `add_drafting` means something to.
_USED_BY = {
    "--num-nodes": _WITH_WIDTH,
    "--widths": tuple(name for name, method in METHODS.items() if method.best_first),
    "--best-width": _WITH_WIDTH,
    "--draft-depth": tuple(name for name in METHODS if name != "autoregressive"),
    "--tree-choices": ("static_tree",),
    "--branching": ("eagle2",),
    "--ngram": ("lookup", "lookup_tree"),
}


class _Given(argparse.Action):
    """Stores the value, and in `given` that the option was there: its value may be the default."""

    def __call__(self, parser, namespace, values, option_string=None):
        setattr(namespace, self.dest, self.const if self.nargs == 0 else values)
        namespace.given = {*getattr(namespace, "given", ()), self.option_strings[0]}


def unused_options(args: argparse.Namespace, methods: Sequence[str]) -> str | None:
    """Lines that name the options of `add_drafting` that were given and that nothing uses, if any."""
    given = getattr(args, "given", ())
    unused = [option for option, users in _USED_BY.items() if option in given and not set(users) & set(methods)]
    notes = [f"note: {', '.join(unused)}: not used by {', '.join(methods)}"] if unused else []
    if "--widths" in given and "--widths" not in unused and AUTO not in args.num_nodes.split(","):
        notes.append(f"note: --widths: not used without --num-nodes {AUTO}")
    return "\n".join(notes) or None


def add_drafting(parser: argparse.ArgumentParser, *, widths: str) -> None:
    """Adds the options of the methods; `widths` is the default of --num-nodes."""
    add = parser.add_argument
    add(
        "--num-nodes",
        action=_Given,
        default=widths,
        help="width of ddtree, eagle2 and lookup_tree, root included; several with commas. auto: rounds of ddtree "
        "take the one of --widths that pays best, by costs measured on this device",
    )
    add("--widths", action=_Given, default=",".join(map(str, DecodeConfig.widths)), help="what auto chooses among")
    add(
        "--best-width", action=_Given, nargs=0, const=True, default=False,
        help="show each method at its fastest width only",
    )  # fmt: skip
    add(
        "--draft-depth", action=_Given, type=int,
        help="tokens drafted a round; default: what the drafter was trained for",
    )  # fmt: skip
    add(
        "--tree-choices", action=_Given, nargs="+", metavar="TREE",
        help=f"static trees: {', '.join(PRESETS)}, a list such as '[(0,), (1,), (0, 0)]', "
        "or a file of the command static-tree; default: eagle-1 down to the drafter's depth",
    )  # fmt: skip
    add(
        "--branching", action=_Given, type=int, default=DecodeConfig.branching,
        help="children drafted of a node (eagle2)",
    )  # fmt: skip
    add(
        "--ngram", action=_Given, type=int, default=DecodeConfig.ngram,
        help="longest run of last tokens that a look-up looks for",
    )  # fmt: skip


def parse_num_nodes(text: str) -> list[int | str]:
    """Comma-separated integers and "auto". Raises ValueError on anything else."""
    try:
        return [n if n == AUTO else int(n) for n in text.split(",")]
    except ValueError:
        raise ValueError(f"--num-nodes must be comma-separated integers or {AUTO}; found {text!r}") from None


def parse_widths(text: str) -> tuple[int, ...]:
    """Comma-separated integers. Raises ValueError on anything else."""
    try:
        return tuple(int(n) for n in text.split(","))
    except ValueError:
        raise ValueError(f"--widths must be comma-separated integers; found {text!r}") from None


def read_trees(given: list[str] | None) -> list[str | None]:
    """What --tree-choices names, files replaced by their `tree_choices`; [None] (the default tree) if not given.

    Raises ValueError naming a file that cannot be read or holds no tree.
    """
    return [_read_tree(Path(text)) if _is_file(text) else text for text in given or ()] or [None]


def _is_file(text: str) -> bool:
    """Whether a tree is the name of a file: by its ending, or because there is one."""
    return text.endswith(".json") or (text not in PRESETS and "(" not in text and Path(text).is_file())


def _read_tree(path: Path) -> str:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{path}: not JSON: {error}") from None
    tree = data.get("tree_choices") if isinstance(data, dict) else None
    if not isinstance(tree, str):
        raise ValueError(f'{path}: expected an object with the text "tree_choices", as static-tree writes it')
    return tree
