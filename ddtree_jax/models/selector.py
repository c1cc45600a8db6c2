"""Candidate selector of DFlash 2: which of a slot's best tokens follows which of the slot before.

A block's slots are drafted together, so that the marginals of two of them may belong to different sentences. The
selector adds a term for each pair of neighbouring tokens:

    score(c after p) = logit(c) + sum over r of A[p, r] * (W h)[r] * B[c, r]

for the K best tokens c of a slot with hidden state h; p is the token picked for the slot before, at first the anchor.

Shape letters: B slots, L depths, K candidates, R rank, E hidden size, V vocabulary.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.scipy.special import logsumexp

from ddtree_jax.models.layers import Linear, linear


class CandidateSelector(nn.Module):
    """Holds `predecessor_codebook` (A) and `successor_codebook` (B) [V, R] and `hidden_projection/weight` (W) [R, E].

    Untrained the successors are zero, and with them every pair's term.
    """

    vocab_size: int
    hidden_size: int
    rank: int
    dtype: jnp.dtype = jnp.bfloat16

    def setup(self):
        shape = (self.vocab_size, self.rank)
        self.predecessor_codebook = self.param("predecessor_codebook", nn.initializers.normal(), shape, self.dtype)
        self.successor_codebook = self.param("successor_codebook", nn.initializers.zeros, shape, self.dtype)
        self.hidden_projection = Linear(self.rank, self.hidden_size, dtype=self.dtype)

    def __call__(self, hidden: jax.Array, candidates: jax.Array, anchor: jax.Array) -> jax.Array:
        """The pairs' terms.

        Args:
          hidden: [B, L, E] of the slots that predict depths 1..L.
          candidates: [B, L, K] int32.
          anchor: [B] int32, the token before the first depth.

        Returns:
          [B, L, K, K] float32: [b, d, p, c] for candidate c at depth d + 1 after candidate p at depth d; at the first
          depth every p is the anchor.
        """
        first = jnp.broadcast_to(anchor[:, None, None], (anchor.shape[0], 1, candidates.shape[2]))
        before = jnp.concatenate([first, candidates[:, :-1]], axis=1)

        def rows(codebook: jax.Array, tokens: jax.Array) -> jax.Array:
            return jnp.take(codebook, tokens, axis=0, mode="clip").astype(jnp.float32)

        weight = linear(hidden, self.hidden_projection.weight, out_dtype=jnp.float32)
        return jnp.einsum(
            "blpr,blcr->blpc",
            rows(self.predecessor_codebook, before) * weight[:, :, None],
            rows(self.successor_codebook, candidates),
            precision=jax.lax.Precision.HIGHEST,
        )


def log_conditionals(log_prob: jax.Array, pairs: jax.Array) -> jax.Array:
    """Log probability of each candidate after each predecessor.

    The scores share out, for each predecessor, what the marginal gives to all candidates together: the rest of the
    vocabulary keeps its probability. So a prefix is as probable as its tokens are, and with pairs of 0 nothing changes.

    Args:
      log_prob: [B, L, K] float32, the candidates' marginals, of the whole vocabulary.
      pairs: [B, L, K, K] float32, terms of the pairs.

    Returns:
      [B, L, K, K] float32, for `ddtree_jax.tree.conditional_tree`.
    """
    scores = log_prob[:, :, None] + pairs
    together = logsumexp(log_prob, axis=-1)[:, :, None, None]
    rest = together - logsumexp(scores, axis=-1, keepdims=True)
    # Where there are no terms the two sums are one, but need not be rounded alike.
    return scores + jnp.where(jnp.any(pairs != 0, axis=-1, keepdims=True), rest, 0.0)
