"""One suite for every implementation of the streaming matmul: subclasses name their cases and compute them."""

from __future__ import annotations

import dataclasses
import zlib

import jax
import jax.numpy as jnp
import numpy as np

TOLERANCE = {"bfloat16": 3e-3, "float16": 5e-4, "float32": 1e-5}  # relative, of the whole result; by its dtype


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One call."""

    rows: int
    features: int  # of the result
    inputs: int
    swiglu: bool = False
    dtype: str = "bfloat16"
    out_dtype: str | None = None
    config: tuple[tuple[str, int], ...] = ()  # fields of the kernel's Config, where the implementation has one

    @property
    def name(self) -> str:
        extras = ["swiglu"] * self.swiglu + [self.out_dtype] * bool(self.out_dtype)
        extras += [f"{field[:2]}{value}" for field, value in self.config]
        return "-".join([f"m{self.rows}o{self.features}e{self.inputs}", self.dtype, *extras])


def make_operands(case: Case) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(zlib.crc32(case.name.encode()))
    x = rng.standard_normal((case.rows, case.inputs), np.float32)
    weight = rng.standard_normal((case.features * (1 + case.swiglu), case.inputs), np.float32) * case.inputs**-0.5
    return jnp.asarray(x, case.dtype), jnp.asarray(weight, case.dtype)


def oracle(case: Case, x: jax.Array, weight: jax.Array) -> np.ndarray:
    """The result in float64."""
    y = np.asarray(x).astype(np.float64) @ np.asarray(weight).astype(np.float64).T
    if not case.swiglu:
        return y
    gate, up = np.split(y, 2, axis=-1)
    return gate / (1 + np.exp(-gate)) * up


class StreamingMatmulSuite:
    """Subclasses set `cases` and define `multiply`, which computes a case in its implementation."""

    cases: tuple[Case, ...] = ()

    def multiply(self, case: Case, x: jax.Array, weight: jax.Array) -> jax.Array:
        raise NotImplementedError

    def test_matches_the_oracle(self, case: Case):
        x, weight = make_operands(case)
        got = self.multiply(case, x, weight)
        assert got.dtype == jnp.dtype(case.out_dtype or case.dtype) and got.shape == (case.rows, case.features)
        wanted = oracle(case, x, weight)
        # By blocks of columns: a tile that is wrong or missing must not drown in the norm of all.
        for first in range(0, case.features, 64):
            block = slice(first, first + 64)
            error = np.linalg.norm(np.asarray(got, np.float64)[:, block] - wanted[:, block])
            error /= np.linalg.norm(wanted[:, block])
            assert error <= TOLERANCE[got.dtype.name], f"columns from {first}: relative error {error:.2e}"
