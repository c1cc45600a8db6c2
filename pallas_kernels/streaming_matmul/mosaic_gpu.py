"""Few rows times a weight matrix on Hopper: a Pallas Mosaic GPU kernel that streams every weight once.

A product of 1 to 256 rows is bound by reading the weights, so the kernel is built around that stream. Each thread
block (or cluster of two, see below) takes `tile` output columns, that is `tile` rows of the weights as they lie in
memory, and all rows of x. One warpgroup brings blocks of weights and of x into a deep ring in shared memory (TMA);
the others hold the accumulators, 64 rows of x each, and multiply: x is the 64-row side of wgmma, whatever lies past
its last row, and the weights are the side whose width is free in steps of 8. That freedom is the point: a tile of 96
gate and 96 up rows, say, cuts Qwen3-8B's 24576 rows into exactly 128 thread blocks for 132 multiprocessors, where
tiles of 64 or 128 leave a half-empty last wave. The price, multiplying rows that nobody needs, is free below about
180 rows.

Where columns alone make too few thread blocks, or so narrow ones that x is read more often than the weights, the inner
dimension is cut too (`splits`). Splits write float32 partial sums, which XLA adds in a fixed order,
fused with whatever comes next (residual, norm): no atomics, and the same bits every time.

With `cluster` = 2 two thread blocks with neighbouring columns share each block of x by multicast, which halves the
traffic of x through the level-2 cache.

For gate and up projections each thread block holds both halves of its columns, and silu(gate) * up is computed on the
accumulators. Where only the largest of each row is wanted, that is all a thread block writes (`mosaic_gpu_argmax`).
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic_gpu_layouts import ROWS, copied_rows, tiled
from pallas_kernels.streaming_matmul import mosaic_gpu_argmax
from pallas_kernels.streaming_matmul.config import PRODUCER_REGISTERS, Config, Shape, epilogue_columns


# Jitted, so that the layers of a model share one trace and one lowering of each kernel (seconds each).
@functools.partial(jax.jit, static_argnames=("shape", "config", "early_weights", "interpret"))
def matmul(
    x: jax.Array,  # [M, E]
    weight: jax.Array,  # [panels * F, E]
    *,
    shape: Shape,
    config: Config,
    early_weights: bool = False,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> jax.Array:  # [M', F] in the output's dtype with one split, else [splits, panels, M', F] float32
    """The kernel and nothing else; the arguments are taken as checked and supported.

    With one split the result is final: x times the weights, or silu(gate) * up of the two panels. With several it is
    the float32 partial sums of each panel, for the caller to add (`api`). M' is M, or the next multiple of 8: the rows
    past M are undefined.
    """
    config.check(shape)
    x = _padded(x, shape)
    chunk = epilogue_columns(shape, config)
    if config.splits == 1:
        out = jax.ShapeDtypeStruct((x.shape[0], shape.features), shape.out_dtype)
    else:
        out = jax.ShapeDtypeStruct((config.splits, shape.panels, x.shape[0], shape.features), jnp.float32)
    staging = dict(out_s=plgpu.SMEM((config.consumers, ROWS, chunk), out.dtype, transforms=tiled(chunk, out.dtype)))
    return _call(shape, config, [out], staging, early_weights, interpret)(x, weight)[0]


@functools.partial(jax.jit, static_argnames=("shape", "config", "early_weights", "interpret"))
def largest_of_blocks(
    x: jax.Array,  # [M, E]
    weight: jax.Array,  # [F, E]
    *,
    shape: Shape,
    config: Config,
    early_weights: bool = False,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> tuple[jax.Array, jax.Array]:  # [blocks, M'] float32 and int32
    """The largest of each row among the columns of each thread block, and the first column that holds it.

    As for `matmul` the arguments are taken as checked. M' is a multiple of 64: the rows past M are undefined.
    """
    config.check(shape)
    results, staging = mosaic_gpu_argmax.results(shape, config), mosaic_gpu_argmax.staging(config)
    return tuple(_call(shape, config, results, staging, early_weights, interpret)(_padded(x, shape), weight))


def _padded(x: jax.Array, shape: Shape) -> jax.Array:
    """x with so many rows that TMA can copy it."""
    spare = copied_rows(shape.rows) - shape.rows
    return jnp.pad(x, ((0, spare), (0, 0))) if spare else x


def _call(shape: Shape, config: Config, results: list[jax.ShapeDtypeStruct], staging: dict, early_weights, interpret):
    """The kernel with these results; `staging` is the shared memory that they pass through."""
    dtype, stages = shape.dtype, config.stages
    x_rows = ROWS * config.consumers * config.row_tiles(shape)
    free = functools.partial(plgpu.Barrier, num_arrivals=config.consumers, num_barriers=stages)
    clusters = {}
    if config.cluster > 1:
        clusters = dict(cluster=(config.cluster,), cluster_names=("peer",))
        free = functools.partial(
            plgpu.ClusterBarrier, collective_axes=("peer",), num_arrivals=config.consumers, num_barriers=stages
        )
    return plgpu.kernel(
        functools.partial(_body, shape, config, early_weights, interpret is not None),
        out_type=results,
        scratch_types=dict(
            x_s=plgpu.SMEM((stages, x_rows, config.block), dtype, transforms=tiled(config.block, dtype)),
            w_s=plgpu.SMEM(
                (stages, shape.panels, config.tile, config.block), dtype, transforms=tiled(config.block, dtype)
            ),
            **staging,
            full=plgpu.Barrier(num_arrivals=1 + shape.panels, num_barriers=stages),
            free=free(),
        ),
        grid=(config.workers(shape),),
        grid_names=("worker",),
        num_threads=config.consumers + 1,
        thread_name="wg",
        kernel_name="streaming_argmax" if shape.argmax else "streaming_matmul",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        interpret=interpret,
        **clusters,
    )


def _body(shape: Shape, config: Config, early_weights: bool, interpreted: bool, x_g, w_g, *results, **scratch):
    wg = lax.axis_index("wg")
    span = _Span(shape, config)
    if not interpreted:
        # At once: every thread block of this launch runs by now, and those of the next, which wait for all of these to
        # end before they read what these write, take their places as they end.
        plgpu.griddepcontrol_launch_dependents()

    @pl.when(wg == config.consumers)
    def _():
        plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
        _produce(shape, config, early_weights, interpreted, span, x_g, w_g, scratch)

    @pl.when(wg < config.consumers)
    def _():
        plgpu.set_max_registers(config.consumer_registers, action="increase")
        _consume(shape, config, span, wg, results, scratch)


class _Span:
    """The items of one worker (a thread block, or a cluster): which columns, and which blocks of the inner dimension.

    Item i stands for the columns of group i // splits and the blocks of split i % splits; worker w takes items
    w, w + workers, ...
    """

    def __init__(self, shape: Shape, config: Config):
        self._shape, self._config = shape, config
        self._worker, self._workers = lax.axis_index("worker"), config.workers(shape)
        self._peer = lax.axis_index("peer") if config.cluster > 1 else 0
        items = config.groups(shape) * config.splits
        self.thread_block = self._worker * config.cluster + self._peer
        self.count = lax.div(items - 1 - self._worker, self._workers) + 1

    def _item(self, n):
        return self._worker + n * self._workers

    def split(self, n):
        return lax.rem(self._item(n), self._config.splits)

    def tile(self, n):
        """Index of this thread block's tile; the last cluster may hold one past the end."""
        return lax.div(self._item(n), self._config.splits) * self._config.cluster + self._peer

    def blocks(self, n):
        """First block of the inner dimension, and the one after the last."""
        total, split = self._config.blocks(self._shape), self.split(n)
        return lax.div(split * total, self._config.splits), lax.div((split + 1) * total, self._config.splits)

    def column(self, n, k):
        """First inner column of the k-th block to be read."""
        if self._config.stagger:
            first, end = self.blocks(n)
            k = first + lax.rem(k - first + self._worker * self._config.stagger, end - first)
        return k * self._config.block


