"""One suite for every implementation of the streaming matmul: subclasses name their cases and compute them."""

from __future__ import annotations

import dataclasses
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

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


ROUNDING = 1e-4  # more than float32 sums of about unit variance can be off


def make_exact_operands(case: Case, kind: str) -> tuple[jax.Array, jax.Array]:
    """Small integers, whose sums are exact and often tie. All products are negative: zeros past the end must not win.

    Args:
      kind: "ties"; "lowest", where the last row of x makes all of its products -inf; "nan", where its first row is NaN
        and so are some of the weights.
    """
    rng = np.random.default_rng(zlib.crc32(f"{case.name} {kind}".encode()))
    x = rng.integers(1, 3, (case.rows, case.inputs)).astype(np.float32)
    weight = -rng.integers(1, 3, (case.features, case.inputs)).astype(np.float32)
    weight[case.features // 2 :] = weight[: case.features - case.features // 2]
    if kind == "lowest":
        x[-1, 0] = np.inf
    if kind == "nan":
        x[0] = np.nan
        weight[rng.integers(1, case.features, 3), 5] = np.nan
    return jnp.asarray(x, case.dtype), jnp.asarray(weight, case.dtype)


class StreamingArgmaxSuite:
    """The same for `streaming_argmax`: subclasses set `cases` and define `find`."""

    cases: tuple[Case, ...] = ()

    def find(self, case: Case, x: jax.Array, weight: jax.Array) -> jax.Array:
        raise NotImplementedError

    def test_finds_the_largest(self, case: Case):
        x, weight = make_operands(case)
        got = self.find(case, x, weight)
        assert got.dtype == jnp.int32 and got.shape == (case.rows,)
        products = oracle(case, x, weight)
        found = products[np.arange(case.rows), got]
        second, first = np.sort(products, axis=1)[:, -2:].T
        assert (found >= first - ROUNDING).all()
        clear = first - second > ROUNDING
        assert clear.mean() > 0.9 and (np.asarray(got) == products.argmax(axis=1))[clear].all()

    @pytest.mark.parametrize("kind", ["ties", "lowest", "nan"])
    def test_takes_the_first_of_equals(self, case: Case, kind: str):
        x, weight = make_exact_operands(case, kind)
        got = self.find(case, x, weight)
        with np.errstate(invalid="ignore"):
            np.testing.assert_array_equal(got, oracle(case, x, weight).argmax(axis=1))
