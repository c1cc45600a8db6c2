import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tree_oracle import check_tree, log, node_prefixes

from ddtree_jax.tree import accept, build_tree, chain_tree, root_tree, unpack_ancestors

jit_accept = jax.jit(accept, static_argnames="max_path")


@pytest.mark.parametrize("depths", [0, 1, 15, 31, 32, 63])
def test_chain_is_a_causal_line(depths):
    rng = np.random.default_rng(depths)
    tokens = rng.integers(0, 50, size=(2, depths)).astype(np.int32)
    log_probs = -rng.random((2, depths)).astype(np.float32)
    tree = jax.device_get(jax.jit(chain_tree)(tokens, log_probs, jnp.array([7, 8], jnp.int32)))
    assert tree.num_nodes == depths + 1
    np.testing.assert_array_equal(np.asarray(unpack_ancestors(tree))[0], np.tri(depths + 1, dtype=bool))
    for slot in range(2):
        check_tree(tree, slot)
        assert node_prefixes(tree, slot)[-1] == tuple(tokens[slot].tolist())
        assert int(tree.tokens[slot, 0]) == 7 + slot
        np.testing.assert_allclose(tree.log_prob[slot, 1:], np.cumsum(log_probs[slot]), rtol=1e-5)


def test_chain_equals_a_built_tree_of_certain_tokens():
    probs = np.eye(5)[[3, 0, 4, 1]]
    built = jax.jit(build_tree, static_argnums=1)(jnp.asarray(log(probs), jnp.float32)[None], 5)
    chain = chain_tree(jnp.array([[3, 0, 4, 1]], jnp.int32), jnp.zeros((1, 4), jnp.float32), jnp.zeros((1,), jnp.int32))
    for got, want in zip(jax.tree.leaves(chain), jax.tree.leaves(built)):
        np.testing.assert_array_equal(got, want)


def test_a_full_chain_commits_every_token_and_the_bonus():
    ones = jnp.ones((1, 15), jnp.int32)
    tree = chain_tree(ones, jnp.zeros((1, 15), jnp.float32), jnp.ones((1,), jnp.int32))
    result = jit_accept(tree, jnp.ones((1, 16), jnp.int32), max_path=16)
    assert int(result.length[0]) == 16
    np.testing.assert_array_equal(result.path[0], np.arange(16))


def test_impossible_tokens_stay_in_the_chain_without_nan():
    log_probs = jnp.array([[-1.0, -jnp.inf, jnp.nan, -1.0]], jnp.float32)
    tree = chain_tree(jnp.zeros((1, 4), jnp.int32), log_probs, jnp.zeros((1,), jnp.int32))
    np.testing.assert_array_equal(tree.log_prob[0], [0, -1, -np.inf, -np.inf, -np.inf])
    assert int(tree.size[0]) == 5


def test_root_tree():
    tree = root_tree(jnp.array([4, 9], jnp.int32))
    np.testing.assert_array_equal(tree.tokens, [[4], [9]])
    np.testing.assert_array_equal(tree.ancestors, np.ones((2, 1, 1), np.uint32))
    np.testing.assert_array_equal(tree.size, [1, 1])
    result = jit_accept(tree, jnp.array([[5], [6]], jnp.int32), max_path=1)
    np.testing.assert_array_equal(result.length, [1, 1])
    np.testing.assert_array_equal(result.tokens, [[5], [6]])


def test_errors():
    tokens, log_probs, roots = jnp.zeros((2, 3), jnp.int32), jnp.zeros((2, 3), jnp.float32), jnp.zeros((2,), jnp.int32)
    with pytest.raises(ValueError, match="expected tokens"):
        chain_tree(tokens, log_probs[:, :2], roots)
    with pytest.raises(ValueError, match="expected tokens"):
        chain_tree(tokens, log_probs, roots[:1])
    with pytest.raises(ValueError, match="float32 log_probs"):
        chain_tree(tokens, tokens, roots)
    with pytest.raises(ValueError, match="root_tokens"):
        root_tree(log_probs)