def _produce(shape, config, early_weights, interpreted, span, x_g, w_g, scratch):
    """Streams all items' blocks of weights and x through the ring."""
    stages = config.stages
    full, free = scratch["full"], scratch["free"]
    last_tile = config.tiles(shape) - 1

    def copy_weights(n, k, step):
        place, tile = lax.rem(step, stages), jnp.minimum(span.tile(n), last_tile)
        for panel in range(shape.panels):
            rows = pl.ds(panel * shape.features + tile * config.tile, config.tile)
            source = w_g.at[rows, pl.ds(span.column(n, k), config.block)]
            plgpu.copy_gmem_to_smem(source, scratch["w_s"].at[place, panel], full.at[place])

    def copy_x(n, k, step):
        # Only rows that there are: what a row of the ring holds past them ends in rows of the result past them.
        rows = pl.ds(0, config.copied_rows(shape))
        source = x_g.at[rows, pl.ds(span.column(n, k), config.block)]
        place = lax.rem(step, stages)
        shared = dict(collective_axes="peer") if config.cluster > 1 else {}
        plgpu.copy_gmem_to_smem(source, scratch["x_s"].at[place, rows], full.at[place], **shared)

    # The ring starts out free. The weights were there before this launch, x is what the kernel before computes: with
    # `early_weights` the ring fills with weights while that kernel ends (programmatic dependent launch).
    first, end = span.blocks(0)
    primed = jnp.minimum(end - first, stages)
    if not (early_weights or interpreted):
        plgpu.griddepcontrol_wait()
    lax.fori_loop(0, primed, lambda j, _: copy_weights(0, first + j, j), None)
    if early_weights and not interpreted:
        plgpu.griddepcontrol_wait()
    lax.fori_loop(0, primed, lambda j, _: copy_x(0, first + j, j), None)

    def item(n, step):
        first, end = span.blocks(n)

        def block(k, step):
            @pl.when(step >= stages)
            def _():
                plgpu.barrier_wait(free.at[lax.rem(step, stages)])

            copy_weights(n, k, step)
            copy_x(n, k, step)
            return step + 1

        return lax.fori_loop(first + jnp.where(n == 0, primed, 0), end, block, step)

    steps = lax.fori_loop(0, span.count, item, primed)

    def drain(step, _):  # every completion of a barrier must be awaited before the barrier goes
        plgpu.barrier_wait(free.at[lax.rem(step, stages)])

    lax.fori_loop(jnp.maximum(steps - stages, 0), steps, drain, None)


