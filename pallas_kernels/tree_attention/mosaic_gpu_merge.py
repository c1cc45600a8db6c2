"""Merging what the splits of a row tile found, and writing tiles to the output."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic_gpu_layouts import COLUMN, MATRIX, ROWS, across, load
from pallas_kernels.tree_attention.mosaic_gpu_static import Static

_COLUMNS = 16  # of head_dim that one thread block merges: one sector of each row


def call_merge(static: Static, out_shape: tuple[int, ...], interpret):
    """The kernel that merges the splits' results.

    It takes the partial results [P, 64, D] in the output's dtype, each row already divided by its sum of weights, and
    the logarithms (base 2) of those sums [P, 64] float32.
    """
    return plgpu.kernel(
        functools.partial(_merge, static),
        out_type=jax.ShapeDtypeStruct(out_shape, static.dtype),
        scratch_types=[plgpu.SMEM((ROWS, _COLUMNS), static.dtype)],
        grid=(static.slots, static.kv_heads, static.plan.tiles, static.head_dim // _COLUMNS),
        grid_names=("slot", "head", "tile", "chunk"),
        kernel_name="tree_attention_merge",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        interpret=interpret,
    )


def _merge(static: Static, part_g, lse_g, out_g, merged_s):
    """Weighs the splits' results by their sums, and writes some columns of one tile."""
    if static.early_launch:
        plgpu.griddepcontrol_launch_dependents()  # the next product may start to read its weights
        plgpu.griddepcontrol_wait()  # the splits have finished, and their results are visible
    slot, head, tile = lax.axis_index("slot"), lax.axis_index("head"), lax.axis_index("tile")
    columns = pl.ds(lax.axis_index("chunk") * _COLUMNS, _COLUMNS)
    splits, first = range(static.config.splits), static.first_partial(slot, head, tile)
    lse = [load(lse_g.at[first + s], COLUMN) for s in splits]
    parts = [load(part_g.at[first + s, :, columns], MATRIX) for s in splits]
    top = functools.reduce(jnp.maximum, lse)
    weights = [jnp.exp2(x - top) for x in lse]
    inverse = 1.0 / functools.reduce(jnp.add, weights)
    scaled = [part.astype(jnp.float32) * across(w * inverse, part.shape) for part, w in zip(parts, weights)]
    merged_s[...] = functools.reduce(jnp.add, scaled).astype(static.dtype)
    plgpu.commit_smem()
    send(static, slot, head, tile, merged_s, out_g, columns)


def send(static: Static, slot, head, tile, source, out_g, columns=None) -> None:
    """Writes a finished tile [64, columns] from shared memory to the rows of the output that it stands for."""
    plan = static.plan
    nodes = pl.ds(lax.div(tile, plan.head_tiles) * plan.nodes_per_tile, plan.nodes_per_tile)

    def send_head(h):
        member = lax.rem(tile, plan.head_tiles) * plan.heads_per_tile + h

        @pl.when((tile < plan.tiles) & (member < plan.group))
        def _():
            target = out_g.at[slot, nodes, head * plan.group + member]
            rows = source.at[pl.ds(h * plan.nodes_per_tile, plan.nodes_per_tile)]
            plgpu.copy_smem_to_gmem(rows, target if columns is None else target.at[:, columns])

    for h in range(plan.heads_per_tile):
        send_head(h)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
