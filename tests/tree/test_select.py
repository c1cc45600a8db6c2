import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ddtree_jax.tree import select
from ddtree_jax.tree.select import (
    FAST_TOP_K,
    Search,
    gpu_search,
    largest_by_counting,
    largest_by_keys,
    sorted_largest,
    top_log_probs,
    top_tokens,
)

SEARCHES = [
    None,
    Search(),
    Search((4,), ("top_k",)),
    Search((7,), ("counting", "repeated")),
    Search((4, 3), ("repeated",)),
    Search((2, 2, 2), ("counting",)),
]


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("k", [1, 7, FAST_TOP_K, FAST_TOP_K + 1, 300, 1000])
def test_top_tokens_match_a_sort(k, search):
    rng = np.random.default_rng(k)
    log_probs = -rng.permuted(np.tile(np.arange(1000, dtype=np.float32), (2, 3, 1)), axis=2)  # no ties
    values, tokens = top_tokens(jnp.asarray(log_probs), k, search=search)
    assert values.shape == tokens.shape == (2, 3, k)
    assert values.dtype == jnp.float32 and tokens.dtype == jnp.int32
    np.testing.assert_array_equal(values, -np.sort(-log_probs, axis=2)[:, :, :k])
    np.testing.assert_array_equal(tokens, np.argsort(-log_probs, axis=2)[:, :, :k])


@pytest.mark.parametrize("search", SEARCHES)
def test_blocks_give_what_the_whole_gives(search):
    """All of the best side by side, a last block that is not full, and fewer possible tokens than asked for."""
    values = np.full((1, 2, 1001), -np.inf, np.float32)
    values[0, 0, 200:230] = -np.arange(30, dtype=np.float32)
    values[0, 1, [1000, 3, 500]] = [-1.0, -2.0, -3.0]
    best, tokens = top_tokens(jnp.asarray(values), 20, search=search)
    np.testing.assert_array_equal(best[0, 0], -np.arange(20, dtype=np.float32))
    np.testing.assert_array_equal(tokens[0, 0], 200 + np.arange(20))
    np.testing.assert_array_equal(best[0, 1, :4], [-1.0, -2.0, -3.0, -np.inf])
    np.testing.assert_array_equal(tokens[0, 1, :3], [1000, 3, 500])
    assert np.all((np.asarray(tokens) >= 0) & (np.asarray(tokens) < 1001))


def test_a_block_that_a_later_selection_finds_again_yields_nothing():
    """Of fewer possible blocks than asked for, the second selection takes some that the first one struck out."""
    values = np.full((1, 1, 3000), -np.inf, np.float32)
    values[0, 0, :6] = -np.arange(6, dtype=np.float32)
    best, tokens = top_tokens(jnp.asarray(values), 2 * FAST_TOP_K, search=Search((4,), ("repeated",)))
    np.testing.assert_array_equal(best[0, 0, :7], [0.0, -1.0, -2.0, -3.0, -4.0, -5.0, -np.inf])
    np.testing.assert_array_equal(tokens[0, 0, :6], np.arange(6))


def test_a_list_too_long_to_be_counted_is_searched_in_another_way(monkeypatch):
    log_probs = -jnp.asarray(np.random.default_rng(0).permutation(500).astype(np.float32))[None, None]
    monkeypatch.setattr(select, "LONGEST_COUNTED", 499)
    monkeypatch.setitem(select.SELECTIONS, "counting", None)
    values, _ = top_tokens(log_probs, 150, search=Search((), ("counting",)))
    np.testing.assert_array_equal(values[0, 0], -np.arange(150))


@pytest.mark.parametrize("size, k, blocks", [(151936, 1, ()), (151936, 63, (16, 16)), (151936, 255, (4, 4, 4, 4))])
def test_what_gpus_do(size, k, blocks):
    """The widths that the lists were made for, and the result of what runs there."""
    search = gpu_search(size, k)
    assert search.blocks == blocks
    logits = jnp.asarray(np.random.default_rng(k).normal(size=(1, 2, size)).astype(np.float32))
    for top in (top_tokens, top_log_probs):
        values, tokens = top(-jnp.abs(logits), k, search=search)
        expected, _ = top(-jnp.abs(logits), k, search=Search())
        np.testing.assert_allclose(values, expected, rtol=1e-6)
        assert all(len(set(row)) == k for row in np.asarray(tokens)[0].tolist())


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("k", [1, 20, 150])
def test_top_of_logits_is_the_top_of_their_log_softmax(k, search):
    logits = jnp.asarray(np.random.default_rng(k).normal(size=(2, 3, 1000)).astype(np.float32) * 7 + 20)
    values, tokens = top_log_probs(logits, k, search=search)
    expected, expected_tokens = top_tokens(jax.nn.log_softmax(logits), k)
    np.testing.assert_allclose(values, expected, rtol=2e-6, atol=2e-6)
    np.testing.assert_array_equal(tokens, expected_tokens)


@pytest.mark.parametrize("search", [None, Search((), ("counting",)), Search((2,), ("counting",))])
def test_logits_that_are_no_numbers(search):
    """As of log_softmax: a NaN, an infinity or -inf alone leave no possible token in their row, -inf only itself."""
    logits = np.zeros((1, 5, 9), np.float32)
    logits[0, 0, 3:], logits[0, 1, 3], logits[0, 2], logits[0, 3, 1:] = np.nan, np.inf, -np.inf, -np.inf
    values, tokens = top_log_probs(jnp.asarray(logits), 2, search=search)
    np.testing.assert_array_equal(values[0, :4], [[-np.inf] * 2] * 3 + [[0.0, -np.inf]])
    np.testing.assert_allclose(values[0, 4], -np.log(9), rtol=1e-6)
    assert tokens[0, 3, 0] == 0 and tokens.min() >= 0 and tokens.max() < 9


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
    with pytest.raises(ValueError, match="logits must be .* float32"):
        top_log_probs(log_probs.astype(jnp.bfloat16), 2)
    with pytest.raises(ValueError, match="float32"):
        top_tokens(log_probs.astype(jnp.bfloat16), 2)
    with pytest.raises(ValueError, match=r"\[B, L, V\]"):
        top_tokens(log_probs[0], 2)
