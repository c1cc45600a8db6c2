"""One suite for the fused norms, whoever runs their kernels: subclasses name the cases and say how to interpret."""

from __future__ import annotations

import dataclasses
import zlib

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.fused_norm import Heads, add_rms_norm, qk_norm_rope
from pallas_kernels.mosaic_gpu_layouts import copied_rows
from pallas_kernels.streaming_matmul import PartialSums

# Of the largest result: one rounding to 16 bits may go the other way, and a product of two of those twice.
TOLERANCE = {"bfloat16": 2**-7, "float16": 2**-10}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One call. `features` is for `add_rms_norm`; without, `heads` are for `qk_norm_rope`."""

    batch: int = 1
    nodes: int
    splits: int
    features: int | None = None
    heads: tuple[int, int, int] = (2, 1, 0)  # queries, keys, gates
    head_dim: int = 64
    rotary: int | None = None  # default head_dim
    norm: bool = True
    zero_centred: bool = False
    dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        what = f"e{self.features}" if self.features else "h" + "-".join(map(str, (*self.heads, self.head_dim)))
        extras = [f"r{self.rotary}"] * bool(self.rotary) + ["plain"] * (not self.norm) + ["zero"] * self.zero_centred
        return "-".join([f"b{self.batch}n{self.nodes}s{self.splits}", what, self.dtype, *extras])

    def described(self) -> Heads:
        queries, keys, gates = self.heads
        return Heads(queries, keys, gates, self.head_dim, 1e-5 if self.norm else None, self.zero_centred)


def numbers(case: Case) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(case.name.encode()))


def partial(rng, case: Case, features: int, interpret) -> tuple[PartialSums, np.ndarray]:
    """Partial sums as the streaming kernel leaves them, poison past the last row, and their total in float64."""
    rows = case.batch * case.nodes
    padded = copied_rows(rows)
    dtype = "float32" if case.splits > 1 else case.dtype
    parts = np.full((case.splits, padded, features), np.nan, np.float32)
    parts[:, :rows] = rng.standard_normal((case.splits, rows, features))
    parts = jnp.asarray(parts, dtype)
    total = np.asarray(parts, np.float64)[:, :rows].sum(0).reshape(case.batch, case.nodes, features)
    return PartialSums(parts, (case.batch, case.nodes), case.dtype, interpret), total


def rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    return np.asarray(jnp.asarray(x.astype(np.float32)).astype(dtype), np.float64)


def normed(x: np.ndarray, weight: jax.Array, eps: float, case: Case) -> np.ndarray:
    wide = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)
    return wide * (np.asarray(weight, np.float64) + case.zero_centred)


def assert_close(got: jax.Array, wanted: np.ndarray, dtype: str) -> None:
    assert got.shape == wanted.shape and got.dtype == dtype
    error = np.abs(np.asarray(got, np.float64) - wanted).max() / np.abs(wanted).max()
    assert error <= TOLERANCE[dtype], f"relative error {error:.2e}"


class FusedNormSuite:
    """Subclasses set `cases` and `interpret`."""

    cases: tuple[Case, ...] = ()
    interpret = None

    def test_matches_the_oracle(self, case: Case):
        (self.check_add if case.features else self.check_heads)(case)

    def check_add(self, case: Case):
        rng = numbers(case)
        update, total = partial(rng, case, case.features, self.interpret)
        x = jnp.asarray(rng.standard_normal((case.batch, case.nodes, case.features)), case.dtype)
        weight = jnp.asarray(rng.standard_normal(case.features), case.dtype)
        options = dict(eps=1e-5, zero_centred=case.zero_centred)
        stream, out = self.call(lambda x, parts, w: add_rms_norm(x, parts, w, **options), x, update, weight)
        wanted = np.asarray(x, np.float64) + rounded(total, case.dtype)
        assert_close(stream, wanted, case.dtype)
        assert_close(out, normed(np.asarray(stream, np.float64), weight, 1e-5, case), case.dtype)

    def check_heads(self, case: Case):
        rng, heads = numbers(case), case.described()
        projected, total = partial(rng, case, heads.count * heads.head_dim, self.interpret)
        q_weight, k_weight = (jnp.asarray(rng.standard_normal(heads.head_dim), case.dtype) for _ in range(2))
        half = (case.rotary or heads.head_dim) // 2
        angles = rng.uniform(0, 6, (case.batch, case.nodes, half))
        cos, sin = jnp.asarray(np.cos(angles), jnp.float32), jnp.asarray(np.sin(angles), jnp.float32)
        results = self.call(lambda *operands: qk_norm_rope(*operands, heads), projected, q_weight, k_weight, cos, sin)
        x = rounded(total, case.dtype).reshape(case.batch, case.nodes, heads.count, heads.head_dim)
        q, k, v, gate = np.split(x, np.cumsum([heads.queries, heads.keys, heads.keys]), axis=2)

        def rotated(x, weight):
            x = normed(x, weight, 1e-5, case) if case.norm else x
            first, second = x[..., :half], x[..., half : 2 * half]
            c, s = np.cos(angles)[:, :, None], np.sin(angles)[:, :, None]
            return np.concatenate([first * c - second * s, second * c + first * s, x[..., 2 * half :]], axis=-1)

        wanted = rotated(q, q_weight), rotated(k, k_weight).swapaxes(1, 2), v.swapaxes(1, 2), gate
        for got, expected in zip(results, wanted, strict=True):
            if expected.size:
                assert_close(got, expected, case.dtype)

    def call(self, function, *operands):
        return function(*operands)
