"""Grouped matrix product on Hopper: a Pallas Mosaic GPU kernel.

A thread block takes one tile of rows and a block of the output's columns. The weights are the left operand of wgmma, 64
or 128 of their rows at a time, and the few rows of x the right one, whose width may be as small as 8: nothing is padded
to 64 rows, and a result that comes out transposed is turned round in shared memory. Weights and rows stream through a
ring by TMA. Thread blocks of the same columns follow each other along the tiles, so that the tiles of one large group
find its weights in the L2 cache.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.grouped_matmul.groups import Groups

_DEPTH = 64  # of the contraction at a time: 128 bytes, one swizzle atom
_STAGES = 4


def unsupported(x: jax.Array, weight: jax.Array, tile: int, swiglu: bool) -> str | None:
    """Why this kernel cannot take a call, or None."""
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        return f"dtype {x.dtype} (bfloat16 and float16 only)"
    columns = weight.shape[1] // 2 if swiglu else weight.shape[1]
    if columns % 64:
        return f"{columns} columns of the result (multiples of 64 only)"
    if x.shape[1] % _DEPTH or x.shape[1] < 2 * _DEPTH:
        return f"rows of {x.shape[1]} (multiples of {_DEPTH} from {2 * _DEPTH} on)"
    if tile % 8 or tile > 128:
        return f"tiles of {tile} rows (multiples of 8 up to 128)"
    return None


@functools.partial(jax.jit, static_argnames=("swiglu", "interpret"))  # the layers of a model share one lowering
def grouped_matmul(
    x: jax.Array,  # [P, I]
    weight: jax.Array,  # [X, O, I]
    groups: Groups,
    *,
    swiglu: bool,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> jax.Array:  # [P, O], or [P, O / 2] with swiglu
    """See `pallas_kernels.grouped_matmul`; the arguments are taken as checked and supported (`unsupported`)."""
    rows, depth = groups.rows_per_tile, x.shape[1]
    parts = 2 if swiglu else 1  # projections whose blocks are taken together
    columns = weight.shape[1] // parts
    # 128 rows of weights at a time leave room for three thread blocks on a multiprocessor, so that start and end of one
    # overlap the streaming of others.
    block = 64 if swiglu or columns % 128 or rows > 64 else 128
    blocks = columns // block

    def body(tile_group_g, tiles_g, x_g, weight_g, out_g, out_s):
        tile, column = lax.axis_index("tile"), lax.axis_index("column")

        @pl.when(tile < tiles_g[0])
        def _():
            matrix = weight_g.at[tile_group_g[tile]]

            def accumulate(*accs):
                def step(_, x_s, *weights_s):
                    for acc, w_s in zip(accs, weights_s, strict=True):
                        plgpu.wgmma(acc, w_s, x_s.transpose((1, 0)))
                    plgpu.wgmma_wait(parts)  # those of the step before are done: its place in the ring is free

                swizzled = dict(transforms=_swizzle(x.dtype), delay_release=1)
                weights = [
                    plgpu.BlockSpec((block, _DEPTH), lambda k, p=p: (p * blocks + column, k), **swizzled)
                    for p in range(parts)
                ]
                plgpu.emit_pipeline(
                    step,
                    grid=(depth // _DEPTH,),
                    in_specs=[plgpu.BlockSpec((rows, _DEPTH), lambda k: (tile, k), **swizzled), *weights],
                    max_concurrent_steps=min(_STAGES, depth // _DEPTH),
                )(x_g, *[matrix] * parts)
                return [acc[...] for acc in accs]

            y = pl.run_scoped(accumulate, *[plgpu.ACC((block, rows), jnp.float32)] * parts)
            if swiglu:
                gate, up = y
                y = [gate / (1.0 + jnp.exp(-gate)) * up]
            out_s.transpose((1, 0))[...] = plgpu.layout_cast(y[0].astype(x.dtype), plgpu.Layout.WGMMA_TRANSPOSED)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(out_s, out_g.at[pl.ds(tile * rows, rows), pl.ds(column * block, block)])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((x.shape[0], columns), x.dtype),
        scratch_types=[plgpu.SMEM((rows, block), x.dtype, transforms=_swizzle(x.dtype))],
        grid=(blocks, groups.tile_group.shape[0]),
        grid_names=("column", "tile"),
        kernel_name="grouped_matmul",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )
    return kernel(groups.tile_group, groups.tiles, x, weight)


def _swizzle(dtype) -> tuple:
    """The shared-memory layout that TMA writes and wgmma reads: tiles of 8 rows and 128 bytes."""
    return plgpu.TilingTransform((8, 128 // jnp.dtype(dtype).itemsize)), plgpu.SwizzleTransform(128)
