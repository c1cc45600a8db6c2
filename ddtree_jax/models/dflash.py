"""The DFlash block-diffusion drafter (arXiv 2602.06036): one pass, a distribution for each of the next L tokens.

The block is [anchor, MASK, ..., MASK] at the positions from the anchor on. Every layer reads keys and values of the
*context*, which are projections of the target's own features, and of the block. Only context rows are cached.

Shape letters: B slots, S block slots, R context rows, H, K, D heads of the drafter, E its hidden size, T taps.
"""

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from ddtree_jax.config import DrafterConfig
from ddtree_jax.models.cache import KVCache, PathRows, commit_rows
from ddtree_jax.models.dynamic_conv import DynamicConv, causal_conv
from ddtree_jax.models.layers import MLP, Linear, RMSNorm, between_mixers, linear, split_heads
from ddtree_jax.models.rope import rope_tables
from ddtree_jax.models.selector import CandidateSelector
from ddtree_jax.tree import static_bits
from pallas_kernels.fused_norm import Heads, apply_rope, qk_norm_rope, rms_norm
from pallas_kernels.linear_chain import Turns
from pallas_kernels.streaming_matmul import PartialSums
from pallas_kernels.tree_attention import projected_tree_attention


def block_visibility(slots: int, causal: bool, sliding_window: int | None) -> np.ndarray:
    """[slots, slots] bool: the slots of its block that a slot sees, all or up to itself, within the window."""
    distance = np.arange(slots)[:, None] - np.arange(slots)[None, :]
    seen = distance >= 0 if causal else np.ones((slots, slots), bool)
    return seen if sliding_window is None else seen & (abs(distance) < sliding_window)


@flax.struct.dataclass
class ContextWeights:
    """What makes keys and values of the context, of all M layers as one: so it is one product, one norm, one rotation.

    A copy of those rows of every layer's projection: 84 MB in the drafter of Qwen3-8B.

    Attributes:
      projection: [2 M K D, E], rows of the keys of all layers, then of the values.
      bias: [2 M K D], or None.
      norm: [M, D], of the keys.
    """

    projection: jax.Array
    bias: jax.Array | None
    norm: jax.Array


def _keys_first(projections: list[jax.Array]) -> jax.Array:
    """Key and value rows of each layer, [2 K D, ...] -> [2 M K D, ...], the keys of all layers first."""
    keys, values = zip(*(jnp.split(x, 2) for x in projections))
    return jnp.concatenate([*keys, *values])


class DraftAttention(nn.Module):
    config: DrafterConfig
    causal: bool
    sliding_window: int | None

    def setup(self):
        c, dtype = self.config, self.config.jax_dtype
        bias = c.attention_bias
        self.qkv_proj = Linear(self.projected_heads.count * c.head_dim, c.hidden_size, use_bias=bias, dtype=dtype)
        self.o_proj = Linear(c.hidden_size, c.num_heads * c.head_dim, use_bias=bias, dtype=dtype)
        self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps, dtype)
        self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps, dtype)

    @property
    def projected_heads(self) -> Heads:
        """What `qkv_proj` holds."""
        c = self.config
        return Heads(
            queries=c.num_heads, keys=c.num_kv_heads, gates=0, head_dim=c.head_dim, eps=c.rms_norm_eps,
            zero_centred=False,
        )  # fmt: skip

    def key_value_rows(self, x: jax.Array) -> jax.Array:
        """The rows of `qkv_proj` that make keys and values, all that the context needs: of its weight or bias."""
        return x[self.config.num_heads * self.config.head_dim :]

    def keys_values(self, x: jax.Array, rope) -> tuple[jax.Array, jax.Array]:
        """Context [B, R, E] -> keys (normed, rotated) and values, [B, K, R, D] each."""
        bias = None if self.qkv_proj.bias is None else self.key_value_rows(self.qkv_proj.bias)
        rows = linear(x, self.key_value_rows(self.qkv_proj.weight), bias)
        k, v = jnp.split(split_heads(rows, 2 * self.config.num_kv_heads), 2, axis=2)
        return apply_rope(self.k_norm(k), *rope).swapaxes(1, 2), v.swapaxes(1, 2)

    def block_heads(self, projected: jax.Array, rope) -> tuple[jax.Array, jax.Array, jax.Array]:
        """`qkv_proj` of block rows -> queries [B, S, H, D], keys and values [B, K, S, D]."""
        weights = self.q_norm.weight, self.k_norm.weight
        return qk_norm_rope(projected, *weights, *rope, self.projected_heads)[:3]

    def __call__(self, projected: jax.Array | PartialSums, rope, positions, cache: KVCache, layer: int) -> jax.Array:
        """`qkv_proj` of block rows, [B, S, (H + 2 K) D] -> [B, S, H D] for `o_proj`."""
        batch, slots = positions.shape
        seen = jnp.asarray(static_bits(block_visibility(slots, self.causal, self.sliding_window)))
        out, *_ = projected_tree_attention(
            projected, self.q_norm.weight, self.k_norm.weight, *rope, self.projected_heads, cache.keys, cache.values,
            cache.length, jnp.broadcast_to(seen[None], (batch, *seen.shape)), scale=self.config.head_dim**-0.5,
            sliding_window=self.sliding_window, positions=positions, layer=layer,
        )  # fmt: skip
        return out.reshape(batch, slots, -1)


