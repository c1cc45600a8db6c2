"""Static trees: one shape for every round, filled with the drafter's tokens by rank (Medusa, EAGLE-1).

Parents, depths and visibility are constants of the compiled program; a round only picks tokens.

Shape letters: B slots · N nodes, root included · L draft depth · R ranks kept per depth.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from ddtree_jax.tree.choices import Choices
from ddtree_jax.tree.draft_tree import DraftTree, in_every_slot, static_bits


@dataclasses.dataclass(frozen=True, eq=False)
class StaticLayout:
    """What a static tree's choices fix; node 0 is the root, the others follow in the order of the choices.

    Attributes:
      parent, depth, rank: [N] int32; rank is that of the node's token at its depth (0 at the root).
      visible: [N, N] bool, node i sees node j.
      widths: per depth, tokens that the tree needs: the largest rank plus one.
    """

    parent: np.ndarray
    depth: np.ndarray
    rank: np.ndarray
    visible: np.ndarray
    widths: tuple[int, ...]


@functools.lru_cache(maxsize=64)
def static_layout(choices: Choices) -> StaticLayout:
    """The layout of checked choices in level order (`parse_choices`)."""
    index = {(): 0} | {ranks: node for node, ranks in enumerate(choices, start=1)}
    parent = np.array([0, *(index[ranks[:-1]] for ranks in choices)], np.int32)
    depth = np.array([0, *map(len, choices)], np.int32)
    visible = np.eye(len(index), dtype=bool)
    for node in range(1, len(index)):  # parents come first
        visible[node] |= visible[parent[node]]
    widths = tuple(1 + max(ranks[-1] for ranks in choices if len(ranks) == d) for d in range(1, depth.max() + 1))
    return StaticLayout(parent, depth, np.array([0, *(ranks[-1] for ranks in choices)], np.int32), visible, widths)


def static_tree(token_log_prob: jax.Array, tokens: jax.Array, choices: Choices, root_tokens: jax.Array) -> DraftTree:
    """Fills a static tree from per-depth candidates. All N = 1 + len(choices) nodes are live.

    Args:
      token_log_prob: [B, L, R] float32, best first (by `top_tokens`); NaN counts as -inf.
      tokens: [B, L, R] int32.
      choices: in level order (static); L and R must hold every depth and rank of it.
      root_tokens: [B] int32, the token committed last.

    Returns:
      A `DraftTree`, nodes in the order of `choices`.

    Raises:
      ValueError: arrays of another rank, shape or dtype, or too few depths or ranks.
    """
    layout = static_layout(choices)
    need = (len(layout.widths), max(layout.widths))
    if tokens.ndim != 3 or tokens.shape != token_log_prob.shape or root_tokens.shape != tokens.shape[:1]:
        raise ValueError(
            "expected token_log_prob and tokens [B, L, R] and root_tokens [B], "
            f"got {token_log_prob.shape}, {tokens.shape} and {root_tokens.shape}"
        )
    if (tokens.dtype, root_tokens.dtype, token_log_prob.dtype) != (jnp.int32, jnp.int32, jnp.float32):
        raise ValueError(
            "expected float32 token_log_prob, int32 tokens and int32 root_tokens, "
            f"got {token_log_prob.dtype}, {tokens.dtype} and {root_tokens.dtype}"
        )
    if tokens.shape[1] < need[0] or tokens.shape[2] < need[1]:
        raise ValueError(f"a tree {need[0]} deep and {need[1]} ranks wide does not fit tokens {tokens.shape}")
    where = (layout.depth[1:] - 1, layout.rank[1:])
    return fill_layout(layout, token_log_prob[:, *where], tokens[:, *where], root_tokens)


def fill_layout(layout: StaticLayout, own: jax.Array, tokens: jax.Array, root_tokens: jax.Array) -> DraftTree:
    """The tree of a layout from what each drafted node holds.

    Args:
      own: [B, N - 1] float32, log probability of each node given its parent; NaN counts as -inf.
      tokens: [B, N - 1] int32.
      root_tokens: [B] int32.
    """
    batch = tokens.shape[0]
    own = jnp.concatenate([jnp.zeros((batch, 1), jnp.float32), jnp.where(jnp.isnan(own), -jnp.inf, own)], axis=1)
    return DraftTree(
        tokens=jnp.concatenate([root_tokens[:, None], tokens], axis=1),
        parent=in_every_slot(layout.parent, batch),
        depth=in_every_slot(layout.depth, batch),
        # Not a product with the mask: 0 times -inf is NaN.
        log_prob=jnp.sum(jnp.where(layout.visible[None], own[:, None, :], 0.0), axis=-1),
        size=jnp.full((batch,), len(layout.parent), jnp.int32),
        ancestors=in_every_slot(static_bits(layout.visible), batch),
    )
