import jax.numpy as jnp
import numpy as np
import pytest

from ddtree_jax.tree.select import FAST_TOP_K, largest_by_counting, largest_by_keys, sorted_largest, top_tokens


@pytest.mark.parametrize("chunks", [None, 3, 7])
@pytest.mark.parametrize("k", [1, 7, FAST_TOP_K, FAST_TOP_K + 1, 300, 400])
def test_top_tokens_match_a_sort(k, chunks):
    rng = np.random.default_rng(k)
    log_probs = -rng.permuted(np.tile(np.arange(400, dtype=np.float32), (2, 3, 1)), axis=2)  # no ties
    values, tokens = top_tokens(jnp.asarray(log_probs), k, chunks=chunks)
    assert values.shape == tokens.shape == (2, 3, k)
    assert values.dtype == jnp.float32 and tokens.dtype == jnp.int32
    np.testing.assert_array_equal(values, -np.sort(-log_probs, axis=2)[:, :, :k])
    np.testing.assert_array_equal(tokens, np.argsort(-log_probs, axis=2)[:, :, :k])


def test_pieces_give_what_the_whole_gives():
    """All of the best in one piece, a last piece that is not full, and fewer possible tokens than asked for."""
    values = np.full((1, 2, 1000), -np.inf, np.float32)
    values[0, 0, 200:230] = -np.arange(30, dtype=np.float32)
    values[0, 1, [999, 3, 500]] = [-1.0, -2.0, -3.0]
    best, tokens = top_tokens(jnp.asarray(values), 20, chunks=16)
    np.testing.assert_array_equal(best[0, 0], -np.arange(20, dtype=np.float32))
    np.testing.assert_array_equal(tokens[0, 0], 200 + np.arange(20))
    np.testing.assert_array_equal(best[0, 1, :4], [-1.0, -2.0, -3.0, -np.inf])
    np.testing.assert_array_equal(tokens[0, 1, :3], [999, 3, 500])
    assert np.all(np.asarray(tokens) < 1000)


def test_equal_tokens_are_taken_once_across_the_rounds_of_selection():
    values, tokens = top_tokens(jnp.full((1, 1, 300), -1.0, jnp.float32), 300)
    np.testing.assert_array_equal(values, np.full((1, 1, 300), -1.0))
    np.testing.assert_array_equal(np.sort(np.asarray(tokens)[0, 0]), np.arange(300))


def test_nan_and_rounding_are_cleaned():
    values, tokens = top_tokens(jnp.array([[[jnp.nan, -2.0, 1e-7, -jnp.inf]]], jnp.float32), 4)
    np.testing.assert_array_equal(values, [[[0.0, -2.0, -np.inf, -np.inf]]])
    np.testing.assert_array_equal(tokens[0, 0, :2], [2, 1])


@pytest.mark.parametrize("count", [1, 5, 60])
def test_short_lists_are_stable(count):
    rng = np.random.default_rng(count)
    values = -rng.integers(0, 6, size=(3, 60)).astype(np.float32)
    values[values == -5] = -np.inf
    best, position = sorted_largest(jnp.asarray(values), count)
    expected = np.argsort(-values, axis=1, kind="stable")[:, :count]
    np.testing.assert_array_equal(position, expected)
    np.testing.assert_array_equal(best, np.take_along_axis(values, expected, axis=1))
    assert position.dtype == jnp.int32


@pytest.mark.parametrize("select", [largest_by_keys, largest_by_counting])
@pytest.mark.parametrize("num_keys", [1, 3])
def test_order_by_several_keys(select, num_keys):
    keys = -np.random.default_rng(num_keys).integers(0, 3, size=(num_keys, 2, 4, 50)).astype(np.float32)
    keys[keys == -2] = -np.inf
    position = select([jnp.asarray(key) for key in keys], 20)
    assert position.shape == (2, 4, 20) and position.dtype == jnp.int32
    np.testing.assert_array_equal(position, np.lexsort(-keys[::-1], axis=-1)[..., :20])  # stable; the last key leads


def test_errors():
    log_probs = jnp.zeros((1, 2, 5), jnp.float32)
    for k in (0, 6):
        with pytest.raises(ValueError, match="between 1 and the vocabulary size 5"):
            top_tokens(log_probs, k)
    with pytest.raises(ValueError, match="float32"):
        top_tokens(log_probs.astype(jnp.bfloat16), 2)
    with pytest.raises(ValueError, match=r"\[B, L, V\]"):
        top_tokens(log_probs[0], 2)
