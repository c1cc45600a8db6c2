"""The target: one functional Flax decoder for Llama 3, Qwen2.5, Qwen3 (dense or with a mixture of experts) and the
hybrids Qwen3.5, Qwen3.6 and Qwen3-Next.

A pass takes N tokens that hang as a tree below the committed text and returns their hidden states and what each
layer must keep of them; it never writes the cache. One token, a chain, a draft tree and a chunk of a prompt are all
such trees.

Shape letters: B slots, N tokens of the pass, H query heads, K key/value heads, D head_dim, E hidden size,
T tapped layers, V vocabulary.
"""

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp

from ddtree_jax.config import TargetConfig
from ddtree_jax.models.cache import KVCache, TreeKV
from ddtree_jax.models.gated_delta import GatedDeltaNet
from ddtree_jax.models.layers import MLP, Linear, RMSNorm, between_mixers, largest, linear
from ddtree_jax.models.moe import MoE
from ddtree_jax.models.recurrent import RecurrentWeights, conv_rows
from ddtree_jax.models.rope import rope_tables
from pallas_kernels.fused_norm import Heads, qk_norm_rope
from pallas_kernels.linear_chain import Turns
from pallas_kernels.tree_attention import projected_tree_attention


@flax.struct.dataclass
class TargetPass:
    """What one pass of the target yields.

    Attributes:
      hidden: [B, N, E], after the final norm.
      features: [B, N, T * E], the residual stream after the tapped blocks, in the order of `taps`; None without taps.
      tree_kv: per layer (keys, values) of the N tokens, [B, K, N, D] each, or the rows of a recurrent layer.
    """

    hidden: jax.Array
    features: jax.Array | None
    tree_kv: TreeKV


def projected_heads(c: TargetConfig) -> Heads:
    """What the fused projection of an attention layer holds."""
    return Heads(
        queries=c.num_heads, keys=c.num_kv_heads, gates=c.num_heads if c.attention_gate else 0,
        head_dim=c.head_dim, eps=c.rms_norm_eps if c.qk_norm else None, zero_centred=c.zero_centred_norms,
    )  # fmt: skip


class Attention(nn.Module):
    config: TargetConfig
    sliding_window: int | None

    def setup(self):
        c = self.config
        self.qkv_proj = Linear(c.qkv_heads * c.head_dim, c.hidden_size, use_bias=c.qkv_bias, dtype=c.jax_dtype)
        self.o_proj = Linear(c.hidden_size, c.num_heads * c.head_dim, use_bias=c.o_bias, dtype=c.jax_dtype)
        if c.qk_norm:
            self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps, c.jax_dtype, c.zero_centred_norms)
            self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps, c.jax_dtype, c.zero_centred_norms)

    @property
    def entry(self) -> Linear:
        """The projection that the mixer starts from."""
        return self.qkv_proj

    @property
    def out(self) -> Linear:
        """The projection of what the mixer yields."""
        return self.o_proj

    def __call__(self, projected, rope, ancestors, positions, cache: KVCache, layer: int):
        """From `entry` of the normed stream, [B, N, (H + 2 K) D or more], to [B, N, H D] for `out`, and its rows."""
        out, k, v, gate = projected_tree_attention(
            projected, *self.norm_weights, *rope, projected_heads(self.config), cache.keys, cache.values, cache.length,
            ancestors, scale=self.config.head_dim**-0.5, sliding_window=self.sliding_window, positions=positions,
            layer=layer,
        )  # fmt: skip
        return self.gated(out, gate), (k, v)

    @property
    def norm_weights(self) -> tuple[jax.Array | None, jax.Array | None]:
        """Of queries and of keys."""
        return (self.q_norm.weight, self.k_norm.weight) if self.config.qk_norm else (None, None)

    def heads(self, projected: jax.Array, rope) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """-> queries [B, N, H, D], keys, values [B, K, N, D], and output gates [B, N, H or 0, D]."""
        return qk_norm_rope(projected, *self.norm_weights, *rope, projected_heads(self.config))

    def gated(self, out: jax.Array, gate: jax.Array) -> jax.Array:
        """[B, N, H, D] of the attention and its gates -> [B, N, H D]."""
        if self.config.attention_gate:
            out = out * jax.nn.sigmoid(gate)
        return out.reshape(*out.shape[:2], -1)


