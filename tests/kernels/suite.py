"""One suite for every implementation of tree attention: subclasses name their cases and how a case is computed."""

from __future__ import annotations

import dataclasses
import zlib

import jax
import jax.numpy as jnp
import numpy as np
from tree_attention_oracle import oracle

TOLERANCE = {"bfloat16": 4e-3, "float16": 1e-3, "float32": 2e-6}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One call. Rows past each length are NaN, and so are the keys and values of the last `dead` nodes."""

    nodes: int
    heads: int
    kv_heads: int
    head_dim: int
    capacity: int
    lengths: tuple[int, ...]  # one per slot
    dtype: str = "bfloat16"
    mask: str = "tree"  # or "causal", "full"
    dead: int = 0  # padding nodes at the end, which see only themselves
    sliding_window: int | None = None
    softcap: float | None = None
    positions: bool = False  # give positions other than the default ones
    page_rows: int = 0  # if set, the cache is cut into pages of so many rows, in random order
    layer: int | None = None  # if set, of a cache array of three layers, of which the others are NaN
    config: tuple[tuple[str, int | str], ...] = ()  # fields of the kernel's Config, where the implementation has one

    @property
    def name(self) -> str:
        extras = [self.mask] if self.mask != "tree" else []
        extras += [f"{key}{value}" for key, value in (("dead", self.dead), ("window", self.sliding_window)) if value]
        extras += ["softcap"] if self.softcap else []
        extras += ["positions"] if self.positions else []
        extras += [f"pages{self.page_rows}"] if self.page_rows else []
        extras += [f"layer{self.layer}"] if self.layer is not None else []
        extras += [str(value) for _, value in self.config]
        shape = f"n{self.nodes}h{self.heads}k{self.kv_heads}d{self.head_dim}c{self.capacity}"
        return "-".join([shape, "x".join(map(str, self.lengths)), self.dtype, *extras])

    @property
    def options(self) -> dict:
        return dict(scale=self.head_dim**-0.5, sliding_window=self.sliding_window, softcap=self.softcap)


def node_mask(case: Case, rng: np.random.Generator) -> np.ndarray:
    """[N, N] bool: row i sees key j."""
    live = case.nodes - case.dead
    sees = np.eye(case.nodes, dtype=bool)
    if case.mask == "full":
        sees[:live, :live] = True
    for i in range(1, live):
        if case.mask == "causal":
            sees[i, :i] = True
        elif case.mask == "tree":
            sees[i] |= sees[rng.integers(max(0, i - 6), i)]
    return sees


def pack(sees: np.ndarray) -> np.ndarray:
    """[N, N] bool -> [N, ceil(N/32)] uint32."""
    padded = np.pad(sees, ((0, 0), (0, -sees.shape[1] % 32)))
    return np.packbits(padded, axis=1, bitorder="little").view(np.uint32)


def make_operands(case: Case) -> tuple[tuple, dict]:
    """The arrays of a case, drawn anew for each case, and its keyword arguments."""
    rng = np.random.default_rng(zlib.crc32(case.name.encode()))
    b, n, h, k, d, c = len(case.lengths), case.nodes, case.heads, case.kv_heads, case.head_dim, case.capacity
    q, k_cache, v_cache, k_tree, v_tree = (
        rng.standard_normal(shape, np.float32)
        for shape in ((b, n, h, d), (b, k, c, d), (b, k, c, d), (b, k, n, d), (b, k, n, d))
    )
    for slot, length in enumerate(case.lengths):
        k_cache[slot, :, length:] = np.nan
        v_cache[slot, :, length:] = np.nan
    for array in (k_tree, v_tree):
        array[:, :, n - case.dead :] = np.nan
    ancestors = np.stack([pack(node_mask(case, rng)) for _ in range(b)])
    lengths = np.array(case.lengths, np.int32)
    options = case.options
    if case.positions:
        options["positions"] = jnp.asarray(lengths[:, None] + np.arange(n, dtype=np.int32)[None, :])
    q, k_cache, v_cache, k_tree, v_tree = (jnp.asarray(x, case.dtype) for x in (q, k_cache, v_cache, k_tree, v_tree))
    return (q, k_cache, v_cache, jnp.asarray(lengths), k_tree, v_tree, jnp.asarray(ancestors)), options


def to_pages(case: Case, operands: tuple) -> tuple:
    """The operands with the cache as shuffled pages and a table; entries past the length point nowhere."""
    q, k_cache, v_cache, lengths, *tree = operands
    rng = np.random.default_rng(len(case.name))
    rows, slots = case.page_rows, len(case.lengths)
    entries = -(-case.capacity // rows)
    order = rng.permutation(slots * entries + 2)  # two pages belong to nobody

    def cut(cache):
        padded = np.pad(np.asarray(cache), ((0, 0), (0, 0), (0, entries * rows - case.capacity), (0, 0)))
        pages = np.full((len(order), case.kv_heads, rows, case.head_dim), np.nan, padded.dtype)
        split = padded.reshape(slots, case.kv_heads, entries, rows, case.head_dim).transpose(0, 2, 1, 3, 4)
        pages[order[: slots * entries]] = split.reshape(slots * entries, *split.shape[2:])
        return jnp.asarray(pages)

    table = order[: slots * entries].reshape(slots, entries).astype(np.int32)
    for slot, length in enumerate(case.lengths):
        table[slot, -(-length // rows) :] = 2**30
    return (q, cut(k_cache), cut(v_cache), jnp.asarray(table), lengths, *tree)


def in_layers(case: Case, operands: tuple, options: dict) -> tuple[tuple, dict]:
    """The operands with the cache as one layer of several, where the case says so."""
    if case.layer is None:
        return operands, options
    q, k_cache, v_cache, *rest = operands
    stacked = (jnp.full((3, *x.shape), jnp.nan, x.dtype).at[case.layer].set(x) for x in (k_cache, v_cache))
    return (q, *stacked, *rest), options | {"layer": case.layer}


class TreeAttentionSuite:
    """Subclasses set `cases` and define `attend`, which computes a case in its implementation.

    Where `case.page_rows` is set they compute it from `to_pages(case, operands)`, else from `in_layers`.
    """

    cases: tuple[Case, ...] = ()

    def attend(self, case: Case, operands: tuple, options: dict) -> jax.Array:
        raise NotImplementedError

    def test_matches_the_oracle(self, case: Case):
        operands, options = make_operands(case)
        out = self.attend(case, operands, options)
        assert out.dtype == operands[0].dtype and out.shape == operands[0].shape
        live = case.nodes - case.dead
        got = np.asarray(out).astype(np.float64)[:, :live]
        with np.errstate(invalid="ignore"):
            wanted = oracle(*operands, **options)[:, :live]
        assert np.isfinite(got).all(), "NaN of dead rows reached live nodes"
        error = np.linalg.norm(got - wanted) / np.linalg.norm(wanted)
        assert error <= TOLERANCE[case.dtype], f"relative error {error:.2e}"
