"""One suite for every implementation of the linear chain: subclasses name their cases and compute them."""

from __future__ import annotations

import dataclasses
import zlib

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.linear_chain import ChainWeights
from pallas_kernels.linear_chain.config import Cut
from pallas_kernels.streaming_matmul import PartialSums

EPS = 1e-6
TOLERANCE = {"bfloat16": 1.2e-2, "float16": 1.5e-3, "float32": 1e-5}  # relative, of a block of columns


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One call."""

    rows: int
    mixed: int
    hidden: int
    intermediate: int
    projected: int = 0
    dtype: str = "bfloat16"
    zero_centred: bool = False
    config: tuple[tuple[str, object], ...] = ()  # of the kernel, where the implementation has one

    @property
    def name(self) -> str:
        extras = ["centred"] * self.zero_centred + ["-".join(f"{k[:2]}{v}" for k, v in self.config)] * bool(self.config)
        sizes = f"m{self.rows}a{self.mixed}e{self.hidden}f{self.intermediate}q{self.projected}"
        return "-".join([sizes, self.dtype, *extras])


def config(out=(64, 1), gate_up=32, down=(64, 1), next=(32, 1), **fields) -> tuple[tuple[str, object], ...]:
    """Sizes of the kernel, small ones but for those given."""
    cuts = dict(out=Cut(*out), gate_up=Cut(gate_up, 1), down=Cut(*down), next=Cut(*next))
    return tuple(sorted((dict(block=64, weight_stages=3, x_stages=2) | cuts | fields).items()))


# Uneven splits, tiles past the end, rows off the tiling; a projection in splits and more thread blocks than items; more
# rows than one warpgroup holds; more rows than there are thread blocks.
NAMED_SIZES = (
    Case(rows=13, mixed=320, hidden=256, intermediate=192, config=config((96, 2), 80, (48, 3), workers=3)),
    Case(rows=40, mixed=128, hidden=128, intermediate=64, projected=160, config=config(next=(48, 2), workers=7)),
    Case(rows=70, mixed=128, hidden=128, intermediate=128, projected=64, config=config(consumers=2, workers=3)),
    Case(rows=128, mixed=64, hidden=128, intermediate=128, config=config(consumers=1, workers=2)),
)


def make_operands(case: Case) -> tuple[jax.Array, jax.Array, ChainWeights]:
    """Mixer's result, residual stream and weights."""
    rng = np.random.default_rng(zlib.crc32(case.name.encode()))

    def normal(*shape, scale=1.0):
        return jnp.asarray(rng.standard_normal(shape, np.float32) * scale, case.dtype)

    def matrix(rows, columns):
        return normal(rows, columns, scale=columns**-0.5)

    weights = ChainWeights(
        out=matrix(case.hidden, case.mixed),
        norm=normal(case.hidden),
        gate_up=matrix(2 * case.intermediate, case.hidden),
        down=matrix(case.hidden, case.intermediate),
        next_norm=normal(case.hidden),
        next=matrix(case.projected, case.hidden) if case.projected else None,
    )
    return normal(case.rows, case.mixed), normal(case.rows, case.hidden), weights


def oracle(case: Case, mixed, stream, weights: ChainWeights) -> tuple[np.ndarray, np.ndarray]:
    """(total, projected or normed) in float64, nothing rounded on the way."""
    wide = lambda x: np.asarray(x).astype(np.float64)  # noqa: E731

    def norm(x, weight):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * (wide(weight) + case.zero_centred)

    middle = wide(stream) + wide(mixed) @ wide(weights.out).T
    gate, up = np.split(norm(middle, weights.norm) @ wide(weights.gate_up).T, 2, axis=-1)
    total = middle + gate / (1 + np.exp(-gate)) * up @ wide(weights.down).T
    normed = norm(total, weights.next_norm)
    return total, normed if weights.next is None else normed @ wide(weights.next).T


class LinearChainSuite:
    """Subclasses set `cases` and define `run`, which computes a case in its implementation."""

    cases: tuple[Case, ...] = ()

    def run(self, case: Case, mixed, stream, weights: ChainWeights) -> tuple[jax.Array, jax.Array]:
        raise NotImplementedError

    def test_matches_the_oracle(self, case: Case):
        mixed, stream, weights = make_operands(case)
        wanted = oracle(case, mixed, stream, weights)
        for name, got, want in zip(("total", "projected"), self.run(case, mixed, stream, weights), wanted, strict=True):
            got = got.total() if isinstance(got, PartialSums) else got
            assert got.shape == want.shape and got.dtype == jnp.dtype(case.dtype)
            # By blocks of columns: a tile that is wrong or missing must not drown in the norm of all.
            for first in range(0, want.shape[1], 64):
                block = slice(first, first + 64)
                error = np.linalg.norm(np.asarray(got, np.float64)[:, block] - want[:, block])
                error /= np.linalg.norm(want[:, block])
                assert error <= TOLERANCE[case.dtype], f"{name}, columns from {first}: relative error {error:.2e}"
