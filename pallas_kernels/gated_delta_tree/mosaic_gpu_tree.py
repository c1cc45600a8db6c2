"""Verification of a tree on Hopper: one thread block per slot, value head and 64 columns of its state.

The nodes are taken in tiles of 64 rows, one after the other. Names follow `reference`. For a tile:

1. R = beta (v - e^G S^T k), less A U of the tiles before, by wgmma.
2. The 64 rows of the triangular system on the tile's diagonal, in float32, 16 rows at a time in registers.
3. output = e^G S^T q + (masked, decayed scores) U of the tiles up to this one, by wgmma.
4. If the mixer's norm is wanted: the two thread blocks of a head are a cluster, send each other their outputs, and
   write them normed over all columns and gated.

Queries and keys are bfloat16 as given. What is float32 (the state, U, A and the scores) goes into wgmma as the sum of
two bfloat16 numbers, the product of the two low parts left out, so that a product is good to about 2^-16.

What is read both along rows and along columns is kept twice: of two loads of the same place the compiler makes one,
which can have one layout only (its search for another takes for ever).

Barriers among the four warps are set by hand (`_settle`), since one around each store would cost more than the stores:
after a store that other threads read, and before one to where they may still read. The rows of the substitution need
none: with one value per row of a matrix (COLUMN), a thread reads back only what it wrote itself.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic_gpu_layouts import COLUMN, MATRIX, ROW, ROWS, across, down, load, tiled

COLUMNS = 64  # of the state that one thread block takes
_BLOCK = 16  # rows of the triangular solve held in registers
_SQUARE = (ROWS, ROWS)


@dataclasses.dataclass(frozen=True)
class Norm:
    """Of the outputs of a head: RMSNorm, then the gate."""

    eps: float
    width: int  # F, columns of the projection
    gates: int  # the first of the output gates among them


@dataclasses.dataclass(frozen=True)
class Static:
    """Everything static about one call."""

    slots: int
    nodes: int  # 16, 32 or a multiple of 64
    value_heads: int
    group: int  # value heads per key head
    key_dim: int
    value_dim: int
    norm: Norm | None = None  # none: the outputs as they are

    @property
    def tiles(self) -> int:
        return -(-self.nodes // ROWS)

    @property
    def rows(self) -> int:
        """Nodes and the spare rows that fill the last tile."""
        return self.tiles * ROWS

    @property
    def tile_nodes(self) -> int:
        """Nodes in one tile."""
        return min(self.nodes, ROWS)


def call(static: Static, interpret):
    """The kernel, a function of layer [1] int32, q and k [B, N, Hk, Dk], v [B, N, Hv, Dv], gates, words and states.

    Gates [B, Hv, 3, rows] float32 are log_decay, beta, and beta again of each node; words [B, 2 * tiles, rows] int32
    the ancestor bits of each node, 32 nodes a word, all zero for padding nodes and spare rows. With a norm also of the
    projection [B, N, F] and the norm's weight [Dv].
    """
    half, single = jnp.bfloat16, jnp.float32

    def smem(*shape, dtype=half):
        return plgpu.SMEM(shape, dtype, transforms=tiled(shape[-1], dtype))

    scratch = dict(
        k_s=smem(static.rows, static.key_dim),
        q_s=smem(ROWS, static.key_dim),
        v_s=smem(ROWS, COLUMNS),  # then the tile's output
        state_s=smem(2, static.key_dim, COLUMNS),  # high and low parts
        # The state as it comes, then the high and low parts of U.
        arrival=plgpu.RefUnion(smem(static.key_dim, COLUMNS, dtype=single), smem(2, static.rows, COLUMNS)),
        # The diagonal block of A, transposed, or the parts of a matrix that multiplies U.
        factor=plgpu.RefUnion(plgpu.SMEM(_SQUARE, single), smem(2, *_SQUARE)),
        # R, then U of the tile; then what `normed` needs: the output gates, and what the other block sends.
        solved=plgpu.RefUnion(plgpu.SMEM((ROWS, COLUMNS), single), *_norm_buffers(static)),
        gates_s=plgpu.SMEM((3, static.rows), single),
        total_s=plgpu.SMEM((2, static.rows), single),  # G, twice
        gates_ready=plgpu.Barrier(),
        ready=plgpu.Barrier(num_arrivals=2),
        tile_ready=plgpu.Barrier(num_arrivals=2),
    )
    if static.norm is not None:
        scratch |= dict(
            room=plgpu.ClusterBarrier(collective_axes=("columns",)),
            output_gates_ready=plgpu.Barrier(),
            sent=plgpu.Barrier(),
        )

    def body(*refs, **scratch):
        _Block(static, *refs, **scratch).run()

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((static.slots, static.nodes, static.value_heads, static.value_dim), half),
        scratch_types=scratch,
        **_grid(static),
        kernel_name="gated_delta_tree",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0, unsafe_no_auto_barriers=True),
        interpret=interpret,
    )
    return lambda layer, q, k, v, gates, words, *rest: kernel(layer, q, k, v, gates, words, words, *rest)


def _norm_buffers(static: Static) -> list:
    if static.norm is None:
        return []
    shape, dtype = (ROWS, COLUMNS), jnp.bfloat16
    # TMA reads whole tiles of a row, here of the projection.
    tile = math.gcd(COLUMNS, static.norm.width, static.norm.gates)
    gates = plgpu.SMEM(shape, dtype, transforms=tiled(tile, dtype))
    return [[gates, plgpu.SMEM(shape, dtype, transforms=tiled(COLUMNS, dtype))]]


def _grid(static: Static) -> dict:
    """Thread blocks that read the same keys follow each other."""
    heads, parts = (static.slots, static.value_heads), static.value_dim // COLUMNS
    if static.norm is None:
        return dict(grid=(*heads, parts), grid_names=("slot", "head", "columns"))
    return dict(grid=heads, grid_names=("slot", "head"), cluster=(parts,), cluster_names=("columns",))


class _Block:
    """What one thread block does; attributes are its refs: _g in global, _s in shared memory."""

    def __init__(self, static: Static, *refs, arrival, factor, solved, **scratch):
        self.static = static
        self.slot, self.head = lax.axis_index("slot"), lax.axis_index("head")
        self.key_head = lax.div(self.head, static.group)
        self.columns = pl.ds(lax.axis_index("columns") * COLUMNS, COLUMNS)
        self.layer_g, self.q_g, self.k_g, self.v_g, self.gates_g, *refs = refs
        self.words_g, self.same_words_g, self.states_g, *refs, self.out_g = refs
        self.solved_s, *norm_buffers = solved
        if static.norm is not None:
            self.projected_g, self.norm_g = refs
            ((self.output_gates_s, self.others_s),) = norm_buffers
        self.arriving_s, self.update_s = arrival
        self.diagonal_s, self.factor_s = factor
        vars(self).update(scratch)

    def run(self) -> None:
        static = self.static
        plgpu.copy_gmem_to_smem(self.gates_g.at[self.slot, self.head], self.gates_s, self.gates_ready)
        keys = self.k_s.at[pl.ds(0, static.nodes)]
        plgpu.copy_gmem_to_smem(self.k_g.at[self.slot, :, self.key_head], keys, self.ready)
        self.fetch(0)
        state = self.states_g.at[self.layer_g[0], self.slot, self.head, :, self.columns]
        plgpu.copy_gmem_to_smem(state, self.arriving_s, self.ready)
        plgpu.barrier_wait(self.gates_ready)
        lax.fori_loop(0, static.tiles, lambda t, _: self.sum_decays(t), None)  # while the rest is on its way
        plgpu.barrier_wait(self.ready)
        for row in range(0, static.key_dim, ROWS):
            rows = pl.ds(row, ROWS)
            _split(load(self.arriving_s.at[rows], MATRIX), self.state_s, rows)
        _settle()

        def tile(t, _):
            plgpu.barrier_wait(self.tile_ready)
            self.solve(t)
            if static.norm is not None:
                self.make_room(t)
            self.write(t)
            pl.when(t + 1 < static.tiles)(lambda: self.fetch(t + 1))

        lax.fori_loop(0, static.tiles, tile, None)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def fetch(self, t) -> None:
        """Starts the copies of a tile's queries and values."""
        live = pl.ds(0, self.static.tile_nodes)
        nodes = pl.ds(t * ROWS, self.static.tile_nodes)
        plgpu.copy_gmem_to_smem(self.q_g.at[self.slot, nodes, self.key_head], self.q_s.at[live], self.tile_ready)
        values = self.v_g.at[self.slot, nodes, self.head, self.columns]
        plgpu.copy_gmem_to_smem(values, self.v_s.at[live], self.tile_ready)

    def sum_decays(self, t) -> None:
        """G of a tile: each row's sum over its ancestors and itself."""

        def add(c, total):
            decay = down(load(self.gates_s.at[0, _rows(c)], ROW), _SQUARE)
            return total + jnp.where(self.sees(t, c) == 1, decay, 0.0).sum(axis=1)

        zeros = plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), COLUMN)
        total = lax.fori_loop(0, t + 1, add, zeros)
        for copy in (0, 1):
            self.total_s[copy, _rows(t)] = total
        _settle()

    def solve(self, t) -> None:
        """U of a tile."""
        beta, total = load(self.gates_s.at[1, _rows(t)], COLUMN), load(self.total_s.at[0, _rows(t)], COLUMN)
        recalled = self.times_state(self.k_s.at[_rows(t)])
        values = load(self.v_s, MATRIX).astype(jnp.float32)
        right = (values - recalled * across(jnp.exp(total), _SQUARE)) * across(beta, _SQUARE)

        def eliminate(c, right):
            scores = _multiply(self.k_s.at[_rows(t)], self.k_s.at[_rows(c)].transpose((1, 0)))
            return right - self.times_updates(self.decayed(t, c, scores) * across(beta, _SQUARE), c)

        right = lax.fori_loop(0, t, eliminate, right)
        alive = jnp.where(_is_diagonal(), self.sees(t, t), 0).sum(axis=1)
        self.solved_s[...] = jnp.where(across(alive, _SQUARE) == 1, right, 0.0)  # of padding, for 0 * NaN is NaN
        self.set_diagonal(t, total)
        lax.fori_loop(0, self.static.tile_nodes // _BLOCK, self.substitute, None)
        _settle()
        _split(load(self.solved_s, MATRIX), self.update_s, _rows(t))
        _settle()

    def set_diagonal(self, t, total) -> None:
        """A of a tile's own rows, transposed: element (j, i) of the array is what row i takes of row j."""
        scores = _multiply(self.k_s.at[_rows(t)], self.k_s.at[_rows(t)].transpose((1, 0)))
        since = down(load(self.total_s.at[1, _rows(t)], ROW), _SQUARE) - across(total, _SQUARE)
        beta = down(load(self.gates_s.at[2, _rows(t)], ROW), _SQUARE)
        low, high = (down(load(self.same_words_g.at[self.slot, 2 * t + w, _rows(t)], ROW), _SQUARE) for w in (0, 1))
        row = _iota(0)
        sees = lax.shift_right_logical(jnp.where(row < 32, low, high), row & 31) & (row < _iota(1)).astype(jnp.int32)
        _settle()
        self.diagonal_s[...] = jnp.where(sees == 1, jnp.exp(since) * scores * beta, 0.0)
        _settle()

    def substitute(self, block, _) -> None:
        """Turns 16 rows of R into rows of U, those before them being done."""
        first = block * _BLOCK

        def eliminate(j, rows):
            solved = load(self.solved_s.at[j], COLUMN)
            return [row - self.diagonal_s[j, first + i] * solved for i, row in enumerate(rows)]

        rows = [load(self.solved_s.at[first + i], COLUMN) for i in range(_BLOCK)]
        rows = lax.fori_loop(0, first, eliminate, rows)
        for i in range(_BLOCK):
            for j in range(i):
                rows[i] = rows[i] - self.diagonal_s[first + j, first + i] * rows[j]
        for i in range(_BLOCK):
            self.solved_s[first + i] = rows[i]

    def write(self, t) -> None:
        """The outputs of a tile."""
        total = load(self.total_s.at[0, _rows(t)], COLUMN)
        out = self.times_state(self.q_s) * across(jnp.exp(total), _SQUARE)

        def add(c, out):
            scores = _multiply(self.q_s, self.k_s.at[_rows(c)].transpose((1, 0)))
            return out + self.times_updates(self.decayed(t, c, scores), c)

        out = lax.fori_loop(0, t + 1, add, out).astype(jnp.bfloat16)
        self.v_s[...] = out if self.static.norm is None else self.normed(out)
        _settle()
        nodes = pl.ds(t * ROWS, self.static.tile_nodes)
        finished = self.v_s.at[pl.ds(0, self.static.tile_nodes)]
        plgpu.copy_smem_to_gmem(finished, self.out_g.at[self.slot, nodes, self.head, self.columns])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def make_room(self, t) -> None:
        """Lets the other block send, and starts the copy of the output gates: U of the tile lies elsewhere now."""
        plgpu.barrier_arrive(self.room)
        first = self.static.norm.gates + self.head * self.static.value_dim + lax.axis_index("columns") * COLUMNS
        gates = self.projected_g.at[self.slot, pl.ds(t * ROWS, ROWS), pl.ds(first, COLUMNS)]
        plgpu.copy_gmem_to_smem(gates, self.output_gates_s, self.output_gates_ready)

    def normed(self, out: jax.Array) -> jax.Array:
        """Outputs [64, 64] normed over the columns of both blocks, and gated."""
        plgpu.barrier_wait(self.room)
        other = 1 - lax.axis_index("columns")
        plgpu.async_store_smem(out, self.others_s, self.sent, cluster_idx=other, cluster_dim="columns")
        wide = out.astype(jnp.float32)
        squares = (wide * wide).sum(axis=1)
        plgpu.barrier_wait(self.output_gates_ready)
        gate = load(self.output_gates_s, MATRIX).astype(jnp.float32)
        weight = down(load(self.norm_g.at[self.columns], ROW), _SQUARE)
        plgpu.barrier_wait(self.sent)
        others = load(self.others_s, MATRIX).astype(jnp.float32)
        squares = squares + (others * others).sum(axis=1)
        scale = lax.rsqrt(squares * (1.0 / self.static.value_dim) + self.static.norm.eps)
        weighed = (wide * across(scale, _SQUARE)).astype(jnp.bfloat16) * weight
        return (weighed.astype(jnp.float32) * (gate / (1.0 + jnp.exp(-gate)))).astype(jnp.bfloat16)

    def sees(self, t, c) -> jax.Array:
        """[64, 64] int32: 1 where the row's node of tile t is, or descends from, the column's of tile c."""
        low, high = (across(load(self.words_g.at[self.slot, 2 * c + w, _rows(t)], COLUMN), _SQUARE) for w in (0, 1))
        column = _iota(1)
        return lax.shift_right_logical(jnp.where(column < 32, low, high), column & 31) & 1

    def decayed(self, t, c, scores) -> jax.Array:
        """e^(G_i - G_j) scores_ij where i descends from j, else 0."""
        rows, columns = load(self.total_s.at[0, _rows(t)], COLUMN), load(self.total_s.at[1, _rows(c)], ROW)
        decay = jnp.exp(across(rows, _SQUARE) - down(columns, _SQUARE))
        return jnp.where(self.sees(t, c) == 1, decay * scores, 0.0)

    def times_state(self, rows_s) -> jax.Array:
        """rows_s [64, Dk] @ S [Dk, 64]."""
        return _sum_of_products((rows_s, self.state_s.at[0]), (rows_s, self.state_s.at[1]))

    def times_updates(self, factor, c) -> jax.Array:
        """factor [64, 64] @ U of tile c [64, 64]."""
        _settle()
        _split(factor, self.factor_s, pl.ds(0, ROWS))
        _settle()
        (high, low), (u_high, u_low) = ((x.at[0], x.at[1]) for x in (self.factor_s, self.update_s.at[:, _rows(c)]))
        return _sum_of_products((high, u_high), (high, u_low), (low, u_high))


def _settle() -> None:
    """All reads and writes of shared memory up to here are done, and visible to wgmma and TMA."""
    plgpu.commit_smem()


def _rows(tile):
    return pl.ds(tile * ROWS, ROWS)


def _iota(dimension: int) -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, _SQUARE, dimension, layout=MATRIX)


def _is_diagonal() -> jax.Array:
    return _iota(0) == _iota(1)


def _split(x, target_s, rows) -> None:
    """Writes float32 x as the sum of two bfloat16 matrices: target_s [2, ..., columns], high part first."""
    high = x.astype(jnp.bfloat16)
    target_s[0, rows] = high
    target_s[1, rows] = (x - high.astype(jnp.float32)).astype(jnp.bfloat16)


def _multiply(a_s, b_s) -> jax.Array:
    return _sum_of_products((a_s, b_s))


def _sum_of_products(*pairs) -> jax.Array:
    """The sum of a @ b over pairs of matrices in shared memory, float32."""

    def run(acc):
        for a, b in pairs:
            plgpu.wgmma(acc, a, b)
        return acc[...]

    shape = pairs[0][0].shape[0], pairs[0][1].shape[1]
    return pl.run_scoped(run, plgpu.ACC(shape, jnp.float32))
