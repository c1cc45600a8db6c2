import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tree_oracle import naive_visible

from ddtree_jax.tree import ancestor_bits, build_tree, num_words, unpack_ancestors
from pallas_kernels.tree_attention.masks import pack_bits, unpack_bits

jit_ancestor_bits = jax.jit(ancestor_bits, static_argnums=2)
jit_pack = jax.jit(pack_bits)
jit_unpack = jax.jit(unpack_bits, static_argnums=1)

WIDTHS = (1, 2, 31, 32, 33, 64, 256)


def random_parents(rng, num_nodes, reach):
    """Random parents-first trees; a small reach gives deep trees, a large one bushy ones."""
    index = np.arange(num_nodes)
    return np.maximum(index - rng.integers(1, reach + 1, size=num_nodes), 0).astype(np.int32)


@pytest.mark.parametrize("num_nodes", WIDTHS)
def test_ancestor_bits_match_a_walk_to_the_root(num_nodes):
    rng = np.random.default_rng(num_nodes)
    parent = np.stack([random_parents(rng, num_nodes, reach) for reach in (1, 3, num_nodes)])
    size = np.array([num_nodes, max(1, num_nodes // 2), num_nodes], np.int32)
    bits = jit_ancestor_bits(jnp.asarray(parent), jnp.asarray(size), num_nodes - 1)
    assert bits.shape == (3, num_nodes, num_words(num_nodes)) and bits.dtype == jnp.uint32
    visible = np.asarray(jit_unpack(bits, num_nodes))
    for slot in range(3):
        np.testing.assert_array_equal(visible[slot], naive_visible(parent[slot], size[slot]))


@pytest.mark.parametrize("max_depth", [1, 2, 3, 4, 7, 8, 15, 16])
def test_max_depth_is_a_sharp_promise(max_depth):
    chain = jnp.maximum(jnp.arange(max_depth + 1, dtype=jnp.int32) - 1, 0)[None]
    bits = jit_ancestor_bits(chain, jnp.array([max_depth + 1], jnp.int32), max_depth)
    np.testing.assert_array_equal(np.asarray(jit_unpack(bits, max_depth + 1))[0], np.tri(max_depth + 1, dtype=bool))


@pytest.mark.parametrize("num_nodes", WIDTHS)
def test_packing_puts_node_j_in_bit_j_of_word_j_over_32(num_nodes):
    flags = np.random.default_rng(0).random((2, 3, num_nodes)) < 0.5
    words = np.asarray(jit_pack(jnp.asarray(flags)))
    for j in range(num_nodes):
        np.testing.assert_array_equal((words[..., j // 32] >> (j % 32)) & 1, flags[..., j])
    np.testing.assert_array_equal(np.asarray(jit_unpack(jnp.asarray(words), num_nodes)), flags)


def test_padding_sees_only_itself():
    parent = jnp.zeros((1, 40), jnp.int32)
    visible = np.asarray(jit_unpack(ancestor_bits(parent, jnp.array([3], jnp.int32), 4), 40))[0]
    np.testing.assert_array_equal(visible[3:], np.eye(40, dtype=bool)[3:])


def test_errors():
    parent, size = jnp.zeros((2, 4), jnp.int32), jnp.ones((2,), jnp.int32)
    with pytest.raises(ValueError, match="parent"):
        ancestor_bits(parent[0], size, 3)
    with pytest.raises(ValueError, match="size"):
        ancestor_bits(parent, size[:1], 3)
    with pytest.raises(ValueError, match="max_depth"):
        ancestor_bits(parent, size, -1)


def test_the_tree_is_a_frozen_pytree():
    tree = jax.jit(build_tree, static_argnums=1)(jnp.log(jnp.full((2, 2, 3), 1 / 3, jnp.float32)), 5)
    assert len(jax.tree.leaves(tree)) == 6
    with pytest.raises(dataclasses.FrozenInstanceError):
        tree.size = tree.size
    same = jax.jit(lambda t: t)(tree)
    assert same.num_nodes == 5
    np.testing.assert_array_equal(unpack_ancestors(same), unpack_ancestors(tree))
    assert {f.name: str(getattr(tree, f.name).dtype) for f in dataclasses.fields(tree)} == {
        "tokens": "int32",
        "parent": "int32",
        "depth": "int32",
        "log_prob": "float32",
        "size": "int32",
        "ancestors": "uint32",
    }
