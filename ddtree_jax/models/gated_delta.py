"""Gated DeltaNet as the mixer of a decoder block, over trees of tokens (arXiv 2412.06464; Qwen3.5, Qwen3-Next).

Shape letters: as in `ddtree_jax.models.recurrent`; E hidden size.
"""

from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp

from ddtree_jax.config import TargetConfig
from ddtree_jax.models.layers import Linear, RMSNorm, split_heads
from ddtree_jax.models.recurrent import (
    RecurrentRows,
    RecurrentState,
    RecurrentWeights,
    conv_taps,
    gates,
    short_conv,
    unit,
)
from pallas_kernels.gated_delta_tree import gated_delta_tree
from pallas_kernels.streaming_matmul import PartialSums


def _decay_rate_init(key, shape, dtype):
    """log of rates uniform in 0.01..16, from heads that forget slowly to heads that forget at once."""
    return jnp.log(jax.random.uniform(key, shape, dtype, 0.01, 16.0))


class GatedDeltaNet(nn.Module):
    """Parameters: `in_proj/weight` [C + 2 Hv + Hv Dv, E] (rows: q, k, v, write strengths, decays, output gates),
    `conv1d` [C, 1, W] with the newest tap last, `A_log` and `dt_bias` [Hv] float32, `norm/weight` [Dv],
    `out_proj/weight` [E, Hv Dv]. Projections that share their input are one matrix.
    """

    config: TargetConfig

    def setup(self):
        c, d, dtype = self.config, self.config.delta, self.config.jax_dtype
        rows = d.conv_channels + 2 * d.num_value_heads + d.value_size
        self.in_proj = Linear(rows, c.hidden_size, dtype=dtype)
        conv_init = nn.initializers.variance_scaling(1.0, "fan_in", "normal", in_axis=-1, out_axis=0)
        self.conv1d = self.param("conv1d", conv_init, (d.conv_channels, 1, d.conv_kernel), dtype)
        self.decay_rate_log = self.param("A_log", _decay_rate_init, (d.num_value_heads,), jnp.float32)
        self.decay_bias = self.param("dt_bias", nn.initializers.ones, (d.num_value_heads,), jnp.float32)
        self.norm = RMSNorm(d.value_head_dim, c.rms_norm_eps, dtype)
        self.out_proj = Linear(c.hidden_size, d.value_size, dtype=dtype)

    def __call__(
        self, x: jax.Array, ancestors: jax.Array, conv_rows: jax.Array, memory: RecurrentState, layer: int
    ) -> tuple[jax.Array, RecurrentRows]:
        """One pass.

        Args:
          x: [B, N, E].
          ancestors: [B, N, ceil(N / 32)] uint32.
          conv_rows: [B, N, W] int32, see `recurrent.conv_rows`.
          memory: of all recurrent layers; only read.
          layer: which of them this one is.

        Returns:
          ([B, N, E], what a commit needs).
        """
        inputs, z = self.project(x)
        taps = conv_taps(memory.window[layer], inputs[..., : self.config.delta.conv_channels], conv_rows)
        out = self.recur(*self.operands(inputs, taps), memory.states, ancestors, layer)
        return self.finish(out, z), RecurrentRows(inputs, self.commit_weights())

    def project(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """[B, N, E] -> (inputs of the convolution and the gates [B, N, C + 2 Hv], output gates [B, N, Hv Dv])."""
        d = self.config.delta
        return jnp.split(self.in_proj(x), (d.conv_channels + 2 * d.num_value_heads,), axis=-1)

    def operands(self, inputs: jax.Array, taps: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        """What the recurrence takes of each token.

        Args:
          inputs: [B, N, C + 2 Hv], see `project`.
          taps: W arrays [B, N, C], the inputs that each token's convolution reads, oldest first.

        Returns:
          (q, k [B, N, Hk, Dk] float32, v [B, N, Hv, Dv], log_decay, beta [B, N, Hv] float32).
        """
        d = self.config.delta
        mixed = short_conv(taps, self.conv1d[:, 0][None, None])
        q, k, v = jnp.split(mixed, (d.key_size, 2 * d.key_size), axis=-1)
        log_decay, beta = gates(
            inputs[..., d.conv_channels :], self.decay_rate_log[None, None], self.decay_bias[None, None]
        )
        q = unit(split_heads(q, d.num_key_heads)) * d.key_head_dim**-0.5
        return q, unit(split_heads(k, d.num_key_heads)), split_heads(v, d.num_value_heads), log_decay, beta

    def recur(self, q, k, v, log_decay, beta, states: jax.Array, ancestors: jax.Array, layer: int) -> jax.Array:
        """`gated_delta_tree` of `operands`, with queries and keys in the dtype that it takes: [B, N, Hv, Dv]."""
        dtype = v.dtype if v.dtype == jnp.bfloat16 else jnp.float32
        return gated_delta_tree(q.astype(dtype), k.astype(dtype), v, log_decay, beta, states, ancestors, layer=layer)

    def finish(self, out: jax.Array, z: jax.Array) -> jax.Array | PartialSums:
        """[B, N, Hv, Dv] of the recurrence and its gates -> [B, N, E]."""
        gate = jax.nn.silu(split_heads(z, out.shape[2]).astype(jnp.float32))
        gated = (self.norm(out).astype(jnp.float32) * gate).astype(out.dtype)
        return self.out_proj.partial(gated.reshape(*out.shape[:2], -1))

    def commit_weights(self) -> RecurrentWeights:
        """What a commit of this layer reads of the parameters."""
        return RecurrentWeights(self.conv1d[:, 0], self.decay_rate_log, self.decay_bias)
