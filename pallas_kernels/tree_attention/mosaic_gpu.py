"""Tree attention on Hopper: one Pallas Mosaic GPU kernel.

A cluster of `splits` thread blocks owns the same rows (up to `consumers` tiles of 64, packed as `packing` says) of one key/value
head and shares its keys: cache blocks first, then tree blocks, in one run-time list cut evenly. In each thread block one warpgroup
streams keys and values through a ring in shared memory (TMA); the others each carry one row tile over them: scores by wgmma,
softmax in base 2 with the row maximum carried, weights back into wgmma from registers. At the end the cluster merges its
partial results, each thread block a slice of head_dim.

Only the blocks that need it are masked: the last one of the cache (by length) and those of the tree (by ancestor bits). Their
values are also cleaned of non-finite numbers by the streaming warpgroup, since a weight of zero times NaN would be NaN.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.tree_attention import masks
from pallas_kernels.tree_attention import packing
from pallas_kernels.tree_attention.config import Config

_LOG2E = math.log2(math.e)
_LOWEST = -1e30  # finite: the difference of two of these is a number
_ROWS = packing.TILE
_MATRIX = plgpu.Layout.WGMMA
_COLUMN = plgpu.Layout.WGMMA.reduce(1)  # one value per row


@dataclasses.dataclass(frozen=True)
class _Kernel:
    """Everything static about one call."""

    plan: packing.RowPlan
    config: Config
    batch: int
    kv_heads: int
    head_dim: int
    tree_blocks: int
    dtype: jnp.dtype
    scale: float
    softcap: float | None
    windowed: bool
    interpreted: bool

    @property
    def row_blocks(self) -> int:
        """Thread blocks along the rows of one key/value head."""
        return -(-self.plan.tiles // self.config.consumers)

    @property
    def in_cluster(self) -> bool:
        return self.config.splits > 1 and self.config.merge == "cluster"

    @property
    def merge_columns(self) -> int:
        """Columns of head_dim that one thread block merges."""
        return 8 * -(-self.head_dim // (8 * self.config.splits)) if self.in_cluster else 16


def tree_attention(
    q: jax.Array,  # [B, N, H, D]
    k_cache: jax.Array,  # [B, K, C, D]
    v_cache: jax.Array,  # [B, K, C, D]
    lengths: jax.Array,  # [B] int32
    k_tree: jax.Array,  # [B, K, N, D]
    v_tree: jax.Array,  # [B, K, N, D]
    ancestors: jax.Array,  # [B, N, W] uint32
    *,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    positions: jax.Array | None = None,  # [B, N] int32
    config: Config,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> jax.Array:  # [B, N, H, D]
    """See `pallas_kernels.tree_attention.tree_attention`; the arguments are taken as checked."""
    batch, nodes, heads, head_dim = q.shape
    kv_heads = k_cache.shape[1]
    plan = packing.plan_rows(nodes, heads // kv_heads)
    tree_blocks = -(-nodes // config.block)
    kernel = _Kernel(
        plan=plan,
        config=config,
        batch=batch,
        kv_heads=kv_heads,
        head_dim=head_dim,
        tree_blocks=tree_blocks,
        dtype=q.dtype,
        scale=scale,
        softcap=softcap,
        windowed=sliding_window is not None,
        interpreted=interpret is not None,
    )
    operands = [q, k_cache, v_cache, lengths, k_tree, v_tree]
    if sliding_window is not None:
        if positions is None:
            positions = masks.node_positions(lengths, ancestors)
        oldest = jnp.maximum(positions - (sliding_window - 1), 0)  # first visible cache row of each node
        operands.append(packing.row_values(oldest, plan))
        operands.append(jnp.stack([jnp.min(oldest, axis=1), jnp.max(oldest, axis=1)], axis=1))
    operands.append(packing.row_words(ancestors, positions, sliding_window, plan, tree_blocks * config.block))
    results = _call(kernel, q.shape, interpret)(*operands)
    if config.splits > 1 and not kernel.in_cluster:
        return _call_merge(kernel, q.shape, interpret)(*results)
    return results[0]


def _call(kernel: _Kernel, out_shape: tuple[int, ...], interpret):
    config, dtype, head_dim = kernel.config, kernel.dtype, kernel.head_dim
    consumers, stages, block = config.consumers, config.stages, config.block
    ring = plgpu.SMEM((stages, block, head_dim), dtype, transforms=_tiled(head_dim, dtype))
    scratch = dict(
        q_s=plgpu.SMEM((consumers, _ROWS, head_dim), dtype, transforms=_tiled(head_dim, dtype)),
        q_ready=plgpu.Barrier(num_arrivals=kernel.plan.heads_per_tile, num_barriers=consumers),
        k_ready=plgpu.Barrier(num_barriers=stages),
        v_ready=plgpu.Barrier(num_barriers=stages),
        v_raw=plgpu.Barrier(num_barriers=stages),
        k_free=plgpu.Barrier(num_arrivals=consumers, num_barriers=stages),
        v_free=plgpu.Barrier(num_arrivals=consumers, num_barriers=stages),
        turn=plgpu.Barrier(num_arrivals=consumers),
    )
    outputs, unions = [], [(ring, ring)]
    if config.splits > 1:
        partials = kernel.batch * kernel.kv_heads * kernel.row_blocks * consumers * config.splits
        outputs.append(jax.ShapeDtypeStruct((partials, _ROWS, head_dim), jnp.float32))
        outputs.append(jax.ShapeDtypeStruct((partials, _ROWS), jnp.float32))
        # The ring is empty by the time results leave, so they share its memory.
        partial_s = plgpu.SMEM((consumers, _ROWS, head_dim), jnp.float32, transforms=_tiled(head_dim, jnp.float32))
        unions.append((partial_s, plgpu.SMEM((consumers, _ROWS), jnp.float32)))
    if config.splits == 1 or kernel.in_cluster:
        outputs.append(jax.ShapeDtypeStruct(out_shape, dtype))
    if kernel.in_cluster:
        unions.append(plgpu.SMEM((consumers, _ROWS, kernel.merge_columns), dtype))
        scratch["merge"] = plgpu.ClusterBarrier(collective_axes=("split",), num_arrivals=consumers)
        outputs.insert(0, outputs.pop())
    scratch["ring"] = plgpu.RefUnion(*unions)
    if kernel.interpreted:
        scratch["p_s"] = plgpu.SMEM((consumers, _ROWS, block), dtype, transforms=_tiled(block, dtype))

    grid = dict(grid=(kernel.batch, kernel.kv_heads, config.splits, kernel.row_blocks), grid_names=("slot", "head", "split", "rows"))
    if kernel.in_cluster:
        grid = dict(grid=(kernel.batch, kernel.kv_heads, kernel.row_blocks), grid_names=("slot", "head", "rows"))
        grid |= dict(cluster=(config.splits,), cluster_names=("split",))
    return plgpu.kernel(
        functools.partial(_body, kernel),
        out_type=outputs,
        scratch_types=scratch,
        **grid,
        num_threads=consumers + 1,
        thread_name="wg",
        kernel_name="tree_attention",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )


def _call_merge(kernel: _Kernel, out_shape: tuple[int, ...], interpret):
    """The kernel that merges the splits' results where they do not form a cluster."""
    chunks = -(-kernel.head_dim // kernel.merge_columns)
    return plgpu.kernel(
        functools.partial(_merge_body, kernel),
        out_type=jax.ShapeDtypeStruct(out_shape, kernel.dtype),
        scratch_types=[plgpu.SMEM((_ROWS, kernel.merge_columns), kernel.dtype)],
        grid=(kernel.batch, kernel.kv_heads, kernel.plan.tiles, chunks),
        grid_names=("slot", "head", "tile", "chunk"),
        kernel_name="tree_attention_merge",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )


def _merge_body(kernel: _Kernel, part_g, lse_g, out_g, merged_s):
    slot, head, tile = lax.axis_index("slot"), lax.axis_index("head"), lax.axis_index("tile")
    columns = pl.ds(lax.axis_index("chunk") * kernel.merge_columns, kernel.merge_columns)
    first = _first_partial(kernel, slot, head, tile)
    merged_s[...] = _merged(kernel, part_g, lse_g, first, columns).astype(kernel.dtype)
    _send(kernel, slot, head, tile, merged_s, out_g, columns)


def _first_partial(kernel, slot, head, tile):
    return ((slot * kernel.kv_heads + head) * (kernel.row_blocks * kernel.config.consumers) + tile) * kernel.config.splits


def _merged(kernel, part_g, lse_g, first, columns):
    """The splits' results weighted by their sums: [64, columns] float32 of one tile."""
    splits = range(kernel.config.splits)
    lse = [_load(lse_g.at[first + s], _COLUMN) for s in splits]
    parts = [_load(part_g.at[first + s, :, columns], _MATRIX) for s in splits]
    top = functools.reduce(jnp.maximum, lse)
    weights = [jnp.exp2(x - top) for x in lse]
    inverse = 1.0 / functools.reduce(jnp.add, weights)
    return functools.reduce(jnp.add, [part * _across(w * inverse, part.shape) for part, w in zip(parts, weights)])


def _send(kernel, slot, head, tile, source, out_g, columns=None):
    """Writes a finished tile [64, columns] from shared memory to the rows of the output that it stands for."""
    plan = kernel.plan
    nodes = pl.ds(lax.div(tile, plan.head_tiles) * plan.nodes_per_tile, plan.nodes_per_tile)
    plgpu.commit_smem()
    for h in range(plan.heads_per_tile):
        member = lax.rem(tile, plan.head_tiles) * plan.heads_per_tile + h

        @pl.when((tile < plan.tiles) & (member < plan.group))
        def _():
            target = out_g.at[slot, nodes, head * plan.group + member]
            rows = source.at[pl.ds(h * plan.nodes_per_tile, plan.nodes_per_tile)]
            plgpu.copy_smem_to_gmem(rows, target if columns is None else target.at[:, columns])

    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _tiled(columns: int, dtype) -> tuple:
    """The shared-memory layout that TMA writes and wgmma reads: tiles of 8 rows, as wide a swizzle as divides the columns."""
    swizzle = next(size for size in (128, 64, 32) if columns * jnp.dtype(dtype).itemsize % size == 0)
    return plgpu.TilingTransform((8, swizzle // jnp.dtype(dtype).itemsize)), plgpu.SwizzleTransform(swizzle)


def _body(kernel: _Kernel, q_g, k_g, v_g, lengths_g, k_tree_g, v_tree_g, *refs, ring, **scratch):
    config = kernel.config
    oldest_g, window_g = None, None
    if kernel.windowed:
        oldest_g, window_g, *refs = refs
    words_g, *out_g = refs
    slot, head, wg = lax.axis_index("slot"), lax.axis_index("head"), lax.axis_index("wg")
    split = lax.axis_index("split")

    length = lengths_g[slot]
    cache_blocks = pl.cdiv(length, config.block)
    whole = lax.div(length, config.block)  # blocks [0, whole) of the cache are live throughout
    skipped = lax.div(window_g[slot, 0], config.block) if kernel.windowed else 0
    skipped = jnp.minimum(skipped, cache_blocks)
    listed = cache_blocks - skipped + kernel.tree_blocks
    begin = skipped + lax.div(split * listed, config.splits)
    end = skipped + lax.div((split + 1) * listed, config.splits)
    span = _Span(begin=begin, end=end, whole=whole, cache_blocks=cache_blocks, length=length)

    @pl.when(wg == config.consumers)
    def _():
        _produce(kernel, span, slot, head, k_g, v_g, k_tree_g, v_tree_g, ring[0], scratch)

    @pl.when(wg < config.consumers)
    def _():
        _consume(kernel, span, slot, head, split, wg, q_g, oldest_g, window_g, words_g, out_g, ring, scratch)


@dataclasses.dataclass(frozen=True)
class _Span:
    """The blocks [begin, end) of one thread block in the list: cache blocks, then tree blocks. Run-time scalars."""

    begin: jax.Array
    end: jax.Array
    whole: jax.Array
    cache_blocks: jax.Array
    length: jax.Array


def _produce(kernel, span, slot, head, k_g, v_g, k_tree_g, v_tree_g, kv_s, scratch):
    """Streams blocks into the ring; blocks with dead rows pass through `_clean` before the consumers see their values."""
    plgpu.set_max_registers(40, action="decrease")
    block, stages = kernel.config.block, kernel.config.stages
    (k_s, v_s), steps = kv_s, span.end - span.begin

    def fetch(i):
        place, j = lax.rem(i, stages), span.begin + i

        def copy(k_ref, v_ref, first_row, v_barrier):
            rows = pl.ds(first_row * block, block)

            @pl.when(i >= stages)
            def _():
                plgpu.barrier_wait(scratch["k_free"].at[place])

            plgpu.copy_gmem_to_smem(k_ref.at[slot, head, rows], k_s.at[place], scratch["k_ready"].at[place])

            @pl.when(i >= stages)
            def _():
                plgpu.barrier_wait(scratch["v_free"].at[place])

            plgpu.copy_gmem_to_smem(v_ref.at[slot, head, rows], v_s.at[place], v_barrier.at[place])

        pl.when(j < span.whole)(lambda: copy(k_g, v_g, j, scratch["v_ready"]))
        pl.when((j >= span.whole) & (j < span.cache_blocks))(lambda: copy(k_g, v_g, j, scratch["v_raw"]))
        pl.when(j >= span.cache_blocks)(lambda: copy(k_tree_g, v_tree_g, j - span.cache_blocks, scratch["v_raw"]))

    def step(i, _):
        # Cleaning lags one block behind, so that the next copy is under way meanwhile.
        pl.when(i < steps)(lambda: fetch(i))
        pl.when((i > 0) & (span.begin + i > span.whole))(lambda: _clean(kernel, span, i - 1, v_s, scratch))

    lax.fori_loop(0, steps + 1, step, None)

    def drain(i, _):
        plgpu.barrier_wait(scratch["k_free"].at[lax.rem(i, stages)])
        plgpu.barrier_wait(scratch["v_free"].at[lax.rem(i, stages)])

    lax.fori_loop(jnp.maximum(steps - stages, 0), steps, drain, None)


def _clean(kernel, span, i, v_s, scratch):
    """Zeroes the values of dead cache rows, and whatever is not finite among tree rows, then hands the block on."""
    place, j = lax.rem(i, kernel.config.stages), span.begin + i
    live_rows = jnp.where(j < span.cache_blocks, span.length - j * kernel.config.block, 0)
    width = min(64, kernel.head_dim & -kernel.head_dim)
    highest = float(jnp.finfo(kernel.dtype).max)
    plgpu.barrier_wait(scratch["v_raw"].at[place])
    for row in range(0, kernel.config.block, _ROWS):
        for column in range(0, kernel.head_dim, width):
            part = v_s.at[place, pl.ds(row, _ROWS), pl.ds(column, width)]
            v = _load(part, _MATRIX).astype(jnp.float32)
            rows = plgpu.broadcasted_iota(jnp.int32, (_ROWS, width), 0, layout=_MATRIX) + row
            # As integers: a select among booleans does not lower.
            keep = (rows < live_rows).astype(jnp.int32) | (jnp.abs(v) <= highest).astype(jnp.int32)
            part[...] = jnp.where(keep == 1, v, 0.0).astype(kernel.dtype)
    plgpu.commit_smem()
    plgpu.barrier_arrive(scratch["v_ready"].at[place])


def _consume(kernel, span, slot, head, split, wg, q_g, oldest_g, window_g, words_g, out_g, ring, scratch):
    """Carries one tile of 64 rows over the blocks of the span and writes its result."""
    plgpu.set_max_registers(232, action="increase")
    plan, config = kernel.plan, kernel.config
    place = lax.axis_index("rows") * config.consumers + wg  # may lie past the last tile: computed, then dropped
    tile = jnp.minimum(place, plan.tiles - 1)
    node_tile, head_tile = lax.div(tile, plan.head_tiles), lax.rem(tile, plan.head_tiles)
    nodes = pl.ds(node_tile * plan.nodes_per_tile, plan.nodes_per_tile)
    q_s = scratch["q_s"].at[wg]

    for h in range(plan.heads_per_tile):
        query_head = head * plan.group + jnp.minimum(head_tile * plan.heads_per_tile + h, plan.group - 1)
        rows = pl.ds(h * plan.nodes_per_tile, plan.nodes_per_tile)
        plgpu.copy_gmem_to_smem(q_g.at[slot, nodes, query_head], q_s.at[rows], scratch["q_ready"].at[wg])
    oldest = _load(oldest_g.at[slot, node_tile], _COLUMN) if kernel.windowed else None
    plgpu.barrier_wait(scratch["q_ready"].at[wg])
    mask = functools.partial(_mask, kernel, span, oldest, words_g.at[slot, node_tile])
    acc, top, total = _attend(kernel, span, wg, window_g.at[slot] if kernel.windowed else None, mask, q_s, ring[0], scratch)

    seen = jnp.where(total > 0, total, 1.0)
    acc = acc * _across(1.0 / seen, acc.shape)
    if config.splits == 1:
        q_s[...] = acc.astype(kernel.dtype)
        _send(kernel, slot, head, place, q_s, out_g[0])
        return

    part_g, lse_g = out_g[-2:]
    partial_s, lse_s = ring[1]
    if config.consumers > 1:  # nobody may still read the ring
        plgpu.barrier_arrive(scratch["turn"])
        plgpu.barrier_wait(scratch["turn"])
    first = _first_partial(kernel, slot, head, place)
    partial_s[wg, ...] = acc
    lse_s[wg, ...] = jnp.where(total > 0, top + jnp.log(seen) * _LOG2E, _LOWEST)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(partial_s.at[wg], part_g.at[first + split])
    plgpu.copy_smem_to_gmem(lse_s.at[wg], lse_g.at[first + split])
    if not kernel.in_cluster:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        return
    plgpu.wait_smem_to_gmem(0)
    plgpu.barrier_arrive(scratch["merge"])
    plgpu.barrier_wait(scratch["merge"])

    @pl.when(split * kernel.merge_columns < kernel.head_dim)
    def _():
        columns = pl.ds(split * kernel.merge_columns, kernel.merge_columns)
        merged_s = ring[2].at[wg]
        merged_s[...] = _merged(kernel, part_g, lse_g, first, columns).astype(kernel.dtype)
        _send(kernel, slot, head, place, merged_s, out_g[0], columns)


def _mask(kernel, span, oldest, words_g, j, scores):
    """Minus infinity where block j's keys are hidden from a row: past the length, before the window, or no ancestor."""
    block = kernel.config.block
    is_tree = j >= span.cache_blocks
    first_word = jnp.where(is_tree, j - span.cache_blocks, 0) * (block // 32)
    column = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=_MATRIX)
    row = column + j * block
    in_cache = (row < span.length).astype(jnp.int32)
    if oldest is not None:
        in_cache = in_cache & (row >= _across(oldest, scores.shape)).astype(jnp.int32)
    word = _across(_load(words_g.at[first_word], _COLUMN), scores.shape)
    for w in range(1, block // 32):
        word = jnp.where(column < 32 * w, word, _across(_load(words_g.at[first_word + w], _COLUMN), scores.shape))
    in_tree = lax.shift_right_logical(word, column & 31) & 1
    visible = jnp.where(jnp.broadcast_to(is_tree, scores.shape), in_tree, in_cache)
    return jnp.where(visible == 1, scores, -jnp.inf)


def _attend(kernel, span, wg, window_g, mask, q_s, kv_s, scratch):
    """Online softmax over the span: the unscaled output [64, D] with each row's maximum (base 2) and sum."""
    config, block = kernel.config, kernel.config.block
    (k_s, v_s), steps = kv_s, span.end - span.begin

    def take_turn():
        if config.schedule == "turns" and config.consumers > 1:
            plgpu.barrier_arrive(scratch["turn"])
            plgpu.barrier_wait(scratch["turn"])

    def weights(scores, j, top, total, masked):
        """Scores of block j -> (weights, factor on what came before, new maximum, new sum)."""
        factor = kernel.scale * _LOG2E
        if kernel.softcap is not None:
            # tanh(x) = 1 - 2 / (1 + e^2x): the hardware's approximate tanh is too coarse once multiplied by the cap.
            grown = jnp.exp2(scores * (2.0 * factor / kernel.softcap))
            scores, factor = kernel.softcap - (2.0 * kernel.softcap) / (grown + 1.0), _LOG2E
        if masked:
            scores = mask(j, scores)
        new_top = jnp.maximum(top, scores.max(axis=1) * factor)
        decay = jnp.exp2(top - new_top)
        p = jnp.exp2(scores * factor - _across(new_top, scores.shape))
        return p, decay, new_top, total * decay

    def in_turn(i, carry, masked):
        acc, top, total = carry
        place = lax.rem(i, config.stages)
        plgpu.barrier_wait(scratch["k_ready"].at[place])

        def score(s_ref):
            plgpu.wgmma(s_ref, q_s, k_s.at[place].transpose((1, 0)))
            take_turn()
            return s_ref[...]

        scores = pl.run_scoped(score, plgpu.ACC((_ROWS, block), jnp.float32))
        plgpu.barrier_arrive(scratch["k_free"].at[place])
        p, decay, top, total = weights(scores, span.begin + i, top, total, masked)
        acc = acc * _across(decay, acc.shape)
        half = p.astype(kernel.dtype)
        total = total + p.sum(axis=1)
        acc, top, total, half = lax.optimization_barrier((acc, top, total, half))
        if config.schedule == "turns" and config.consumers > 1:
            plgpu.barrier_arrive(scratch["turn"])
        plgpu.barrier_wait(scratch["v_ready"].at[place])
        if config.schedule == "turns" and config.consumers > 1:
            plgpu.barrier_wait(scratch["turn"])
        acc = _add_product(kernel, scratch, wg, acc, half, v_s.at[place])
        plgpu.barrier_arrive(scratch["v_free"].at[place])
        return acc, top, total

    def overlapped(i, carry, masked):
        """Scores of block i while the weights of block i - 1 are multiplied into the values."""
        acc, top, total, half = carry
        place, before = lax.rem(i, config.stages), lax.rem(i - 1, config.stages)

        def both(s_ref, o_ref):
            o_ref[...] = acc
            plgpu.barrier_wait(scratch["k_ready"].at[place])
            plgpu.wgmma(s_ref, q_s, k_s.at[place].transpose((1, 0)))
            plgpu.barrier_wait(scratch["v_ready"].at[before])
            plgpu.wgmma(o_ref, half, v_s.at[before])
            scores = plgpu.wgmma_accumulator_load(s_ref, wait_n=1)
            plgpu.barrier_arrive(scratch["k_free"].at[place])
            p, decay, new_top, new_total = weights(scores, span.begin + i, top, total, masked)
            return p, decay, new_top, new_total + p.sum(axis=1), o_ref[...]

        if kernel.interpreted:
            plgpu.barrier_wait(scratch["k_ready"].at[place])

            def score(s_ref):
                plgpu.wgmma(s_ref, q_s, k_s.at[place].transpose((1, 0)))
                return s_ref[...]

            scores = pl.run_scoped(score, plgpu.ACC((_ROWS, block), jnp.float32))
            plgpu.barrier_arrive(scratch["k_free"].at[place])
            plgpu.barrier_wait(scratch["v_ready"].at[before])
            new_acc = _add_product(kernel, scratch, wg, acc, half, v_s.at[before])
            p, decay, new_top, new_total = weights(scores, span.begin + i, top, total, masked)
            new_total = new_total + p.sum(axis=1)
        else:
            p, decay, new_top, new_total, new_acc = pl.run_scoped(
                both, plgpu.ACC((_ROWS, block), jnp.float32), plgpu.ACC((_ROWS, kernel.head_dim), jnp.float32)
            )
        plgpu.barrier_arrive(scratch["v_free"].at[before])
        return new_acc * _across(decay, new_acc.shape), new_top, new_total, p.astype(kernel.dtype)

    def first(i, carry):
        acc, top, total, _ = carry
        plgpu.barrier_wait(scratch["k_ready"].at[0])

        def score(s_ref):
            plgpu.wgmma(s_ref, q_s, k_s.at[0].transpose((1, 0)))
            return s_ref[...]

        scores = pl.run_scoped(score, plgpu.ACC((_ROWS, block), jnp.float32))
        plgpu.barrier_arrive(scratch["k_free"].at[0])
        p, _, top, total = weights(scores, span.begin, top, total, True)
        return acc, top, total + p.sum(axis=1), p.astype(kernel.dtype)

    def last(i, carry):
        acc, top, total, half = carry
        place = lax.rem(steps - 1, config.stages)
        plgpu.barrier_wait(scratch["v_ready"].at[place])
        acc = _add_product(kernel, scratch, wg, acc, half, v_s.at[place])
        plgpu.barrier_arrive(scratch["v_free"].at[place])
        return acc, top, total, half

    zeros = plgpu.layout_cast(jnp.zeros((_ROWS, kernel.head_dim), jnp.float32), _MATRIX)
    lowest = plgpu.layout_cast(jnp.full((_ROWS,), _LOWEST, jnp.float32), _COLUMN)
    carry = zeros, lowest, plgpu.layout_cast(jnp.zeros((_ROWS,), jnp.float32), _COLUMN)
    if config.schedule == "turns" and config.consumers > 1:
        pl.when(wg == 1)(take_turn)
    if window_g is not None:
        # Blocks that the oldest rows see and the newest do not.
        edge = jnp.clip(pl.cdiv(window_g[1], block) - span.begin, 0, steps)
        if config.schedule != "overlap":
            carry = lax.fori_loop(0, edge, functools.partial(in_turn, masked=True), carry)
    else:
        edge = 0
    plain = jnp.clip(span.whole - span.begin, edge, steps)
    if config.schedule == "overlap":
        some = jnp.minimum(steps, 1)
        half = plgpu.layout_cast(jnp.zeros((_ROWS, block), kernel.dtype), _MATRIX)
        carry = lax.fori_loop(0, some, first, (*carry, half))
        if window_g is not None:
            edge = jnp.maximum(edge, some)
            carry = lax.fori_loop(some, edge, functools.partial(overlapped, masked=True), carry)
        else:
            edge = some
        plain = jnp.clip(span.whole - span.begin, edge, steps)
        carry = lax.fori_loop(edge, plain, functools.partial(overlapped, masked=False), carry)
        carry = lax.fori_loop(plain, steps, functools.partial(overlapped, masked=True), carry)
        return lax.fori_loop(0, some, last, carry)[:3]
    carry = lax.fori_loop(edge, plain, functools.partial(in_turn, masked=False), carry)
    carry = lax.fori_loop(plain, steps, functools.partial(in_turn, masked=True), carry)
    if config.schedule == "turns" and config.consumers > 1:
        pl.when(wg == 0)(take_turn)
    return carry


def _add_product(kernel, scratch, wg, acc, p, v):
    """acc [64, D] float32 + p [64, block] @ v [block, D]."""
    if kernel.interpreted:  # the interpreter knows neither operands in registers nor preset accumulators
        p_s = scratch["p_s"].at[wg]
        p_s[...] = p
        plgpu.commit_smem()

        def product(ref):
            plgpu.wgmma(ref, p_s, v)
            return ref[...]

        return acc + pl.run_scoped(product, plgpu.ACC(acc.shape, jnp.float32))
    return pl.run_state(lambda ref: plgpu.wgmma(ref, p, v))(plgpu.ACC.init(acc))


def _across(column, shape):
    """Spreads one value per row [64] over the columns of a matrix."""
    return lax.broadcast_in_dim(column, shape, (0,))


def _load(ref, layout):
    return plgpu.load(ref, layout=layout, optimized=False)
