"""Suites for every implementation of the gated delta rule: subclasses name their cases and how one is computed."""

from __future__ import annotations

import dataclasses
import zlib

import gated_delta_oracle as oracle
import jax
import jax.numpy as jnp
import numpy as np
from suite import pack

TREE_TOLERANCE = {"bfloat16": 4e-3, "float32": 1e-6}
COMMIT_TOLERANCE = 1e-6
LAYERS = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class TreeCase:
    """One call of `gated_delta_tree`. All about the last `dead` nodes is NaN, and so are the layers not read."""

    nodes: int
    key_heads: int = 2
    group: int = 2  # value heads per key head
    dim: int = 128
    slots: int = 1
    dtype: str = "float32"
    mask: str = "tree"  # or "chain", "star": children of the root only
    inputs: str = "usual"  # see `draw`
    dead: int = 0  # padding nodes at the end

    @property
    def name(self) -> str:
        shape = f"n{self.nodes}k{self.key_heads}g{self.group}d{self.dim}b{self.slots}"
        return "-".join([shape, self.dtype, self.mask, self.inputs, *([f"dead{self.dead}"] if self.dead else [])])


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommitCase:
    """One call of `gated_delta_replay` or `gated_delta_fold`; all rows past the counts are NaN."""

    rows: int
    counts: tuple[int, ...]  # one per slot
    key_heads: int = 2
    group: int = 2
    dim: int = 128
    dtype: str = "float32"  # of the values
    inputs: str = "usual"

    @property
    def name(self) -> str:
        shape = f"p{self.rows}k{self.key_heads}g{self.group}d{self.dim}"
        return "-".join([shape, "x".join(map(str, self.counts)), self.dtype, self.inputs])


def draw(rng: np.random.Generator, lead: tuple[int, ...], key_heads: int, heads: int, dim: int, kind: str) -> tuple:
    """q and k [*lead, Hk, D], v [*lead, Hv, D], log_decay and beta [*lead, Hv], float32.

    Kinds: "usual", each head with a decay of its own, from slow to very fast; "mixed", each token with one, so that
    fast and slow ones meet on a path, and some that forget everything; "parallel", keys that are nearly the same,
    strong writes and no decay, the worst case for the triangular system.
    """

    def unit(x):
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    q, k = (unit(rng.standard_normal((*lead, key_heads, dim), np.float32)) for _ in range(2))
    v = rng.standard_normal((*lead, heads, dim), np.float32)
    beta = 1 / (1 + np.exp(-rng.standard_normal((*lead, heads), np.float32)))
    if kind == "parallel":
        k = unit(unit(rng.standard_normal((key_heads, dim), np.float32)) + np.float32(1e-3) * k)
        return q * np.float32(dim**-0.5), k, v, np.zeros_like(beta), np.full_like(beta, 0.999)
    if kind == "mixed":
        exponent = np.where(rng.random(beta.shape) < 0.03, np.inf, rng.uniform(-4, 2, beta.shape))
    else:
        exponent = np.linspace(-4, 1.3, heads) + 0.3 * rng.standard_normal(beta.shape)
    return q * np.float32(dim**-0.5), k, v, -(10.0**exponent).astype(np.float32), beta


def node_mask(case: TreeCase, rng: np.random.Generator) -> np.ndarray:
    """[N, N] bool: column j is row i or an ancestor of it."""
    sees = np.eye(case.nodes, dtype=bool)
    for i in range(1, case.nodes - case.dead):
        parent = {"chain": i - 1, "star": 0, "tree": int(rng.integers(max(0, i - 8), i))}[case.mask]
        sees[i] |= sees[parent]
    return sees


def make_tree(case: TreeCase) -> tuple[jax.Array, ...]:
    """The operands of a case, drawn anew for each."""
    rng = np.random.default_rng(zlib.crc32(case.name.encode()))
    heads = case.key_heads * case.group
    drawn = draw(rng, (case.slots, case.nodes), case.key_heads, heads, case.dim, case.inputs)
    for array in drawn:
        array[:, case.nodes - case.dead :] = np.nan
    q, k, v, log_decay, beta = drawn
    states = np.full((LAYERS, case.slots, heads, case.dim, case.dim), np.nan, np.float32)
    states[1] = 0.3 * rng.standard_normal(states.shape[1:], np.float32)
    ancestors = np.stack([pack(node_mask(case, rng)) for _ in range(case.slots)])
    q, k, v = (jnp.asarray(x, case.dtype) for x in (q, k, v))
    return q, k, v, *(jnp.asarray(x) for x in (log_decay, beta, states, ancestors))


