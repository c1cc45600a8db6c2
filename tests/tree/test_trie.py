"""Merged continuations against a dictionary of prefixes in plain Python."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tree_oracle import check_tree, node_prefixes

from ddtree_jax.tree import trie_tree
from ddtree_jax.tree.trie import GOES_ON

jit_trie = jax.jit(trie_tree, static_argnums=2)


def prefixes(tokens, weights, depths):
    """Probability of every prefix of one slot."""
    out, total = {}, weights.sum()
    for row, weight in zip(tokens.tolist(), weights.tolist()):
        for depth in range(1, depths + 1) if weight > 0 else ():
            key = tuple(row[:depth])
            out[key] = out.get(key, 0.0) + weight / total * GOES_ON**depth
    return out


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_the_most_probable_prefixes_are_kept(data):
    # Few shapes, so that little is compiled; few tokens, so that much is merged.
    width, depths, num_nodes = data.draw(st.sampled_from([(1, 4, 5), (5, 3, 8), (6, 4, 40)]))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    tokens = rng.integers(0, 3, (2, width, depths)).astype(np.int32)
    weights = rng.uniform(0.1, 1, (2, width)).astype(np.float32)
    weights[rng.random((2, width)) < 0.3] = 0
    roots = np.array([7, 8], np.int32)
    tree = jit_trie(jnp.asarray(tokens), jnp.asarray(weights), num_nodes, jnp.asarray(roots))
    for slot in range(2):
        check_tree(tree, slot)
        expected = prefixes(tokens[slot], weights[slot].astype(np.float64), depths)
        found = node_prefixes(tree, slot)[1:]
        size = int(tree.size[slot])
        assert size == 1 + min(num_nodes - 1, len(expected)) and len(set(found)) == len(found)
        assert int(tree.tokens[slot, 0]) == roots[slot]
        got = np.exp(np.asarray(tree.log_prob[slot, 1:size], np.float64))
        np.testing.assert_allclose(got, [expected[p] for p in found], rtol=1e-5)
        np.testing.assert_allclose(got, sorted(expected.values(), reverse=True)[: size - 1], rtol=1e-5)


def test_one_continuation_is_a_chain():
    tree = jit_trie(jnp.array([[[4, 4, 5]]], jnp.int32), jnp.ones((1, 1), jnp.float32), 4, jnp.array([1], jnp.int32))
    assert tree.tokens.tolist() == [[1, 4, 4, 5]] and tree.parent.tolist() == [[0, 0, 1, 2]]


def test_no_continuation_is_the_root_alone():
    tree = jit_trie(jnp.zeros((1, 3, 2), jnp.int32), jnp.zeros((1, 3), jnp.float32), 4, jnp.array([5], jnp.int32))
    check_tree(tree, 0)
    assert tree.size.tolist() == [1] and tree.tokens.tolist() == [[5, 0, 0, 0]]


def test_refusals():
    tokens, weights, roots = jnp.zeros((1, 2, 3), jnp.int32), jnp.ones((1, 2), jnp.float32), jnp.zeros((1,), jnp.int32)
    for args, message in (
        ((tokens, weights, 1, roots), "num_nodes counts the root"),
        ((tokens[0], weights, 4, roots), r"tokens \[B, W, L\]"),
        ((tokens, weights[:, :1], 4, roots), r"weights \[B, W\]"),
        ((tokens, weights, 4, jnp.zeros((2,), jnp.int32)), r"root_tokens \[1\]"),
        ((tokens, weights.astype(jnp.float16), 4, roots), "float16"),
    ):
        with pytest.raises(ValueError, match=message):
            trie_tree(*args)
