"""Which tree is built from a drafter's distributions, one a depth or one a depth and predecessor.

Shared by all drafters that give such marginals or conditionals.

Shape letters: B slots, N nodes, L draft depth, V vocabulary, K candidates.
"""

import dataclasses
from typing import Protocol

import jax
import jax.numpy as jnp

from ddtree_jax.tree import (
    Choices,
    DraftTree,
    build_tree,
    chain_tree,
    conditional_chain,
    conditional_static_tree,
    conditional_tree,
    static_layout,
    static_tree,
    top_tokens,
)


class Shape(Protocol):
    """Static and hashable."""

    def depths(self, drafted: int) -> int:
        """Depths that the tree can use of the `drafted` ones."""

    def build(self, log_probs: jax.Array, root: jax.Array) -> DraftTree:
        """The tree below `root` [B] from log_probs [B, L, V] float32, L = depths(...)."""

    def build_conditional(self, tokens: jax.Array, log_conditional: jax.Array, root: jax.Array) -> DraftTree:
        """The tree from candidates [B, L, K] int32 and their conditionals [B, L, K, K] (`conditional_tree`)."""


@dataclasses.dataclass(frozen=True)
class Chain:
    """The most probable token of every depth."""

    def depths(self, drafted: int) -> int:
        return drafted

    def build(self, log_probs: jax.Array, root: jax.Array) -> DraftTree:
        return chain_tree(jnp.argmax(log_probs, axis=-1).astype(jnp.int32), jnp.max(log_probs, axis=-1), root)

    def build_conditional(self, tokens: jax.Array, log_conditional: jax.Array, root: jax.Array) -> DraftTree:
        return conditional_chain(tokens, log_conditional, root)


@dataclasses.dataclass(frozen=True)
class MostProbable:
    """DDTree: the N - 1 most probable prefixes."""

    num_nodes: int

    def depths(self, drafted: int) -> int:
        return min(drafted, self.num_nodes - 1)

    def build(self, log_probs: jax.Array, root: jax.Array) -> DraftTree:
        return build_tree(log_probs, self.num_nodes, root_tokens=root)

    def build_conditional(self, tokens: jax.Array, log_conditional: jax.Array, root: jax.Array) -> DraftTree:
        return conditional_tree(tokens, log_conditional, self.num_nodes, root)


@dataclasses.dataclass(frozen=True)
class Static:
    """A tree fixed in advance, in level order (`parse_choices`)."""

    choices: Choices

    def depths(self, drafted: int) -> int:
        return len(static_layout(self.choices).widths)

    def build(self, log_probs: jax.Array, root: jax.Array) -> DraftTree:
        # One selection as wide as the widest depth: launching another costs more than ranks that nobody reads.
        return static_tree(*top_tokens(log_probs, max(static_layout(self.choices).widths)), self.choices, root)

    def build_conditional(self, tokens: jax.Array, log_conditional: jax.Array, root: jax.Array) -> DraftTree:
        return conditional_static_tree(tokens, log_conditional, self.choices, root)