def make_commit(case: CommitCase) -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(zlib.crc32(case.name.encode()))
    slots, heads = len(case.counts), case.key_heads * case.group
    _, *drawn = draw(rng, (LAYERS, slots, case.rows), case.key_heads, heads, case.dim, case.inputs)
    for array in drawn:
        for slot, count in enumerate(case.counts):
            array[:, slot, count:] = np.nan
    k, v, log_decay, beta = (jnp.asarray(x) for x in drawn)
    states = 0.3 * rng.standard_normal((LAYERS, slots, heads, case.dim, case.dim), np.float32)
    return k, v.astype(case.dtype), log_decay, beta, jnp.asarray(states), jnp.asarray(case.counts, jnp.int32)


def relative_error(got, wanted) -> float:
    return np.linalg.norm(np.asarray(got).astype(np.float64) - wanted) / np.linalg.norm(wanted)


class TreeSuite:
    """Subclasses set `cases` and define `outputs`, which computes layer 1 of a case's operands."""

    cases: tuple[TreeCase, ...] = ()

    def outputs(self, case: TreeCase, operands: tuple) -> jax.Array:
        raise NotImplementedError

    def test_matches_the_oracle(self, case: TreeCase):
        operands = make_tree(case)
        out = self.outputs(case, operands)
        assert out.shape == operands[2].shape and out.dtype == operands[2].dtype
        live = case.nodes - case.dead
        got, wanted = np.asarray(out)[:, :live], oracle.tree(*operands, layer=1)[:, :live]
        assert np.isfinite(got.astype(np.float32)).all(), "NaN of padding nodes or of other layers reached live nodes"
        error = relative_error(got, wanted)
        assert error <= TREE_TOLERANCE[case.dtype], f"relative error {error:.2e}"
        # No head hides behind another: fast decays leave small outputs.
        worst = max(relative_error(got[:, :, h], wanted[:, :, h]) for h in range(got.shape[2]))
        assert worst <= 2 * TREE_TOLERANCE[case.dtype], f"relative error of one head {worst:.2e}"

    def test_strangers_do_not_change_a_bit(self, case: TreeCase):
        """The outputs of a node and its ancestors stay the same bits when everything about the others changes."""
        operands = make_tree(case)
        rng = np.random.default_rng(case.nodes)
        nodes = np.arange(case.nodes - case.dead)
        sees = np.unpackbits(np.asarray(operands[6][0]).view(np.uint8), axis=-1, bitorder="little").astype(bool)
        node = max(nodes, key=lambda i: sees[i].sum() if case.mask != "chain" else i == len(nodes) // 2)
        strangers = ~sees[node, : case.nodes]
        heads = operands[2].shape[2]
        others = draw(rng, (case.slots, case.nodes), case.key_heads, heads, case.dim, "mixed")
        changed = [
            jnp.where(strangers.reshape(1, -1, *[1] * (x.ndim - 2)), jnp.asarray(y, x.dtype), x)
            for x, y in zip(operands, others)
        ]
        before, after = (np.asarray(self.outputs(case, (*x, *operands[5:]))) for x in (operands[:5], changed))
        np.testing.assert_array_equal(before[0][~strangers], after[0][~strangers])


class CommitSuite:
    """Subclasses set `cases` and define `commit`, which returns the states after."""

    cases: tuple[CommitCase, ...] = ()

    def commit(self, case: CommitCase, operands: tuple) -> jax.Array:
        raise NotImplementedError

    def test_matches_the_oracle(self, case: CommitCase):
        operands = make_commit(case)
        before, wanted = np.asarray(operands[4]).copy(), oracle.commit(*operands)
        got = np.asarray(self.commit(case, operands))
        assert got.shape == before.shape and got.dtype == np.float32
        for slot, count in enumerate(case.counts):
            if count == 0:
                np.testing.assert_array_equal(got[:, slot], before[:, slot])
            for head in range(got.shape[2]):
                error = relative_error(got[:, slot, head], wanted[:, slot, head])
                assert error <= COMMIT_TOLERANCE, f"relative error of slot {slot}, head {head}: {error:.2e}"
