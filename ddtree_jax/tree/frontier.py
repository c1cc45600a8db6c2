"""What building a tree of most probable prefixes has in common, whatever gives their probabilities.

Depth by depth, the most probable of (prefixes kept one depth above) x (tokens of this depth) are kept; one selection
over all depths makes the tree. That is exact wherever a child is never more probable than its parent. Let G be the
N - 1 most probable prefixes, ties in the order of nodes. With a prefix all that it extends is in G, so a prefix at
depth d has d - 1 ancestors there, and at most N - d of G lie at depth d. If every prefix of G at depth d - 1 was
kept, every one at depth d is among the candidates, where all others are less probable or come later: the N - d best
hold them.

Shape letters: B slots · N nodes, root included · L draft depth · R tokens per depth · W prefixes kept at one depth.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from ddtree_jax.tree.draft_tree import DraftTree, place_of, tree_below_root
from ddtree_jax.tree.select import sorted_largest


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything about a build that depends on shapes only; a "pair" is (prefix kept one depth above, token rank).

    Pairs are numbered through all depths, and so are kept prefixes ("prefix numbers", in order of depth).
    """

    num_nodes: int
    ranks: int  # R
    widths: tuple[int, ...]  # prefixes kept per depth
    prefix: tuple[np.ndarray, ...]  # per depth: the pair's prefix, as a position within the depth above
    rank: tuple[np.ndarray, ...]  # per depth: the pair's token rank
    pair_parent: np.ndarray  # pair -> prefix number of its prefix, -1 for the root
    pair_token: np.ndarray  # pair -> its token's place in the flattened [L * R]
    pair_depth: np.ndarray  # pair -> depth of the node it makes


@functools.lru_cache(maxsize=64)
def frontier_plan(num_nodes: int, depths: int, ranks: int, *, independent: bool = True) -> Plan:
    """The plan of a build.

    Args:
      independent: the tokens of a depth have one distribution, best first, whatever the prefix: of pairs with 1-based
        ranks (i, r) only those with i * r <= W can be kept (`build_from_top`). Otherwise all pairs are looked at.
    """
    widths, prefixes, token_ranks = [], [], []
    parents, flat_tokens, pair_depths = [], [], []
    above, above_start = 1, -1  # depth 0 holds the root alone; its "prefix number" is -1
    for depth in range(1, min(depths, num_nodes - 1) + 1):
        room = num_nodes - depth
        product = np.outer(np.arange(1, above + 1), np.arange(1, ranks + 1))
        # Row-major order, which is what makes ties go to the earlier prefix, then to the better token.
        prefix, rank = (a.astype(np.int32) for a in np.nonzero((product <= room) | (not independent)))
        prefixes.append(prefix)
        token_ranks.append(rank)
        parents.append(above_start + prefix)
        flat_tokens.append((depth - 1) * ranks + rank)
        pair_depths.append(np.full_like(prefix, depth))
        above, above_start = min(room, prefix.size), above_start + above
        widths.append(above)
    return Plan(
        num_nodes=num_nodes,
        ranks=ranks,
        widths=tuple(widths),
        prefix=tuple(prefixes),
        rank=tuple(token_ranks),
        pair_parent=np.concatenate(parents).astype(np.int32),
        pair_token=np.concatenate(flat_tokens).astype(np.int32),
        pair_depth=np.concatenate(pair_depths).astype(np.int32),
    )


def tree_of_best(plan: Plan, weights: jax.Array, pairs: jax.Array, tokens: jax.Array, roots: jax.Array) -> DraftTree:
    """The tree of the N - 1 best of all kept prefixes.

    Args:
      plan: of the build.
      weights: [B, sum of W] float32, log probability of every kept prefix, shallow depths first.
      pairs: [B, sum of W] int32, the pair that each of them is.
      tokens: [B, L, R] int32.
      roots: [B] int32.
    """
    count = min(plan.num_nodes - 1, weights.shape[1])
    log_prob, chosen = sorted_largest(weights, count)  # `weights` has shallower depths first: so do ties
    live = log_prob > -jnp.inf
    pair = jnp.take_along_axis(pairs, chosen, axis=1, mode="clip")  # [B, count]
    # A node's parent is the chosen prefix with its parent's number. It is always there: it is at least as probable
    # and comes earlier.
    flat_tokens = tokens.reshape(tokens.shape[0], -1)
    return tree_below_root(
        roots,
        jnp.take_along_axis(flat_tokens, jnp.asarray(plan.pair_token)[pair], axis=1, mode="clip"),
        place_of(jnp.asarray(plan.pair_parent)[pair], chosen),
        jnp.asarray(plan.pair_depth)[pair],
        log_prob,
        live,
        num_nodes=plan.num_nodes,
        max_depth=len(plan.widths),
    )


def check_num_nodes(num_nodes: int) -> None:
    if num_nodes < 1:
        raise ValueError(f"num_nodes counts the root and must be at least 1, got {num_nodes}")


def check_array(name: str, array: jax.Array, rank: int, dtype: jnp.dtype) -> None:
    if array.ndim != rank or 0 in array.shape[1:]:
        raise ValueError(f"{name} must have rank {rank} and no empty axis, got shape {array.shape}")
    if array.dtype != dtype:
        raise ValueError(f"{name} must be {jnp.dtype(dtype).name}, got {array.dtype}")


def roots_of(root_tokens: jax.Array | None, batch: int) -> jax.Array:
    if root_tokens is None:
        return jnp.zeros((batch,), jnp.int32)
    check_array("root_tokens", root_tokens, 1, jnp.int32)
    if root_tokens.shape != (batch,):
        raise ValueError(f"root_tokens must have shape ({batch},), got {root_tokens.shape}")
    return root_tokens
