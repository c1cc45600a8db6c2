"""What recurrent layers keep of the committed text, and how a commit moves it on.

A Gated DeltaNet layer (arXiv 2412.06464) remembers the last W - 1 inputs of its convolution and one matrix a value
head. A pass over a tree reads both once and writes neither. What it leaves of a token are the projections before the
convolution; a commit computes keys, values, decays and write strengths of the kept tokens anew, in float32, and runs
the recurrence over them, all layers at once. So a token of a tree costs one row a layer, never a state.

Shape letters: M recurrent layers, B slots, N tokens of a pass, R rows of a commit, W taps of the convolution,
C its channels (queries, keys, values), Hk, Hv, Dk, Dv key and value heads and their dimensions.
"""

from collections.abc import Callable, Sequence

import flax.struct
import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from ddtree_jax.config import DeltaConfig
from pallas_kernels.gated_delta_tree import (
    MixerWeights,
    gated_delta_fold,
    gated_delta_replay,
    gates,
    short_conv,
    unit,
)


@flax.struct.dataclass
class RecurrentState:
    """The memory of all recurrent layers, after the last committed token.

    Attributes:
      window: [M, B, W - 1, C] the last inputs of the convolution, oldest first, in the model's dtype; zeros at first.
      states: [M, B, Hv, Dk, Dv] float32.
    """

    window: jax.Array
    states: jax.Array

    @classmethod
    def empty(cls, config: DeltaConfig, *, layers: int, batch: int, dtype: jnp.dtype) -> "RecurrentState":
        """The state before any text."""
        c = config
        return cls(
            window=jnp.zeros((layers, batch, c.conv_kernel - 1, c.conv_channels), dtype),
            states=jnp.zeros((layers, batch, c.num_value_heads, c.key_head_dim, c.value_head_dim), jnp.float32),
        )


@flax.struct.dataclass
class RecurrentWeights:
    """What a commit reads of the parameters of all recurrent layers, as it reads it.

    Attributes:
      conv_weight: [M, W, keys and values of C], the newest tap last: queries are of no use to a state.
      decay_rate_log, decay_bias: [M, Hv] float32 (`A_log`, `dt_bias`).
    """

    conv_weight: jax.Array
    decay_rate_log: jax.Array
    decay_bias: jax.Array

    @classmethod
    def of(cls, layers: Sequence[MixerWeights], config: DeltaConfig) -> "RecurrentWeights":
        """Of all layers, in order."""
        return cls(
            conv_weight=jnp.stack([w.conv[config.key_size :].T for w in layers]),
            decay_rate_log=jnp.stack([w.decay_rate_log for w in layers]),
            decay_bias=jnp.stack([w.decay_bias for w in layers]),
        )


@flax.struct.dataclass
class RecurrentRows:
    """What a pass leaves of one recurrent layer.

    Attributes:
      inputs: [B, N, C + 2 Hv], projections before the convolution: queries, keys, values, write strengths, decays.
    """

    inputs: jax.Array


def parents(ancestors: jax.Array) -> jax.Array:
    """The parent of each node, [B, N] int32, -1 at roots, from packed ancestor-or-self bits [B, N, Q] uint32.

    Parents come before children, so of a node's ancestors the parent has the largest index: the highest bit below it.
    """
    nodes, words = ancestors.shape[1:]
    node = jnp.arange(nodes, dtype=jnp.int32)[:, None]
    word = jnp.arange(words, dtype=jnp.int32)[None, :]
    own = jnp.where(word == node // 32, jnp.uint32(1) << (node % 32).astype(jnp.uint32), jnp.uint32(0))
    above = ancestors & ~own[None]
    highest = 31 - jax.lax.clz(above).astype(jnp.int32)
    return jnp.max(jnp.where(above == 0, -1, 32 * word[None] + highest), axis=-1)


def conv_rows(ancestors: jax.Array, kernel: int) -> jax.Array:
    """Rows that each token's convolution reads, oldest tap first.

    Returns:
      [B, N, W] int32 into the W - 1 rows of the window followed by the N rows of the pass.
    """
    window = kernel - 1
    batch, nodes = ancestors.shape[:2]
    # One step up: a root follows the window's last row, a row of the window the one before it.
    above = jnp.concatenate(
        [
            jnp.broadcast_to(jnp.arange(-1, window - 1, dtype=jnp.int32)[None], (batch, window)),
            parents(ancestors) + window,
        ],
        axis=1,
    )
    row = jnp.broadcast_to(jnp.arange(window, window + nodes, dtype=jnp.int32)[None], (batch, nodes))
    rows = [row]
    for _ in range(window):
        row = jnp.take_along_axis(above, row, axis=1, mode="clip")
        rows.append(row)
    return jnp.stack(rows[::-1], axis=-1)


def append(
    state: RecurrentState, rows: Sequence[RecurrentRows], weights: RecurrentWeights, count: jax.Array
) -> RecurrentState:
    """Moves the state over the first `count` [B] rows of a pass over consecutive tokens (a chunk of a prompt)."""
    return _advance(gated_delta_fold, state, rows, weights, count)


def replay(
    state: RecurrentState, rows: Sequence[RecurrentRows], weights: RecurrentWeights, count: jax.Array
) -> RecurrentState:
    """`append` for the few rows of an accepted path: one token after the other, in float32."""
    return _advance(gated_delta_replay, state, rows, weights, count)


def _advance(
    recurrence: Callable, state: RecurrentState, rows: Sequence[RecurrentRows], weights: RecurrentWeights,
    count: jax.Array,
) -> RecurrentState:  # fmt: skip
    """A count of 0 leaves every bit of a slot."""
    kernel, channels = state.window.shape[2] + 1, state.window.shape[3]
    value_heads, key_dim, value_dim = state.states.shape[2:]
    values = value_heads * value_dim
    keys = (channels - values) // 2
    inputs = jnp.stack([r.inputs for r in rows])  # [M, B, R, C + 2 Hv]
    number = inputs.shape[2]

    # As they lie: XLA would make rows the fastest axis of all, as a commit's gates have it, and transpose twice.
    in_order = Layout(major_to_minor=(0, 1, 2, 3))
    strength_decay = with_layout_constraint(inputs[..., channels:], in_order)
    line = with_layout_constraint(jnp.concatenate([state.window, inputs[..., :channels]], axis=2), in_order)
    # Queries are of no use to a state.
    taps = [line[:, :, t : t + number, keys:] for t in range(kernel)]
    conv_weights = [weights.conv_weight[:, None, None, t] for t in range(kernel)]
    k, v = jnp.split(short_conv(taps, conv_weights), (keys,), axis=-1)
    decay_weights = (w[:, None, None] for w in (weights.decay_rate_log, weights.decay_bias))
    log_decay, beta = gates(strength_decay, *decay_weights)
    states = recurrence(
        unit(k.reshape(*k.shape[:3], -1, key_dim)), v.reshape(*v.shape[:3], value_heads, value_dim),
        log_decay, beta, state.states, count,
    )  # fmt: skip
    return RecurrentState(window=_last_rows(line, count, kernel - 1), states=states)


def _last_rows(line: jax.Array, count: jax.Array, rows: int) -> jax.Array:
    """line [M, B, R, C] from row count [B] on, `rows` of them."""
    if len(count) == 1:  # a gather makes XLA transpose all of it
        return jax.lax.dynamic_slice_in_dim(line, count[0], rows, axis=2)
    index = count[:, None] + jnp.arange(rows, dtype=jnp.int32)[None, :]
    return jnp.take_along_axis(line, index[None, :, :, None], axis=2, mode="clip")
