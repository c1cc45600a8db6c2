"""What building a tree of most probable prefixes has in common, whatever gives their probabilities.

Depth by depth, the most probable of (prefixes kept one depth above) x (tokens of this depth) are kept; one selection
over all depths makes the tree. That is exact wherever a child is never more probable than its parent. Let G be the
N - 1 most probable prefixes, ties in the order of nodes. With a prefix all that it extends is in G, so a prefix at
depth d has d - 1 ancestors there, and at most N - d of G lie at depth d. If every prefix of G at depth d - 1 was
kept, every one at depth d is among the candidates, where all others are less probable or come later: the N - d best
hold them.

Where the tokens of a depth have one distribution whatever the prefix, most candidates need not be looked at. Take the
i-th prefix kept at depth a with tokens of 1-based ranks r_1..r_m below it. The first i prefixes with ranks of at most
r_1..r_m are at least as probable and come no later, depth by depth: i at depth a, i r_1 below them, i r_1 r_2 below
those and so on, beside a - 1 ancestors. If all of them are more than N - 1, the candidate is not in G. So few are left
that some depths can go together: candidates of m depths below one list of kept prefixes, each depth sorted by itself.
That gives the order of going depth by depth: by probability, equal ones by that of their parents and so on up to the
kept prefixes, then by place and ranks.

Shape letters: B slots · N nodes, root included · L draft depth · R tokens per depth · W prefixes kept at one depth ·
m depths of a step · M candidates of one depth.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from ddtree_jax.tree.draft_tree import DraftTree, place_of, tree_below_root
from ddtree_jax.tree.select import sorted_largest

# A step takes several depths as long as it compares no more numbers: of any two candidates of one depth those of m
# depths. A step less is three kernels less, which saves an H200 some 7 us.
STEP_COMPARISONS = 7_000_000

# In place of a token: none, since the candidate is shallower, or one that makes it impossible.
NO_TOKEN, IMPOSSIBLE = -1, -2


@dataclasses.dataclass(frozen=True)
class Step:
    """Neighbouring depths whose candidates are made and sorted at once, from the prefixes kept at the depth above.

    A candidate is a kept prefix and the tokens of 1..m depths below it. The m lists are padded to one length M with
    candidates that are impossible.

    Attributes:
      prefix: [m, M] int32, the candidate's kept prefix, as a position within the depth above the step.
      tokens: [m, m, M] int32; [i] holds the tokens at the step's depth i, as places in the flattened [L * R], or
        `NO_TOKEN` or `IMPOSSIBLE`.
      widths: prefixes kept at each of the m depths.
      first_pair: number of the step's first candidate.
    """

    prefix: np.ndarray
    tokens: np.ndarray
    widths: tuple[int, ...]
    first_pair: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything about a build that depends on shapes only; a "pair" is a candidate, that is (its parent, token rank).

    Pairs are numbered through all depths, and so are kept prefixes ("prefix numbers", in order of depth).
    """

    num_nodes: int
    widths: tuple[int, ...]  # prefixes kept per depth
    steps: tuple[Step, ...]
    pair_above: np.ndarray  # pair -> pair of its parent; -1: the root; -2 - p: the kept prefix of number p
    pair_token: np.ndarray  # pair -> its token's place in the flattened [L * R]
    pair_depth: np.ndarray  # pair -> depth of the node it makes


@functools.lru_cache(maxsize=64)
def frontier_plan(num_nodes: int, depths: int, ranks: int, *, independent: bool = True) -> Plan:
    """The plan of a build.

    Args:
      independent: the tokens of a depth have one distribution, best first, whatever the prefix: few pairs can be kept
        (`build_from_top`), and steps take several depths. Otherwise a step is one depth, with all pairs.
    """
    depths = min(depths, num_nodes - 1)
    widths, steps, tables, first_pair = [], [], [], 0
    while (above := len(widths)) < depths:
        kept = _kept(above, widths[-1] if widths else 1)
        levels = [kept.children(num_nodes, ranks, independent)]
        while independent and above + len(levels) < depths:
            below = levels[-1].children(num_nodes, ranks, independent)
            if _comparisons([*levels, below]) > STEP_COMPARISONS:
                break
            levels.append(below)
        step = _step(levels, num_nodes, first_pair)
        above_pairs = -1 if above == 0 else -2 - sum(widths[:-1]) - levels[0].prefix
        tables += _pair_tables(levels, step, above_pairs)
        first_pair += step.prefix.size
        widths += step.widths
        steps.append(step)
    pair_above, pair_token, pair_depth = (np.concatenate(x).astype(np.int32) for x in zip(*tables, strict=True))
    return Plan(num_nodes, tuple(widths), tuple(steps), pair_above, pair_token, pair_depth)


