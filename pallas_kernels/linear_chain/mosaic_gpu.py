"""The products between two mixers on Hopper as one persistent kernel.

A product of few rows is bound by reading its weights, and a step of a model is a chain of such products, each short: a
kernel of its own spends a quarter of its time filling the pipeline and waiting for its last thread block. Here one
thread block a multiprocessor runs the whole chain

    out projection, add and norm, gate and up with SwiGLU, down, add and norm, the next mixer's projection

and never stops reading weights: one warpgroup streams the weights of all products, one after the other, through a ring
in shared memory, and depends on nothing but free places in it: not even on the operation before this launch. While the
thread blocks wait for each other between two products, the ring fills with the weights of the next. A second warpgroup
brings x, which the product before computes, and so waits; the others multiply, as in `streaming_matmul`: 64 rows of x
on one side of wgmma, the weights on the other.

Between two steps of the chain stands a counter in memory: whoever has written its share adds one, whoever reads waits
for all. Splits of a product leave float32 partial sums that the norm after it adds in order, so the result is the same
bits every time. All thread blocks must run at once, or those that wait would keep the others from starting: `api` asks
the device for its multiprocessors first.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils as mosaic_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref

from pallas_kernels.fused_norm.mosaic_gpu_add import normed, vector
from pallas_kernels.linear_chain.config import REDUCTION_BYTES, Chain, Config, Cut
from pallas_kernels.mosaic_gpu_layouts import MATRIX, ROWS, tiled
from pallas_kernels.streaming_matmul.config import PRODUCER_REGISTERS, Shape


@dataclasses.dataclass(frozen=True)
class Product:
    """A step: out = x times the weights."""

    name: str
    x: str
    weight: str
    out: str


@dataclasses.dataclass(frozen=True)
class Norm:
    """A step: total = stream + the sum of parts, normed = its norm."""

    stream: str
    parts: str
    weight: str
    total: str
    normed: str


Step = Product | Norm
_TURN = 37  # thread blocks by which the first item of a step moves on from that of the step before
COUNTERS = 8  # one for each step that another one follows, and some


def steps(chain: Chain) -> tuple[Step, ...]:
    """The chain in its order; names are those of its arrays."""
    last = (Product("next", "next_normed", "next_weight", "projected"),) if chain.projected else ()
    return (
        Product("out", "mixed", "out_weight", "out_parts"),
        Norm("stream", "out_parts", "norm_weight", "middle", "normed"),
        Product("gate_up", "normed", "gate_up_weight", "activated"),
        Product("down", "activated", "down_weight", "down_parts"),
        Norm("middle", "down_parts", "next_norm_weight", "total", "next_normed"),
        *last,
    )


def results(chain: Chain, config: Config) -> dict[str, jax.ShapeDtypeStruct]:
    """Every array that the steps write."""
    rows, hidden = config.stored_rows(chain), (chain.rows, chain.hidden)

    def parts(name, features):
        splits = config.cut(name).splits
        return jax.ShapeDtypeStruct((splits, rows, features), config.result_dtype(chain, name))

    found = dict(
        out_parts=parts("out", chain.hidden),
        middle=jax.ShapeDtypeStruct(hidden, chain.dtype),
        normed=jax.ShapeDtypeStruct((rows, chain.hidden), chain.dtype),
        activated=jax.ShapeDtypeStruct((1, rows, chain.intermediate), chain.dtype),
        down_parts=parts("down", chain.hidden),
        total=jax.ShapeDtypeStruct(hidden, chain.dtype),
        next_normed=jax.ShapeDtypeStruct((rows, chain.hidden), chain.dtype),
    )
    return found | (dict(projected=parts("next", chain.projected)) if chain.projected else {})


def new_counters() -> jax.Array:
    """For `run`: zeros, to be made anew for each pass of a model."""
    return jnp.zeros((COUNTERS,), jnp.int32)


@functools.partial(jax.jit, static_argnames=("chain", "config"))
def run(
    operands: dict[str, jax.Array], counters: jax.Array, turn: jax.Array, *, chain: Chain, config: Config
) -> tuple[dict[str, jax.Array], jax.Array]:
    """The whole chain in one launch; arguments are taken as checked and supported.

    Args:
      operands: `mixed` [M', A] (M' is `chain.padded_rows`), `stream` [M, E] and the weights that `steps` names.
      counters: [COUNTERS] int32, zeros before the first of the runs that share them, then what the run before left.
        They only grow: resetting them in every run would cost a launch.
      turn: [1] int32, number of the run among those that share the counters. All of them have the same `workers` and
        `consumers`, and after one without a projection none has one.

    Returns:
      (the arrays of `results`, counters).
    """
    held = jax.new_ref(counters)
    found = _call(chain, config, steps(chain), operands | dict(turn=turn, counters=held), None)
    return found, jax.freeze(held)


def run_by_steps(
    operands: dict[str, jax.Array], *, chain: Chain, config: Config, interpret: plgpu.InterpretGPUParams
) -> dict[str, jax.Array]:
    """`run` with a launch for each step, for the interpreter, which knows no counters between thread blocks."""
    known = dict(operands)
    for step in steps(chain):
        known |= _call(chain, config, (step,), known, interpret)
    return {name: known[name] for name in results(chain, config)}


def _names(step: Step) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Arrays that a step reads and writes."""
    if isinstance(step, Product):
        return (step.x, step.weight), (step.out,)
    return (step.stream, step.parts, step.weight), (step.total, step.normed)


