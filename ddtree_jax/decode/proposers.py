"""Proposers: how a round gets its draft tree. The loop knows nothing else of a method.

A proposer is a frozen, hashable object (a static argument of the jitted loop). What it needs at run time, parameters
and cache, are pytrees that the loop hands over and takes back.

Shape letters: B slots, N nodes, L draft depth, P = L + 1 rows committed at most, V vocabulary.
"""

import dataclasses
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from ddtree_jax.config import DrafterConfig
from ddtree_jax.models.cache import KVCache
from ddtree_jax.models.decoder import Decoder
from ddtree_jax.models.dflash import DFlash
from ddtree_jax.tree import DraftTree, build_tree, chain_tree, root_tree


class Proposer(Protocol):
    """What the loop asks of a drafter.

    Attributes:
      max_path: P, most rows one round can commit.
      taps: target blocks whose output the proposer wants to see.
    """

    max_path: int
    taps: tuple[int, ...]

    def init_cache(self, batch: int, rows: int) -> Any:
        """An empty cache pytree, or None."""

    def propose(self, params: Any, target_params: Any, cache: Any, root: jax.Array) -> DraftTree:
        """The tree below the last committed tokens `root` [B]."""

    def absorb(self, params: Any, cache: Any, features: jax.Array | None, count: jax.Array) -> Any:
        """Takes over the target's features [B, R, T * E] of the rows just committed, `count` [B] of them live."""


@dataclasses.dataclass(frozen=True)
class NoDraft:
    """Autoregressive decoding: the tree of one node."""

    max_path: int = 1
    taps: tuple[int, ...] = ()

    def init_cache(self, batch, rows):
        return None

    def propose(self, params, target_params, cache, root):
        return root_tree(root)

    def absorb(self, params, cache, features, count):
        return cache


@dataclasses.dataclass(frozen=True)
class DFlashProposer:
    """A DFlash block, as the chain of its most probable tokens or as the tree of its N most probable prefixes.

    Attributes:
      target: the decoder whose embedding and head the drafter shares.
      config: of the drafter.
      depth: L, slots used (at most `config.depth`).
      num_nodes: N for a tree, None for the chain.
    """

    target: Decoder
    config: DrafterConfig
    depth: int
    num_nodes: int | None

    @property
    def max_path(self) -> int:
        return self.depth + 1

    @property
    def taps(self) -> tuple[int, ...]:
        return self.config.target_layer_ids

    def init_cache(self, batch: int, rows: int) -> KVCache:
        return KVCache.empty(self.config, batch=batch, rows=rows)

    def log_probs(self, params: Any, target_params: Any, cache: KVCache, root: jax.Array) -> jax.Array:
        """The drafter's marginals, [B, L, V] float32."""
        c = self.config
        slots = self.depth if c.sample_from_anchor else self.depth + 1
        masks = jnp.full((root.shape[0], slots - 1), c.mask_token_id, jnp.int32)
        tokens = jnp.concatenate([root[:, None], masks], axis=1)
        block = self.target.apply({"params": target_params}, tokens, method=Decoder.embed_tokens)
        if c.embedding_scale != 1.0:
            block = block * jnp.asarray(c.embedding_scale, block.dtype)
        hidden = DFlash(c).apply({"params": params}, block, cache)
        hidden = hidden if c.sample_from_anchor else hidden[:, 1:]
        dtype = self.target.config.jax_dtype
        logits = self.target.apply({"params": target_params}, hidden.astype(dtype), method=Decoder.logits)
        logits = logits * c.output_multiplier
        if c.logit_softcap is not None:
            logits = c.logit_softcap * jnp.tanh(logits / c.logit_softcap)
        return jax.nn.log_softmax(logits, axis=-1)

    def propose(self, params: Any, target_params: Any, cache: KVCache, root: jax.Array) -> DraftTree:
        return self.tree(self.log_probs(params, target_params, cache, root), root)

    def tree(self, log_probs: jax.Array, root: jax.Array) -> DraftTree:
        """The tree, or the chain, of marginals [B, L, V] below `root` [B]."""
        if self.num_nodes is not None:
            return build_tree(log_probs, self.num_nodes, root_tokens=root)
        tokens = jnp.argmax(log_probs, axis=-1).astype(jnp.int32)
        return chain_tree(tokens, jnp.max(log_probs, axis=-1), root)

    def absorb(self, params: Any, cache: KVCache, features: jax.Array | None, count: jax.Array) -> KVCache:
        return DFlash(self.config).apply({"params": params}, features, count, cache, method=DFlash.absorb)