@dataclasses.dataclass(frozen=True)
class _Level:
    """Candidates of one depth, in order of their parents, siblings in order of rank: arrays [M], tokens [i, M].

    Attributes:
      depth: of them.
      prefix, tokens: as of `Step`, without padding.
      parent: position in the level above.
      product: of 1-based ranks: candidates of this depth that come no later, this one included.
      before: the same of all depths.
    """

    depth: int
    prefix: np.ndarray
    tokens: np.ndarray
    parent: np.ndarray
    product: np.ndarray
    before: np.ndarray

    def children(self, num_nodes: int, ranks: int, independent: bool) -> _Level:
        """All children, or those that the tree can hold with all that come before them."""
        room = (num_nodes - 1 - self.before) // self.product if independent else np.full_like(self.before, ranks)
        room = np.clip(room, 0, ranks)
        parent = np.repeat(np.arange(len(room)), room)
        rank = np.arange(len(parent)) - np.repeat(np.cumsum(room) - room, room)
        product = self.product[parent] * (rank + 1)
        tokens = np.concatenate([self.tokens[:, parent], self.depth * ranks + rank[None]])
        return _Level(self.depth + 1, self.prefix[parent], tokens, parent, product, self.before[parent] + product)


def _kept(depth: int, width: int) -> _Level:
    """The prefixes kept at a depth, or the root, which counts for nothing: it is always there."""
    place, none = np.arange(width), np.zeros((0, width), np.int64)
    before = place + depth if depth else place
    return _Level(depth, place, none, place, place + 1, before)


def _comparisons(levels: list[_Level]) -> int:
    return (len(levels) * max(len(level.prefix) for level in levels)) ** 2


def _step(levels: list[_Level], num_nodes: int, first_pair: int) -> Step:
    longest = max(len(level.prefix) for level in levels)
    prefix = np.zeros((len(levels), longest), np.int32)
    tokens = np.full((len(levels), *prefix.shape), NO_TOKEN, np.int32)
    tokens[0] = IMPOSSIBLE
    for i, level in enumerate(levels):
        prefix[i, : len(level.prefix)] = level.prefix
        tokens[: i + 1, i, : len(level.prefix)] = level.tokens
    widths = tuple(min(num_nodes - level.depth, len(level.prefix)) for level in levels)
    return Step(prefix, tokens, widths, first_pair)


def _pair_tables(levels: list[_Level], step: Step, above_pairs: np.ndarray | int) -> list[tuple[np.ndarray, ...]]:
    """Of each level (pair_above, pair_token, pair_depth), padded."""
    longest, tables = step.prefix.shape[1], []
    for i, level in enumerate(levels):
        above = above_pairs if i == 0 else step.first_pair + (i - 1) * longest + level.parent
        padded = np.zeros((3, longest), np.int64)
        padded[:, : len(level.prefix)] = np.stack(np.broadcast_arrays(above, level.tokens[-1], level.depth))
        tables.append(tuple(padded))
    return tables


def tree_of_best(plan: Plan, weights: jax.Array, pairs: jax.Array, tokens: jax.Array, roots: jax.Array) -> DraftTree:
    """The tree of the N - 1 best of all kept prefixes.

    Args:
      plan: of the build.
      weights: [B, sum of W] float32, log probability of every kept prefix, shallow depths first.
      pairs: [B, sum of W] int32, the pair that each of them is.
      tokens: [B, L, R] int32.
      roots: [B] int32.
    """
    count = min(plan.num_nodes - 1, weights.shape[1])
    log_prob, chosen = sorted_largest(weights, count)  # `weights` has shallower depths first: so do ties
    live = log_prob > -jnp.inf
    pair = jnp.take_along_axis(pairs, chosen, axis=1, mode="clip")  # [B, count]
    above = jnp.asarray(plan.pair_above)[pair]
    kept = jnp.take_along_axis(pairs, jnp.maximum(-2 - above, 0), axis=1, mode="clip")
    flat_tokens = tokens.reshape(tokens.shape[0], -1)
    return tree_below_root(
        roots,
        jnp.take_along_axis(flat_tokens, jnp.asarray(plan.pair_token)[pair], axis=1, mode="clip"),
        # The parent is always there: it is at least as probable and comes earlier.
        place_of(jnp.where(above < -1, kept, above), pair),
        jnp.asarray(plan.pair_depth)[pair],
        log_prob,
        live,
        num_nodes=plan.num_nodes,
        max_depth=len(plan.widths),
    )


def check_num_nodes(num_nodes: int) -> None:
    if num_nodes < 1:
        raise ValueError(f"num_nodes counts the root and must be at least 1, got {num_nodes}")


def check_array(name: str, array: jax.Array, rank: int, dtype: jnp.dtype) -> None:
    if array.ndim != rank or 0 in array.shape[1:]:
        raise ValueError(f"{name} must have rank {rank} and no empty axis, got shape {array.shape}")
    if array.dtype != dtype:
        raise ValueError(f"{name} must be {jnp.dtype(dtype).name}, got {array.dtype}")


def roots_of(root_tokens: jax.Array | None, batch: int) -> jax.Array:
    if root_tokens is None:
        return jnp.zeros((batch,), jnp.int32)
    check_array("root_tokens", root_tokens, 1, jnp.int32)
    if root_tokens.shape != (batch,):
        raise ValueError(f"root_tokens must have shape ({batch},), got {root_tokens.shape}")
    return root_tokens
