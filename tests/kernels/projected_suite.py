"""One suite for tree attention from a raw projection, whoever runs its kernel."""

from __future__ import annotations

import dataclasses
import zlib

import fused_norm_suite as norms
import jax
import jax.numpy as jnp
import numpy as np
import suite
from tree_attention_oracle import oracle

from pallas_kernels.fused_norm import Heads
from pallas_kernels.streaming_matmul import PartialSums

# Queries and keys are rounded once more than what `suite.TOLERANCE` is about, and not always as the oracle rounds.
TOLERANCE = {dtype: 2 * tolerance for dtype, tolerance in suite.TOLERANCE.items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One call. Cache rows past each length, the last `dead` nodes and rows past the last one are NaN."""

    nodes: int
    heads: tuple[int, int, int] = (4, 1, 0)  # queries, keys, gates
    head_dim: int = 64
    rotary: int | None = None  # default head_dim
    norm: bool = True
    zero_centred: bool = False
    capacity: int
    lengths: tuple[int, ...]  # one per slot
    dtype: str = "bfloat16"
    mask: str = "tree"
    dead: int = 0
    sliding_window: int | None = None
    positions: bool = False
    layer: int | None = None
    spare_rows: int = 0  # of the projection, past those of the last slot
    config: tuple[tuple[str, int], ...] = ()

    @property
    def attention(self) -> suite.Case:
        queries, keys, _ = self.heads
        return suite.Case(
            nodes=self.nodes, heads=queries, kv_heads=keys, head_dim=self.head_dim, capacity=self.capacity,
            lengths=self.lengths, dtype=self.dtype, mask=self.mask, dead=self.dead, layer=self.layer,
            sliding_window=self.sliding_window, positions=self.positions, config=self.config,
        )  # fmt: skip

    @property
    def head_norms(self) -> norms.Case:
        return norms.Case(
            batch=len(self.lengths), nodes=self.nodes, splits=1, heads=self.heads, head_dim=self.head_dim,
            rotary=self.rotary, norm=self.norm, zero_centred=self.zero_centred, dtype=self.dtype,
        )  # fmt: skip

    @property
    def name(self) -> str:
        extras = [f"g{self.heads[2]}"] * (self.heads[2] > 0) + [f"r{self.rotary}"] * bool(self.rotary)
        extras += ["plain"] * (not self.norm) + ["zero"] * self.zero_centred
        extras += [f"spare{self.spare_rows}"] * (self.spare_rows > 0)
        return "-".join([self.attention.name, *extras])

    def described(self) -> Heads:
        return self.head_norms.described()


@dataclasses.dataclass
class Call:
    """Operands of a case by name, and the results that are wanted: float64, of the live nodes."""

    parts: jax.Array  # [1, B * N or more, heads * D]
    weights: tuple[jax.Array, jax.Array]
    rope: tuple[jax.Array, jax.Array]
    cache: tuple[jax.Array, jax.Array]
    lengths: jax.Array
    ancestors: jax.Array
    options: dict
    wanted: tuple[np.ndarray, ...]  # output, keys, values, gates


def make_call(case: Case) -> Call:
    rng, heads = np.random.default_rng(zlib.crc32(case.name.encode())), case.described()
    (_, k_cache, v_cache, lengths, _, _, ancestors), options = suite.make_operands(case.attention)
    _, k_stored, v_stored, *_ = suite.in_layers(case.attention, (None, k_cache, v_cache), {})[0]
    batch, rows, live = len(case.lengths), len(case.lengths) * case.nodes, case.nodes - case.dead
    parts = np.full((1, rows + case.spare_rows, heads.count * heads.head_dim), np.nan, np.float32)
    drawn = rng.standard_normal((batch, case.nodes, heads.count * heads.head_dim), np.float32)
    drawn[:, live:] = np.nan
    parts[0, :rows] = drawn.reshape(rows, -1)
    parts = jnp.asarray(parts, case.dtype)
    # Weights about 1: with random ones, scores would be so large that softmax picks one key.
    weights = tuple(jnp.asarray(rng.uniform(0.7, 1.3, heads.head_dim) - case.zero_centred, case.dtype) for _ in "qk")
    half = (case.rotary or case.head_dim) // 2
    angles = rng.uniform(0, 6, (batch, case.nodes, half))
    cos, sin = jnp.asarray(np.cos(angles), jnp.float32), jnp.asarray(np.sin(angles), jnp.float32)

    x = np.asarray(parts, np.float64)[0, :rows].reshape(batch, case.nodes, heads.count, heads.head_dim)
    q, k, v, gate = np.split(x, np.cumsum([heads.queries, heads.keys, heads.keys]), axis=2)
    q, k = (_finished(y, w, case, angles) for y, w in zip((q, k), weights))
    k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
    with np.errstate(invalid="ignore"):
        out = oracle(q, k_cache, v_cache, lengths, k, v, ancestors, **options)
    del options["softcap"]
    options |= {} if case.layer is None else dict(layer=case.layer)
    wanted = out[:, :live], k[:, :, :live], v[:, :, :live], gate[:, :live]
    return Call(parts, weights, (cos, sin), (k_stored, v_stored), lengths, ancestors, options, wanted)


def _finished(x: np.ndarray, weight: jax.Array, case: Case, angles: np.ndarray) -> np.ndarray:
    """Queries or keys [B, N, heads, D] normed and rotated, in the dtype's precision."""
    half = angles.shape[-1]
    x = norms.normed(x, weight, case.described().eps, case.head_norms) if case.norm else x
    first, second = x[..., :half], x[..., half : 2 * half]
    c, s = np.cos(angles)[:, :, None], np.sin(angles)[:, :, None]
    rotated = [first * c - second * s, second * c + first * s, x[..., 2 * half :]]
    return norms.rounded(np.concatenate(rotated, axis=-1), case.dtype)


class ProjectedSuite:
    """Subclasses set `cases` and define `attend`."""

    cases: tuple[Case, ...] = ()

    def attend(self, case: Case, call: Call) -> tuple[jax.Array, ...]:
        """What `projected_tree_attention` returns; values and gates may be left out."""
        raise NotImplementedError

    def projected(self, case: Case, call: Call) -> PartialSums:
        return PartialSums(call.parts, (len(case.lengths), case.nodes), case.dtype)

    def test_matches_the_oracle(self, case: Case):
        call, live = make_call(case), case.nodes - case.dead
        out, k, *views = self.attend(case, call)
        assert out.shape == (len(case.lengths), case.nodes, case.heads[0], case.head_dim) and out.dtype == case.dtype
        wanted_out, wanted_k, *wanted_views = call.wanted
        got = np.asarray(out).astype(np.float64)[:, :live]
        assert np.isfinite(got).all(), "NaN of dead rows reached live nodes"
        error = np.linalg.norm(got - wanted_out) / np.linalg.norm(wanted_out)
        assert error <= TOLERANCE[case.dtype], f"relative error {error:.2e}"
        assert k.shape == (len(case.lengths), case.heads[1], case.nodes, case.head_dim)
        norms.assert_close(k[:, :, :live], wanted_k, case.dtype)
        for view, wanted, axis in zip(views, wanted_views, (2, 1)):
            np.testing.assert_array_equal(np.take(np.asarray(view, np.float64), range(live), axis=axis), wanted)
