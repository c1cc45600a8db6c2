"""The multi-token prediction layer that Qwen3.5, Qwen3.6 and Qwen3-Next checkpoints bring along, as a drafter.

Mechanics as in SGLang's and vLLM's qwen3_5_mtp; transformers leaves the layer out.

Shape letters: B slots, R rows, W nodes of a step, E hidden size.
"""

import jax
import jax.numpy as jnp

from ddtree_jax.models.layers import Linear, RMSNorm
from ddtree_jax.models.step_drafter import DraftRows, StepDrafter


class MTP(StepDrafter):
    """Parameters beside those of the layer: `pre_fc_norm_embedding/weight`, `pre_fc_norm_hidden/weight` and `fc/weight`
    [E, 2 * E]. Embedding and head are the target's.

    The residual stream is a projection of the token's embedding and the context side by side, each normed. The context
    is the target's hidden state after its final norm; a node hands its own, after this layer's final norm, to its
    children, the same state that the head reads. All norms multiply by 1 + weight.
    """

    def setup(self):
        super().setup()
        c = self.config
        norm = dict(eps=c.rms_norm_eps, dtype=c.jax_dtype, zero_centred=c.zero_centred_norms)
        self.pre_fc_norm_embedding = RMSNorm(c.hidden_size, **norm)
        self.pre_fc_norm_hidden = RMSNorm(c.hidden_size, **norm)
        self.fc = Linear(c.hidden_size, 2 * c.hidden_size, dtype=c.jax_dtype)

    @property
    def attention_inputs(self) -> int:
        return self.config.hidden_size

    def context(self, hidden: jax.Array, features: jax.Array | None) -> jax.Array:
        return hidden.astype(self.config.jax_dtype)

    def enter(self, embeddings: jax.Array, context: jax.Array) -> tuple[jax.Array, jax.Array]:
        both = [self.pre_fc_norm_embedding(embeddings), self.pre_fc_norm_hidden(context)]
        x = self.fc(jnp.concatenate(both, axis=-1))
        return self.input_layernorm(x), x

    def leave(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        hidden = self.norm(x)
        return hidden, hidden

    def _touch(self, hidden, cache):
        """Runs every parameter once, for `init`: hidden [B, 1, E]."""
        seen = jnp.ones((*hidden.shape[:2], 1), bool)
        rows = DraftRows.empty(self.config, hidden.shape[0])
        return self(hidden, hidden, cache.length[:, None], cache, rows, seen)
