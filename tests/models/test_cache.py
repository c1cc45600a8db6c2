"""Rows appended to a cache, also where 64-bit integers are the default."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ddtree_jax import testing
from ddtree_jax.models.cache import KVCache, append_rows


@pytest.mark.parametrize("x64", [False, True])
def test_append_rows(x64):
    config = testing.tiny_target_config(num_layers=1, sliding_windows=(None,))
    with jax.enable_x64(x64):
        cache = KVCache.empty(config, batch=2, rows=6)
        rows = jnp.arange(2 * 2 * 2 * 8, dtype=jnp.float32).reshape(2, 2, 2, 8)
        cache = append_rows(cache, ((rows, -rows),), jnp.array([2, 1], jnp.int32))
        cache = append_rows(cache, ((rows + 100, rows),), jnp.array([0, 2], jnp.int32))
    assert cache.length.tolist() == [2, 3] and cache.length.dtype == jnp.int32
    np.testing.assert_array_equal(cache.keys[0][0, :, :2], rows[0])
    np.testing.assert_array_equal(cache.keys[0][1, :, 0], rows[1, :, 0])
    np.testing.assert_array_equal(cache.keys[0][1, :, 1:3], rows[1] + 100)
