"""Tree attention on Hopper: a Pallas Mosaic GPU kernel.

Thread blocks are cut along slots, key/value heads, row tiles and keys (`splits`). One thread block holds up to
`consumers` tiles of 64 rows (packed as `packing` says) of one key/value head, and a share of its keys: the list of
cache blocks, then tree blocks, cut evenly at run time. One warpgroup streams keys and values through a ring in shared
memory (TMA); each of the others carries one tile over them: scores by wgmma, softmax in base 2 with the running maximum
carried, weights back into wgmma from registers. A second kernel merges the splits of a tile; it is launched while the
first still runs.

Only blocks that need it are masked: the last one of the cache by its length, those at the edge of a sliding window, and
those of the tree by ancestor bits. The structure (two computing warpgroups taking turns, one streaming) follows
FlashAttention-3 (arXiv:2407.08608) and the Hopper attention kernel that ships with Pallas; splitting the keys follows
Flash-Decoding.

`mosaic_gpu_projected` gives the same kernel a raw projection instead of queries and tree rows: then the tree's block
comes first, and its keys and the queries are normed and rotated before the first product (`mosaic_gpu_prepare`).

Why the splits do not merge inside a thread block cluster: an H200 runs at most 15 clusters of 8, or 7 of 16, thread
blocks of this size at once, so that 128 thread blocks would take two waves.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic_gpu_layouts import COLUMN, ROWS, across, copied_rows, load, tiled
from pallas_kernels.tree_attention import masks, packing
from pallas_kernels.tree_attention.config import Config
from pallas_kernels.tree_attention.mosaic_gpu_attend import attend
from pallas_kernels.tree_attention.mosaic_gpu_merge import call_merge, send
from pallas_kernels.tree_attention.mosaic_gpu_prepare import fetch_tree, prepare_keys, prepare_queries
from pallas_kernels.tree_attention.mosaic_gpu_static import LOG2E, LOWEST, Span, Static
from pallas_kernels.tree_attention.mosaic_gpu_stream import produce


def tree_attention(
    q: jax.Array,  # [B, N, H, D]
    k_cache: jax.Array,  # [B, K, C, D], [M, B, K, C, D] with `layer`, or pages [P, K, R, D]
    v_cache: jax.Array,  # the same
    lengths: jax.Array,  # [B] int32
    k_tree: jax.Array,  # [B, K, N, D]
    v_tree: jax.Array,  # [B, K, N, D]
    ancestors: jax.Array,  # [B, N, W] uint32
    *,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    positions: jax.Array | None = None,  # [B, N] int32
    page_table: jax.Array | None = None,  # [B, M] int32, with a paged cache
    layer: int | None = None,
    config: Config,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> jax.Array:  # [B, N, H, D]
    """See `pallas_kernels.tree_attention`; the arguments are taken as checked and supported (`unsupported`)."""
    k_cache, v_cache, first_slot = slots_of_layers(k_cache, v_cache, layer)
    return _tree_attention(
        q, k_cache, v_cache, lengths, k_tree, v_tree, ancestors, scale=scale, sliding_window=sliding_window,
        softcap=softcap, positions=positions, page_table=page_table, first_slot=first_slot, config=config,
        interpret=interpret,
    )  # fmt: skip


def slots_of_layers(k_cache: jax.Array, v_cache: jax.Array, layer: int | None):
    """Slots of all layers in one line, and where this layer's begin: keys, values, [1] int32; None without layers."""
    if layer is None:
        return k_cache, v_cache, None
    first_slot = jnp.array([layer * k_cache.shape[1]], jnp.int32)
    return *(x.reshape(-1, *x.shape[2:]) for x in (k_cache, v_cache)), first_slot


def with_spare_nodes(spare: int, ancestors: jax.Array, positions: jax.Array | None):
    """Ancestors [B, N, W] and positions [B, N] with so many nodes more that nobody sees."""
    ancestors = jnp.pad(ancestors, ((0, 0), (0, spare), (0, 0)))
    return ancestors, positions if positions is None else jnp.pad(positions, ((0, 0), (0, spare)), mode="edge")


