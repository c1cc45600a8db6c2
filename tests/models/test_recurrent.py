"""Recurrent layers over trees: who follows whom, what a commit moves on, and what nothing may touch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ddtree_jax import testing
from ddtree_jax.models import cache as cache_lib
from ddtree_jax.models import recurrent
from ddtree_jax.models.cache import KVCache
from ddtree_jax.models.decoder import Decoder
from ddtree_jax.models.recurrent import RecurrentRows, RecurrentState, RecurrentWeights
from ddtree_jax.tree import ancestor_bits, gather_path, static_bits
from pallas_kernels.gated_delta_tree import MixerWeights

CONFIG = testing.tiny_hybrid_config()
LAYERS, BATCH, KERNEL = 3, 2, CONFIG.delta.conv_kernel
CHANNELS, HEADS = CONFIG.delta.conv_channels, CONFIG.delta.num_value_heads
append_rows, commit_rows = jax.jit(cache_lib.append_rows), jax.jit(cache_lib.commit_rows)


def random_parents(rng, nodes, size):
    """[nodes]: a random tree of `size` live nodes, parents before children; padding has parent 0, as in a DraftTree."""
    parent = np.zeros(nodes, np.int32)
    for i in range(1, size):
        parent[i] = rng.integers(0, i) if rng.random() < 0.5 else i - 1
    return parent


@pytest.mark.parametrize("nodes,size", [(1, 1), (33, 33), (64, 50)])
def test_parents_and_conv_rows(nodes, size):
    rng = np.random.default_rng(nodes)
    parent = np.stack([random_parents(rng, nodes, size) for _ in range(BATCH)])
    sizes = jnp.full((BATCH,), size, jnp.int32)
    bits = jax.jit(ancestor_bits, static_argnums=2)(jnp.asarray(parent), sizes, nodes)
    # Roots and padding follow the committed text.
    expected = np.where((np.arange(nodes) == 0) | (np.arange(nodes) >= size), -1, parent)
    np.testing.assert_array_equal(jax.jit(recurrent.parents)(bits), expected)

    rows = np.asarray(jax.jit(recurrent.conv_rows, static_argnums=1)(bits, KERNEL))
    assert rows.shape == (BATCH, nodes, KERNEL)
    for b in range(BATCH):
        for i in range(nodes):
            line, node = [], i
            while node >= 0:
                line.insert(0, KERNEL - 1 + node)
                node = expected[b, node]
            assert rows[b, i].tolist() == (list(range(KERNEL - 1)) + line)[-KERNEL:]


def random_state(rng):
    empty = RecurrentState.empty(CONFIG.delta, layers=LAYERS, batch=BATCH, dtype=jnp.float32)
    return jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape), x.dtype), empty)


def random_rows(rng, nodes):
    shape = BATCH, nodes, CHANNELS + 2 * HEADS
    return [RecurrentRows(jnp.asarray(rng.standard_normal(shape), jnp.float32)) for _ in range(LAYERS)]


def random_weights(rng):
    def one():
        return MixerWeights(
            conv=jnp.asarray(rng.standard_normal((CHANNELS, KERNEL)), jnp.float32),
            decay_rate_log=jnp.asarray(rng.uniform(-5, 1, HEADS), jnp.float32),
            decay_bias=jnp.asarray(rng.standard_normal(HEADS), jnp.float32),
            norm=None,
        )

    return [one() for _ in range(LAYERS)]


def stacked(weights):
    return RecurrentWeights.of(weights, CONFIG.delta)


def reference(state, rows, weights, path, count):
    """The definition in float64, slot by slot and token by token."""
    window, states = (np.asarray(x, np.float64) for x in (state.window, state.states))
    window, states = window.copy(), states.copy()
    keys, group = CONFIG.delta.key_size, HEADS // CONFIG.delta.num_key_heads
    for m, layer in enumerate(zip(rows, weights)):
        inputs, weight, rate_log, bias = (np.asarray(x, np.float64) for x in jax.tree.leaves(layer))
        for b in range(BATCH):
            for node in path[b][: count[b]]:
                x, (strength, decay) = inputs[b, node, :CHANNELS], np.split(inputs[b, node, CHANNELS:], 2)
                taps = np.concatenate([window[m, b], x[None]])
                window[m, b] = taps[1:]
                mixed = np.sum(taps.T * weight, axis=1)
                mixed = mixed / (1 + np.exp(-mixed))
                k = mixed[keys : 2 * keys].reshape(-1, CONFIG.delta.key_head_dim)
                k = np.repeat(k / np.sqrt(np.sum(k * k, axis=-1, keepdims=True) + 1e-6), group, axis=0)
                v = mixed[2 * keys :].reshape(HEADS, -1)
                s = states[m, b] * np.exp(-np.exp(rate_log) * np.log1p(np.exp(decay + bias)))[:, None, None]
                u = (v - np.einsum("hkv,hk->hv", s, k)) / (1 + np.exp(-strength))[:, None]
                states[m, b] = s + k[:, :, None] * u[:, None, :]
    return window, states


@pytest.mark.parametrize("count", [(9, 4), (1, 9), (0, 2)])
def test_a_commit_follows_the_path(count):
    rng = np.random.default_rng(sum(count))
    state, rows, weights = random_state(rng), random_rows(rng, 20), random_weights(rng)
    path = np.stack([np.sort(rng.choice(20, 9, replace=False)) for _ in range(BATCH)]).astype(np.int32)
    kept = [r.replace(inputs=gather_path(r.inputs, jnp.asarray(path))) for r in rows]
    after = jax.jit(recurrent.replay)(state, kept, stacked(weights), jnp.asarray(count, jnp.int32))
    window, states = reference(state, rows, weights, path, count)
    np.testing.assert_array_equal(after.window, window.astype(np.float32))
    assert np.linalg.norm(after.states - states) <= 1e-6 * np.linalg.norm(states)


@pytest.mark.parametrize("count", [(150, 64), (1, 65), (0, 128)])
def test_a_chunk_of_a_prompt_is_a_long_path(count):
    rng = np.random.default_rng(sum(count))
    state, rows, weights = random_state(rng), random_rows(rng, 150), random_weights(rng)
    after = jax.jit(recurrent.append)(state, rows, stacked(weights), jnp.asarray(count, jnp.int32))
    window, states = reference(state, rows, weights, np.arange(150)[None].repeat(BATCH, 0), count)
    np.testing.assert_array_equal(after.window, window.astype(np.float32))
    assert np.linalg.norm(after.states - states) <= 1e-6 * np.linalg.norm(states)


@pytest.mark.parametrize("kind", ["append", "replay"])
def test_a_count_of_zero_leaves_every_bit(kind):
    """Whatever the rows hold: a finished slot's rows are of no text."""
    rng = np.random.default_rng(3)
    state, rows, weights = random_state(rng), random_rows(rng, 8), stacked(random_weights(rng))
    rows = [r.replace(inputs=r.inputs.at[0].set(jnp.nan)) for r in rows]
    after = jax.jit(getattr(recurrent, kind))(state, rows, weights, jnp.asarray([0, 3], jnp.int32))
    np.testing.assert_array_equal(after.window[:, 0], state.window[:, 0])
    np.testing.assert_array_equal(after.states[:, 0], state.states[:, 0])
    assert not np.array_equal(after.states[:, 1], state.states[:, 1])
    assert np.isfinite(after.states).all()


