"""The EAGLE-3 drafter (arXiv 2503.01840): one Llama layer over the embedding of a token and three taps of the target.

Shape letters: B slots, R rows, E hidden size, T taps, U tokens of the drafter's vocabulary.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from ddtree_jax.config import Eagle3Config
from ddtree_jax.models.layers import Linear, RMSNorm, linear
from ddtree_jax.models.step_drafter import DraftRows, StepDrafter


class DraftHead(nn.Module):
    """Holds `weight` [U, E] and `target_ids` [U] int32, the target's token that each row stands for."""

    config: Eagle3Config

    def setup(self):
        c = self.config
        init = nn.initializers.variance_scaling(1.0, "fan_in", "normal", in_axis=-1, out_axis=0)
        self.weight = self.param("weight", init, (c.draft_vocab_size, c.hidden_size), c.jax_dtype)
        self.target_ids = self.param("target_ids", lambda _: jnp.arange(c.draft_vocab_size, dtype=jnp.int32))


class Eagle3(StepDrafter):
    """Parameters beside those of the layer: `fc/weight` [E, T * E_target], `hidden_norm/weight`, `lm_head/weight`,
    `lm_head/target_ids` and, if it has one, `embed/weight` [V, E].

    The attention projects the token's embedding and the context side by side, each normed; the residual stream is the
    context. A node hands its residual stream to its children as it leaves the layer, before the final norm.
    """

    def setup(self):
        super().setup()
        c, dtype = self.config, self.config.jax_dtype
        self.fc = Linear(c.hidden_size, len(c.target_layer_ids) * c.target_hidden_size, dtype=dtype)
        self.hidden_norm = RMSNorm(c.hidden_size, c.rms_norm_eps, dtype)
        self.lm_head = DraftHead(c)
        if c.own_embedding:
            self.embed = Linear(c.target_vocab_size, c.hidden_size, dtype=dtype)

    @property
    def attention_inputs(self) -> int:
        return 2 * self.config.hidden_size

    def context(self, hidden: jax.Array, features: jax.Array | None) -> jax.Array:
        return self.fc(features.astype(self.config.jax_dtype))

    def enter(self, embeddings: jax.Array, context: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.concatenate([self.input_layernorm(embeddings), self.hidden_norm(context)], axis=-1), context

    def leave(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return self.norm(x), x

    def embed_tokens(self, tokens: jax.Array) -> jax.Array:
        """[...] int32 -> [..., E], of the drafter's own table."""
        return jnp.take(self.embed.weight, tokens, axis=0, mode="clip")

    def logits(self, hidden: jax.Array) -> jax.Array:
        """[..., E] -> [..., U] float32, accumulated in float32."""
        return linear(hidden, self.lm_head.weight, out_dtype=jnp.float32)

    def token_ids(self, drafted: jax.Array) -> jax.Array:
        """Rows of the head [...] int32 -> tokens of the target."""
        return jnp.take(self.lm_head.target_ids, drafted, axis=0, mode="clip")

    def _touch(self, tokens, features, cache):
        """Runs every parameter once, for `init`: tokens [B, 1], features [B, 1, T * E_target]."""
        context = self.context(features, features)
        embeddings = self.embed_tokens(tokens) if self.config.own_embedding else context
        rows = DraftRows.empty(self.config, tokens.shape[0])
        seen = jnp.ones((*tokens.shape, 1), bool)
        hidden, *_ = self(embeddings, context, cache.length[:, None], cache, rows, seen)
        return self.logits(hidden), self.token_ids(tokens)