class DraftBlock(nn.Module):
    config: DrafterConfig
    causal: bool
    sliding_window: int | None

    def setup(self):
        c = self.config
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps, c.jax_dtype)
        self.self_attn = DraftAttention(c, self.causal, self.sliding_window)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps, c.jax_dtype)
        self.mlp = MLP(c.hidden_size, c.intermediate_size, c.jax_dtype)
        if c.conv_taps:
            self.attention_conv = DynamicConv(c.hidden_size, c.conv_taps, c.conv_group_size, c.jax_dtype)
            self.mlp_conv = DynamicConv(c.hidden_size, c.conv_taps, c.conv_group_size, c.jax_dtype)

    @property
    def entry(self) -> Linear | None:
        """The projection of the normed stream that this layer starts from; none if convolutions come before it."""
        return None if self.config.conv_taps else self.self_attn.qkv_proj

    def __call__(self, x, start, next_norm: RMSNorm, next_entry: Linear | None, turns: Turns, *attention_args):
        """One layer, up to where the next one starts.

        Args:
          x: [B, S, E], the residual stream.
          start: its norm, or `entry` of that.
          next_norm, next_entry: of the layer after this one, or the final norm and none.

        Returns:
          The residual stream after this layer, and the next one's start.
        """
        attention, norm = self.self_attn, self.post_attention_layernorm
        if not self.config.conv_taps:
            mixed = attention(start, *attention_args)
            return between_mixers(mixed, x, attention.o_proj, norm, self.mlp, next_norm, next_entry, turns)
        before, after = self.attention_conv.kernels(start)
        projected = attention.qkv_proj.partial(causal_conv(start, before))
        mixed = attention.o_proj(attention(projected, *attention_args))
        x, n = norm.add(x, causal_conv(mixed, after))
        before, after = self.mlp_conv.kernels(n)
        return next_norm.add(x, causal_conv(self.mlp(causal_conv(n, before)), after))


class VocabularyMap(nn.Module):
    """Holds `target_ids` [V] int32: the target's id of each token that the drafter can draft."""

    size: int

    def setup(self):
        self.target_ids = self.param("target_ids", lambda key: jnp.arange(self.size, dtype=jnp.int32))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return jnp.take(self.target_ids, tokens, axis=0, mode="clip")


