"""Drafters that run once a depth (EAGLE-3, MTP): chains, static trees and EAGLE-2's dynamic trees, on the device.

The drafter attends to the nodes that it drafted in this round as the target will: each sees the committed rows and its
own ancestors. What is committed is computed anew from what the target computed there, so that the cache is a function
of the text alone.

Shape letters: B slots, R rows, W nodes of a step, M nodes so far, E the drafter's hidden size, V vocabulary.
"""

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from ddtree_jax.config import Eagle3Config, MTPConfig
from ddtree_jax.decode.proposers.growth import Growth
from ddtree_jax.decode.proposers.protocol import TextRows
from ddtree_jax.models.cache import KVCache, append_rows
from ddtree_jax.models.decoder import Decoder
from ddtree_jax.models.eagle3 import Eagle3
from ddtree_jax.models.mtp import MTP
from ddtree_jax.models.step_drafter import DraftRows
from ddtree_jax.tree import DraftTree, gather_path, top_log_probs


@flax.struct.dataclass
class StepCache:
    """Row i needs token i + 1, so the last one stays open until that token is known.

    Attributes:
      rows: keys and values of all tokens but the last.
      context: [B, E], what the last token's row takes of the target.
      length: [B] int32, tokens so far; 0 where `context` is of none.
    """

    rows: KVCache
    context: jax.Array
    length: jax.Array


@flax.struct.dataclass
class _Step:
    """A round between two steps.

    Attributes:
      position: [B] int32, of the nodes to come.
      context: [B, W, E], what the step before left for its children.
      seen: [B, W, M] bool, the nodes that it saw.
      rows: all nodes.
    """

    position: jax.Array
    context: jax.Array
    seen: jax.Array
    rows: DraftRows


@dataclasses.dataclass(frozen=True)
class StepProposer:
    """A tree that grows from one step to the next.

    Attributes:
      target: the decoder whose embedding and head the drafter shares, unless it has its own.
      config: of the drafter.
      growth: which tree.
    """

    target: Decoder
    config: Eagle3Config | MTPConfig
    growth: Growth
    uses_drafter: bool = True

    @property
    def max_path(self) -> int:
        return self.growth.depth + 1

    @property
    def taps(self) -> tuple[int, ...]:
        return self.config.target_layer_ids

    def prepare(self, params: Any) -> Any:
        return params

    def init_cache(self, batch: int, rows: int) -> StepCache:
        return StepCache(
            rows=KVCache.empty(self.config, batch=batch, rows=rows),
            context=jnp.zeros((batch, self.config.hidden_size), self.config.jax_dtype),
            length=jnp.zeros((batch,), jnp.int32),
        )

    def propose(self, params: Any, target_params: Any, cache: StepCache, root: jax.Array) -> DraftTree:
        def expand(state: _Step, tokens: jax.Array, parents: jax.Array, ranks: int):
            seen = gather_path(state.seen, parents)
            own = jnp.broadcast_to(jnp.eye(tokens.shape[1], dtype=bool)[None], (*tokens.shape, tokens.shape[1]))
            seen = jnp.concatenate([seen, own], axis=-1)
            embeddings = self._embed(params, target_params, tokens)
            positions = jnp.broadcast_to(state.position[:, None], tokens.shape)
            hidden, context, rows = self._apply(
                params, embeddings, gather_path(state.context, parents), positions, cache.rows, state.rows, seen
            )
            value, drafted = top_log_probs(self._logits(params, target_params, hidden), ranks)
            drafted = self._apply(params, drafted, method="token_ids") if self.config.own_head else drafted
            return value, drafted, _Step(state.position + 1, context, seen, rows)

        batch = root.shape[0]
        first = _Step(
            position=cache.rows.length, context=cache.context[:, None], seen=jnp.zeros((batch, 1, 0), bool),
            rows=DraftRows.empty(self.config, batch),
        )  # fmt: skip
        return self.growth.grow(expand, first, root)

    def absorb(self, params: Any, target_params: Any, cache: StepCache, rows: TextRows) -> StepCache:
        fresh = self._apply(params, rows.hidden, rows.features, method="context")
        # The first token completes the open row, each further one that of the token before it.
        context = jnp.concatenate([cache.context[:, None], fresh[:, :-1]], axis=1)
        # At the beginning of a text no row is open: the first pair is none, and the others move up.
        missing = (cache.length == 0).astype(jnp.int32)
        pairs = jnp.arange(rows.tokens.shape[1], dtype=jnp.int32)[None] + missing[:, None]
        pairs = jnp.minimum(pairs, rows.tokens.shape[1] - 1)
        embeddings = self._embed(params, target_params, gather_path(rows.tokens, pairs))
        positions = cache.rows.length[:, None] + jnp.arange(rows.tokens.shape[1], dtype=jnp.int32)[None]
        kv = self._apply(params, embeddings, gather_path(context, pairs), positions, method="keys_values")
        last = gather_path(fresh, jnp.maximum(rows.count - 1, 0)[:, None])[:, 0]
        return StepCache(
            rows=append_rows(cache.rows, (kv,), jnp.maximum(rows.count - missing, 0)),
            context=jnp.where((rows.count > 0)[:, None], last, cache.context),
            length=cache.length + rows.count,
        )

    def _apply(self, params: Any, *args: Any, method: str = "__call__") -> Any:
        model = MTP if isinstance(self.config, MTPConfig) else Eagle3
        return model(self.config).apply({"params": params}, *args, method=method)

    def _logits(self, params: Any, target_params: Any, hidden: jax.Array) -> jax.Array:
        """[B, W, E] -> float32, over the drafter's vocabulary or the target's."""
        if self.config.own_head:
            return self._apply(params, hidden, method="logits")
        hidden = hidden.astype(self.target.config.jax_dtype)
        return self.target.apply({"params": target_params}, hidden, method=Decoder.logits)

    def _embed(self, params: Any, target_params: Any, tokens: jax.Array) -> jax.Array:
        """[B, W] int32 -> [B, W, E] in the drafter's dtype."""
        if self.config.own_embedding:
            return self._apply(params, tokens, method="embed_tokens")
        embeddings = self.target.apply({"params": target_params}, tokens, method=Decoder.embed_tokens)
        return embeddings.astype(self.config.jax_dtype)
