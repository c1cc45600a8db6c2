"""DFlash drafters: one pass of a block gives a distribution for each of the next L tokens.

DFlash 2 goes on from there: its selector makes the distribution of each depth depend on the token before.

A drafter may have fewer tokens than its target: distributions and the tree's building stay in the drafter's ids, and
only the tokens that made it into the tree are looked up.

Shape letters: B slots, L depths of the tree, P = L + 1 rows committed at most, V vocabulary of the drafter,
K candidates.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ddtree_jax.config import DrafterConfig
from ddtree_jax.decode.proposers.protocol import TextRows
from ddtree_jax.decode.proposers.shapes import MostProbable, Shape
from ddtree_jax.models.cache import KVCache
from ddtree_jax.models.decoder import Decoder
from ddtree_jax.models.dflash import DFlash
from ddtree_jax.models.selector import log_conditionals
from ddtree_jax.tree import DraftTree, top_log_probs


@dataclasses.dataclass(frozen=True)
class DFlashProposer:
    """A tree over the marginals of a DFlash block.

    Attributes:
      target: the decoder whose embedding and head serve a drafter that has none.
      config: of the drafter.
      depth: slots drafted (at most `config.depth`); the tree may use fewer.
      shape: which tree.
    """

    target: Decoder
    config: DrafterConfig
    depth: int
    shape: Shape
    uses_drafter: bool = True

    @property
    def max_path(self) -> int:
        return self.shape.depths(self.depth) + 1

    @property
    def taps(self) -> tuple[int, ...]:
        return self.config.target_layer_ids

    def prepare(self, params: Any) -> Any:
        """With the context's weights of all layers side by side (`ContextWeights`)."""
        if "context" in params:
            return params
        weights = DFlash(self.config).apply({"params": params}, method=DFlash.context_weights)
        return {**params, "context": weights}

    def init_cache(self, batch: int, rows: int) -> KVCache:
        return KVCache.empty(self.config, batch=batch, rows=rows)

    def log_probs(self, params: Any, target_params: Any, cache: KVCache, root: jax.Array) -> jax.Array:
        """The drafter's marginals, [B, L, V] float32."""
        return jax.nn.log_softmax(self.logits(params, target_params, cache, root), axis=-1)

    def logits(self, params: Any, target_params: Any, cache: KVCache, root: jax.Array) -> jax.Array:
        """The same before they are normalised."""
        return self._logits(params, target_params, self._hidden(params, target_params, cache, root))

    def conditionals(
        self, params: Any, target_params: Any, cache: KVCache, root: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Of DFlash 2: candidates [B, L, K] int32, and the log probability of each after each of the depth before,
        [B, L, K, K] float32."""
        hidden = self._hidden(params, target_params, cache, root)
        log_prob, tokens = top_log_probs(self._logits(params, target_params, hidden), self.config.max_candidates)
        pairs = DFlash(self.config).apply({"params": params}, hidden, tokens, root, method=DFlash.pairs)
        return tokens, log_conditionals(log_prob, pairs)

    def _hidden(self, params: Any, target_params: Any, cache: KVCache, root: jax.Array) -> jax.Array:
        """The drafter's hidden states at the slots that predict depths 1..L, [B, L, E]."""
        c = self.config
        slots = self.depth if c.sample_from_anchor else self.depth + 1
        masks = jnp.full((root.shape[0], slots - 1), c.mask_token_id, jnp.int32)
        tokens = jnp.concatenate([root[:, None], masks], axis=1)
        if c.own_embedding:
            block = DFlash(c).apply({"params": params}, tokens, method=DFlash.embed_tokens)
        else:
            block = self.target.apply({"params": target_params}, tokens, method=Decoder.embed_tokens)
        if c.embedding_scale != 1.0:
            block = block * jnp.asarray(c.embedding_scale, block.dtype)
        hidden = DFlash(c).apply({"params": params}, block, cache)
        hidden = hidden if c.sample_from_anchor else hidden[:, 1:]
        # All slots are drafted together, as the drafter was trained; only those that the tree uses need logits.
        return hidden[:, : self.shape.depths(self.depth)]

    def _logits(self, params: Any, target_params: Any, hidden: jax.Array) -> jax.Array:
        """[B, L, E] -> [B, L, V] float32."""
        c = self.config
        if c.own_head:
            logits = DFlash(c).apply({"params": params}, hidden, method=DFlash.logits)
        else:
            dtype = self.target.config.jax_dtype
            logits = self.target.apply({"params": target_params}, hidden.astype(dtype), method=Decoder.logits)
        logits = logits * c.output_multiplier
        if c.logit_softcap is not None:
            logits = c.logit_softcap * jnp.tanh(logits / c.logit_softcap)
        return logits

    def propose(self, params: Any, target_params: Any, cache: KVCache, root: jax.Array) -> DraftTree:
        return self.build(params, self.draft(params, target_params, cache, root), root)

    def of_width(self, num_nodes: int) -> "DFlashProposer":
        return dataclasses.replace(self, shape=MostProbable(num_nodes))

    def draft(self, params: Any, target_params: Any, cache: KVCache, root: jax.Array) -> tuple[jax.Array, ...]:
        """What trees are built from: the logits, or `conditionals`."""
        if self.config.selector_rank:
            return self.conditionals(params, target_params, cache, root)
        return (self.logits(params, target_params, cache, root),)

    def empty_scores(self, batch: int) -> tuple[jax.Array, ...]:
        c, depths = self.config, self.shape.depths(self.depth)
        if c.selector_rank:
            k = c.max_candidates
            return jnp.zeros((batch, depths, k), jnp.int32), jnp.zeros((batch, depths, k, k), jnp.float32)
        return (jnp.zeros((batch, depths, c.vocab_size), jnp.float32),)

    def build(self, params: Any, scores: tuple[jax.Array, ...], root: jax.Array) -> DraftTree:
        scores = tuple(x[:, : self.shape.depths(self.depth)] for x in scores)
        if self.config.selector_rank:
            return self.shape.build_conditional(*scores, root)
        (logits,) = scores
        tree = self.shape.build(*top_log_probs(logits, self.shape.ranks(logits.shape[-1])), root)
        if self.config.draft_vocab_size is None:
            return tree
        drafted = DFlash(self.config).apply({"params": params}, tree.tokens, method=DFlash.target_ids)
        # Root and padding, both of depth 0, are not the drafter's tokens.
        return dataclasses.replace(tree, tokens=jnp.where(tree.depth > 0, drafted, tree.tokens))

    def absorb(self, params: Any, target_params: Any, cache: KVCache, rows: TextRows) -> KVCache:
        weights = params.get("context")
        return DFlash(self.config).apply(
            {"params": params}, rows.features, rows.count, cache, weights, method=DFlash.absorb
        )
