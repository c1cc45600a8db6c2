import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ddtree_jax.tree import gather_path, gather_path_rows, write_rows


def move(cache, tree_rows, path, lengths):
    """In a cache of two layers, of which the second gets the opposite."""
    rows = gather_path_rows(tree_rows, path)
    first, second = write_rows(jnp.stack([cache, -cache]), jnp.stack([rows, -rows]), lengths)
    np.testing.assert_array_equal(first, -second)
    return first


def random_paths(rng, slots, num_nodes, length):
    """Rising node indices from the root, then the last one repeated, as `accept` gives them."""
    paths = np.zeros((slots, length), np.int32)
    for row in paths:
        accepted = rng.integers(1, length + 1)
        row[1:accepted] = np.sort(rng.choice(np.arange(1, num_nodes), size=accepted - 1, replace=False))
        row[accepted:] = row[accepted - 1]
    return paths


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("slots", "num_nodes", "length"), [(1, 1, 1), (3, 16, 5), (4, 33, 16)])
def test_rows_land_after_the_live_ones(slots, num_nodes, length, dtype):
    heads, capacity, head_dim = 2, 40, 8
    rng = np.random.default_rng(num_nodes)
    cache = jnp.asarray(rng.normal(size=(slots, heads, capacity, head_dim)), dtype)
    tree_rows = jnp.asarray(rng.normal(size=(slots, heads, num_nodes, head_dim)), dtype)
    path = random_paths(rng, slots, num_nodes, length)
    lengths = rng.integers(0, capacity - length + 1, size=slots).astype(np.int32)
    lengths[0] = capacity - length  # the last place that fits
    expected = np.array(cache)
    for slot in range(slots):
        for step in range(length):
            expected[slot, :, lengths[slot] + step] = np.asarray(tree_rows)[slot, :, path[slot, step]]
    moved = move(cache, tree_rows, path, lengths)
    assert moved.dtype == dtype
    np.testing.assert_array_equal(np.asarray(moved), expected)


def test_the_second_branch_moves_to_the_front():
    # Start 11 rows; nodes 0, 3, 4 are accepted, so node rows 3 and 4 become cache rows 12 and 13.
    tree_rows = jnp.arange(7, dtype=jnp.float32).reshape(1, 1, 7, 1)
    cache = jnp.full((1, 1, 20, 1), -1, jnp.float32)
    path, start = jnp.array([[0, 3, 4, 4]], jnp.int32), jnp.array([11], jnp.int32)
    moved = np.asarray(move(cache, tree_rows, path, start)).ravel()
    np.testing.assert_array_equal(moved[11:15], [0, 3, 4, 4])
    assert (np.delete(moved, range(11, 15)) == -1).all()


@pytest.mark.parametrize("tail", [(), (3,), (2, 3)])
def test_gather_path(tail):
    rng = np.random.default_rng(len(tail))
    x = rng.normal(size=(3, 10, *tail)).astype(np.float32)
    path = random_paths(rng, 3, 10, 4)
    got = jax.jit(gather_path)(x, path)
    np.testing.assert_array_equal(got, np.stack([x[slot, path[slot]] for slot in range(3)]))


def test_errors():
    cache, rows, lengths = jnp.zeros((1, 2, 3, 8, 4)), jnp.zeros((1, 2, 3, 5, 4)), jnp.zeros((2,), jnp.int32)
    path = jnp.zeros((2, 2), jnp.int32)
    with pytest.raises(ValueError, match=r"expected \[M, B, K, C, D\]"):
        write_rows(cache[0], rows, lengths)
    with pytest.raises(ValueError, match="does not fit rows"):
        write_rows(cache, rows[:, :, :2], lengths)
    with pytest.raises(ValueError, match="lengths"):
        write_rows(cache, rows, lengths[:1])
    with pytest.raises(ValueError, match="one dtype"):
        write_rows(cache, rows.astype(jnp.bfloat16), lengths)
    with pytest.raises(ValueError, match="9 rows do not fit"):
        write_rows(cache, jnp.zeros((1, 2, 3, 9, 4)), lengths)
    with pytest.raises(ValueError, match="expected tree_rows"):
        gather_path_rows(rows[0], path[:1])
    with pytest.raises(ValueError, match="expected x"):
        gather_path(rows[0], path[:1])
