"""Methods and widths to time, as decode configs."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from ddtree_jax.config import METHODS, DecodeConfig, DraftConfig
from ddtree_jax.decode.plan import LOOKUP_DEPTH
from ddtree_jax.tree import Choices, best_static_tree

# How often the target's token is each of a depth's ranks, to have static trees of the usual proportions: a token is
# right 7 times of 10, and the next best 0.3 times as often.
_HITS = 0.7 * 0.3 ** np.arange(10)


@functools.lru_cache
def static_choices(nodes: int, drafter: DraftConfig) -> Choices:
    """The best static tree of `nodes` nodes, root included, of a drafter whose every depth has the hits above."""
    hits = np.broadcast_to(_HITS[: drafter.max_candidates], (drafter.depth, min(len(_HITS), drafter.max_candidates)))
    return best_static_tree(hits, nodes)[0]


def decode_config(method: str, nodes: int, drafter: DraftConfig) -> DecodeConfig:
    """How to decode with a method at a width of `nodes`, root included; chains have a width of their own."""
    if method == "static_tree":
        return DecodeConfig(method=method, tree_choices=static_choices(nodes, drafter))
    return DecodeConfig(method=method, num_nodes=nodes) if METHODS[method].has_width else DecodeConfig(method=method)


def variants(methods: Sequence[str], nodes: Sequence[int], drafter: DraftConfig) -> list[tuple[str, int]]:
    """(method, N) in the order of the table, N the rows that a round verifies."""
    chain = [drafter.depth + 1]
    lengths = {"autoregressive": [1], "lookup": [LOOKUP_DEPTH + 1], "dflash": chain, "best_path": chain}
    lengths["static_tree"] = sorted({1 + len(static_choices(n, drafter)) for n in nodes})
    return [(method, n) for method in methods for n in lengths.get(method, nodes)]
