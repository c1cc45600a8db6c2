"""Picking the largest: of the vocabulary (long rows, order of ties free) and of candidate lists (short, stable).

The k largest values of a row lie in the k blocks of neighbouring values with the largest maxima. So of the vocabulary
only the maxima of small blocks are made, one read, and what is sorted or compared are short lists: maxima first, then
the values of the blocks that they lead to.

Shape letters: B slots · L draft depth · V vocabulary · M candidates.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

# The longest list that XLA's radix select on GPUs serves; above it XLA sorts the whole row. Measured on an H200 with
# 15 rows of 151936: 69 us for 63 tokens, but 605 us for 255 and 591 us for a stable selection of any length.
FAST_TOP_K = 128
# The longest list that is compared all with all: the work grows with its square.
LONGEST_COUNTED = 4096
# On a GPU blocks are as wide as makes lists of so many candidates, and maxima are taken again while there are more.
_CANDIDATES, _MAXIMA = 1024, 1200


@dataclasses.dataclass(frozen=True)
class Search:
    """How the k largest of a long row are found. All ways give the same, up to ties. Static.

    Attributes:
      blocks: values in a block, then maxima in a block of maxima and so on; () looks at the row itself. Blocks that
        would leave more than half of their level as candidates are passed over.
      select: how a list is searched, a key of `SELECTIONS`: the values, then their blocks' maxima and so on; the last
        name serves all further levels.
    """

    blocks: tuple[int, ...] = ()
    select: tuple[str, ...] = ("repeated",)


# A CPU takes 3.6 ms for 63 of 15 rows of 151936 and 1.0 ms by blocks, and no list is too short for its top-k.
CPU_SEARCH = Search((32,), ("top_k",))


def gpu_search(size: int, k: int) -> Search:
    """What `top_tokens` does on a GPU; `python -m benchmarks.tree_build` times it and others."""
    if k == 1:
        return Search()
    width = min(16, max(4, 1 << max(1, _CANDIDATES // k).bit_length() - 1))
    blocks = []
    while size > _MAXIMA and 2 * k * width <= size:
        blocks.append(width)
        size = -(-size // width)
    return Search(tuple(blocks), ("counting",))


def top_tokens(log_probs: jax.Array, k: int, *, search: Search | None = None) -> tuple[jax.Array, jax.Array]:
    """The k most probable tokens of every depth, best first; NaN counts as probability 0.

    Which of several exactly equal tokens is taken, and their order, is unspecified, since it depends on the search; any
    choice gives a tree of equal probability, and none changes the committed text.

    Args:
      log_probs: [B, L, V] float32.
      k: tokens to keep, 1 <= k <= V (static).
      search: how (static), by default what suits the platform.

    Returns:
      log_prob [B, L, k] float32 and token [B, L, k] int32. Tokens of probability above 0 are distinct.

    Raises:
      ValueError: k out of range, or an array of another rank or dtype.
    """

    def found(log_probs: jax.Array, search: Search) -> tuple[jax.Array, jax.Array]:
        return _largest(clean_log_probs(log_probs), k, search)

    return _on_platform("log_probs", found, log_probs, k, search)


def top_log_probs(logits: jax.Array, k: int, *, search: Search | None = None) -> tuple[jax.Array, jax.Array]:
    """`top_tokens` of log_softmax(logits) without the array of all log probabilities: the search reads the logits
    once, and the sum of exponentials once more.

    Tokens that only rounding makes equally probable come in the order of their logits.

    Args:
      logits: [B, L, V] float32.

    For other arguments, result and errors see `top_tokens`.
    """

    def found(logits: jax.Array, search: Search) -> tuple[jax.Array, jax.Array]:
        best, token = _largest(jnp.where(jnp.isnan(logits), -jnp.inf, logits), k, search)
        peak = best[..., :1]
        total = jnp.sum(jnp.exp(logits - peak), axis=-1, keepdims=True)
        return clean_log_probs((best - peak) - jnp.log(total)), token

    return _on_platform("logits", found, logits, k, search)


def _on_platform(name: str, found: Callable, values: jax.Array, k: int, search: Search | None):
    """found(values, search), the search being the platform's where none is given."""
    if values.ndim != 3 or values.dtype != jnp.float32:
        raise ValueError(f"{name} must be [B, L, V] float32, got {values.shape} {values.dtype}")
    size = values.shape[-1]
    if not 1 <= k <= size:
        raise ValueError(f"k must be between 1 and the vocabulary size {size}, got {k}")
    if search is not None:
        return found(values, search)
    on_gpu, on_cpu = (functools.partial(found, search=s) for s in (gpu_search(size, k), CPU_SEARCH))
    return lax.platform_dependent(values, cuda=on_gpu, default=on_cpu)


