"""Trees of a drafter whose next token depends on the one before: a first-order chain over a few candidates a depth.

DFlash 2 scores every pair of candidates of neighbouring depths (see `ddtree_jax.models.selector`). The probability of a
prefix is then a product of conditionals, and the tree of the N - 1 most probable prefixes, the chain of the best picks
and static trees are built from them as from marginals.

Shape letters: B slots · N nodes, root included · L draft depth · K candidates per depth · W prefixes kept at one depth.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from ddtree_jax.tree.chain import chain_tree, root_tree
from ddtree_jax.tree.choices import Choices
from ddtree_jax.tree.draft_tree import DraftTree
from ddtree_jax.tree.frontier import check_array, check_num_nodes, frontier_plan, roots_of, tree_of_best
from ddtree_jax.tree.select import clean_log_probs, sorted_largest
from ddtree_jax.tree.static import fill_layout, static_layout


def conditional_tree(
    tokens: jax.Array, log_conditional: jax.Array, num_nodes: int, root_tokens: jax.Array | None = None
) -> DraftTree:
    """The tree of the `num_nodes - 1` most probable prefixes of a first-order chain, exactly.

    Depth by depth the best of (prefixes kept one depth above) x (candidates) are kept, each prefix with the candidate
    that it ends in; why that is exact is said in `ddtree_jax.tree.frontier`. Nodes are ordered as in `build_tree`, of
    equally probable siblings the earlier candidate first.

    Args:
      tokens: [B, L, K] int32, distinct within a depth.
      log_conditional: [B, L, K, K] float32; [b, d, p, c] is the log probability of candidate c at depth d + 1 after
        candidate p at depth d. At the first depth p = 0 stands for the root. Values above 0 (rounding) count as 0, NaN
        as -inf. A row need not add up to 1.
      num_nodes: N, root included (static).
      root_tokens: [B] int32; 0 if left out.

    Returns:
      A `DraftTree` of width N.

    Raises:
      ValueError: N < 1, or arrays of another rank, shape or dtype.
    """
    check_num_nodes(num_nodes)
    batch, depths, count = _check(tokens, log_conditional)
    roots = roots_of(root_tokens, batch)
    if num_nodes == 1:
        return root_tree(roots)
    plan = frontier_plan(num_nodes, depths, count, independent=False)
    log_conditional = clean_log_probs(log_conditional)
    weights, last = jnp.zeros((batch, 1), jnp.float32), jnp.zeros((batch, 1), jnp.int32)
    all_weights, all_pairs = [], []
    for depth, (step, width) in enumerate(zip(plan.steps, plan.widths, strict=True)):
        # A child is never more probable than its parent: rounding is monotone and no conditional is above 0.
        rows = jnp.take_along_axis(log_conditional[:, depth], last[:, :, None], axis=1, mode="clip")
        weights, kept = sorted_largest((weights[:, :, None] + rows).reshape(batch, -1), width)
        last = kept % count
        all_weights.append(weights)
        all_pairs.append(kept + step.first_pair)
    return tree_of_best(plan, jnp.concatenate(all_weights, axis=1), jnp.concatenate(all_pairs, axis=1), tokens, roots)


def conditional_chain(tokens: jax.Array, log_conditional: jax.Array, root_tokens: jax.Array) -> DraftTree:
    """The walk from left to right that takes the most probable candidate after the one it has just taken.

    Args:
      tokens, log_conditional: as for `conditional_tree`.
      root_tokens: [B] int32.

    Returns:
      A `DraftTree` of width L + 1.
    """
    batch, depths, _ = _check(tokens, log_conditional)
    log_conditional = clean_log_probs(log_conditional)
    last = jnp.zeros((batch, 1), jnp.int32)
    picked, own = [], []
    for depth in range(depths):
        row = jnp.take_along_axis(log_conditional[:, depth], last[:, :, None], axis=1, mode="clip")[:, 0]
        last = jnp.argmax(row, axis=1, keepdims=True).astype(jnp.int32)
        picked.append(jnp.take_along_axis(tokens[:, depth], last, axis=1, mode="clip"))
        own.append(jnp.max(row, axis=1, keepdims=True))
    return chain_tree(jnp.concatenate(picked, axis=1), jnp.concatenate(own, axis=1), root_tokens)


def conditional_static_tree(
    tokens: jax.Array, log_conditional: jax.Array, choices: Choices, root_tokens: jax.Array
) -> DraftTree:
    """A static tree whose ranks are those of the distribution after the parent. All nodes are live.

    Args:
      tokens, log_conditional: as for `conditional_tree`; L and K must hold every depth and rank of the choices.
      choices: in level order (static).
      root_tokens: [B] int32.

    Raises:
      ValueError: arrays of another rank, shape or dtype, or too few depths or candidates.
    """
    batch, depths, count = _check(tokens, log_conditional)
    layout = static_layout(choices)
    need = (len(layout.widths), max(layout.widths))
    if depths < need[0] or count < need[1]:
        raise ValueError(f"a tree {need[0]} deep and {need[1]} ranks wide does not fit candidates {tokens.shape}")
    value, order = lax.top_k(clean_log_probs(log_conditional[:, : need[0]]), need[1], is_stable=True)
    last, own, picked = jnp.zeros((batch, 1), jnp.int32), [], []
    for depth, above in enumerate(range(need[0]), start=1):
        (nodes,) = (layout.depth == depth).nonzero()
        # Positions of the parents within the depth above; level order keeps them together.
        place = layout.parent[nodes] - (layout.depth == above).argmax()
        flat = last[:, place] * need[1] + layout.rank[nodes][None]

        def here(table, flat=flat, above=above):
            return jnp.take_along_axis(table[:, above].reshape(batch, -1), flat, axis=1, mode="clip")

        last = here(order).astype(jnp.int32)
        own.append(here(value))
        picked.append(jnp.take_along_axis(tokens[:, above], last, axis=1, mode="clip"))
    return fill_layout(layout, jnp.concatenate(own, axis=1), jnp.concatenate(picked, axis=1), root_tokens)


def _check(tokens: jax.Array, log_conditional: jax.Array) -> tuple[int, int, int]:
    check_array("tokens", tokens, 3, jnp.int32)
    check_array("log_conditional", log_conditional, 4, jnp.float32)
    if log_conditional.shape != (*tokens.shape, tokens.shape[-1]):
        found = f"{tokens.shape} and {log_conditional.shape}"
        raise ValueError(f"expected tokens [B, L, K] and log_conditional [B, L, K, K], got {found}")
    return tokens.shape
