"""Picking the largest: of the vocabulary (long rows, order of ties free) and of candidate lists (short, stable).

Shape letters: B slots · L draft depth · V vocabulary · M candidates.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

# The longest list that XLA's radix select on GPUs serves; above it XLA sorts the whole row. Measured on an H200 with
# 15 rows of 151936: 69 us for 63 tokens, but 605 us for 255 and 591 us for a stable selection of any length.
FAST_TOP_K = 128

# Pieces of the vocabulary that are searched separately, and their finds together (1: the whole row at once). One row of
# a selection is the work of one thread block, and a tree has only some 15 rows. `python -m benchmarks.tree_build
# --chunks 1,8,16,32,64` times them.
CHUNKS = 1


def top_tokens(log_probs: jax.Array, k: int, *, chunks: int | None = None) -> tuple[jax.Array, jax.Array]:
    """The k most probable tokens of every depth, best first; NaN counts as probability 0.

    Which of several exactly equal tokens is taken, and their order, is unspecified (a stable selection sorts the
    vocabulary on GPUs); any choice gives a tree of equal probability, and none changes the committed text.

    Args:
      log_probs: [B, L, V] float32.
      k: tokens to keep, 1 <= k <= V (static).
      chunks: pieces of the vocabulary searched separately (static), default `CHUNKS`. The result is the same.

    Returns:
      log_prob [B, L, k] float32 and token [B, L, k] int32. Tokens of probability above 0 are distinct.

    Raises:
      ValueError: k out of range, or an array of another rank or dtype.
    """
    if log_probs.ndim != 3 or log_probs.dtype != jnp.float32:
        raise ValueError(f"log_probs must be [B, L, V] float32, got {log_probs.shape} {log_probs.dtype}")
    if not 1 <= k <= log_probs.shape[-1]:
        raise ValueError(f"k must be between 1 and the vocabulary size {log_probs.shape[-1]}, got {k}")
    remaining = clean_log_probs(log_probs)
    values, tokens = [], []
    for taken in range(0, k, FAST_TOP_K):
        if taken:  # two fast selections beat one sort: strike out what was found and look again
            remaining = jnp.put_along_axis(remaining, tokens[-1], -jnp.inf, axis=-1, inplace=False)
        value, token = _largest(remaining, min(FAST_TOP_K, k - taken), CHUNKS if chunks is None else chunks)
        values.append(value)
        tokens.append(token)
    return jnp.concatenate(values, axis=-1), jnp.concatenate(tokens, axis=-1)


def _largest(values: jax.Array, k: int, chunks: int) -> tuple[jax.Array, jax.Array]:
    """The k largest of the last axis and where they are: of each piece first, then of what the pieces yield."""
    size = values.shape[-1]
    width = -(-size // chunks)
    if chunks == 1 or width <= 2 * k:  # pieces that yield about all they have save nothing
        best, place = lax.top_k(values, k, is_stable=False)
        return best, place.astype(jnp.int32)
    leading = [(0, 0)] * (values.ndim - 1)
    padded = jnp.pad(values, [*leading, (0, chunks * width - size)], constant_values=-jnp.inf)
    best, place = lax.top_k(padded.reshape(*values.shape[:-1], chunks, width), k, is_stable=False)
    place = place.astype(jnp.int32) + lax.broadcasted_iota(jnp.int32, place.shape, place.ndim - 2) * width
    flat = (*values.shape[:-1], chunks * k)
    best, chosen = lax.top_k(best.reshape(flat), k, is_stable=False)
    place = jnp.take_along_axis(place.reshape(flat), chosen.astype(jnp.int32), axis=-1, mode="clip")
    return best, jnp.minimum(place, size - 1)  # padding may stand for tokens of probability 0


def clean_log_probs(log_probs: jax.Array) -> jax.Array:
    """NaN becomes -inf (a selection would rank it first), values that rounding put above 0 become 0, and -0 becomes 0
    (some selections rank it below)."""
    return jnp.where(jnp.isnan(log_probs), -jnp.inf, jnp.where(log_probs >= 0, 0.0, log_probs))


def sorted_largest(values: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """The `count` largest of each row of a short list, in falling order, equal ones in order of position.

    Args:
      values: [..., M] float32 without NaN.
      count: 1 <= count <= M (static).

    Returns:
      values [..., count] float32 and positions [..., count] int32.
    """
    position = largest_by_keys((values,), count)
    return jnp.take_along_axis(values, position, axis=-1, mode="clip"), position


def largest_by_keys(keys: Sequence[jax.Array], count: int) -> jax.Array:
    """Positions of the `count` largest in falling order: by the first key, equal ones by the next, then by position.

    Args:
      keys: arrays [..., M] float32 without NaN.
      count: 1 <= count <= M (static).

    Returns:
      [..., count] int32.
    """

    def by_sorting(*keys: jax.Array) -> jax.Array:
        if len(keys) == 1:
            return lax.top_k(keys[0], count, is_stable=True)[1].astype(jnp.int32)
        position = lax.broadcasted_iota(jnp.int32, keys[0].shape, keys[0].ndim - 1)
        return lax.sort((*(-key for key in keys), position), num_keys=len(keys), is_stable=True)[-1][..., :count]

    def by_counting(*keys: jax.Array) -> jax.Array:
        return largest_by_counting(keys, count)

    # A GPU compares all with all in less time than a sort takes to start: the 256-node build takes 102 us instead of
    # 293 us on an H200.
    return lax.platform_dependent(*keys, cuda=by_counting, default=by_sorting)


def largest_by_counting(keys: Sequence[jax.Array], count: int) -> jax.Array:
    """`largest_by_keys` in two fused reductions: a value's place is the number of values that come before it."""
    position = jnp.arange(keys[0].shape[-1], dtype=jnp.int32)
    before = position[None, :] < position[:, None]
    before = jnp.broadcast_to(before, (*keys[0].shape, len(position)))
    for key in reversed(keys):
        here, other = key[..., :, None], key[..., None, :]
        before = (other > here) | ((other == here) & before)
    place = jnp.sum(before, axis=-1, dtype=jnp.int32)  # [..., M], a permutation
    wanted = jnp.arange(count, dtype=jnp.int32)[:, None]
    wanted, position = (jnp.broadcast_to(x, (*place.shape[:-1], count, len(position))) for x in (wanted, position))
    return jnp.sum(jnp.where(place[..., None, :] == wanted, position, 0), axis=-1, dtype=jnp.int32)
