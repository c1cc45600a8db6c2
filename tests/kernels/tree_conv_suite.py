"""One suite for every implementation of the short convolution along a tree: subclasses name cases and compute them."""

from __future__ import annotations

import dataclasses
import zlib

import jax
import jax.numpy as jnp
import numpy as np

TAPS, LAYERS, LAYER = 4, 3, 1
TOLERANCE = 2**-7  # of the largest result: two roundings to bfloat16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One call."""

    nodes: int
    slots: int = 1
    heads: tuple[int, int] = (1, 2)
    dim: int = 64
    spare: int = 32  # columns of the projection past the channels
    mask: str = "tree"  # or "chain"

    @property
    def name(self) -> str:
        heads = "x".join(map(str, self.heads))
        return f"n{self.nodes}b{self.slots}h{heads}d{self.dim}s{self.spare}-{self.mask}"

    @property
    def channels(self) -> int:
        return (2 * self.heads[0] + self.heads[1]) * self.dim


def draw_paths(rng: np.random.Generator, case) -> tuple[np.ndarray, np.ndarray]:
    """Of a tree or chain in each slot: what a node's taps read, [B, N, W] int32, and whom it sees, [B, N, N] bool."""
    rows = np.zeros((case.slots, case.nodes, TAPS), np.int32)
    sees = np.tile(np.eye(case.nodes, dtype=bool), (case.slots, 1, 1))
    for slot in range(case.slots):
        for node in range(case.nodes):
            parent = node - 1 if case.mask == "chain" else int(rng.integers(0, max(node, 1)))
            # Above the root come the window's rows, the newest first.
            above = rows[slot, parent] if node else np.array([0, 0, 1, 2])
            rows[slot, node] = [*above[1:], TAPS - 1 + node]
            if node:
                sees[slot, node] |= sees[slot, parent]
    return rows, sees


def make_operands(case: Case) -> tuple[jax.Array, ...]:
    """projected, window (NaN in layers not read), rows, weight."""
    rng = np.random.default_rng(zlib.crc32(case.name.encode()))
    projected = rng.standard_normal((case.slots, case.nodes, case.channels + case.spare))
    window = np.full((LAYERS, case.slots, TAPS - 1, case.channels), np.nan)
    window[LAYER] = rng.standard_normal(window.shape[1:])
    rows, _ = draw_paths(rng, case)
    weight = rng.standard_normal((case.channels, TAPS)) * 0.5
    bf16 = (jnp.asarray(x, jnp.bfloat16) for x in (projected, window, weight))
    projected, window, weight = bf16
    return projected, window, jnp.asarray(rows), weight


def oracle(case: Case, projected, window, rows, weight) -> list[np.ndarray]:
    """Queries, keys and values in float64."""
    x, old, w = (np.asarray(a, np.float64) for a in (projected, window[LAYER], weight))
    line = np.concatenate([old, x[..., : case.channels]], axis=1)
    total = sum(line[np.arange(case.slots)[:, None], np.asarray(rows)[..., t]] * w[:, t] for t in range(TAPS))
    mixed = total / (1 + np.exp(-total))
    key_size = case.heads[0] * case.dim
    q, k, v = np.split(mixed, (key_size, 2 * key_size), axis=-1)
    q, k = (x.reshape(*x.shape[:2], -1, case.dim) for x in (q, k))
    q, k = (x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
    return [q * case.dim**-0.5, k, v.reshape(*v.shape[:2], -1, case.dim)]


class TreeConvSuite:
    """Subclasses set `cases` and define `convolve`, which computes a case in its implementation."""

    cases: tuple[Case, ...] = ()

    def convolve(self, case: Case, operands) -> tuple[jax.Array, ...]:
        raise NotImplementedError

    def test_matches_the_oracle(self, case: Case):
        operands = make_operands(case)
        for got, wanted in zip(self.convolve(case, operands), oracle(case, *operands), strict=True):
            assert got.shape[1] >= case.nodes
            error = np.abs(np.asarray(got[:, : case.nodes], np.float64) - wanted).max() / np.abs(wanted).max()
            assert error <= TOLERANCE, f"relative error {error:.2e}"
