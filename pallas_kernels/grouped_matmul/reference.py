"""Grouped matrix product in XLA, on any device: a loop over the tiles that have rows.

Why not `jax.lax.ragged_dot`: on a CPU it becomes one product of all rows with all groups, masked (X times the work, and
X copies of the rows); on a GPU XLA's own expansion of it reads every group too. A pass over a tree touches some experts
only, and reading them is what it costs.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def grouped_matmul(x, weight, groups, *, swiglu: bool) -> jax.Array:
    """See `pallas_kernels.grouped_matmul.grouped_matmul`; the arguments are taken as checked.

    Every product has the shape of one tile, so a row's result depends neither on its neighbours nor on their number.
    """
    rows = groups.rows_per_tile
    columns = weight.shape[1] // 2 if swiglu else weight.shape[1]
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None

    def step(i, out):
        tile = lax.dynamic_slice_in_dim(x, i * rows, rows)
        matrix = lax.dynamic_index_in_dim(weight, groups.tile_group[i], keepdims=False)
        y = jnp.einsum("ri,oi->ro", tile, matrix, precision=precision, preferred_element_type=jnp.float32)
        if swiglu:
            gate, up = jnp.split(y, 2, axis=1)
            y = jax.nn.silu(gate) * up
        return lax.dynamic_update_slice_in_dim(out, y.astype(x.dtype), i * rows, axis=0)

    return lax.fori_loop(0, groups.tiles[0], step, jnp.zeros((x.shape[0], columns), x.dtype))
