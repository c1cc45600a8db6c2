"""Gated DeltaNet layers over packed rows: each document starts from an empty state, as it does in decoding.

Shape letters: b rows, S tokens a row, E hidden size, W taps of the convolution, Hv value heads.
"""

import jax
import jax.numpy as jnp

from ddtree_jax.models.gated_delta import GatedDeltaNet
from pallas_kernels.gated_delta_tree import conv_heads, gated_delta_fold, gated_delta_tree, gated_norm, gates
from pallas_kernels.tree_attention.masks import pack_bits

_CHUNK = 64  # tokens a step: as many as a prompt's fold takes at a time


def mix_rows(mixer: GatedDeltaNet, x: jax.Array, starts: jax.Array) -> jax.Array:
    """What `mixer` gives each document of a row alone.

    A chunk of tokens is a forest of chains below the state before it: a token sees those of its document. The first
    token of a document forgets the state (a decay of zero) and its convolution reads zeros before it.

    Args:
      mixer: bound to its parameters.
      x: [b, S, E], normed.
      starts: [b, S] int32, first index of each token's document.

    Returns:
      [b, S, E].
    """
    d, (b, length, _) = mixer.config.delta, x.shape
    weights = mixer.weights()
    channels, strengths_decays, output_gates = jnp.split(mixer.in_proj(x), (d.conv_channels, d.kept_channels), axis=-1)
    index = jnp.arange(length, dtype=jnp.int32)[None, :]
    taps = _taps(channels, index, starts, d.conv_kernel)
    q, k, v = conv_heads(taps, weights.conv, heads=d.heads, dims=d.dims)
    log_decay, beta = gates(strengths_decays, weights.decay_rate_log, weights.decay_bias)
    dtype = v.dtype if v.dtype == jnp.bfloat16 else jnp.float32  # as `gated_delta_mixer` has it
    log_decay = jnp.where((index == starts)[:, :, None], -jnp.inf, log_decay)

    spare = -length % _CHUNK
    index = jnp.arange(length + spare, dtype=jnp.int32)[None, :]

    def chunks(array):  # [b, S, ...] -> [S / chunk, b, chunk, ...], padded with tokens that neither decay nor write
        padded = jnp.pad(array, ((0, 0), (0, spare), *[(0, 0)] * (array.ndim - 2)))
        return padded.reshape(b, -1, _CHUNK, *array.shape[2:]).swapaxes(0, 1)

    index = jnp.broadcast_to(index, (b, length + spare)).reshape(b, -1, _CHUNK).swapaxes(0, 1)
    # The spare tokens at the end belong to nobody: each sees itself.
    first = jnp.maximum(chunks(starts), jnp.where(index < length, 0, index))
    seen = (first[..., :, None] <= index[..., None, :]) & (index[..., None, :] <= index[..., :, None])
    everything = jnp.full((b,), _CHUNK, jnp.int32)

    def step(states, chunk):
        q, k, v, log_decay, beta, bits = chunk
        out = gated_delta_tree(q.astype(dtype), k.astype(dtype), v, log_decay, beta, states, bits, layer=0)
        return gated_delta_fold(k[None], v[None], log_decay[None], beta[None], states, everything), out

    states = jnp.zeros((1, b, d.num_value_heads, d.key_head_dim, d.value_head_dim), jnp.float32)
    operands = tuple(chunks(array) for array in (q, k, v, log_decay, beta))
    _, out = jax.lax.scan(step, states, (*operands, pack_bits(seen)))
    out = out.swapaxes(0, 1).reshape(b, length + spare, *v.shape[2:])[:, :length]
    return mixer.out_proj(gated_norm(out, output_gates, weights.norm, mixer.norm.eps))


def _taps(inputs: jax.Array, index: jax.Array, starts: jax.Array, kernel: int) -> list[jax.Array]:
    """W arrays [b, S, C], oldest first: the inputs that each token's convolution reads, none of another document."""
    taps = []
    for back in range(kernel - 1, -1, -1):
        moved = jnp.pad(inputs, ((0, 0), (back, 0), (0, 0)))[:, : inputs.shape[1]]
        taps.append(jnp.where((index - back >= starts)[:, :, None], moved, jnp.zeros((), inputs.dtype)))
    return taps
