"""One suite for every implementation of the grouped matrix product: subclasses name their cases and the product."""

from __future__ import annotations

import dataclasses
import functools
import zlib

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.grouped_matmul import group_rows, tile_rows

TOLERANCE = {"bfloat16": 4e-3, "float16": 1e-3, "float32": 2e-6}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One call. The matrices of groups without rows are NaN."""

    rows: int
    groups: int
    columns: int  # of the result
    depth: int
    dtype: str = "bfloat16"
    swiglu: bool = False
    spread: str = "random"  # or "one": all rows in one group
    tile: int = 0  # 0: as `tile_rows` chooses

    @property
    def name(self) -> str:
        extras = ["swiglu"] * self.swiglu + ([self.spread] if self.spread != "random" else [])
        extras += [f"tile{self.tile}"] if self.tile else []
        return "-".join([f"a{self.rows}x{self.groups}o{self.columns}i{self.depth}", self.dtype, *extras])


def make_operands(case: Case):
    """(group of each row [A], rows [A, I], matrices [X, O, I]), drawn anew for each case."""
    rng = np.random.default_rng(zlib.crc32(case.name.encode()))
    group = rng.integers(0, case.groups, case.rows).astype(np.int32)
    if case.spread == "one":
        group[:] = case.groups // 2
    x = rng.standard_normal((case.rows, case.depth), np.float32)
    matrices = rng.standard_normal((case.groups, case.columns * (1 + case.swiglu), case.depth), np.float32)
    matrices = matrices / case.depth**0.5
    matrices[np.setdiff1d(np.arange(case.groups), group)] = np.nan
    return jnp.asarray(group), jnp.asarray(x, case.dtype), jnp.asarray(matrices, case.dtype)


@functools.partial(jax.jit, static_argnums=(2, 3))
def lay_out(group, x, num_groups: int, tile: int):
    """The groups, and the rows in their layout."""
    groups = group_rows(group, num_groups, tile)
    return groups, x[groups.source]


def oracle(case: Case, group, x, matrices) -> np.ndarray:
    """[A, columns] float64, row by row."""
    x, matrices = np.asarray(x, np.float64), np.asarray(matrices, np.float64)
    out = np.stack([matrices[g] @ row for g, row in zip(np.asarray(group), x, strict=True)])
    if case.swiglu:
        gate, up = np.split(out, 2, axis=1)
        out = gate / (1 + np.exp(-gate)) * up
    return out


class GroupedMatmulSuite:
    """Subclasses set `cases` and define `multiply`, which computes padded rows in its implementation."""

    cases: tuple[Case, ...] = ()

    def multiply(self, x: jax.Array, matrices: jax.Array, groups, swiglu: bool) -> jax.Array:
        raise NotImplementedError

    def test_matches_the_oracle(self, case: Case):
        group, x, matrices = make_operands(case)
        groups, padded = lay_out(group, x, case.groups, case.tile or tile_rows(case.rows, case.groups))
        out = self.multiply(padded, matrices, groups, case.swiglu)
        assert out.dtype == x.dtype and out.shape == (groups.source.shape[0], case.columns)
        got = np.asarray(out[groups.place], np.float64)  # rows of no group may hold anything
        wanted = oracle(case, group, x, matrices)
        assert np.isfinite(got).all(), "a group without rows was used"
        error = np.linalg.norm(got - wanted) / np.linalg.norm(wanted)
        assert error <= TOLERANCE[case.dtype], f"relative error {error:.2e}"
