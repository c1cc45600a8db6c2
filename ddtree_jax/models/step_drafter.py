"""The part that drafters of one layer share which run once a depth: attention over committed rows and drafted nodes.

Row i stands at position i. It takes what the target computed there and the embedding of token i + 1, and its output
tells token i + 2. A drafted node takes the output of its parent's row instead. There being one layer, the keys and
values of committed rows are projections of what the rows take: nothing but the last row needs attention.

Shape letters: B slots, R rows, W nodes of a step, M nodes so far, that step's included, H, K, D heads of the drafter,
E its hidden size.
"""

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp

from ddtree_jax.config import StepDrafterConfig
from ddtree_jax.models.cache import KVCache
from ddtree_jax.models.layers import MLP, Linear, RMSNorm, split_heads
from ddtree_jax.models.moe import MoE
from ddtree_jax.models.rope import rope_tables
from pallas_kernels.fused_norm import apply_rope
from pallas_kernels.tree_attention import tree_attention
from pallas_kernels.tree_attention.masks import pack_bits


@flax.struct.dataclass
class DraftRows:
    """The nodes drafted so far in a round; they never reach the cache.

    Attributes:
      keys, values: [B, K, M, D], rotary embedding applied to the keys.
      seen: [B, M, M] bool, element [i, j] says that node j is i or an ancestor of i.
    """

    keys: jax.Array
    values: jax.Array
    seen: jax.Array

    @classmethod
    def empty(cls, config: StepDrafterConfig, batch: int) -> "DraftRows":
        none = jnp.zeros((batch, config.num_kv_heads, 0, config.head_dim), config.jax_dtype)
        return cls(none, none, jnp.zeros((batch, 0, 0), bool))

    def append(self, keys: jax.Array, values: jax.Array, seen: jax.Array) -> "DraftRows":
        """With W more nodes: keys and values [B, K, W, D], seen [B, W, M]."""
        old = jnp.pad(self.seen, ((0, 0), (0, 0), (0, seen.shape[1])))
        return DraftRows(
            jnp.concatenate([self.keys, keys], axis=2),
            jnp.concatenate([self.values, values], axis=2),
            jnp.concatenate([old, seen], axis=1),
        )


class StepAttention(nn.Module):
    """Query and key/value projections are apart, since committed rows need no queries."""

    config: StepDrafterConfig
    in_features: int

    def setup(self):
        c = self.config
        norm = dict(eps=c.rms_norm_eps, dtype=c.jax_dtype, zero_centred=c.zero_centred_norms)
        self.query_heads = c.num_heads * (2 if c.attention_gate else 1)  # output gates after the queries
        self.q_proj = Linear(self.query_heads * c.head_dim, self.in_features, dtype=c.jax_dtype)
        self.kv_proj = Linear(2 * c.num_kv_heads * c.head_dim, self.in_features, dtype=c.jax_dtype)
        self.o_proj = Linear(c.hidden_size, c.num_heads * c.head_dim, dtype=c.jax_dtype)
        if c.qk_norm:
            self.q_norm = RMSNorm(c.head_dim, **norm)
            self.k_norm = RMSNorm(c.head_dim, **norm)

    def keys_values(self, x: jax.Array, rope) -> tuple[jax.Array, jax.Array]:
        """[B, R, in_features] -> keys (normed, rotated) and values, [B, K, R, D] each."""
        k, v = jnp.split(split_heads(self.kv_proj(x), 2 * self.config.num_kv_heads), 2, axis=2)
        k = self.k_norm(k) if self.config.qk_norm else k
        return apply_rope(k, *rope).swapaxes(1, 2), v.swapaxes(1, 2)

    def __call__(self, x, rope, cache: KVCache, rows: DraftRows, seen) -> tuple[jax.Array, DraftRows]:
        """[B, W, in_features] of new nodes, which see `seen` [B, W, M] -> [B, W, E] and the rows with them."""
        c = self.config
        q, gate = jnp.split(split_heads(self.q_proj(x), self.query_heads), (c.num_heads,), axis=2)
        q = self.q_norm(q) if c.qk_norm else q
        old = rows.keys.shape[2]
        rows = rows.append(*self.keys_values(x, rope), seen)
        # Attention has a query for every key: those of earlier nodes have been answered and are left empty.
        q = jnp.pad(apply_rope(q, *rope), ((0, 0), (old, 0), (0, 0), (0, 0)))
        out = tree_attention(
            q, cache.keys, cache.values, cache.length, rows.keys, rows.values, pack_bits(rows.seen),
            scale=c.head_dim**-0.5, layer=0,
        )[:, old:]  # fmt: skip
        if c.attention_gate:
            out = out * jax.nn.sigmoid(gate)
        return self.o_proj.partial(out.reshape(*out.shape[:2], -1)), rows


