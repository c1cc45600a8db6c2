"""Which tree is built from a drafter's distributions, one a depth or one a depth and predecessor.

Shared by all drafters that give such marginals or conditionals.

Shape letters: B slots, N nodes, L draft depth, V vocabulary, R ranks, K candidates.
"""

import dataclasses
from typing import Protocol

import jax

from ddtree_jax.tree import (
    Choices,
    DraftTree,
    build_from_top,
    chain_tree,
    conditional_chain,
    conditional_static_tree,
    conditional_tree,
    static_layout,
    static_tree,
)


class Shape(Protocol):
    """Static and hashable."""

    def depths(self, drafted: int) -> int:
        """Depths that the tree can use of the `drafted` ones."""

    def ranks(self, vocab_size: int) -> int:
        """R, the most probable tokens of a depth that the tree can use."""

    def build(self, log_prob: jax.Array, tokens: jax.Array, root: jax.Array) -> DraftTree:
        """The tree below `root` [B] from log_prob [B, L, R] float32 and tokens [B, L, R] int32, best first (by
        `top_tokens`), L = depths(...) and R = ranks(...)."""

    def build_conditional(self, tokens: jax.Array, log_conditional: jax.Array, root: jax.Array) -> DraftTree:
        """The tree from candidates [B, L, K] int32 and their conditionals [B, L, K, K] (`conditional_tree`)."""


@dataclasses.dataclass(frozen=True)
class Chain:
    """The most probable token of every depth."""

    def depths(self, drafted: int) -> int:
        return drafted

    def ranks(self, vocab_size: int) -> int:
        return 1

    def build(self, log_prob: jax.Array, tokens: jax.Array, root: jax.Array) -> DraftTree:
        return chain_tree(tokens[..., 0], log_prob[..., 0], root)

    def build_conditional(self, tokens: jax.Array, log_conditional: jax.Array, root: jax.Array) -> DraftTree:
        return conditional_chain(tokens, log_conditional, root)


@dataclasses.dataclass(frozen=True)
class MostProbable:
    """DDTree: the N - 1 most probable prefixes."""

    num_nodes: int

    def depths(self, drafted: int) -> int:
        return min(drafted, self.num_nodes - 1)

    def ranks(self, vocab_size: int) -> int:
        return max(1, min(self.num_nodes - 1, vocab_size))

    def build(self, log_prob: jax.Array, tokens: jax.Array, root: jax.Array) -> DraftTree:
        return build_from_top(log_prob, tokens, self.num_nodes, root)

    def build_conditional(self, tokens: jax.Array, log_conditional: jax.Array, root: jax.Array) -> DraftTree:
        return conditional_tree(tokens, log_conditional, self.num_nodes, root)


@dataclasses.dataclass(frozen=True)
class Static:
    """A tree fixed in advance, in level order (`parse_choices`)."""

    choices: Choices

    def depths(self, drafted: int) -> int:
        return len(static_layout(self.choices).widths)

    def ranks(self, vocab_size: int) -> int:
        # One selection as wide as the widest depth: launching another costs more than ranks that nobody reads.
        return max(static_layout(self.choices).widths)

    def build(self, log_prob: jax.Array, tokens: jax.Array, root: jax.Array) -> DraftTree:
        return static_tree(log_prob, tokens, self.choices, root)

    def build_conditional(self, tokens: jax.Array, log_conditional: jax.Array, root: jax.Array) -> DraftTree:
        return conditional_static_tree(tokens, log_conditional, self.choices, root)