class Block(nn.Module):
    config: TargetConfig
    layer: int

    def setup(self):
        c = self.config
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps, c.jax_dtype, c.zero_centred_norms)
        if self.layer in c.delta_layers:
            self.linear_attn = GatedDeltaNet(c)
        else:
            self.self_attn = Attention(c, c.sliding_windows[self.layer])
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps, c.jax_dtype, c.zero_centred_norms)
        moe = c.moe_of(self.layer)
        if moe is None:
            self.mlp = MLP(c.hidden_size, c.intermediate_size, c.jax_dtype)
        else:
            self.mlp = MoE(moe, c.hidden_size, c.jax_dtype)

    @property
    def mixer(self) -> nn.Module:
        return self.linear_attn if self.layer in self.config.delta_layers else self.self_attn

    def __call__(self, x, projected, following: tuple[RMSNorm, Linear | None], turns: Turns, *mixer_args):
        """One block, up to where the next one's mixer starts.

        Args:
          x: [B, N, E], the residual stream.
          projected: `mixer.entry` of its norm, or partial sums of that.
          following: the norm after this block, and the projection after that, if any.
          turns: of this pass.
          *mixer_args: of the mixer.

        Returns:
          The residual stream after this block, what `following` makes of it, the mixer's rows.
        """
        mixed, tree_kv = self.mixer(projected, *mixer_args)
        x, projected = between_mixers(
            mixed, x, self.mixer.out, self.post_attention_layernorm, self.mlp, *following, turns
        )
        return x, projected, tree_kv


class Decoder(nn.Module):
    """Parameters: `embed/weight` [V, E], `layers_i/...`, `norm/weight` [E] and, if untied, `lm_head/weight` [V, E].

    Query, key and value projections are one matrix (q rows first, then k, then v, then the output gates if there are
    any), gate and up another: fewer, larger reads in a memory-bound step.
    """

    config: TargetConfig

    def setup(self):
        c = self.config
        self.embed = Linear(c.vocab_size, c.hidden_size, dtype=c.jax_dtype)
        self.layers = [Block(c, i) for i in range(c.num_layers)]
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps, c.jax_dtype, c.zero_centred_norms)
        if not c.tie_embeddings:
            self.lm_head = Linear(c.vocab_size, c.hidden_size, dtype=c.jax_dtype)

    def __call__(
        self, tokens: jax.Array, positions: jax.Array, ancestors: jax.Array, cache: KVCache, taps: tuple[int, ...] = ()
    ) -> TargetPass:
        """One pass.

        Args:
          tokens: [B, N] int32.
          positions: [B, N] int32, absolute (cache.length + depth in the tree).
          ancestors: [B, N, ceil(N / 32)] uint32, bit j of row i set where token i sees token j; a
            token comes after all that it sees.
          cache: committed tokens; all of them are visible to all N.
          taps: zero-based blocks whose output is kept.
        """
        c = self.config
        x = self.embed_tokens(tokens)
        rope = rope_tables(c.rope, positions, c.rotary_dim or c.head_dim)
        rows = conv_rows(ancestors, c.delta.conv_kernel) if c.delta_layers else None
        attention_layers = [i for i in range(c.num_layers) if i not in c.delta_layers]
        turns, tree_kv, stream = Turns(), [], []  # stream[i]: after block i
        projected = self.layers[0].mixer.entry.partial(self.layers[0].input_layernorm(x))
        ends = [(layer.input_layernorm, layer.mixer.entry) for layer in self.layers[1:]] + [(self.norm, None)]
        for i, (layer, following) in enumerate(zip(self.layers, ends, strict=True)):
            if i in c.delta_layers:
                args = (ancestors, rows, cache.recurrent, c.delta_layers.index(i))
            else:
                args = (rope, ancestors, positions, cache, attention_layers.index(i))
            x, projected, kept = layer(x, projected, following, turns, *args)
            stream.append(x)
            tree_kv.append(kept)
        features = jnp.concatenate([stream[i] for i in taps], axis=-1) if taps else None
        return TargetPass(hidden=projected, features=features, tree_kv=tuple(tree_kv))

    def embed_tokens(self, tokens: jax.Array) -> jax.Array:
        """[...] int32 -> [..., E]."""
        return jnp.take(self.embed.weight, tokens, axis=0, mode="clip")

    def logits(self, hidden: jax.Array) -> jax.Array:
        """[..., E] -> [..., V] float32, accumulated in float32."""
        return linear(hidden, self._head, out_dtype=jnp.float32)

    def greedy(self, hidden: jax.Array) -> jax.Array:
        """[..., E] -> [...] int32, the token of the largest of `logits`, which need not be written for it."""
        return largest(hidden, self._head)

    @property
    def _head(self) -> jax.Array:
        return (self.embed if self.config.tie_embeddings else self.lm_head).weight

    def commit_weights(self) -> RecurrentWeights | None:
        """What a commit reads of the parameters; a loop makes it once, before its first turn."""
        c = self.config
        if not c.delta_layers:
            return None
        return RecurrentWeights.of([self.layers[i].linear_attn.weights() for i in c.delta_layers], c.delta)

    def _touch(self, tokens, positions, ancestors, cache):
        """Runs every parameter once, for `init`."""
        return self.logits(self(tokens, positions, ancestors, cache).hidden)