@pytest.fixture(scope="module")
def decoder():
    target = testing.tiny_target(seed=2, hybrid=True, num_layers=2, sliding_windows=(None,) * 2, delta_layers=(0,))
    module = Decoder(target.config)

    @jax.jit
    def run(tokens, parent, cache):
        size = jnp.full((BATCH,), parent.shape[1], jnp.int32)
        bits = ancestor_bits(parent, size, parent.shape[1])
        positions = cache.length[:, None] + jnp.sum(jax.lax.population_count(bits), axis=-1).astype(jnp.int32) - 1
        return module.apply({"params": target.params}, tokens, positions, bits, cache)

    chain = jnp.asarray(np.maximum(np.arange(24) - 1, 0), jnp.int32)
    prompt = jnp.asarray(np.random.default_rng(0).integers(0, 60, (BATCH, 24)), jnp.int32)
    empty = KVCache.empty(target.config, batch=BATCH, rows=64)
    out = run(prompt, jnp.broadcast_to(chain[None], (BATCH, 24)), empty)
    weights = module.apply({"params": target.params}, method=Decoder.commit_weights)
    return run, append_rows(empty, out.tree_kv, jnp.asarray([24, 17], jnp.int32), weights), weights


def test_siblings_do_not_see_each_other(decoder):
    """Other tokens elsewhere in the tree leave a branch bit for bit as it was; its own ancestors do not."""
    run, cache, _ = decoder
    rng = np.random.default_rng(1)
    parent = random_parents(rng, 24, 24)
    path = [23]
    while path[0]:
        path.insert(0, parent[path[0]])
    tokens = rng.integers(0, 60, (BATCH, 24)).astype(np.int32)
    other = (tokens + rng.integers(1, 60, tokens.shape)) % 60
    other[:, path] = tokens[:, path]
    parents = jnp.asarray(np.broadcast_to(parent, tokens.shape))
    a, b = (run(jnp.asarray(t, jnp.int32), parents, cache) for t in (tokens, other))
    np.testing.assert_array_equal(a.hidden[:, path], b.hidden[:, path])
    off = [i for i in range(24) if i not in path]
    assert np.all(np.any(np.asarray(a.hidden)[:, off] != np.asarray(b.hidden)[:, off], axis=-1))
    own = tokens.copy()
    own[:, path[1]] = (own[:, path[1]] + 1) % 60
    assert np.all(run(jnp.asarray(own), parents, cache).hidden[:, 23] != a.hidden[:, 23])


