"""Trees whose shape is known in advance: a chain of drafted tokens, and the root alone.

A chain is the draft of ordinary speculative decoding; a root alone is autoregressive decoding. Both run through the
same verification as any other tree.

Shape letters: B slots · L draft depth · N = L + 1 nodes.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from ddtree_jax.tree.draft_tree import DraftTree, in_every_slot, static_bits


def chain_tree(tokens: jax.Array, log_probs: jax.Array, root_tokens: jax.Array) -> DraftTree:
    """A chain: node i is drafted token i - 1 and its parent is node i - 1.

    All N = L + 1 nodes are live, also where the drafter gives a token the probability 0.

    Args:
      tokens: [B, L] int32 drafted tokens; L = 0 gives the root alone.
      log_probs: [B, L] float32, each token's own log probability; NaN counts as -inf.
      root_tokens: [B] int32, the token committed last.

    Returns:
      A `DraftTree` of width L + 1.

    Raises:
      ValueError: arrays of another rank, shape or dtype.
    """
    if tokens.ndim != 2 or log_probs.shape != tokens.shape or root_tokens.shape != tokens.shape[:1]:
        raise ValueError(
            "expected tokens [B, L], log_probs [B, L] and root_tokens [B], "
            f"got {tokens.shape}, {log_probs.shape} and {root_tokens.shape}"
        )
    if tokens.dtype != jnp.int32 or root_tokens.dtype != jnp.int32 or log_probs.dtype != jnp.float32:
        raise ValueError(
            "expected int32 tokens, float32 log_probs and int32 root_tokens, "
            f"got {tokens.dtype}, {log_probs.dtype} and {root_tokens.dtype}"
        )
    batch, depths = tokens.shape
    num_nodes = depths + 1
    index = np.arange(num_nodes, dtype=np.int32)
    own = jnp.where(jnp.isnan(log_probs), -jnp.inf, log_probs)

    return DraftTree(
        tokens=jnp.concatenate([root_tokens[:, None], tokens], axis=1),
        parent=in_every_slot(np.maximum(index - 1, 0), batch),
        depth=in_every_slot(index, batch),
        log_prob=jnp.concatenate([jnp.zeros((batch, 1), jnp.float32), jnp.cumsum(own, axis=1)], axis=1),
        size=jnp.full((batch,), num_nodes, jnp.int32),
        ancestors=in_every_slot(static_bits(np.tri(num_nodes, dtype=bool)), batch),
    )


def root_tree(root_tokens: jax.Array) -> DraftTree:
    """The tree of one node: nothing is drafted, a round commits the target's next token.

    Args:
      root_tokens: [B] int32, the token committed last.

    Returns:
      A `DraftTree` of width 1.

    Raises:
      ValueError: another rank or dtype.
    """
    if root_tokens.ndim != 1 or root_tokens.dtype != jnp.int32:
        raise ValueError(f"root_tokens must be [B] int32, got {root_tokens.shape} {root_tokens.dtype}")
    nothing = (root_tokens.shape[0], 0)
    return chain_tree(jnp.zeros(nothing, jnp.int32), jnp.zeros(nothing, jnp.float32), root_tokens)