class DFlash(nn.Module):
    """Parameters: `fc/weight` [E, T * E_target], `hidden_norm/weight`, `layers_i/...`, `norm/weight`.

    Query, key and value projections are one matrix (in this order), gate and up another. A drafter may have tables of
    its own: `embed/weight` [V_target, E], `lm_head/weight` [V, E] and, with fewer tokens than the target,
    `d2t/target_ids` [V].

    DFlash 2 is the same with `DynamicConv` around attention and MLP of every layer (of the block, never of the context)
    and a `CandidateSelector` over the candidates of each slot.
    """

    config: DrafterConfig

    def setup(self):
        c, dtype = self.config, self.config.jax_dtype
        self.fc = Linear(c.hidden_size, len(c.target_layer_ids) * c.target_hidden_size, dtype=dtype)
        self.hidden_norm = RMSNorm(c.hidden_size, c.rms_norm_eps, dtype)
        self.layers = [DraftBlock(c, a, w) for a, w in zip(c.causal, c.sliding_windows, strict=True)]
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps, dtype)
        if c.own_embedding:
            self.embed = Linear(c.target_vocab_size, c.hidden_size, dtype=dtype)
        if c.own_head:
            self.lm_head = Linear(c.vocab_size, c.hidden_size, dtype=dtype)
        if c.draft_vocab_size is not None:
            self.d2t = VocabularyMap(c.draft_vocab_size)
        if c.selector_rank:
            self.candidate_selector = CandidateSelector(c.vocab_size, c.hidden_size, c.selector_rank, dtype)

    def context_weights(self) -> ContextWeights:
        """For `context_rows`; a loop that calls it makes them once, before its first turn."""
        attention = [layer.self_attn for layer in self.layers]
        return ContextWeights(
            projection=_keys_first([a.key_value_rows(a.qkv_proj.weight) for a in attention]),
            bias=(
                _keys_first([a.key_value_rows(a.qkv_proj.bias) for a in attention])
                if self.config.attention_bias
                else None
            ),
            norm=jnp.stack([a.k_norm.weight for a in attention]),
        )

    def context_rows(
        self, features: jax.Array, positions: jax.Array, weights: ContextWeights | None = None
    ) -> PathRows:
        """Context keys and values of every layer: what `DraftAttention.keys_values` makes of the context.

        Args:
          features: [B, R, T * E_target], the target's taps at committed tokens.
          positions: [B, R] int32, their absolute positions.
          weights: `context_weights`, made here if left out.

        Returns:
          Keys and values, [M, B, K, R, D] each. The context is the same tensor in every layer and skips the layers'
          input norm.
        """
        c = self.config
        weights = self.context_weights() if weights is None else weights
        context = self.hidden_norm(self.fc(features.astype(c.jax_dtype)))
        projected = linear(context, weights.projection, weights.bias)
        heads = projected.reshape(*positions.shape, 2, c.num_layers, c.num_kv_heads, c.head_dim)
        # In the cache's order before the norm, so that its sums need no transposition of their own.
        keys, values = heads.transpose(2, 3, 0, 4, 1, 5)  # [M, B, K, R, D] each
        keys = rms_norm(keys, weights.norm[:, None, None, None], c.rms_norm_eps)
        rope = rope_tables(c.rope, positions, c.head_dim)
        rotate = jax.vmap(lambda x: apply_rope(x.swapaxes(1, 2), *rope).swapaxes(1, 2))
        return PathRows(keys=rotate(keys), values=values, recurrent=())

    def __call__(self, block: jax.Array, cache: KVCache) -> jax.Array:
        """One draft pass.

        Args:
          block: [B, S, E] embeddings of anchor and masks; the anchor stands at position cache.length.
          cache: context rows of all committed tokens before the anchor.

        Returns:
          [B, S, E] hidden states after the final norm, for the target's head.
        """
        c = self.config
        slots = jnp.arange(block.shape[1], dtype=jnp.int32)
        positions = cache.length[:, None] + slots[None, :]
        rope = rope_tables(c.rope, positions, c.head_dim)
        x, turns = block.astype(c.jax_dtype), Turns()
        first, *others = self.layers
        start = first.input_layernorm(x)
        start = start if first.entry is None else first.entry.partial(start)
        ends = [*((layer.input_layernorm, layer.entry) for layer in others), (self.norm, None)]
        for i, (layer, end) in enumerate(zip(self.layers, ends, strict=True)):
            x, start = layer(x, start, *end, turns, rope, positions, cache, i)
        return start

    def absorb(
        self, features: jax.Array, count: jax.Array, cache: KVCache, weights: ContextWeights | None = None
    ) -> KVCache:
        """Appends the context rows of features [B, R, T * E_target] that follow the cache; `count` [B] are live."""
        rows = jnp.arange(features.shape[1], dtype=jnp.int32)
        positions = cache.length[:, None] + rows[None, :]
        return commit_rows(cache, self.context_rows(features, positions, weights), count)

    def embed_tokens(self, tokens: jax.Array) -> jax.Array:
        """[...] int32, the target's ids -> [..., E], of a drafter with its own embedding."""
        return jnp.take(self.embed.weight, tokens, axis=0, mode="clip")

    def logits(self, hidden: jax.Array) -> jax.Array:
        """[..., E] -> [..., V] float32, of a drafter with its own head, before `output_multiplier` and soft cap."""
        return linear(hidden, self.lm_head.weight, out_dtype=jnp.float32)

    def target_ids(self, tokens: jax.Array) -> jax.Array:
        """The target's ids of drafted tokens [...] int32."""
        return tokens if self.config.draft_vocab_size is None else self.d2t(tokens)

    def pairs(self, hidden: jax.Array, candidates: jax.Array, anchor: jax.Array) -> jax.Array:
        """What the selector adds for each pair of neighbouring candidates (`CandidateSelector`)."""
        return self.candidate_selector(hidden, candidates, anchor)

    def _touch(self, features, count, block, cache):
        """Runs every parameter once, for `init`."""
        c, token = self.config, jnp.zeros((1,), jnp.int32)
        hidden = self(block, self.absorb(features, count, cache))
        own = (self.embed_tokens(token) if c.own_embedding else None, self.logits(hidden) if c.own_head else None)
        pairs = self.pairs(hidden, token[None, None], token) if c.selector_rank else None
        return hidden, own, self.target_ids(token), pairs
