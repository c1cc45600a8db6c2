"""Grouped matrix product: the public function, its argument checks, and the choice of implementation."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import choice
from pallas_kernels.grouped_matmul import mosaic_gpu, reference
from pallas_kernels.grouped_matmul.groups import Groups


def grouped_matmul(
    x: jax.Array,  # [P, I]
    weight: jax.Array,  # [X, O, I]
    groups: Groups,
    *,
    swiglu: bool = False,
    implementation: str | None = None,
) -> jax.Array:  # [P, O], or [P, O / 2] with swiglu
    """Each row of x times the transposed matrix of its group, accumulated in float32.

    Only the matrices of groups that have rows are read.

    Args:
      x: rows in the layout of `groups` (`x_of_rows[groups.source]`), float32, float16 or bfloat16.
      weight: one matrix a group, in x's dtype.
      groups: see `group_rows`.
      swiglu: the matrices are two projections, gate first; yields silu(gate) * up, computed in float32.
      implementation: "xla", "mosaic_gpu", or None to choose: "mosaic_gpu" on a Hopper GPU where it can, else "xla". The
        GPU kernel takes float16 and bfloat16, I a multiple of 64 from 128 on and columns of the result in multiples
        of 64.

    Returns:
      The products in x's dtype. Rows of tiles past `groups.tiles` are undefined; rows that pad a tile are finite where
      x is.

    Raises:
      ValueError: the arguments contradict each other.
      NotImplementedError: the implementation asked for cannot do this call; the message names what.
    """
    choice.check(implementation)
    _check_arrays(x, weight, groups, swiglu)
    obstacle = mosaic_gpu.unsupported(x, weight, groups.rows_per_tile, swiglu)
    chosen = reference if choice.choose(implementation, obstacle) == "xla" else mosaic_gpu
    return chosen.grouped_matmul(x, weight, groups, swiglu=swiglu)


def _check_arrays(x, weight, groups, swiglu):
    """Raises ValueError where shapes or dtypes contradict each other."""
    if x.ndim != 2:
        raise ValueError(f"x must be [P, I], got shape {x.shape}")
    if weight.ndim != 3 or weight.shape[2] != x.shape[1]:
        raise ValueError(f"weight must be [X, O, {x.shape[1]}] to fit x {x.shape}, got shape {weight.shape}")
    if x.shape[0] != groups.source.shape[0]:
        raise ValueError(f"x must have the {groups.source.shape[0]} rows of the groups' layout, got {x.shape[0]}")
    if swiglu and weight.shape[1] % 2:
        raise ValueError(f"with swiglu the matrices must have an even number of rows, got {weight.shape[1]}")
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"x must be floating point, got {x.dtype}")
    if weight.dtype != x.dtype:
        raise ValueError(f"weight must be {x.dtype} like x, got {weight.dtype}")