def test_a_committed_branch_is_the_text_it_spells(decoder):
    """The cache after a tree's branch equals the cache after the same tokens as a chain."""
    run, cache, weights = decoder
    rng = np.random.default_rng(4)
    parent = random_parents(rng, 24, 24)
    path = [23]
    while path[0]:
        path.insert(0, parent[path[0]])
    tokens = rng.integers(0, 60, (BATCH, 24)).astype(np.int32)
    count = jnp.asarray([len(path), len(path) - 1], jnp.int32)
    tree = run(jnp.asarray(tokens), jnp.asarray(np.broadcast_to(parent, tokens.shape)), cache)
    rows = np.zeros((BATCH, 24), np.int32) + path[-1]
    rows[:, : len(path)] = path
    by_tree = commit_rows(cache, cache_lib.path_rows(tree.tree_kv, jnp.asarray(rows)), count, weights)
    chain = jnp.asarray(np.maximum(np.arange(24) - 1, 0), jnp.int32)
    line = run(jnp.asarray(tokens[:, rows[0]]), jnp.broadcast_to(chain[None], tokens.shape), cache)
    by_chain = append_rows(cache, line.tree_kv, count, weights)
    np.testing.assert_array_equal(by_tree.length, by_chain.length)
    np.testing.assert_allclose(by_tree.recurrent.window, by_chain.recurrent.window, atol=2e-5)
    np.testing.assert_allclose(by_tree.recurrent.states, by_chain.recurrent.states, atol=2e-5)


def test_an_empty_cache():
    """One array for all recurrent layers, keys and values for the attention layer only, every buffer its own."""
    cache = KVCache.empty(testing.tiny_hybrid_config(dtype="bfloat16"), batch=2, rows=8)
    d = CONFIG.delta
    assert cache.keys.shape[:2] == cache.values.shape[:2] == (1, 2)
    assert cache.recurrent.states.shape == (3, 2, d.num_value_heads, d.key_head_dim, d.value_head_dim)
    assert (cache.recurrent.states.dtype, cache.recurrent.window.dtype) == (jnp.float32, jnp.bfloat16)
    assert cache.recurrent.window.shape == (3, 2, 3, d.conv_channels)
    assert KVCache.empty(testing.tiny_target_config(), batch=2, rows=8).recurrent is None


def test_bits_of_a_chain_are_a_line():
    bits = jnp.asarray(static_bits(np.tri(40, dtype=bool)))[None]
    rows = np.arange(40)[:, None] + np.arange(KERNEL)[None]
    np.testing.assert_array_equal(jax.jit(recurrent.conv_rows, static_argnums=1)(bits, KERNEL)[0], rows)