# Jitted, and the layer a run-time value, so that the layers of a model share one trace and one lowering of each kernel
# (seconds each).
@functools.partial(jax.jit, static_argnames=("scale", "sliding_window", "softcap", "config", "interpret"))
def _tree_attention(
    q, k_cache, v_cache, lengths, k_tree, v_tree, ancestors, *, scale, sliding_window, softcap, positions, page_table,
    first_slot, config, interpret,
):  # fmt: skip
    live_nodes = q.shape[1]
    if spare := copied_rows(live_nodes) - live_nodes:
        q = jnp.pad(q, ((0, 0), (0, spare), (0, 0), (0, 0)))
        k_tree, v_tree = (jnp.pad(x, ((0, 0), (0, 0), (0, spare), (0, 0))) for x in (k_tree, v_tree))
        ancestors, positions = with_spare_nodes(spare, ancestors, positions)
    slots, nodes, heads, head_dim = q.shape
    static = Static(
        plan=packing.plan_rows(nodes, heads // k_cache.shape[1]),
        config=config,
        slots=slots,
        kv_heads=k_cache.shape[1],
        head_dim=head_dim,
        dtype=q.dtype,
        scale=scale,
        softcap=softcap,
        windowed=sliding_window is not None,
        page_rows=None if page_table is None else k_cache.shape[2],
        interpreted=interpret is not None,
    )
    operands = dict(q=q, k=k_cache, v=v_cache, lengths=lengths, k_tree=k_tree, v_tree=v_tree)
    if page_table is not None:
        operands["table"] = page_table
    if first_slot is not None:
        operands["first_slot"] = first_slot
    operands |= mask_operands(static, lengths, ancestors, positions, sliding_window)
    (out,) = launch(static, q.shape, operands, interpret)
    return out[:, :live_nodes]


def mask_operands(
    static: Static,
    lengths: jax.Array,
    ancestors: jax.Array,  # [B, N, W] uint32
    positions: jax.Array | None,  # [B, N] int32
    sliding_window: int | None,
) -> dict[str, jax.Array]:
    """What tells the kernel who sees whom: the tree, and the edge of a window."""
    found = {}
    if sliding_window is not None:
        if positions is None:
            positions = masks.node_positions(lengths, ancestors)
        oldest = jnp.maximum(positions - (sliding_window - 1), 0)  # first visible cache row of each node
        found["oldest"] = packing.row_values(oldest, static.plan)
        found["window"] = jnp.stack([jnp.min(oldest, axis=1), jnp.max(oldest, axis=1)], axis=1)
    key_slots = static.tree_blocks * static.tree_block
    found["words"] = packing.row_words(ancestors, positions, sliding_window, static.plan, key_slots)
    return found


def launch(static: Static, out_shape: tuple[int, ...], operands: dict[str, jax.Array], interpret) -> list[jax.Array]:
    """Both kernels: the output [B, N, H, D] and, of a raw projection, the finished keys [B, K, N, D]."""
    found = list(_call(static, out_shape, tuple(operands), interpret)(*operands.values()))
    keys = [] if static.heads is None else [found.pop()]
    out = call_merge(static, out_shape, interpret)(*found) if static.config.splits > 1 else found[0]
    return [out, *keys]


def unsupported(q: jax.Array, page_rows: int | None, rows: int, scale: float) -> str | None:
    """Why this kernel cannot take a call, or None. `rows` is the cache capacity C, or the number of page rows."""
    head_dim, dtype = q.shape[-1], q.dtype
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"dtype {dtype} (bfloat16 and float16 only)"
    if head_dim % 32 or head_dim > 256:
        return f"head_dim {head_dim} (multiples of 32 up to 256)"
    if rows == 0 or rows % 8:
        return f"a cache of {rows} rows (multiples of 8 only: TMA copies tiles of 8 rows)"
    if scale <= 0:
        return f"scale {scale} (positive only)"
    if page_rows is not None and page_rows not in (16, 32, 64, 128):
        return f"pages of {page_rows} rows (16, 32, 64 or 128)"
    return None


def _call(static: Static, out_shape: tuple[int, ...], names: tuple[str, ...], interpret):
    """The kernel, a function of the operands in the order of `names`.

    It returns the output, or the splits' results, and last, of a raw projection, the keys.
    """
    config, dtype, head_dim = static.config, static.dtype, static.head_dim
    consumers, stages, pieces = config.consumers, config.stages, static.pieces
    keys = plgpu.SMEM((stages, config.block, head_dim), dtype, transforms=tiled(head_dim, dtype))
    scratch = dict(
        q_s=plgpu.SMEM((consumers, ROWS, head_dim), dtype, transforms=tiled(head_dim, dtype)),
        ring=plgpu.RefUnion((keys, keys)),
        q_ready=plgpu.Barrier(num_arrivals=static.plan.heads_per_tile, num_barriers=consumers),
        k_ready=plgpu.Barrier(num_arrivals=pieces, num_barriers=stages),
        v_ready=plgpu.Barrier(num_arrivals=pieces, num_barriers=stages),
        v_raw=plgpu.Barrier(num_arrivals=pieces, num_barriers=stages),
        k_free=plgpu.Barrier(num_arrivals=consumers, num_barriers=stages),
        v_free=plgpu.Barrier(num_arrivals=consumers, num_barriers=stages),
        turn=plgpu.Barrier(num_arrivals=consumers),
    )
    results = [jax.ShapeDtypeStruct(out_shape, dtype)]
    if config.splits > 1:
        partials = static.first_partial(static.slots, 0, 0)
        results = [
            jax.ShapeDtypeStruct((partials, ROWS, head_dim), dtype),
            jax.ShapeDtypeStruct((partials, ROWS), jnp.float32),
        ]
        scratch["lse_s"] = plgpu.SMEM((consumers, ROWS), jnp.float32)
    if static.heads is not None:
        results.append(jax.ShapeDtypeStruct((static.slots, static.kv_heads, static.plan.nodes, head_dim), dtype))
        scratch["k_raw"] = plgpu.Barrier(num_arrivals=1)
    if static.interpreted:
        scratch["p_s"] = plgpu.SMEM((consumers, ROWS, config.block), dtype, transforms=tiled(config.block, dtype))
    return plgpu.kernel(
        functools.partial(_body, static, names),
        out_type=results,
        scratch_types=scratch,
        # Row blocks of one split follow each other, so that they read the same keys at about the same time.
        grid=(static.slots, static.kv_heads, config.splits, static.row_blocks),
        grid_names=("slot", "head", "split", "rows"),
        num_threads=consumers + 1,
        thread_name="wg",
        kernel_name="tree_attention",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        interpret=interpret,
    )


def _body(static: Static, names: tuple[str, ...], *refs, **scratch):
    operands, results = dict(zip(names, refs)), refs[len(names) :]
    config = static.config
    if static.early_launch:
        plgpu.griddepcontrol_wait()  # whatever ran before has finished writing our operands
    slot, head, split = lax.axis_index("slot"), lax.axis_index("head"), lax.axis_index("split")
    wg = lax.axis_index("wg")
    length = operands["lengths"][slot]
    cache_blocks = pl.cdiv(length, config.block)
    skipped = 0
    if static.windowed:
        skipped = jnp.minimum(lax.div(operands["window"][slot, 0], config.block), cache_blocks)
    listed = cache_blocks - skipped + static.tree_blocks
    # Rounded so that the split that has the tree, and so the masks, is never the one with a block more.
    if static.heads is None:
        start, share = skipped, pl.cdiv
    else:
        start, share = skipped - static.tree_blocks, lax.div
    span = Span(
        begin=start + share(split * listed, config.splits),
        end=start + share((split + 1) * listed, config.splits),
        first=skipped,
        whole=lax.div(length, config.block),
        cache_blocks=cache_blocks,
        length=length,
    )

    @pl.when(wg == config.consumers)
    def _():
        produce(static, span, slot, head, operands, scratch["ring"][0], scratch)

    @pl.when(wg < config.consumers)
    def _():
        _consume(static, span, slot, head, split, wg, operands, results, scratch)


def _consume(static: Static, span: Span, slot, head, split, wg, operands, results, scratch):
    """Computes one tile of 64 rows over the span and writes its result, or its share of it."""
    plan, config = static.plan, static.config
    plgpu.set_max_registers(232, action="increase")
    tile = lax.axis_index("rows") * config.consumers + wg  # may lie past the last tile: computed, then dropped
    real = jnp.minimum(tile, plan.tiles - 1)
    node_tile, head_tile = lax.div(real, plan.head_tiles), lax.rem(real, plan.head_tiles)
    nodes = pl.ds(node_tile * plan.nodes_per_tile, plan.nodes_per_tile)
    q_s = scratch["q_s"].at[wg]
    for h in range(plan.heads_per_tile):
        query_head = head * plan.group + jnp.minimum(head_tile * plan.heads_per_tile + h, plan.group - 1)
        rows = pl.ds(h * plan.nodes_per_tile, plan.nodes_per_tile)
        plgpu.copy_gmem_to_smem(operands["q"].at[slot, nodes, query_head], q_s.at[rows], scratch["q_ready"].at[wg])
    ring = scratch["ring"][0]
    if static.heads is not None:
        # The last warpgroup, since of two it is the one that starts behind.
        has_tree = (span.begin < span.first) & (span.end > span.begin) & (wg == config.consumers - 1)
        pl.when(has_tree)(functools.partial(fetch_tree, static, slot, head, operands, ring, scratch))
    oldest, window_g = None, None
    if static.windowed:
        oldest, window_g = load(operands["oldest"].at[slot, node_tile], COLUMN), operands["window"].at[slot]
    words_g = operands["words"].at[slot, node_tile]
    if static.heads is None:
        plgpu.barrier_wait(scratch["q_ready"].at[wg])
    else:
        keys = functools.partial(prepare_keys, static, slot, head, ring[0].at[0], operands, results[-1], scratch)
        pl.when(has_tree)(keys)
        prepare_queries(static, slot, node_tile, q_s, operands, scratch["q_ready"].at[wg])
    acc, top, total = attend(static, span, wg, q_s, ring, words_g, oldest, window_g, scratch)

    if static.early_launch:
        plgpu.griddepcontrol_launch_dependents()
    seen = jnp.where(total > 0, total, 1.0)
    q_s[...] = (acc * across(1.0 / seen, acc.shape)).astype(static.dtype)  # the queries are spent
    if config.splits == 1:
        plgpu.commit_smem()
        send(static, slot, head, tile, q_s, results[0])
        return
    part_g, lse_g = results[:2]
    mine, lse_s = static.first_partial(slot, head, tile) + split, scratch["lse_s"].at[wg]
    lse_s[...] = jnp.where(total > 0, top + jnp.log(seen) * LOG2E, LOWEST)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(q_s, part_g.at[mine])
    plgpu.copy_smem_to_gmem(lse_s, lse_g.at[mine])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
