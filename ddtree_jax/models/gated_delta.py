"""Gated DeltaNet as the mixer of a decoder block, over trees of tokens (arXiv 2412.06464; Qwen3.5, Qwen3-Next).

Shape letters: as in `ddtree_jax.models.recurrent`; E hidden size.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from ddtree_jax.config import TargetConfig
from ddtree_jax.models.layers import Linear, RMSNorm, total
from ddtree_jax.models.recurrent import RecurrentRows, RecurrentState
from pallas_kernels.gated_delta_tree import MixerWeights, gated_delta_mixer
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
        self.in_proj = Linear(d.projected_channels, c.hidden_size, dtype=dtype)
        conv_init = nn.initializers.variance_scaling(1.0, "fan_in", "normal", in_axis=-1, out_axis=0)
        self.conv1d = self.param("conv1d", conv_init, (d.conv_channels, 1, d.conv_kernel), dtype)
        self.decay_rate_log = self.param("A_log", _decay_rate_init, (d.num_value_heads,), jnp.float32)
        self.decay_bias = self.param("dt_bias", nn.initializers.ones, (d.num_value_heads,), jnp.float32)
        self.norm = RMSNorm(d.value_head_dim, c.rms_norm_eps, dtype)
        self.out_proj = Linear(c.hidden_size, d.value_size, dtype=dtype)

    @property
    def entry(self) -> Linear:
        """The projection that the mixer starts from."""
        return self.in_proj

    @property
    def out(self) -> Linear:
        """The projection of what the mixer yields."""
        return self.out_proj

    def __call__(
        self,
        projected: jax.Array | PartialSums,
        ancestors: jax.Array,
        conv_rows: jax.Array,
        memory: RecurrentState,
        layer: int,
    ) -> tuple[jax.Array, RecurrentRows]:
        """One pass.

        Args:
          projected: [B, N, rows of `in_proj`], `entry` of the normed stream.
          ancestors: [B, N, ceil(N / 32)] uint32.
          conv_rows: [B, N, W] int32, see `recurrent.conv_rows`.
          memory: of all recurrent layers; only read.
          layer: which of them this one is.

        Returns:
          ([B, N, Hv Dv] for `out`, what a commit needs).
        """
        projected, d = total(projected), self.config.delta
        out = gated_delta_mixer(
            projected, memory.window, memory.states, conv_rows, ancestors, self.weights(), heads=d.heads,
            eps=self.norm.eps, layer=layer,
        )  # fmt: skip
        return out, RecurrentRows(projected[..., : d.kept_channels])

    def weights(self) -> MixerWeights:
        """What is not a projection."""
        return MixerWeights(self.conv1d[:, 0], self.decay_rate_log, self.decay_bias, self.norm.weight)
