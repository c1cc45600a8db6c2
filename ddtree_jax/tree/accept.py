"""Acceptance: follow the target's own draws through the tree.

Shape letters: B slots · N nodes, root included · P path length · Q = ceil(N / 32) words.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from ddtree_jax.tree.draft_tree import DraftTree
from pallas_kernels.tree_attention.masks import pack_bits, unpack_bits


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
    tokens, so the reached nodes form one path and the deepest one ends it. (With equal siblings, which no builder
    here makes, the first of the deepest nodes wins.)

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
    last = jnp.argmax(jnp.where(reached, tree.depth, -1), axis=1).astype(jnp.int32)  # [B]

    last_depth = jnp.take_along_axis(tree.depth, last[:, None], axis=1, mode="clip")  # [B, 1]
    last_bits = jnp.take_along_axis(tree.ancestors, last[:, None, None], axis=1, mode="clip")[:, 0]  # [B, Q]
    on_path = unpack_bits(last_bits, num_nodes)  # [B, N]
    # The path holds one node of every depth, so "the node of depth k on the path" needs no sequential walk.
    step = jnp.arange(max_path, dtype=jnp.int32)[None]  # [1, P]
    here = on_path[:, None, :] & (tree.depth[:, None, :] == step[:, :, None])  # [B, P, N]
    path = jnp.sum(jnp.where(here, node[:, None, :], 0), axis=-1, dtype=jnp.int32)  # [B, P]
    path = jnp.where(step <= last_depth, path, last[:, None])
    return Acceptance(
        path=path,
        length=jnp.minimum(last_depth[:, 0] + 1, max_path),
        tokens=jnp.take_along_axis(draws, path, axis=1, mode="clip"),
    )