class StepDrafter(nn.Module):
    """One layer. What it takes of a token and of the target is up to the drafter: see `enter`.

    Parameters: `input_layernorm/weight`, `self_attn/...`, `post_attention_layernorm/weight`, `mlp/...`, `norm/weight`
    and the drafter's own.
    """

    config: StepDrafterConfig

    def setup(self):
        c = self.config
        norm = dict(eps=c.rms_norm_eps, dtype=c.jax_dtype, zero_centred=c.zero_centred_norms)
        self.input_layernorm = RMSNorm(c.hidden_size, **norm)
        self.self_attn = StepAttention(c, self.attention_inputs)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, **norm)
        if c.moe is None:
            self.mlp = MLP(c.hidden_size, c.intermediate_size, c.jax_dtype)
        else:
            self.mlp = MoE(c.moe, c.hidden_size, c.jax_dtype)
        self.norm = RMSNorm(c.hidden_size, **norm)

    @property
    def attention_inputs(self) -> int:
        """Width of what the attention projects."""
        raise NotImplementedError

    def context(self, hidden: jax.Array, features: jax.Array | None) -> jax.Array:
        """What rows take of the target: its final hidden states [B, R, E_target] and taps -> [B, R, E]."""
        raise NotImplementedError

    def enter(self, embeddings: jax.Array, context: jax.Array) -> tuple[jax.Array, jax.Array]:
        """[B, R, E] each -> (what the attention projects [B, R, attention_inputs], the residual stream [B, R, E])."""
        raise NotImplementedError

    def leave(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The residual stream after the layer [B, W, E] -> (hidden states for the head, context of child nodes)."""
        raise NotImplementedError

    def keys_values(self, embeddings, context, positions) -> tuple[jax.Array, jax.Array]:
        """Cache rows of committed tokens, [B, K, R, D] each.

        Args:
          embeddings: [B, R, E] of the tokens after each row's.
          context: [B, R, E], see `context`.
          positions: [B, R] int32.
        """
        return self.self_attn.keys_values(self.enter(embeddings, context)[0], self._rope(positions))

    def __call__(self, embeddings, context, positions, cache: KVCache, rows: DraftRows, seen):
        """One step over W nodes.

        Args:
          embeddings: [B, W, E] of the nodes' tokens.
          context: [B, W, E], of the committed row or of the parents.
          positions: [B, W] int32.
          cache: committed rows; all nodes see all of them.
          rows: nodes of earlier steps.
          seen: [B, W, M] bool.

        Returns:
          hidden states for the head [B, W, E], context of children [B, W, E], the rows with these nodes.
        """
        x, residual = self.enter(embeddings, context)
        mixed, rows = self.self_attn(x, self._rope(positions), cache, rows, seen)
        x, normed = self.post_attention_layernorm.add(residual, mixed)
        x = x + self.mlp(normed)
        return *self.leave(x), rows

    def _rope(self, positions):
        return rope_tables(self.config.rope, positions, self.config.rotary_dim or self.config.head_dim)
