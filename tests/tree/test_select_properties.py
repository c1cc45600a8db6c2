"""Every way to pick the most probable tokens against numpy, on rows of many ties and values that are no numbers."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree_jax.tree.select import FAST_TOP_K, SELECTIONS, Search, top_log_probs, top_tokens

# V and k: widths of blocks divide some, and where k is near V no blocks are used.
SIZES = [(1, 1), (5, 5), (96, 1), (97, 6), (97, 96), (700, FAST_TOP_K + 20)]
BLOCKS = [(), (2,), (8,), (4, 2), (2, 2, 3)]
searches = st.builds(
    Search, st.sampled_from(BLOCKS), st.sampled_from([*((name,) for name in SELECTIONS), ("counting", "repeated")])
)
jit_top_tokens = jax.jit(top_tokens, static_argnames=("k", "search"))
jit_top_log_probs = jax.jit(top_log_probs, static_argnames=("k", "search"))


def rows(seed, size, high):
    """[2, 2, V] multiples of 1/4 up to `high`, some impossible and some NaN; now and then hardly any is possible."""
    rng = np.random.default_rng(seed)
    values = np.float32(high) - rng.integers(0, rng.choice([1, 3, 400]), size=(2, 2, size)).astype(np.float32) / 4
    values[rng.random(values.shape) < 0.1] = -0.0
    values[rng.random(values.shape) < rng.choice([0.0, 0.3, 0.99, 1.0], size=(2, 2, 1))] = -np.inf
    return values, rng.random(values.shape) < 0.1


def check(values, tokens, exact, k):
    """values and tokens are k largest of `exact` [..., V], which has no NaN; no possible token is there twice."""
    values, tokens = np.asarray(values), np.asarray(tokens)
    assert tokens.min() >= 0 and tokens.max() < exact.shape[-1]
    np.testing.assert_allclose(values, -np.sort(-exact, axis=-1)[..., :k], rtol=1e-6, atol=1e-6)
    own = np.take_along_axis(exact, tokens, axis=-1)
    possible = values > -np.inf
    np.testing.assert_allclose(values[possible], own[possible], rtol=1e-6, atol=1e-6)
    for row, live in zip(tokens.reshape(-1, k), possible.reshape(-1, k)):
        assert len(set(row[live])) == live.sum()


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.sampled_from(SIZES), searches, st.integers(0, 2**32 - 1))
def test_top_tokens(sizes, search, seed):
    size, k = sizes
    values, nan = rows(seed, size, high=0)
    got = jit_top_tokens(jnp.asarray(np.where(nan, np.nan, values)), k=k, search=search)
    check(*got, np.where(nan, -np.inf, values), k)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.sampled_from(SIZES), searches, st.integers(0, 2**32 - 1))
def test_top_log_probs(sizes, search, seed):
    size, k = sizes
    logits, _ = rows(seed, size, high=50)
    got = jit_top_log_probs(jnp.asarray(logits), k=k, search=search)
    peak = np.maximum(logits.max(axis=-1, keepdims=True), -1e30).astype(np.float64)
    total = np.exp(logits - peak).sum(axis=-1, keepdims=True)
    check(*got, logits - peak - np.log(np.maximum(total, 1e-300)), k)
