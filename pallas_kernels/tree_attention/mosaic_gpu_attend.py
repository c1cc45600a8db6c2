"""The computing warpgroups: each carries one tile of 64 rows over the blocks in the ring."""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic_gpu_layouts import COLUMN, MATRIX, ROWS, across, add_product, load
from pallas_kernels.tree_attention.mosaic_gpu_static import LOG2E, LOWEST, Span, Static


def attend(static: Static, span: Span, wg, q_s, ring, words_g, oldest, window_g, scratch):
    """Online softmax of one tile over the span.

    Args:
      q_s: the tile's queries in shared memory, [64, D].
      words_g: its ancestor words, [W, 64].
      oldest: with a window, the first cache row that each row sees, [64].
      window_g: the least and the greatest of those among all the slot's nodes, [2].

    Returns:
      The sum of weighted values [64, D] float32, each row's maximum score [64] (base 2) that the weights are relative
      to, and the sum of weights [64].
    """
    config, steps = static.config, span.end - span.begin
    in_turns = config.consumers == 2
    zeros = plgpu.layout_cast(jnp.zeros((ROWS, static.head_dim), jnp.float32), MATRIX)
    lowest = plgpu.layout_cast(jnp.full((ROWS,), LOWEST, jnp.float32), COLUMN)
    carry = zeros, lowest, plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), COLUMN)

    def run(carry, start, stop, visible, width=config.block):
        step = functools.partial(_step, static, span, wg, q_s, ring, scratch, visible, width, in_turns)
        return lax.fori_loop(start, stop, step, carry)

    def run_tree(carry, start, stop):
        return run(carry, start, stop, functools.partial(_visible_in_tree, static, span, words_g), static.tree_block)

    edge = functools.partial(_visible_in_cache, static, span, oldest)
    start = 0 if static.heads is None else jnp.clip(span.first - span.begin, 0, steps)
    whole, cached = (jnp.clip(x - span.begin, start, steps) for x in (span.whole, span.cache_blocks))
    if in_turns:  # the second warpgroup runs half a step behind the first
        pl.when(wg == 1)(lambda: _meet(scratch))
    if static.heads is not None:
        carry = run_tree(carry, 0, start)
    if oldest is not None:  # blocks that some rows see and others no longer do
        seen = jnp.clip(pl.cdiv(window_g[1], config.block) - span.begin, start, whole)
        carry = run(carry, start, seen, edge)
        start = seen
    carry = run(carry, start, whole, None)
    carry = run(carry, whole, cached, edge)
    if static.heads is None:
        carry = run_tree(carry, cached, steps)
    if in_turns:
        pl.when(wg == 0)(lambda: _meet(scratch))
    return carry


def _meet(scratch):
    plgpu.barrier_arrive(scratch["turn"])
    plgpu.barrier_wait(scratch["turn"])


def _step(static, span, wg, q_s, ring, scratch, visible, width, in_turns, i, carry):
    """One block of `width` keys, all of them visible if `visible` is None.

    In turns: while one warpgroup multiplies, the other computes its softmax.
    """
    acc, top, total = carry
    place = lax.rem(i, static.config.stages)
    k, v = (ref.at[place, pl.ds(0, width)] for ref in ring)
    marks = None if visible is None else visible(span.begin + i)  # its loads overlap the product below
    plgpu.barrier_wait(scratch["k_ready"].at[place])

    def score(s_ref):
        plgpu.wgmma(s_ref, q_s, k.transpose((1, 0)))
        if in_turns:
            _meet(scratch)
        return s_ref[...]

    scores = pl.run_scoped(score, plgpu.ACC((ROWS, width), jnp.float32))
    if static.heads is not None and visible is not None:  # finished keys may still be on their way out
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    plgpu.barrier_arrive(scratch["k_free"].at[place])

    scores, factor = _cap(static, scores)
    if marks is not None:
        scores = jnp.where(marks(scores.shape) == 1, scores, -jnp.inf)
    new_top = jnp.maximum(top, scores.max(axis=1) * factor)
    decay = jnp.exp2(top - new_top)
    p = jnp.exp2(scores * factor - across(new_top, scores.shape))
    acc = acc * across(decay, acc.shape)
    total = total * decay
    half = p.astype(static.dtype)
    total = total + p.sum(axis=1)
    acc, top, total, half = lax.optimization_barrier((acc, new_top, total, half))

    if in_turns:  # the tensor cores are asked for once the values have come
        plgpu.barrier_arrive(scratch["turn"])
    plgpu.barrier_wait(scratch["v_ready"].at[place])
    if in_turns:
        plgpu.barrier_wait(scratch["turn"])
    acc = add_product(acc, half, v, p_s=scratch["p_s"].at[wg] if static.interpreted else None)
    plgpu.barrier_arrive(scratch["v_free"].at[place])
    return acc, top, total


def _cap(static, scores):
    """Applies the soft cap; returns the scores with the factor that takes them to base-2 logarithms."""
    factor = static.scale * LOG2E
    if static.softcap is None:
        return scores, factor
    # tanh(x) = 1 - 2 / (1 + e^2x): the hardware's approximate tanh is too coarse once multiplied by the cap.
    grown = jnp.exp2(scores * (2.0 * factor / static.softcap))
    return static.softcap - (2.0 * static.softcap) / (grown + 1.0), LOG2E


def _visible_in_cache(static, span, oldest, j):
    """Marks with 1 the cache rows of block j before the length and not before the window."""

    def marks(shape):
        row = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=MATRIX) + j * static.config.block
        seen = (row < span.length).astype(jnp.int32)
        if oldest is not None:
            seen = seen & (row >= across(oldest, shape)).astype(jnp.int32)
        return seen

    return marks


def _visible_in_tree(static, span, words_g, j):
    """Marks with 1 the tree keys of block j that are ancestors."""
    per_block = static.tree_block // 32
    first = (j - span.cache_blocks) * per_block if static.heads is None else 0
    words = [load(words_g.at[first + w], COLUMN) for w in range(per_block)]

    def marks(shape):
        column = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=MATRIX)
        word = across(words[0], shape)
        for w in range(1, per_block):
            word = jnp.where(column < 32 * w, word, across(words[w], shape))
        return lax.shift_right_logical(word, column & 31) & 1

    return marks
