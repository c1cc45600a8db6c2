"""Static trees as users write them: a list of tuples of child ranks, as in Medusa (arXiv 2401.10774) and EAGLE.

The tuple (0, 2) is the node that takes the most probable token of the first depth and the third of the second. The
root is not listed.
"""

from __future__ import annotations

import ast
import numbers
from collections.abc import Sequence

Choices = tuple[tuple[int, ...], ...]

# Published trees, grouped by the ranks down to a parent: each entry lists the ranks of that parent's children.
_PUBLISHED: dict[str, dict[tuple[int, ...], range]] = {
    # EAGLE (arXiv 2401.15077), `mc_sim_7b_63` of its choices.py: 25 nodes, five deep.
    "eagle-1": {
        (): range(4),
        (0,): range(3), (1,): range(2), (2,): range(2), (3,): range(1),
        (0, 0): range(3), (0, 1): range(2), (0, 2): range(2), (1, 0): range(1),
        (0, 0, 0): range(3),
        (0, 0, 0, 0): range(2),
    },
    # Medusa, `mc_sim_7b_63` of its medusa_choices.py, found on Vicuna-7B: 63 nodes, four deep.
    "medusa-vicuna-7b": {
        (): range(10),
        (0,): range(10), (1,): range(7), (2,): range(3), (3,): range(2), (4,): range(1), (5,): range(1),
        (6,): range(1), (7,): range(1), (8,): range(1), (9,): range(1),
        (0, 0): range(10), (0, 1): range(3), (0, 2): range(2), (0, 3): range(1), (0, 4): range(1), (0, 5): range(1),
        (0, 6): range(1), (0, 7): range(1), (1, 0): range(2), (2, 0): range(1),
        (0, 0, 0): range(2),
    },
}  # fmt: skip

PRESETS: dict[str, Choices] = {
    name: tuple(sorted(((*above, r) for above, ranks in tree.items() for r in ranks), key=lambda c: (len(c), c)))
    for name, tree in _PUBLISHED.items()
}


def parse_choices(value: str | Sequence, *, max_depth: int, max_rank: int, max_nodes: int) -> Choices:
    """A checked tree in level order (shallow first, then by ranks), whatever order it was written in.

    Args:
      value: the name of a preset, a list of tuples, or its text, e.g. "[(0,), (1,), (0, 0)]".
      max_depth: longest tuple allowed.
      max_rank: largest rank allowed, zero-based.
      max_nodes: most nodes allowed, root included.

    Raises:
      ValueError: anything else, naming the entry: no tuple of integers, negative, too deep, too wide, twice there,
        or without its parent.
    """
    if isinstance(value, str):
        value = PRESETS[value] if value in PRESETS else _literal(value)
    if not isinstance(value, Sequence) or isinstance(value, bytes):
        raise ValueError(f"tree_choices must be a list of tuples of child ranks; found {value!r}")
    if not value:
        raise ValueError("tree_choices is empty: it must name at least one node below the root")
    if 1 + len(value) > max_nodes:
        raise ValueError(f"tree_choices has {len(value)} nodes; at most {max_nodes - 1} below the root are possible")
    seen: set[tuple[int, ...]] = set()
    for entry in value:
        ranks = _entry(entry, max_depth, max_rank)
        if ranks in seen:
            raise ValueError(f"tree_choices: {ranks} is there twice")
        seen.add(ranks)
    ordered = sorted(seen, key=lambda ranks: (len(ranks), ranks))
    for ranks in ordered:
        if len(ranks) > 1 and ranks[:-1] not in seen:
            raise ValueError(f"tree_choices: {ranks} is there without its parent {ranks[:-1]}")
    return tuple(ordered)


def default_choices(max_depth: int) -> Choices:
    """The tree of EAGLE-1 down to `max_depth`."""
    return tuple(ranks for ranks in PRESETS["eagle-1"] if len(ranks) <= max_depth)


def _literal(text: str) -> object:
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        shown = text if len(text) <= 60 else text[:60] + "..."
        raise ValueError(
            "tree_choices must be a list such as '[(0,), (1,), (0, 0)]' or one of the presets "
            f"{', '.join(PRESETS)}; found {shown!r}"
        ) from None


def _entry(entry: object, max_depth: int, max_rank: int) -> tuple[int, ...]:
    if not isinstance(entry, Sequence) or isinstance(entry, str | bytes) or not entry:
        raise ValueError(f"tree_choices: an entry must be a tuple of child ranks, such as (0, 1); found {entry!r}")
    for rank in entry:
        if not isinstance(rank, numbers.Integral) or isinstance(rank, bool):
            raise ValueError(f"tree_choices: {entry!r} has the rank {rank!r}, which is not an integer")
        if rank < 0:
            raise ValueError(f"tree_choices: {entry!r} has the negative rank {rank}")
        if rank > max_rank:
            raise ValueError(f"tree_choices: {entry!r} is too wide: rank {rank} of at most {max_rank}")
    if len(entry) > max_depth:
        raise ValueError(f"tree_choices: {entry!r} is too deep: {len(entry)} of at most {max_depth} drafted tokens")
    return tuple(int(rank) for rank in entry)
