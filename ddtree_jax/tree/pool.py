"""The best tree among nodes that were drafted step by step (the re-ranking of EAGLE-2, arXiv 2406.16858).

Shape letters: B slots · N nodes, root included · M nodes drafted.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ddtree_jax.tree.draft_tree import DraftTree, place_of, tree_below_root
from ddtree_jax.tree.select import sorted_largest


def tree_from_pool(
    root_tokens: jax.Array,
    tokens: jax.Array,
    parent: jax.Array,
    depth: jax.Array,
    log_prob: jax.Array,
    *,
    num_nodes: int,
    max_depth: int,
) -> DraftTree:
    """Keeps the N - 1 most probable of the drafted nodes.

    Args:
      root_tokens: [B] int32, the token committed last.
      tokens: [B, M] int32, parents before children.
      parent: [B, M] int32, places among the M; -1 for the root.
      depth: [B, M] int32, edges from the root.
      log_prob: [B, M] float32 without NaN, from the root, no larger than the parent's. Nodes of -inf are not kept.
      num_nodes: N (static).
      max_depth: an upper bound of the depths (static).

    Returns:
      A `DraftTree` of width N, nodes in falling order of probability; of equal ones the earlier comes first, so that
      with a node its parent is kept, before it.
    """
    log_prob, chosen = sorted_largest(log_prob, min(num_nodes - 1, tokens.shape[1]))
    tokens, parent, depth = (jnp.take_along_axis(x, chosen, axis=1, mode="clip") for x in (tokens, parent, depth))
    return tree_below_root(
        root_tokens, tokens, place_of(parent, chosen), depth, log_prob, log_prob > -jnp.inf,
        num_nodes=num_nodes, max_depth=max_depth,
    )  # fmt: skip
