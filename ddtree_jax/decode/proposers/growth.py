"""How a tree grows when every node has a distribution of its own, given by a drafter that runs once a depth.

A growth asks for the children of the nodes that it wants to go on from, a depth at a time. All shapes are static.

Shape letters: B slots, W nodes of a step, N nodes, root included, L depths, k branching.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from ddtree_jax.tree import Choices, DraftTree, fill_layout, sorted_largest, static_layout, tree_from_pool

# (state, tokens [B, W], parents [B, W]: places in the step before, ranks r) -> the r best children of each node: log
# probabilities and tokens [B, W, r], best first, and the next state. The first step's only node is the root.
Expand = Callable[[Any, jax.Array, jax.Array, int], tuple[jax.Array, jax.Array, Any]]


class Growth(Protocol):
    """Static and hashable.

    Attributes:
      depth: L, of the deepest node.
    """

    depth: int

    def grow(self, expand: Expand, state: Any, root: jax.Array) -> DraftTree:
        """The tree below `root` [B]."""


@dataclasses.dataclass(frozen=True)
class StaticGrowth:
    """A tree fixed in advance, in level order (`parse_choices`); ranks are those of the parent's distribution."""

    choices: Choices

    @property
    def depth(self) -> int:
        return len(static_layout(self.choices).widths)

    def grow(self, expand: Expand, state: Any, root: jax.Array) -> DraftTree:
        layout = static_layout(self.choices)
        tokens, log_prob = [], []
        inner = np.zeros(1, np.int32)  # the nodes of this depth that have children; the root first
        below, places = root[:, None], np.zeros(1, np.int32)
        for depth in range(self.depth):
            children = np.flatnonzero(layout.depth == depth + 1)
            slots = np.searchsorted(inner, layout.parent[children])
            ranks = layout.rank[children]
            parents = jnp.broadcast_to(jnp.asarray(places)[None], below.shape)
            own, drafted, state = expand(state, below, parents, int(ranks.max()) + 1)
            own, drafted = own[:, slots, ranks], drafted[:, slots, ranks]  # [B, children]
            log_prob.append(own)
            tokens.append(drafted)
            further = np.isin(children, layout.parent)
            inner, below, places = children[further], drafted[:, further], slots[further].astype(np.int32)
        return fill_layout(layout, jnp.concatenate(log_prob, axis=1), jnp.concatenate(tokens, axis=1), root)


@dataclasses.dataclass(frozen=True)
class DynamicGrowth:
    """EAGLE-2 (arXiv 2406.16858, section 4): at every depth the k nodes of largest probability go on to k children
    each; of all nodes drafted the N - 1 most probable are kept.

    A child is worth no more than its parent, so that what is kept is a tree.
    """

    num_nodes: int
    depth: int
    branching: int

    def grow(self, expand: Expand, state: Any, root: jax.Array) -> DraftTree:
        k = self.branching
        start = jnp.zeros((root.shape[0], 1), jnp.int32)
        own, tokens, state = expand(state, root[:, None], start, k)
        scores, tokens = own[:, 0], tokens[:, 0]  # [B, k], nodes that go on
        first = jnp.broadcast_to(jnp.arange(k, dtype=jnp.int32)[None], tokens.shape)
        places, parents = first, jnp.zeros_like(first)  # in the pool, and in the step before
        pool = [(scores, tokens, jnp.full_like(first, -1), jnp.ones_like(first))]
        size = k
        for depth in range(2, self.depth + 1):
            own, drafted, state = expand(state, tokens, parents, k)  # [B, k, k]
            total = (scores[:, :, None] + own).reshape(root.shape[0], k * k)
            drafted = drafted.reshape(total.shape)
            pool.append((total, drafted, jnp.repeat(places, k, axis=1), jnp.full_like(drafted, depth)))
            if depth < self.depth:
                scores, chosen = sorted_largest(total, k)
                tokens = jnp.take_along_axis(drafted, chosen, axis=1, mode="clip")
                places, parents = size + chosen, chosen // k
            size += k * k
        total, tokens, parents, depths = (jnp.concatenate(parts, axis=1) for parts in zip(*pool, strict=True))
        return tree_from_pool(root, tokens, parents, depths, total, num_nodes=self.num_nodes, max_depth=self.depth)


def chain(depth: int) -> StaticGrowth:
    """The most probable token after the most probable token, `depth` times."""
    return StaticGrowth(tuple((0,) * d for d in range(1, depth + 1)))
