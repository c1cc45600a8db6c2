"""Gated DeltaNet as the mixer of a decoder block, over trees of tokens (arXiv 2412.06464; Qwen3.5, Qwen3-Next).

Shape letters: as in `ddtree_jax.models.recurrent`; E hidden size.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from ddtree_jax.config import TargetConfig
from ddtree_jax.models.layers import Linear, RMSNorm, split_heads
from ddtree_jax.models.recurrent import RecurrentRows, RecurrentState, RecurrentWeights, gates, short_conv, unit
from ddtree_jax.tree import gather_path
from pallas_kernels.gated_delta_tree import gated_delta_tree


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
        d, dtype = self.config.delta, x.dtype
        unit_dtype = dtype if dtype == jnp.bfloat16 else jnp.float32
        channels, heads = d.conv_channels, d.num_value_heads
        inputs, z = jnp.split(self.in_proj(x), (channels + 2 * heads,), axis=-1)
        weights = self.commit_weights()
        line = jnp.concatenate([memory.window[layer], inputs[..., :channels]], axis=1)
        taps = [gather_path(line, conv_rows[..., t]) for t in range(d.conv_kernel)]
        mixed = short_conv(taps, weights.conv_weight[None, None])
        q, k, v = jnp.split(mixed, (d.key_size, 2 * d.key_size), axis=-1)
        log_decay, beta = gates(inputs[..., channels:], self.decay_rate_log[None, None], self.decay_bias[None, None])
        out = gated_delta_tree(
            (unit(split_heads(q, d.num_key_heads)) * d.key_head_dim**-0.5).astype(unit_dtype),
            unit(split_heads(k, d.num_key_heads)).astype(unit_dtype),
            split_heads(v, heads), log_decay, beta, memory.states, ancestors, layer=layer,
        )  # fmt: skip
        gate = jax.nn.silu(split_heads(z, heads).astype(jnp.float32))
        gated = (self.norm(out).astype(jnp.float32) * gate).astype(dtype)
        return self.out_proj(gated.reshape(*x.shape[:2], -1)), RecurrentRows(inputs, weights)

    def commit_weights(self) -> RecurrentWeights:
        """What a commit of this layer reads of the parameters."""
        return RecurrentWeights(self.conv1d[:, 0], self.decay_rate_log, self.decay_bias)
