"""The mixture of experts of Qwen3-MoE and Qwen3.5-MoE: routing, the experts, and the block that holds them.

A token's experts depend on that token alone: no expert has a capacity, none is dropped, and the order of a sum is that
of the token's own ranks. So a text stays the same whatever else is in the pass.

Shape letters: M tokens, E hidden size, X experts, k experts a token, F intermediate size of one.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from ddtree_jax.config import MoEConfig
from ddtree_jax.models.layers import MLP, Linear
from pallas_kernels.grouped_matmul import group_rows, grouped_matmul, tile_rows


def route(logits: jax.Array, k: int, renormalise: bool) -> tuple[jax.Array, jax.Array]:
    """The k most probable experts of each token.

    Args:
      logits: [M, X] in the model's dtype, as the references round them; the softmax is float32.
      k: experts a token.
      renormalise: divide the k probabilities by their sum.

    Returns:
      (experts [M, k] int32, weights [M, k] in the dtype of `logits`), the most probable first. Of equal probabilities
      the lowest index comes first; torch.topk, which the references use, leaves the order of ties open.
    """
    weights, experts = lax.top_k(jax.nn.softmax(logits.astype(jnp.float32), axis=-1), k)
    if renormalise:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return experts, weights.astype(logits.dtype)


def mix(x: jax.Array, experts: jax.Array, weights: jax.Array, gate_up: jax.Array, down: jax.Array) -> jax.Array:
    """The weighted sum of each token's experts.

    Args:
      x: [M, E].
      experts, weights: [M, k], see `route`.
      gate_up: [X, 2F, E], gate first.
      down: [X, E, F].

    Returns:
      [M, E] in x's dtype, summed in float32 in the order of `experts`. Weights of experts that no token chose are not
      read (see `pallas_kernels.grouped_matmul`).
    """
    (tokens, k), num_experts = experts.shape, gate_up.shape[0]
    groups = group_rows(experts.reshape(-1), num_experts, tile_rows(tokens * k, num_experts))
    rows = jnp.take(x, groups.source // k, axis=0, mode="clip")
    rows = grouped_matmul(grouped_matmul(rows, gate_up, groups, swiglu=True), down, groups)
    chosen = jnp.take(rows, groups.place.reshape(tokens, k), axis=0, mode="clip").astype(jnp.float32)  # [M, k, E]
    return jnp.sum(chosen * weights.astype(jnp.float32)[:, :, None], axis=1).astype(x.dtype)


class StackedLinear(nn.Module):
    """Holds `weight` [count, features, in_features]: one projection an expert."""

    count: int
    features: int
    in_features: int
    dtype: jnp.dtype = jnp.bfloat16

    def setup(self):
        init = nn.initializers.variance_scaling(1.0, "fan_in", "normal", in_axis=-1, out_axis=-2, batch_axis=0)
        self.weight = self.param("weight", init, (self.count, self.features, self.in_features), self.dtype)


class MoE(nn.Module):
    """Parameters: `gate/weight` [X, E], `gate_up_proj/weight` [X, 2F, E], `down_proj/weight` [X, E, F] and, with a
    shared expert, `shared_expert/...` (an `MLP`) and `shared_expert_gate/weight` [1, E].
    """

    config: MoEConfig
    hidden_size: int
    dtype: jnp.dtype = jnp.bfloat16

    def setup(self):
        c, hidden = self.config, self.hidden_size
        self.gate = Linear(c.num_experts, hidden, dtype=self.dtype)
        self.gate_up_proj = StackedLinear(c.num_experts, 2 * c.intermediate_size, hidden, self.dtype)
        self.down_proj = StackedLinear(c.num_experts, hidden, c.intermediate_size, self.dtype)
        if c.shared_intermediate_size:
            self.shared_expert = MLP(hidden, c.shared_intermediate_size, self.dtype)
            self.shared_expert_gate = Linear(1, hidden, dtype=self.dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, N, E] -> [B, N, E]."""
        c, tokens = self.config, x.reshape(-1, self.hidden_size)
        experts, weights = route(self.gate(tokens), c.experts_per_token, c.renormalise)
        out = mix(tokens, experts, weights, self.gate_up_proj.weight, self.down_proj.weight)
        if c.shared_intermediate_size:
            share = jax.nn.sigmoid(self.shared_expert_gate(tokens))
            out = out + jnp.broadcast_to(share, tokens.shape) * self.shared_expert(tokens)
        return out.reshape(x.shape)
