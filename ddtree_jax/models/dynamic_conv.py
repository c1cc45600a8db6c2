"""Grouped dynamic causal convolution of DFlash 2: neighbouring slots of a block mix, by weights that a slot predicts.

Shape letters: B slots of the batch, S block slots, E hidden size, T taps, G channels a group.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from ddtree_jax.models.layers import Linear

SIDES = ("before", "after")  # of the layer that a convolution surrounds


def _identity(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    """Tap 0 passes every channel through, the others nothing."""
    return jnp.zeros(shape, dtype).at[:, 0].set(1)


class DynamicConv(nn.Module):
    """Holds `base_kernel` [2, T, E] and `kernel_projection/weight` [2 * T * E / G, E]; untrained, an identity.

    Both sides of a layer are convolved with coefficients predicted from the input of the first. Coefficients are
    base + prediction; the channels of a group share their prediction.
    """

    hidden_size: int
    taps: int
    group_size: int
    dtype: jnp.dtype = jnp.bfloat16

    def setup(self):
        self.base_kernel = self.param("base_kernel", _identity, (len(SIDES), self.taps, self.hidden_size), self.dtype)
        rows = len(SIDES) * self.taps * self.hidden_size // self.group_size
        self.kernel_projection = Linear(rows, self.hidden_size, dtype=self.dtype, init=nn.initializers.zeros)

    def kernels(self, x: jax.Array) -> tuple[jax.Array, ...]:
        """[B, S, E] -> the coefficients of either side, [B, S, T, E] each."""
        predicted = self.kernel_projection(x).reshape(*x.shape[:-1], len(SIDES), self.taps, -1)
        predicted = jnp.repeat(predicted, self.group_size, axis=-1)
        kernels = jnp.broadcast_to(self.base_kernel, predicted.shape) + predicted
        return tuple(kernels[..., side, :, :] for side in range(len(SIDES)))


def causal_conv(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """y[i] = sum over t of kernel[i, t] * x[i - t], elementwise in channels; before the block's start x is 0.

    Args:
      x: [B, S, E], one block of each slot and nothing else.
      kernel: [B, S, T, E].

    Returns:
      [B, S, E] in x's dtype.
    """
    slots, y = x.shape[1], x * kernel[:, :, 0]
    for tap in range(1, kernel.shape[2]):
        y = y + jnp.pad(x, ((0, 0), (tap, 0), (0, 0)))[:, :slots] * kernel[:, :, tap]
    return y
