"""The commit on Hopper: one thread block per layer, slot and value head, its state in registers, updated in place.

Each of 128 threads holds one column of the state. A row of the commit is a dot product of every column with the key,
then an update of it, with no exchange between threads; keys come from shared memory, the same word for all threads.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic_gpu_layouts import across, down, load

DIM = 128  # Dk, and Dv: as many columns as threads
MOST_ROWS = 128  # of a commit, so that keys and values fit in shared memory
PART = 32  # rows of the state that one operation takes
COLUMNS = plgpu.Layout.TILED(plgpu.Tiling(((PART, DIM), (32,), (1,))), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)
KEYS, VALUES = COLUMNS.reduce(1), COLUMNS.reduce(0)  # all of them in every thread; one in each


def call(shape: tuple[int, ...], group: int, rows: int, values_dtype, interpret):
    """The kernel, a function of k [M, B, P, Hk, Dk], v, gates, count [B] and a Ref of states [M, B, Hv, Dk, Dv].

    Gates [M, B, Hv, 2, P] float32 are decay (not its logarithm) and beta. `shape` is that of the states.
    """
    layers, slots, heads = shape[:3]
    scratch = dict(
        # Twice: one load would hold the key in 128 more registers from the dot product to the update.
        k_s=plgpu.SMEM((2, rows, DIM), jnp.float32),
        v_s=plgpu.SMEM((rows, DIM), values_dtype),
        gates_s=plgpu.SMEM((2, rows), jnp.float32),
        ready=plgpu.Barrier(num_arrivals=4),
    )

    def body(*refs):
        pl.run_scoped(functools.partial(_commit, group, rows, *refs), **scratch)

    # Not `plgpu.kernel`, which takes no Ref to update in place.
    return pl.kernel(
        body,
        mesh=plgpu.Mesh(grid=(layers, slots, heads), grid_names=("layer", "slot", "head")),
        # Threads share nothing but what TMA brings.
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        interpret=interpret or False,
        name="gated_delta_replay",
    )


def _commit(group, rows, k_g, v_g, gates_g, count_g, states_g, *, k_s, v_s, gates_s, ready):
    layer, slot, head = (lax.axis_index(name) for name in ("layer", "slot", "head"))
    count = jnp.minimum(count_g[slot], rows)
    parts = [pl.ds(d, PART) for d in range(0, DIM, PART)]

    def keys(copy, p):
        return [across(load(k_s.at[copy, p, part], KEYS), (PART, DIM)) for part in parts]

    def step(p, state):
        decay, beta = gates_s[0, p], gates_s[1, p]
        recalled = functools.reduce(jnp.add, [(s * key).sum(axis=0) for s, key in zip(state, keys(0, p))])
        update = beta * (load(v_s.at[p], VALUES).astype(jnp.float32) - decay * recalled)
        update = down(update, (PART, DIM))
        return [decay * s + key * update for s, key in zip(state, keys(1, p))]

    @pl.when(count > 0)
    def _():
        for copy in (0, 1):
            plgpu.copy_gmem_to_smem(k_g.at[layer, slot, :, lax.div(head, group)], k_s.at[copy], ready)
        plgpu.copy_gmem_to_smem(v_g.at[layer, slot, :, head], v_s, ready)
        plgpu.copy_gmem_to_smem(gates_g.at[layer, slot, head], gates_s, ready)
        state = [load(states_g.at[layer, slot, head, part], COLUMNS) for part in parts]
        plgpu.barrier_wait(ready)
        for part, updated in zip(parts, lax.fori_loop(0, count, step, state)):
            states_g[layer, slot, head, part] = updated
