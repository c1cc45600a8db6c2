"""States to time a loop with: caches full of noise, at any context, without reading a prompt.

Noise and not zeros, so that tokens differ: a mixture of experts then reads as many experts as it would of a text.
"""

from typing import Any

import jax
import jax.numpy as jnp

from ddtree_jax.decode.loop import DecodeLoop
from ddtree_jax.decode.proposers.step import StepCache
from ddtree_jax.decode.state import DecodeState


def noise(tree: Any) -> Any:
    """Normal random numbers for every floating-point array; others stay as they are."""
    leaves, structure = jax.tree.flatten(tree)
    keys = jax.random.split(jax.random.key(2), len(leaves))
    floating = [jnp.issubdtype(x.dtype, jnp.floating) for x in leaves]
    return structure.unflatten(
        [jax.random.normal(k, x.shape, x.dtype) if f else x for k, x, f in zip(keys, leaves, floating)]
    )


def noisy_state(loop: DecodeLoop, batch: int, cache_rows: int, output_rows: int) -> DecodeState:
    """`DecodeLoop.init_state` with noise in its caches."""
    state = loop.init_state(batch, cache_rows, output_rows)
    target_cache, drafter_cache = noise((state.target_cache, state.drafter_cache))
    return state.replace(target_cache=target_cache, drafter_cache=drafter_cache)


def at_context(state: DecodeState, context: int) -> DecodeState:
    """The state after `context` tokens of text."""

    def set_length(cache, length=context):  # each with a buffer of its own, so that all can be donated
        if cache is None:
            return None
        if isinstance(cache, StepCache):  # the last token's row is open
            cache = cache.replace(rows=set_length(cache.rows, max(context - 1, 0)))
        return cache.replace(length=jnp.full_like(cache.length, length))

    return state.replace(target_cache=set_length(state.target_cache), drafter_cache=set_length(state.drafter_cache))