def _largest(values: jax.Array, k: int, search: Search) -> tuple[jax.Array, jax.Array]:
    """The k largest of the last axis, best first, and where they are; values [..., M] without NaN."""
    size, blocks, select = values.shape[-1], search.blocks, search.select
    while blocks and 2 * k * blocks[0] > size:
        blocks = blocks[1:]
    if not blocks:
        return _search_list(values, k, select[0])
    width = blocks[0]
    best, block = _largest(_block_maxima(values, width), k, Search(blocks[1:], select[1:] or select))
    inside = lax.broadcasted_iota(jnp.int32, (*block.shape, width), block.ndim)
    place = block[..., None] * width + inside
    flat = (*block.shape[:-1], k * width)
    candidates = jnp.take_along_axis(values, place.reshape(flat), axis=-1, mode="clip").reshape(place.shape)
    # Nothing is in a block without a value above -inf, which may be one that was found before (`_repeatedly`).
    candidates = jnp.where((place < size) & (best[..., None] > -jnp.inf), candidates, -jnp.inf).reshape(flat)
    # Made once, for XLA would look each up in every comparison.
    best, chosen = _search_list(lax.optimization_barrier(candidates), k, select[0])
    place = jnp.take_along_axis(block, chosen // width, axis=-1, mode="clip") * width + chosen % width
    return best, jnp.minimum(place, size - 1)  # padding may stand for tokens of probability 0


def _block_maxima(values: jax.Array, width: int) -> jax.Array:
    """[..., M] -> [..., M / width], the last block filled up with -inf."""
    missing = -values.shape[-1] % width
    if missing:
        values = jnp.pad(values, [*[(0, 0)] * (values.ndim - 1), (0, missing)], constant_values=-jnp.inf)
    return jnp.max(values.reshape(*values.shape[:-1], -1, width), axis=-1)


def _search_list(values: jax.Array, k: int, select: str) -> tuple[jax.Array, jax.Array]:
    if k == 1:
        return jnp.max(values, axis=-1, keepdims=True), lax.argmax(values, values.ndim - 1, jnp.int32)[..., None]
    if select == "counting" and values.shape[-1] > LONGEST_COUNTED:
        select = "repeated"
    return SELECTIONS[select](values, k)


def _by_top_k(values: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    # Where only some of the k are read XLA would sort the whole list for them.
    best, place = lax.optimization_barrier(lax.top_k(values, k, is_stable=False))
    return best, place.astype(jnp.int32)


def _repeatedly(values: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """Two fast selections beat one sort: strikes out what was found and looks again."""
    found = []
    for taken in range(0, k, FAST_TOP_K):
        if taken:
            values = jnp.put_along_axis(values, found[-1][1], -jnp.inf, axis=-1, inplace=False)
        found.append(_by_top_k(values, min(FAST_TOP_K, k - taken)))
    best, place = zip(*found)
    return jnp.concatenate(best, axis=-1), jnp.concatenate(place, axis=-1)


def _by_counting(values: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    place = largest_by_counting((values,), k)
    return jnp.take_along_axis(values, place, axis=-1, mode="clip"), place


SELECTIONS = {"top_k": _by_top_k, "repeated": _repeatedly, "counting": _by_counting}


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
    square = (*keys[0].shape, len(position))
    here, other = (lax.broadcasted_iota(jnp.int32, square, len(square) - n) for n in (2, 1))
    before = other < here
    for key in reversed(keys):
        here, other = key[..., :, None], key[..., None, :]
        before = (other > here) | ((other == here) & before)
    place = jnp.sum(before, axis=-1, dtype=jnp.int32)  # [..., M], a permutation
    wanted = jnp.arange(count, dtype=jnp.int32)[:, None]
    wanted, position = (jnp.broadcast_to(x, (*place.shape[:-1], count, len(position))) for x in (wanted, position))
    return jnp.sum(jnp.where(place[..., None, :] == wanted, position, 0), axis=-1, dtype=jnp.int32)