def _call(
    chain: Chain, config: Config, program: tuple[Step, ...], operands: dict[str, jax.Array],
    interpret: plgpu.InterpretGPUParams | None,
) -> dict[str, jax.Array]:  # fmt: skip
    """What some steps write, in one launch."""
    config.check(chain)
    written = [name for step in program for name in _names(step)[1]]
    read = list(dict.fromkeys(name for step in program for name in _names(step)[0] if name not in written))
    if len(program) > 1:
        read += ["turn", "counters"]
    out_types = results(chain, config)
    products = [step for step in program if isinstance(step, Product)]
    scratch = {}
    if products:
        dtype = chain.dtype
        free = functools.partial(plgpu.Barrier, num_arrivals=config.consumers)
        scratch = dict(
            x_s=plgpu.SMEM(
                (config.x_stages, config.x_rows(chain), config.block), dtype, transforms=tiled(config.block, dtype)
            ),
            w_s=plgpu.SMEM(
                (config.weight_stages, config.largest_tile(chain), config.block),
                dtype,
                transforms=tiled(config.block, dtype),
            ),
            x_full=plgpu.Barrier(num_arrivals=1, num_barriers=config.x_stages),
            w_full=plgpu.Barrier(num_arrivals=1, num_barriers=config.weight_stages),
            x_free=free(num_barriers=config.x_stages),
            w_free=free(num_barriers=config.weight_stages),
        )
    names = [*read, *written]

    def body(*refs, **scratch):
        arrays = dict(zip(names, refs))
        _Worker(chain, config, program, arrays, scratch, interpret is not None).work()

    found = plgpu.kernel(
        body,
        out_type=[out_types[name] for name in written],
        scratch_types=scratch,
        grid=(config.workers,),
        grid_names=("worker",),
        num_threads=config.consumers + 2,
        thread_name="wg",
        kernel_name="linear_chain",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=REDUCTION_BYTES),
        interpret=interpret,
    )(*[operands[name] for name in read])
    return dict(zip(written, found))


