"""Tree attention on Hopper from a raw projection: the kernel of `mosaic_gpu`, which norms and rotates by itself."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.fused_norm import Heads
from pallas_kernels.mosaic_gpu_layouts import ROWS, copied_rows
from pallas_kernels.tree_attention import mosaic_gpu, packing
from pallas_kernels.tree_attention.config import Config
from pallas_kernels.tree_attention.mosaic_gpu_static import Static


def projected_tree_attention(
    projected: jax.Array,  # [B, N or more, heads * D]
    q_weight: jax.Array | None,  # [D]
    k_weight: jax.Array | None,  # [D]
    cos: jax.Array,  # [B, N, R / 2] float32
    sin: jax.Array,
    k_cache: jax.Array,  # [B, K, C, D], or [M, B, K, C, D] with `layer`
    v_cache: jax.Array,  # the same
    lengths: jax.Array,  # [B] int32
    ancestors: jax.Array,  # [B, N, W] uint32
    *,
    heads: Heads,
    scale: float,
    sliding_window: int | None = None,
    positions: jax.Array | None = None,  # [B, N] int32
    layer: int | None = None,
    config: Config,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> tuple[jax.Array, jax.Array]:  # [B, N, H, D], [B, K, N, D]
    """The attention's output and the finished keys; the arguments are taken as checked and `supported`."""
    k_cache, v_cache, first_slot = mosaic_gpu.slots_of_layers(k_cache, v_cache, layer)
    return _projected_tree_attention(
        projected, q_weight, k_weight, cos, sin, k_cache, v_cache, lengths, ancestors, heads=heads, scale=scale,
        sliding_window=sliding_window, positions=positions, first_slot=first_slot, config=config, interpret=interpret,
    )  # fmt: skip


# Jitted, and the layer a run-time value: see `mosaic_gpu`.
@functools.partial(jax.jit, static_argnames=("heads", "scale", "sliding_window", "config", "interpret"))
def _projected_tree_attention(
    projected, q_weight, k_weight, cos, sin, k_cache, v_cache, lengths, ancestors, *, heads, scale, sliding_window,
    positions, first_slot, config, interpret,
):  # fmt: skip
    live_nodes, head_dim = cos.shape[1], heads.head_dim
    nodes = copied_rows(live_nodes)
    if spare := nodes - live_nodes:
        cos, sin = (jnp.pad(x, ((0, 0), (0, spare), (0, 0))) for x in (cos, sin))
        ancestors, positions = mosaic_gpu.with_spare_nodes(spare, ancestors, positions)
        if projected.shape[1] < nodes:
            projected = jnp.pad(projected, ((0, 0), (0, nodes - projected.shape[1]), (0, 0)))
    slots = projected.shape[0]
    static = Static(
        plan=packing.plan_rows(nodes, heads.queries // heads.keys),
        config=config,
        slots=slots,
        kv_heads=heads.keys,
        head_dim=head_dim,
        dtype=projected.dtype,
        scale=scale,
        softcap=None,
        windowed=sliding_window is not None,
        page_rows=None,
        interpreted=interpret is not None,
        heads=heads,
    )
    operands = dict(
        q=projected.reshape(*projected.shape[:2], heads.count, head_dim), k=k_cache, v=v_cache, lengths=lengths
    )
    if heads.eps is not None:
        operands |= dict(q_weight=q_weight, k_weight=k_weight)
    operands["tables"] = _tables(cos, sin, static.plan)
    if first_slot is not None:
        operands["first_slot"] = first_slot
    operands |= mosaic_gpu.mask_operands(static, lengths, ancestors, positions, sliding_window)
    out, keys = mosaic_gpu.launch(static, (slots, nodes, heads.queries, head_dim), operands, interpret)
    return out[:, :live_nodes], keys[:, :, :live_nodes]


def _tables(cos: jax.Array, sin: jax.Array, plan: packing.RowPlan) -> jax.Array:
    """[B, N, R / 2] each -> [B, tiles, 2, 64, R / 2], of the tiles of queries, then of those of keys if they differ."""
    plans = [plan] if plan.nodes_per_tile == ROWS else [plan, packing.RowPlan(plan.nodes, 1, ROWS)]
    both = (jnp.concatenate([packing.row_values(table, p) for p in plans], axis=1) for table in (cos, sin))
    return jnp.stack(list(both), axis=2)


def supported(projected: jax.Array, cos: jax.Array, config: Config) -> bool:
    """Whether this kernel can take a call that `mosaic_gpu` can: the tree must be one block of keys."""
    nodes, half = cos.shape[1:]
    return projected.dtype.itemsize == 2 and half > 0 and half % 16 == 0 and nodes <= config.block