def _consume(shape, config, span, wg, results, scratch):
    """Multiplies this warpgroup's rows with each item's weights, and writes the product or what is wanted of it."""
    stages, row_tiles = config.stages, config.row_tiles(shape)
    full, free = scratch["full"], scratch["free"]
    first_row = wg * row_tiles * ROWS

    def item(n, carry):
        step, found = carry
        first, end = span.blocks(n)

        def accumulate(*accumulators):
            def block(k, step):
                place = lax.rem(step, stages)
                plgpu.barrier_wait(full.at[place])
                for i, accumulator in enumerate(accumulators):
                    t, panel = divmod(i, shape.panels)
                    x = scratch["x_s"].at[place, pl.ds(first_row + t * ROWS, ROWS)]
                    plgpu.wgmma(accumulator, x, scratch["w_s"].at[place, panel].transpose((1, 0)))
                plgpu.wgmma_wait(len(accumulators))  # those of the block before are done

                @pl.when(k > first)
                def _():
                    plgpu.barrier_arrive(free.at[lax.rem(step + stages - 1, stages)])

                return step + 1

            after = lax.fori_loop(first, end, block, step)
            values = [accumulator[...] for accumulator in accumulators]
            plgpu.barrier_arrive(free.at[lax.rem(after + stages - 1, stages)])
            return values

        accumulator = plgpu.ACC((ROWS, config.tile), jnp.float32)
        values = pl.run_scoped(accumulate, *[accumulator] * (row_tiles * shape.panels))
        if shape.argmax:
            column = span.tile(n) * config.tile
            found = [mosaic_gpu_argmax.better(f, v, column, shape.features) for f, v in zip(found, values, strict=True)]
            return step + end - first, found
        for t in range(row_tiles):
            panels = values[t * shape.panels : (t + 1) * shape.panels]
            if config.splits == 1 and shape.panels == 2:
                panels = [panels[0] / (1.0 + jnp.exp(-panels[0])) * panels[1]]
            for panel, value in enumerate(panels):
                _write(shape, config, span, n, wg, first_row + t * ROWS, panel, value, results[0], scratch)
        return step + end - first, found

    nothing = [mosaic_gpu_argmax.nothing() for _ in range(row_tiles)] if shape.argmax else []
    _, found = lax.fori_loop(0, span.count, item, (0, nothing))
    for t, best in enumerate(found):
        mosaic_gpu_argmax.write(best, span.thread_block, wg, first_row + t * ROWS, results, scratch)
    plgpu.wait_smem_to_gmem(0)


def _write(shape, config, span, n, wg, row, panel, value, out_g, scratch):
    """Writes 64 rows of a tile through shared memory, some columns at a time; what lies past the array is dropped."""
    out_s = scratch["out_s"].at[wg]
    chunk, tile = out_s.shape[-1], span.tile(n)
    target = out_g if config.splits == 1 else out_g.at[span.split(n), panel]
    for column in range(0, config.tile, chunk):
        first = tile * config.tile + column
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        out_s[...] = value[:, column : column + chunk].astype(out_s.dtype)
        plgpu.commit_smem()

        @pl.when((first < shape.features) & (row < shape.rows))
        def _(first=first):
            plgpu.copy_smem_to_gmem(out_s, target.at[pl.ds(row, ROWS), pl.ds(first, chunk)])
