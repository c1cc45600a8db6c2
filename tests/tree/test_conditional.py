"""Trees of a first-order chain against all its prefixes, written out."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tree_oracle import check_tree, log, node_prefixes

from ddtree_jax.tree import (
    build_from_top,
    chain_tree,
    conditional_chain,
    conditional_static_tree,
    conditional_tree,
    static_tree,
)

SLOTS = 3
SHAPES = [(1, 1, 2), (1, 4, 3), (2, 3, 8), (3, 3, 12), (3, 4, 90), (4, 2, 17)]  # L, K, N
jit_tree = jax.jit(conditional_tree, static_argnums=2)
jit_chain = jax.jit(conditional_chain)
jit_static = jax.jit(conditional_static_tree, static_argnums=2)


def draw(rng, depths, count, concentration=None):
    """Tokens [B, L, K] and log conditionals [B, L, K, K]; at the first depth only row 0 means anything."""
    shape = (SLOTS, depths, count, count)
    concentration = rng.choice([0.05, 0.3, 1.0, 5.0], size=shape[:3]) if concentration is None else concentration
    gamma = rng.standard_gamma(np.broadcast_to(concentration, shape[:3])[..., None], size=shape) + 1e-30
    gamma[rng.random(shape) < 0.1] = 0.0
    rows = gamma / np.maximum(gamma.sum(-1, keepdims=True), 1e-30)
    values = log(rows * rng.uniform(0.3, 1.0, size=(*shape[:2], 1, 1))).astype(np.float32)  # some mass is elsewhere
    tokens = np.argsort(rng.random((SLOTS, depths, 50)), axis=-1)[..., :count].astype(np.int32)
    return tokens, values


def prefixes(tokens, values):
    """Every possible prefix of one slot with its log probability; `values` in float64."""
    depths, count = tokens.shape
    for depth in range(1, depths + 1):
        for path in itertools.product(range(count), repeat=depth):
            weight = math.fsum(values[d, path[d - 1] if d else 0, c] for d, c in enumerate(path))
            if weight > -math.inf:
                yield tuple(int(tokens[d, c]) for d, c in enumerate(path)), weight


@settings(max_examples=24, deadline=None, derandomize=True)
@given(st.sampled_from(SHAPES), st.integers(0, 2**32 - 1))
def test_no_tree_is_more_probable(shape, seed):
    depths, count, num_nodes = shape
    tokens, values = draw(np.random.default_rng(seed), depths, count)
    tree = jax.device_get(jit_tree(jnp.asarray(tokens), jnp.asarray(values), num_nodes))
    for slot in range(SLOTS):
        check_tree(tree, slot)
        everything = dict(prefixes(tokens[slot], values[slot].astype(np.float64)))
        best = sorted(everything.values(), reverse=True)[: num_nodes - 1]
        got = np.asarray(tree.log_prob[slot, 1 : int(tree.size[slot])])
        np.testing.assert_allclose(got, best, rtol=3e-6, atol=3e-6)
        own = [everything[prefix] for prefix in node_prefixes(tree, slot)[1:]]
        np.testing.assert_allclose(got, own, rtol=3e-6, atol=3e-6)


def test_a_good_child_of_a_bad_parent():
    """Its marginal would have left the parent's brother in front: only the conditional tells."""
    values = np.full((1, 2, 2, 2), -np.inf, np.float32)
    values[0, 0, 0] = log([0.6, 0.4])
    values[0, 1] = log([[0.5, 0.5], [0.01, 0.99]])
    tokens = np.array([[[7, 8], [3, 4]]], np.int32)
    tree = conditional_tree(jnp.asarray(tokens), jnp.asarray(values), 4)
    assert node_prefixes(tree, 0) == [(), (7,), (8,), (8, 4)]
    # The walk is greedy: it stays with what it picked, and its next token is the one that follows that pick.
    values[0, 1] = log([[0.1, 0.9], [0.99, 0.01]])
    chain = conditional_chain(jnp.asarray(tokens), jnp.asarray(values), jnp.asarray([1], jnp.int32))
    assert chain.tokens.tolist() == [[1, 7, 4]]
    np.testing.assert_allclose(chain.log_prob[0], log([1, 0.6, 0.54]), rtol=1e-6)


CHOICES = ((0,), (1,), (2,), (0, 0), (0, 2), (2, 1), (0, 2, 0), (2, 1, 1))


def test_walk_and_static_tree_follow_the_picked_token():
    rng = np.random.default_rng(4)
    tokens, values = draw(rng, 3, 4, concentration=1.0)
    root = np.array([5, 6, 7], np.int32)
    chain = jax.device_get(jit_chain(jnp.asarray(tokens), jnp.asarray(values), jnp.asarray(root)))
    static = jax.device_get(jit_static(jnp.asarray(tokens), jnp.asarray(values), CHOICES, jnp.asarray(root)))
    for slot in range(SLOTS):
        last, expected = 0, [int(root[slot])]
        for depth in range(3):
            last = int(np.argmax(values[slot, depth, last]))
            expected.append(int(tokens[slot, depth, last]))
        assert chain.tokens[slot].tolist() == expected
        for prefix, choice, weight in zip(node_prefixes(static, slot)[1:], CHOICES, static.log_prob[slot, 1:]):
            last, words, total = 0, [], 0.0
            for depth, rank in enumerate(choice):
                row = values[slot, depth, last]
                last = int(np.argsort(-row, kind="stable")[rank])
                words.append(int(tokens[slot, depth, last]))
                total += float(row[last])
            assert prefix == tuple(words)
            np.testing.assert_allclose(weight, total, rtol=1e-5)


def test_equal_rows_are_marginals():
    """Where the predecessor does not matter all three trees are those of independent depths, bit by bit."""
    rng = np.random.default_rng(5)
    marginals = -np.sort(rng.exponential(size=(SLOTS, 3, 4)), axis=-1).astype(np.float32)
    tokens = np.argsort(rng.random((SLOTS, 3, 9)), axis=-1)[..., :4].astype(np.int32)
    values = np.repeat(marginals[:, :, None], 4, axis=2)
    root = jnp.asarray([1, 2, 3], jnp.int32)
    t, v, m = jnp.asarray(tokens), jnp.asarray(values), jnp.asarray(marginals)
    pairs = [
        (conditional_tree(t, v, 30, root), build_from_top(m, t, 30, root)),
        (conditional_chain(t, v, root), chain_tree(t[:, :, 0], m[:, :, 0], root)),
        (conditional_static_tree(t, v, CHOICES, root), static_tree(m, t, CHOICES, root)),
    ]
    for got, expected in pairs:
        jax.tree.map(np.testing.assert_array_equal, got, expected)


def test_refusals():
    tokens, values = (jnp.asarray(x) for x in draw(np.random.default_rng(0), 2, 3))
    root = jnp.zeros((SLOTS,), jnp.int32)
    with pytest.raises(ValueError, match=r"tokens \[B, L, K\] and log_conditional \[B, L, K, K\], got \(3, 2, 3\)"):
        conditional_tree(tokens, values[:, :, :2], 4)
    with pytest.raises(ValueError, match="log_conditional must be float32"):
        conditional_chain(tokens, values.astype(jnp.bfloat16), root)
    with pytest.raises(ValueError, match="num_nodes counts the root"):
        conditional_tree(tokens, values, 0)
    with pytest.raises(ValueError, match="3 deep and 3 ranks wide does not fit"):
        conditional_static_tree(tokens, values, CHOICES, root)
