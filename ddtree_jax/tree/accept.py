"""Acceptance: follow the target's own draws through the tree.

Shape letters: B slots · N nodes, root included · P path length · Q = ceil(N / 32) words.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from ddtree_jax.tree.draft_tree import DraftTree
from pallas_kernels.tree_attention.masks import pack_bits


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Acceptance:
    """What one round accepted, per slot.

    Attributes:
      path: [B, P] int32, nodes from the root (entry 0) to the deepest accepted node, which fills the rest of the row.
      length: [B] int32, accepted nodes, root included, 1 <= length <= P. Also the number of tokens committed.
      tokens: [B, P] int32, the text this round adds, `draws` at the path's nodes: the tokens of path nodes 1, 2, ...
        and last the next root (the draw that no child matched). Entry k is valid for k < length.
    """

    path: jax.Array
    length: jax.Array
    tokens: jax.Array


def accept(tree: DraftTree, draws: jax.Array, *, max_path: int) -> Acceptance:
    """Walks from the root for as long as the target's draw at a node is the token of one of its children.

    The result is lossless: every committed token is the target's own draw given exactly the text before it, the tree
    does not depend on the draws, and draws off the path are never looked at. So the text has the target's law at any
    temperature, whatever the drafter proposed (arXiv 2604.12989, section on verification). No test against the
    drafter's probabilities is needed, nor could one do better: a lossless scheme must emit a text that starts with
    node u's prefix with the target's probability pi(u), so on average it can accept at most the sum of pi over the
    tree's nodes, and this walk accepts exactly that.

    All nodes are checked at once. An edge holds if the draw at the parent is the child's token; a node is reached if
    the edges of all its ancestors and its own hold, which on packed words is one and-not; siblings have distinct
    tokens, so the reached nodes form one path. (Of equal siblings, which no builder here makes and which stand for the
    same text, the first reached counts at each depth.)

    Args:
      tree: the verified `DraftTree`.
      draws: [B, N] int32, the target's draw (or argmax) at every node; ignored at padding nodes.
      max_path: P (static). At least the tree's largest depth + 1 to use all of it; a smaller P cuts the path, which
        stays lossless.

    Returns:
      An `Acceptance` with path length P.

    Raises:
      ValueError: draws of another shape or dtype, or max_path < 1.
    """
    if draws.shape != tree.tokens.shape or draws.dtype != jnp.int32:
        raise ValueError(f"draws must be {tree.tokens.shape} int32, got {draws.shape} {draws.dtype}")
    if max_path < 1:
        raise ValueError(f"max_path counts the root and must be at least 1, got {max_path}")
    num_nodes = tree.num_nodes
    node = jnp.arange(num_nodes, dtype=jnp.int32)[None]  # [1, N]
    drawn_above = jnp.take_along_axis(draws, tree.parent, axis=1, mode="clip")
    edge_ok = (node == 0) | ((node < tree.size[:, None]) & (tree.tokens == drawn_above))  # [B, N]
    broken = tree.ancestors & ~pack_bits(edge_ok)[:, None, :]  # [B, N, Q]
    reached = jnp.all(broken == jnp.uint32(0), axis=-1)  # [B, N]
    # One number says how deep a node lies and, of equally deep ones, which is the first. The largest up to depth k is
    # the path's node of depth k, or where the path ends before that its last: one reduction instead of a walk.
    step = jnp.arange(max_path, dtype=jnp.int32)[None]  # [1, P]
    seen = reached[:, None, :] & (tree.depth[:, None, :] <= step[:, :, None])  # [B, P, N]
    number = tree.depth * num_nodes + (num_nodes - 1 - node)
    deepest = jnp.max(jnp.where(seen, number[:, None, :], 0), axis=-1)  # [B, P]; the root is always reached
    path = num_nodes - 1 - deepest % num_nodes
    return Acceptance(
        path=path,
        length=deepest[:, -1] // num_nodes + 1,
        tokens=jnp.take_along_axis(draws, path, axis=1, mode="clip"),
    )
