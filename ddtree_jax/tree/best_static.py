"""The best static tree for measured hits of the drafter's ranks.

Model: the target's token at depth d is the drafter's token of rank r with probability p[d, r], given that the path
down to it was right. A node of ranks (r_1, ..., r_d) is then accepted with probability p[1, r_1] ... p[d, r_d], and
the expected accepted length of a tree is 1 (the target's own token) plus the sum over its nodes. A child is never
more probable than its parent, so the N - 1 most probable nodes are prefix-closed and no other tree of N nodes is
better (the argument of arXiv 2604.12989, Propositions 1 and 2, with frequencies in place of the drafter's own
probabilities; Medusa, arXiv 2401.10774, 2.3.3, grows its trees greedily by the same estimate).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

import numpy as np

from ddtree_jax.tree.choices import Choices

MISSED = -1
"""In place of a rank: the token is none of the ranks looked at."""
UNKNOWN = -2
"""In place of a rank: the text ends before this depth."""


def best_static_tree(hits: np.ndarray, num_nodes: int) -> tuple[Choices, float]:
    """The tree of at most `num_nodes` nodes, root included, with the largest expected accepted length.

    Args:
      hits: [L, R] float64, p[d, r] as above, in 0..1 and at most 1 in sum over a depth's ranks.
      num_nodes: N. Nodes of probability 0 are left out, so the tree may be smaller.

    Returns:
      (choices in level order, expected accepted length). Ties put the shallower node first, then the smaller ranks.

    Raises:
      ValueError: hits that are no such frequencies, or N < 2.
    """
    hits = np.asarray(hits, np.float64)
    if hits.ndim != 2 or not hits.size or not np.all((hits >= 0) & (hits <= 1)) or np.any(hits.sum(1) > 1 + 1e-9):
        raise ValueError(f"hits must be frequencies [depths, ranks] with sums of at most 1 per depth; got\n{hits}")
    if num_nodes < 2:
        raise ValueError(f"num_nodes counts the root and must be at least 2, got {num_nodes}")
    # Measured frequencies need not fall with rank: walk each depth's ranks in falling order, as a heap of "next
    # sibling" and "first child" must.
    order = np.argsort(-hits, axis=1, kind="stable")
    depths, ranks = hits.shape

    def entry(places: tuple[int, ...], above: float):
        """A heap entry, most probable first: (-p, depth, ranks, places in falling order, p of the parent)."""
        chosen = tuple(int(order[d, i]) for d, i in enumerate(places))
        return (-above * hits[len(places) - 1, chosen[-1]], len(places), chosen, places, above)

    heap, chosen, expected = [entry((0,), 1.0)], [], 1.0
    while heap and len(chosen) < num_nodes - 1:
        negative, depth, path, places, above = heapq.heappop(heap)
        if negative == 0:
            break
        chosen.append(path)
        expected -= negative
        if places[-1] + 1 < ranks:
            heapq.heappush(heap, entry((*places[:-1], places[-1] + 1), above))
        if depth < depths:
            heapq.heappush(heap, entry((*places, 0), -negative))
    return tuple(sorted(chosen, key=lambda path: (len(path), path))), expected


def rank_hits(paths: np.ndarray, ranks: int) -> np.ndarray:
    """Frequencies p[d, r] from the ranks that the text's own tokens had in each round's draft.

    Args:
      paths: [rounds, L] int, rank of the text's token at each depth, `MISSED` or `UNKNOWN`.
      ranks: R.

    Returns:
      [L, R] float64: of the rounds whose tokens were all found down to depth d - 1 and whose text goes on, the share
      with rank r at depth d; 0 where no round got so far.
    """
    depths = paths.shape[1]
    hits = np.zeros((depths, ranks))
    alive = np.ones(len(paths), bool)
    for depth in range(depths):
        here = paths[alive & (paths[:, depth] != UNKNOWN), depth]
        if here.size:
            hits[depth] = np.bincount(here[here >= 0], minlength=ranks)[:ranks] / here.size
        alive &= paths[:, depth] >= 0
    return hits


def replayed_length(choices: Iterable[tuple[int, ...]], paths: np.ndarray) -> float:
    """Mean accepted length, the target's own token included, that a tree would have had in the recorded rounds.

    Args:
      choices: the tree.
      paths: [rounds, L] int as for `rank_hits`.

    Returns:
      Mean over the rounds whose text covers all depths (nan without any); unlike the model's expectation it knows how
      the depths of a round hang together.
    """
    nodes = frozenset(choices)
    lengths = []
    for path in paths[(paths != UNKNOWN).all(axis=1)].tolist():
        length = 1
        while length <= len(path) and tuple(path[:length]) in nodes:
            length += 1
        lengths.append(length)
    return float(np.mean(lengths)) if lengths else float("nan")
