"""The tree of the most probable prefixes, built on the device with static shapes.

The drafter gives one distribution per depth and treats depths as independent, so a prefix has the product of its
tokens' probabilities. The tree that maximises the expected number of accepted nodes under that model is the set of
the N - 1 most probable prefixes, which is prefix-closed by itself (DDTree, arXiv 2604.12989, Propositions 1 and 2).
The paper finds it with a heap on the host (Algorithm 1). Here the same set comes from a few small selections, of some
depths at a time, and one over all depths, without a heap and without leaving the device; see `build_from_top`.

Shape letters: B slots · N nodes, root included · L draft depth · V vocabulary · R tokens kept per depth (top-k) ·
W prefixes kept at one depth.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ddtree_jax.tree.chain import root_tree
from ddtree_jax.tree.draft_tree import DraftTree
from ddtree_jax.tree.frontier import (
    NO_TOKEN,
    Plan,
    check_array,
    check_num_nodes,
    frontier_plan,
    roots_of,
    tree_of_best,
)
from ddtree_jax.tree.select import clean_log_probs, largest_by_keys, top_tokens


def build_tree(log_probs: jax.Array, num_nodes: int, *, root_tokens: jax.Array | None = None) -> DraftTree:
    """The tree of the `num_nodes - 1` most probable prefixes, exactly (arXiv 2604.12989, Algorithm 1, Lemma 1).

    Nodes are ordered by non-increasing log_prob; ties put the shallower node first, then the one whose parent comes
    first, then the better token (tokens of equal probability: in the order of `top_tokens`). Parents therefore always
    come before children, also when probabilities are exactly 1. Prefixes of probability 0 (-inf) and NaN entries never
    become nodes: where fewer than N - 1 prefixes are possible the rest is padding.

    Args:
      log_probs: [B, L, V] float32, the drafter's log softmax per depth.
      num_nodes: N, root included (static).
      root_tokens: [B] int32, the token committed last; 0 if left out.

    Returns:
      A `DraftTree` of width N.

    Raises:
      ValueError: N < 1, or arrays of another rank, shape or dtype.
    """
    check_num_nodes(num_nodes)
    check_array("log_probs", log_probs, 3, jnp.float32)
    batch, depths, vocab = log_probs.shape
    if num_nodes == 1:
        return root_tree(roots_of(root_tokens, batch))
    # A path cannot be deeper than there are nodes to draft, nor use a token beyond rank N - 1 (Lemma 1).
    depths = min(depths, num_nodes - 1)
    token_log_prob, tokens = top_tokens(log_probs[:, :depths], min(num_nodes - 1, vocab))
    return build_from_top(token_log_prob, tokens, num_nodes, root_tokens)


def build_from_top(
    token_log_prob: jax.Array, tokens: jax.Array, num_nodes: int, root_tokens: jax.Array | None = None
) -> DraftTree:
    """`build_tree` on tokens that were already picked per depth, best first (by `top_tokens` or a fused kernel).

    Depth by depth, or some depths at once, keep the most probable of the prefixes kept above x the tokens below them.
    All lists are sorted, so that a prefix has many that come before it, known by its ranks alone. Which candidates the
    tree can hold is therefore known at trace time, about N ln N of N * R at one depth; see `frontier`.

    The result is exact with R = min(N - 1, V) tokens per depth (Lemma 1 of the paper). With fewer it is exact among
    the trees of these tokens.

    Args:
      token_log_prob: [B, L, R] float32, non-increasing along R. Values above 0 (rounding) count as 0, NaN as -inf.
      tokens: [B, L, R] int32, distinct within a depth.
      num_nodes: N, root included (static).
      root_tokens: [B] int32; 0 if left out.

    Returns:
      A `DraftTree` of width N.

    Raises:
      ValueError: N < 1, or arrays of another rank, shape or dtype.
    """
    check_num_nodes(num_nodes)
    check_array("token_log_prob", token_log_prob, 3, jnp.float32)
    check_array("tokens", tokens, 3, jnp.int32)
    if tokens.shape != token_log_prob.shape:
        raise ValueError(f"tokens {tokens.shape} and token_log_prob {token_log_prob.shape} must have one shape")
    batch, depths, ranks = tokens.shape
    roots = roots_of(root_tokens, batch)
    if num_nodes == 1:
        return root_tree(roots)
    plan = frontier_plan(num_nodes, depths, ranks)
    weights, pairs = _frontiers(clean_log_probs(token_log_prob), plan)  # [B, sum of W]
    return tree_of_best(plan, weights, pairs, tokens, roots)


def _frontiers(token_log_prob: jax.Array, plan: Plan) -> tuple[jax.Array, jax.Array]:
    """The kept prefixes of all depths, shallow first: log probability and pair number, each [B, sum of W]."""
    batch = token_log_prob.shape[0]
    flat = token_log_prob.reshape(batch, -1)

    def at(tokens: np.ndarray) -> jax.Array:
        values = jnp.take(flat, tokens, axis=1, mode="clip")
        absent = jnp.where(tokens == NO_TOKEN, 0.0, -jnp.inf).astype(jnp.float32)
        return jnp.where((tokens >= 0)[None], values, absent[None])

    weights = jnp.zeros((batch, 1), jnp.float32)
    all_weights, all_pairs = [], []
    for step in plan.steps:
        # Depth by depth, as float32 adds: a child is never more probable than its parent, since rounding is monotone
        # and no token is above 0. The last sums are the candidates' own, those before are the sums of their ancestors.
        sums = [jnp.take(weights, step.prefix, axis=1, mode="clip")]
        for tokens in step.tokens:
            sums.append(sums[-1] + at(tokens))  # [B, m, M]
        # Made once: XLA would add them up in every comparison, or keep the comparisons in memory.
        sums = lax.optimization_barrier(sums[1:])
        kept = largest_by_keys(sums[::-1], max(step.widths))
        best = jnp.take_along_axis(sums[-1], kept, axis=2, mode="clip")
        for level, width in enumerate(step.widths):
            all_weights.append(best[:, level, :width])
            all_pairs.append(kept[:, level, :width] + step.first_pair + level * step.prefix.shape[1])
        weights = all_weights[-1]
    return jnp.concatenate(all_weights, axis=1), jnp.concatenate(all_pairs, axis=1)
