"""The builder against two independent oracles on random marginals, small enough to enumerate everything."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tree_oracle import all_prefixes, check_tree, heap_tree, log, node_prefixes, ordered_prefixes

from ddtree_jax.tree import build_from_top, build_tree

SLOTS = 5
# L, V, N: from the root alone to more nodes than there are prefixes. Every shape is compiled once.
SHAPES = [
    (1, 1, 2),
    (1, 5, 4),
    (2, 2, 7),
    (2, 5, 12),
    (3, 3, 10),
    (4, 2, 17),
    (4, 3, 33),
    (4, 5, 70),
    (4, 5, 784),
]
jit_build = jax.jit(build_tree, static_argnums=1)
jit_from_top = jax.jit(build_from_top, static_argnums=2)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.sampled_from(SHAPES), st.integers(0, 2**32 - 1))
def test_no_tree_is_more_probable(shape, seed):
    depths, vocab, num_nodes = shape
    rng = np.random.default_rng(seed)
    concentration = rng.choice([0.05, 0.3, 1.0, 5.0], size=(SLOTS, depths))
    gamma = rng.standard_gamma(concentration[:, :, None], size=(SLOTS, depths, vocab)) + 1e-30
    gamma[rng.random(gamma.shape) < 0.1] = 0.0  # impossible tokens, sometimes a whole depth
    log_probs = log(gamma / np.maximum(gamma.sum(axis=2, keepdims=True), 1e-30)).astype(np.float32)
    tree = jax.device_get(jit_build(jnp.asarray(log_probs), num_nodes))
    for slot in range(SLOTS):
        exact = log_probs[slot].astype(np.float64)
        check_tree(tree, slot, exact)
        got = np.asarray(tree.log_prob[slot, 1 : int(tree.size[slot])], np.float64)
        by_enumeration = sorted((w for _, w in all_prefixes(exact)), reverse=True)[: num_nodes - 1]
        by_heap = [w for _, w in heap_tree(exact, num_nodes - 1)]
        assert len(got) == len(by_enumeration) == len(by_heap)
        np.testing.assert_allclose(got, by_enumeration, rtol=2e-6, atol=2e-6)
        np.testing.assert_allclose(got, by_heap, rtol=2e-6, atol=2e-6)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.sampled_from(SHAPES), st.integers(0, 2**32 - 1))
def test_ties_come_out_in_the_documented_order(shape, seed):
    # Multiples of 1/8 add without rounding, so ties are exact and frequent: among siblings, across branches, and
    # (tokens of probability 1) between parents and children. The whole order is then determined.
    depths, vocab, num_nodes = shape
    rng = np.random.default_rng(seed)
    eighths = -rng.integers(0, rng.choice([2, 4, 30]), size=(SLOTS, depths, vocab)) / 8.0
    eighths[rng.random(eighths.shape) < 0.05] = -np.inf
    values = -np.sort(-eighths, axis=2)
    tokens = rng.permuted(np.broadcast_to(np.arange(vocab), values.shape), axis=2).astype(np.int32)
    tree = jax.device_get(jit_from_top(jnp.asarray(values, jnp.float32), jnp.asarray(tokens), num_nodes))
    for slot in range(SLOTS):
        check_tree(tree, slot)
        expected = ordered_prefixes(values[slot])[: num_nodes - 1]
        assert node_prefixes(tree, slot)[1:] == [
            tuple(int(tokens[slot, d, r]) for d, r in enumerate(ranks)) for ranks, _ in expected
        ]
        np.testing.assert_array_equal(tree.log_prob[slot, 1 : int(tree.size[slot])], [w for _, w in expected])
