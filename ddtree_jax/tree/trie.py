"""A tree out of whole continuations: equal beginnings are merged, the most probable prefixes are kept.

Shape letters: B slots · W continuations · L tokens of each · N nodes, root included.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from ddtree_jax.tree.draft_tree import DraftTree, place_of, tree_below_root
from ddtree_jax.tree.select import sorted_largest

GOES_ON = 0.9  # probability that a continuation which was right so far is right for one more token


def trie_tree(tokens: jax.Array, weights: jax.Array, num_nodes: int, root_tokens: jax.Array) -> DraftTree:
    """The N - 1 most probable prefixes of a mixture of continuations.

    The text follows continuation w with probability weights[w] / sum(weights) and leaves it at each token with
    probability 1 - GOES_ON, so a prefix of d tokens has the probability GOES_ON^d times the share of the
    continuations that begin with it. A child is less probable than its parent: the kept set is prefix-closed.

    Nodes are ordered by falling probability; ties put the shallower node first, then the earlier continuation.

    Args:
      tokens: [B, W, L] int32.
      weights: [B, W] float32, 0 or more and finite; a continuation of weight 0 does not exist.
      num_nodes: N, root included (static).
      root_tokens: [B] int32, the token committed last.

    Returns:
      A `DraftTree` of width N; where there are fewer prefixes the rest is padding, without continuations all of it.

    Raises:
      ValueError: N < 2, or arrays of another rank, shape or dtype.
    """
    if num_nodes < 2:
        raise ValueError(f"num_nodes counts the root and must be at least 2, got {num_nodes}")
    if tokens.ndim != 3 or 0 in tokens.shape or weights.shape != tokens.shape[:2]:
        raise ValueError(f"expected tokens [B, W, L] and weights [B, W], got {tokens.shape} and {weights.shape}")
    if root_tokens.shape != tokens.shape[:1]:
        raise ValueError(f"expected root_tokens [{tokens.shape[0]}], got {root_tokens.shape}")
    if (tokens.dtype, weights.dtype, root_tokens.dtype) != (jnp.int32, jnp.float32, jnp.int32):
        raise ValueError(
            "expected int32 tokens, float32 weights and int32 root_tokens, "
            f"got {tokens.dtype}, {weights.dtype} and {root_tokens.dtype}"
        )
    batch, width, depths = tokens.shape
    depths = min(depths, num_nodes - 1)
    tokens = tokens[:, :, :depths].swapaxes(1, 2)  # [B, L, W]
    exists = (weights > 0)[:, None, None, :]
    same = tokens[:, :, :, None] == tokens[:, :, None, :]
    same = (jnp.cumsum(~same, axis=1, dtype=jnp.int32) == 0) & exists  # [B, L, W, W']: equal down to this depth
    # A prefix belongs to the first continuation that begins with it, which also ends up with its probability.
    owner = jnp.argmax(same, axis=-1).astype(jnp.int32)  # [B, L, W]
    is_owner = (owner == jnp.arange(width, dtype=jnp.int32)[None, None]) & exists[:, 0]
    share = jnp.sum(jnp.where(same, weights[:, None, None, :], 0.0), axis=-1)
    share = share / jnp.maximum(jnp.sum(weights, axis=-1), jnp.finfo(jnp.float32).tiny)[:, None, None]
    fade = jnp.asarray(GOES_ON ** np.arange(1, depths + 1), jnp.float32)[None, :, None]
    probability = jnp.where(is_owner, share * fade, 0.0).reshape(batch, depths * width)

    count = min(num_nodes - 1, depths * width)
    best, chosen = sorted_largest(probability, count)  # depth-major: ties go to the shallower node
    live = best > 0
    depth = chosen // width + 1
    # The parent is owned by the first continuation that begins like this one, one token shorter.
    up = jnp.take_along_axis(owner.reshape(batch, -1), jnp.maximum(chosen - width, 0), axis=1, mode="clip")
    above = jnp.where(depth > 1, (depth - 2) * width + up, -1)
    return tree_below_root(
        root_tokens,
        jnp.take_along_axis(tokens.reshape(batch, -1), chosen, axis=1, mode="clip"),
        place_of(above, chosen),
        depth,
        jnp.log(best),
        live,
        num_nodes=num_nodes,
        max_depth=depths,
    )