class _Worker:
    """One thread block and its part of every step."""

    def __init__(self, chain: Chain, config: Config, program, arrays, scratch, interpreted: bool):
        self.chain, self.config, self.program = chain, config, program
        self.arrays, self.scratch, self.interpreted = arrays, scratch, interpreted
        self.worker = lax.axis_index("worker")
        self.shapes = chain.shapes
        self.written = {name for step in program for name in _names(step)[1]}

    def work(self) -> None:
        wg, config = lax.axis_index("wg"), self.config
        if not self.interpreted:
            plgpu.griddepcontrol_launch_dependents()

        @pl.when(wg == config.consumers)
        def _():
            plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
            if self.products:
                self.stream_weights()

        @pl.when(wg == config.consumers + 1)
        def _():
            plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
            if self.products:
                self.stream_x()

        @pl.when(wg < config.consumers)
        def _():
            plgpu.set_max_registers(config.consumer_registers, action="increase")
            self.compute(wg)

    # Between steps.

    def arrivals(self, index: int) -> int:
        """Who adds to the counter of a step: all consumers after a product, the first of each block after a norm."""
        return self.config.workers * (self.config.consumers if isinstance(self.program[index], Product) else 1)

    def wait_for(self, name: str) -> None:
        """Waits until the step that writes an array has ended everywhere."""
        for index, step in enumerate(self.program):
            if name in _names(step)[1]:
                _wait(self.arrays["counters"].at[pl.ds(index, 1)], self.arrays["turn"], self.arrivals(index))
                return
        if not self.interpreted:  # an operand
            plgpu.griddepcontrol_wait()

    def signal(self, index: int) -> None:
        if index < len(self.program) - 1:
            if isinstance(self.program[index + 1], Product):
                _fence()  # of what is read by TMA
            _signal(self.arrays["counters"].at[pl.ds(index, 1)])

    # Products.

    def items(self, product: Product) -> _Items:
        turn = _TURN * self.program.index(product)
        return _Items(self.shapes[product.name], self.config, self.config.cut(product.name), self.worker, turn)

    def stream_weights(self) -> None:
        stages = self.config.weight_stages
        full, free = self.scratch["w_full"], self.scratch["w_free"]
        count = 0
        for product in self.products:
            items, shape, weight = self.items(product), self.shapes[product.name], self.arrays[product.weight]
            tile = self.config.cut(product.name).tile

            def block(n, k, count, product=product, items=items, shape=shape, weight=weight, tile=tile):
                for panel in range(shape.panels):
                    place = lax.rem(count, stages)

                    @pl.when(count >= stages)
                    def _(place=place):
                        plgpu.barrier_wait(free.at[place])

                    rows = pl.ds(panel * shape.features + items.tile(n) * tile, tile)
                    source = weight.at[rows, pl.ds(k * self.config.block, self.config.block)]
                    plgpu.copy_gmem_to_smem(source, self.scratch["w_s"].at[place, pl.ds(0, tile)], full.at[place])
                    count += 1
                return count

            with jax.named_scope(f"weights of {product.name}"):
                count = items.loop(block, count)
        self.drain(free, stages, count)

    def stream_x(self) -> None:
        stages = self.config.x_stages
        full, free = self.scratch["x_full"], self.scratch["x_free"]
        rows = pl.ds(0, -(-self.chain.rows // 8) * 8)  # what lies past them ends in rows of the result past the last
        count = 0
        for product in self.products:
            with jax.named_scope(f"wait for {product.x}"):
                self.wait_for(product.x)
                if product.x in self.written:
                    _fence()
            items, x = self.items(product), self.arrays[product.x]
            x = x.at[0] if len(x.shape) == 3 else x

            def block(n, k, count, x=x):
                place = lax.rem(count, stages)

                @pl.when(count >= stages)
                def _():
                    plgpu.barrier_wait(free.at[place])

                source = x.at[rows, pl.ds(k * self.config.block, self.config.block)]
                plgpu.copy_gmem_to_smem(source, self.scratch["x_s"].at[place, rows], full.at[place])
                return count + 1

            with jax.named_scope(f"x of {product.name}"):
                count = items.loop(block, count)
        self.drain(free, stages, count)

    @property
    def products(self) -> list[Product]:
        return [step for step in self.program if isinstance(step, Product)]

    @staticmethod
    def drain(free, stages: int, count) -> None:
        """Every completion of a barrier must be awaited before the barrier goes."""
        first = jnp.maximum(count - stages, 0)
        lax.fori_loop(first, count, lambda i, _: plgpu.barrier_wait(free.at[lax.rem(i, stages)]), None)

    def compute(self, wg) -> None:
        if not self.interpreted:  # a thread block that has nothing to multiply must not count early
            plgpu.griddepcontrol_wait()
        w_count = x_count = jnp.int32(0)
        for index, step in enumerate(self.program):
            if isinstance(step, Product):
                with jax.named_scope(step.name):
                    w_count, x_count = self.multiply(step, wg, w_count, x_count)
                with jax.named_scope(f"end of {step.name}"):
                    self.signal(index)
            else:

                @pl.when(wg == 0)
                def _(index=index, step=step):
                    with jax.named_scope(f"norm to {step.normed}"):
                        self.normalise(step)
                        self.signal(index)

    def multiply(self, product: Product, wg, w_count, x_count):
        config, shape = self.config, self.shapes[product.name]
        tile, row_tiles = config.cut(product.name).tile, config.row_tiles(self.chain)
        items, panels = self.items(product), shape.panels
        s = self.scratch

        def w_place(i):
            return lax.rem(i, config.weight_stages)

        def x_place(i):
            return lax.rem(i, config.x_stages)

        first_row = wg * row_tiles * ROWS

        def item(n, counts):
            first, end = items.blocks(n)

            def accumulate(*accumulators):
                def block(k, counts):
                    w_count, x_count = counts
                    x_now = x_place(x_count)
                    plgpu.barrier_wait(s["x_full"].at[x_now])
                    for panel in range(panels):
                        w_now = w_place(w_count)
                        plgpu.barrier_wait(s["w_full"].at[w_now])
                        for t in range(row_tiles):
                            x = s["x_s"].at[x_now, pl.ds(first_row + t * ROWS, ROWS)]
                            accumulator = accumulators[t * panels + panel]
                            plgpu.wgmma(accumulator, x, s["w_s"].at[w_now, pl.ds(0, tile)].transpose((1, 0)))
                        plgpu.wgmma_wait(row_tiles)  # those before are done

                        def release(w_count=w_count, panel=panel):
                            plgpu.barrier_arrive(s["w_free"].at[w_place(w_count + config.weight_stages - 1)])
                            if panel == 0:
                                plgpu.barrier_arrive(s["x_free"].at[x_place(x_count + config.x_stages - 1)])

                        pl.when(k > first)(release) if panel == 0 else release()
                        w_count += 1
                    return w_count, x_count + 1

                counts_after = lax.fori_loop(first, end, block, counts)
                values = [accumulator[...] for accumulator in accumulators]
                plgpu.barrier_arrive(s["w_free"].at[w_place(counts_after[0] + config.weight_stages - 1)])
                plgpu.barrier_arrive(s["x_free"].at[x_place(counts_after[1] + config.x_stages - 1)])
                return values

            accumulator = plgpu.ACC((ROWS, tile), jnp.float32)
            values = pl.run_scoped(accumulate, *[accumulator] * (row_tiles * panels))
            for t in range(row_tiles):
                value = values[t * panels]
                if panels == 2:
                    value = value / (1.0 + jnp.exp(-value)) * values[t * panels + 1]
                self.write(product, shape, items, n, wg, first_row + t * ROWS, value)
            return counts[0] + panels * (end - first), counts[1] + (end - first)

        return lax.fori_loop(0, items.count, item, (w_count, x_count))

    def write(self, product: Product, shape: Shape, items, n, wg, row, value) -> None:
        """Writes 64 rows of a tile straight from registers: a copy by TMA would queue behind the weights to come."""
        tile, stored = self.config.cut(product.name).tile, min(ROWS, self.config.stored_rows(self.chain))
        columns = math.gcd(tile, shape.features)
        target = self.arrays[product.out].at[items.split(n)]
        for column in range(0, tile, columns):
            first = items.tile(n) * tile + column

            @pl.when(first < shape.features)
            def _(column=column, first=first):
                part = value[:, column : column + columns].astype(target.dtype)
                if self.interpreted:
                    target[pl.ds(row, stored), pl.ds(first, columns)] = part[:stored]
                else:
                    _store(target.at[pl.ds(row, stored), pl.ds(first, columns)], part, stored)

    # Norms.

    def normalise(self, step: Norm) -> None:
        """Adds up and norms this thread block's rows: row i is for worker i modulo their number."""
        chain, arrays, workers = self.chain, self.arrays, self.config.workers
        layout = plgpu.Layout.WG_STRIDED((chain.hidden,), vec_size=vector(chain.hidden))
        load = functools.partial(plgpu.load, layout=layout, optimized=False)
        weight, parts = load(arrays[step.weight]), arrays[step.parts]

        def one(n, _):
            row = self.worker + n * workers
            stream = load(arrays[step.stream].at[row])  # on its way while the product before ends

            @pl.when(n == 0)
            def _():
                self.wait_for(step.parts)

            total = functools.reduce(
                jnp.add, [load(parts.at[s, row, pl.ds(0, chain.hidden)]) for s in range(parts.shape[0])]
            )
            stream = stream + total.astype(chain.dtype)
            arrays[step.total][row] = stream
            arrays[step.normed][row] = normed(stream, weight, eps=chain.eps, zero_centred=chain.zero_centred)

        lax.fori_loop(0, _share(chain.rows, workers, self.worker), one, None)


class _Items:
    """What one thread block does of a product: item i is tile i // splits and split i % splits.

    Worker w takes items w', w' + workers, ... with w' = w + turn modulo workers, so that it is not the same thread
    blocks that have nothing to do in every product.
    """

    def __init__(self, shape: Shape, config: Config, cut: Cut, worker, turn: int):
        self._cut, self._workers = cut, config.workers
        self._first = lax.rem(worker + turn % config.workers, config.workers)
        self._total = shape.inputs // config.block
        self.count = _share(-(-shape.features // cut.tile) * cut.splits, config.workers, self._first)

    def _item(self, n):
        return self._first + n * self._workers

    def split(self, n):
        return lax.rem(self._item(n), self._cut.splits)

    def tile(self, n):
        return lax.div(self._item(n), self._cut.splits)

    def blocks(self, n):
        """First block of the inner dimension, and the one after the last."""
        split, splits = self.split(n), self._cut.splits
        return lax.div(split * self._total, splits), lax.div((split + 1) * self._total, splits)

    def loop(self, body, count):
        """Runs count = body(item, block, count) over all blocks of all items."""

        def item(n, count):
            return lax.fori_loop(*self.blocks(n), functools.partial(body, n), count)

        return lax.fori_loop(0, self.count, item, jnp.int32(count))


def _share(total: int, workers: int, worker):
    """How many of the numbers worker, worker + workers, ... lie below total."""
    return lax.div(jnp.int32(total + workers - 1) - worker, jnp.int32(workers))


def _fence() -> None:
    """Orders what threads write or read themselves with what TMA does."""

    @plgpu.inline_mgpu()
    def fence(ctx):
        mosaic_utils.inline_ptx("fence.proxy.async.global;", has_side_effects=True)

    fence()


def _signal(counter) -> None:
    """Adds one, after all that this warpgroup has written."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def signal(ctx, counter):
        mosaic_utils.warpgroup_barrier()
        mosaic_utils.SemaphoreRef(mosaic_utils.memref_ptr(counter)).signal(1, memory_scope="gpu")

    signal(counter)


def _wait(counter, turn, arrivals: int) -> None:
    """Waits until the counter has seen the arrivals of this turn and of those before."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType()))
    def wait(ctx, counter, turn):
        i32 = ir.IntegerType.get_signless(32)
        turns = arith.addi(memref.load(turn, [arith.constant(ir.IndexType.get(), 0)]), arith.constant(i32, 1))
        target = arith.muli(turns, arith.constant(i32, arrivals))
        semaphore = mosaic_utils.SemaphoreRef(mosaic_utils.memref_ptr(counter))
        semaphore.wait(target, decrement=False, memory_scope="gpu")

    wait(counter, turn)


def _store(target, value, rows: int) -> None:
    """target[:] = value for the first `rows` of 64 rows, each thread its own registers and nothing awaited."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), MATRIX))
    def store(ctx, target, value):
        for (row, column), register in zip(value.layout.thread_idxs(value.shape), value.registers.flat, strict=True):
            pointer = mosaic_utils.memref_ptr(mosaic_utils.memref_slice(target, (row, column)))
            bits = mosaic_utils.bitwidth(register.type)
            word = mosaic_utils.bitcast(register, ir.IntegerType.get_signless(bits))
            live = None
            if rows < ROWS:
                limit = arith.constant(ir.IndexType.get(), rows)
                live = arith.cmpi(arith.CmpIPredicate.ult, row, limit)
            text = f"st.global.b{bits} [$0], $1;"
            mosaic_utils.inline_ptx(text, pointer, word, predicate=live, has_side_effects=True)

    store(target, value)
