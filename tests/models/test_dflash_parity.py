"""The DFlash drafter with its growing context cache against a full recomputation of the published equations."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_models import DRAFTERS, DRAFTERS_TARGET, drafter, golden, target

from ddtree_jax.decode.proposers import Chain, DFlashProposer
from ddtree_jax.models.cache import KVCache
from ddtree_jax.models.decoder import Decoder
from ddtree_jax.models.dflash import DFlash, block_visibility
from ddtree_jax.models.rope import rope_tables

TOLERANCE = 1e-4
CAPACITY = 48
ROWS = 8  # rows of one absorb call, of which some are live


def close(actual, expected):
    actual = np.asarray(actual)
    assert actual.shape == expected.shape
    difference = np.abs(actual - expected).max()
    assert difference <= TOLERANCE, f"max abs difference {difference:.2e}"


@functools.cache
def functions(config):
    """Jitted absorb(params, features, count, cache) and draft(params, block, cache)."""
    model = DFlash(config)

    def absorb(params, features, count, cache):
        return model.apply({"params": params}, features, count, cache, method=DFlash.absorb)

    return jax.jit(absorb), jax.jit(lambda params, block, cache: model.apply({"params": params}, block, cache))


def empty_cache(config, batch=2):
    """Rows that nobody wrote are NaN: reading one of them cannot go unnoticed."""
    shape = (config.num_layers, batch, config.num_kv_heads, CAPACITY, config.head_dim)
    keys, values = (jnp.asarray(np.full(shape, np.nan, config.jax_dtype)) for _ in "kv")
    return KVCache(keys=keys, values=values, length=jnp.zeros((batch,), jnp.int32))


def grow(config, params, features, lengths, cache, seed):
    """Absorbs `features` up to `lengths` [B] in steps of random sizes, another size in each slot."""
    rng, absorb = np.random.default_rng(seed), functions(config)[0]
    have = np.asarray(cache.length).copy()
    while (have < lengths).any():
        count = np.minimum(rng.integers(0, ROWS + 1, len(lengths)), lengths - have)
        # Rows past the live ones come from rejected tokens: anything.
        rows = rng.standard_normal((len(lengths), ROWS, features.shape[-1])).astype(np.float32)
        for b, n in enumerate(count):
            rows[b, :n] = features[b, have[b] : have[b] + n]
        cache = absorb(params, jnp.asarray(rows), jnp.asarray(count, jnp.int32), cache)
        have += count.astype(have.dtype)
    np.testing.assert_array_equal(cache.length, lengths)
    return cache


def block_of(config, anchors):
    """Embeddings [B, S, E] of [anchor, MASK, ...]."""
    tokens = np.full((len(anchors), config.block_size), config.mask_token_id)
    tokens[:, 0] = anchors
    embedding = np.asarray(target(DRAFTERS_TARGET).params["embed"]["weight"])
    return jnp.asarray(embedding[tokens] * np.float32(config.embedding_scale))


def hidden_after(config, params, features, lengths, anchors):
    """Hidden states of one block from scratch."""
    cache = grow(config, params, features, np.asarray(lengths), empty_cache(config, len(lengths)), 0)
    return np.asarray(functions(config)[1](params, block_of(config, anchors), cache))


@pytest.fixture(params=DRAFTERS)
def case(request):
    model = drafter(request.param)
    return model.config, model.params, golden("drafters", request.param)


def test_goldens_cover_the_variants():
    configs = {name: drafter(name).config for name in DRAFTERS}
    assert configs["full"].causal == (False,) * 3
    assert configs["full"].block_size == 8
    assert configs["sliding"].causal == (True, False)
    assert configs["sliding"].sliding_windows == (8, None)
    assert configs["sliding"].block_size == 6
    assert configs["bias"].attention_bias
    assert (configs["scaled"].output_multiplier, configs["scaled"].logit_softcap) == (0.6, 4.0)
    assert configs["scaled"].embedding_scale == 1.7
    assert configs["from_anchor"].causal == (False, False)
    assert configs["from_anchor"].depth == configs["from_anchor"].block_size == 5
    assert (configs["second"].conv_taps, configs["second"].selector_rank, configs["second"].selector_top_k) == (2, 5, 7)


def test_incremental_context_equals_full_recomputation(case):
    """Two blocks in a row: the first must leave nothing behind in the cache."""
    config, params, gold = case
    cache = empty_cache(config)
    for j in range(2):
        cache = grow(config, params, gold["features"], gold["lengths"][:, j], cache, j)
        block = block_of(config, gold["anchors"][:, j])
        close(functions(config)[1](params, block, cache), gold["hidden"][:, j])


def test_proposed_log_probs(case):
    """Scales, soft cap and slot layout, as the decode loop applies them, with the target's embedding and head."""
    config, params, gold = case
    model = target(DRAFTERS_TARGET)
    proposer = DFlashProposer(Decoder(model.config), config, config.depth, Chain())
    cache = empty_cache(config)
    for j in range(2):
        cache = grow(config, params, gold["features"], gold["lengths"][:, j], cache, 7 + j)
        root = jnp.asarray(gold["anchors"][:, j], jnp.int32)
        close(jax.jit(proposer.log_probs)(params, model.params, cache, root), gold["log_probs"][:, j])


def test_context_of_all_layers_at_once_equals_layer_by_layer(case):
    """To the last bit, whether the stacked weights are made by the call or were made before."""
    config, params, gold = case
    model = DFlash(config).bind({"params": params})
    features = jnp.asarray(gold["features"][:, :ROWS])
    positions = jnp.asarray([[3], [40]], jnp.int32) + jnp.arange(ROWS, dtype=jnp.int32)[None]
    rope = rope_tables(config.rope, positions, config.head_dim)
    context = model.hidden_norm(model.fc(features))
    keys, values = zip(*(layer.self_attn.keys_values(context, rope) for layer in model.layers))
    for weights in (None, model.context_weights()):
        rows = model.context_rows(features, positions, weights)
        np.testing.assert_array_equal(rows.keys, jnp.stack(keys))
        np.testing.assert_array_equal(rows.values, jnp.stack(values))


@pytest.mark.parametrize("name", ["full", "scaled"])
def test_order_of_taps_matters(name):
    model, gold = drafter(name), golden("drafters", name)
    first, second, *rest = np.split(gold["features"], len(model.config.target_layer_ids), axis=-1)
    swapped = np.concatenate([second, first, *rest], axis=-1)
    hidden = hidden_after(model.config, model.params, swapped, gold["lengths"][:, 0], gold["anchors"][:, 0])
    assert np.abs(hidden - gold["hidden"][:, 0]).max() > 0.1


def test_hidden_norm_scales_the_context():
    """The norm stands behind fc and has a weight: doubling it doubles the context and so the values."""
    model, gold = drafter("full"), golden("drafters", "full")
    features, count = jnp.asarray(gold["features"][:, :ROWS]), jnp.full((2,), ROWS, jnp.int32)
    doubled = {**model.params, "hidden_norm": {"weight": 2 * model.params["hidden_norm"]["weight"]}}
    absorb = functions(model.config)[0]
    once, twice = (absorb(p, features, count, empty_cache(model.config)) for p in (model.params, doubled))
    for a, b in zip(once.values, twice.values, strict=True):
        np.testing.assert_array_equal(2 * a[:, :, :ROWS], b[:, :, :ROWS])
    # fc behind the norm would let the scale of the features through.
    louder = absorb(model.params, 3 * features, count, empty_cache(model.config))
    np.testing.assert_allclose(louder.values[0][:, :, :ROWS], once.values[0][:, :, :ROWS], atol=1e-4)


@pytest.mark.parametrize(("windows", "reach"), [((8, 8), 8), ((8, None), None)])
def test_window(windows, reach):
    """A window of W in all layers hides what lies W or more before the anchor; one full layer sees it."""
    model, gold = drafter("sliding"), golden("drafters", "sliding")
    causal = tuple(w is not None for w in windows)
    config = dataclasses.replace(model.config, sliding_windows=windows, causal=causal)
    lengths, anchors = gold["lengths"][:, 0], gold["anchors"][:, 0]
    base = hidden_after(config, model.params, gold["features"], lengths, anchors)
    cut = 8
    far, near = gold["features"].copy(), gold["features"].copy()
    for b, start in enumerate(lengths):
        far[b, : start - cut + 1] += 1  # positions up to start - W
        near[b, start - cut + 1] += 1  # the first position that any slot sees: the anchor's
    change = np.abs(hidden_after(config, model.params, far, lengths, anchors) - base).max(axis=(0, 2))
    if reach is None:
        assert change.min() > 1e-3
    else:
        np.testing.assert_array_equal(change, 0)
    change = np.abs(hidden_after(config, model.params, near, lengths, anchors) - base).max(axis=(0, 2))
    assert change[0] > 1e-3


def test_causal_layers_hide_later_slots():
    """What stands in the last slot changes only itself under causal layers, and every slot under a full one."""
    model, gold = drafter("sliding"), golden("drafters", "sliding")
    for causal in ((True, True), (True, False)):
        config = dataclasses.replace(model.config, causal=causal)
        cache = grow(config, model.params, gold["features"], gold["lengths"][:, 0], empty_cache(config), 3)
        block = block_of(config, gold["anchors"][:, 0])
        draft = functions(config)[1]
        change = draft(model.params, block.at[:, -1].add(1.0), cache) - draft(model.params, block, cache)
        change = np.abs(np.asarray(change)).max(axis=(0, 2))
        assert change[-1] > 1e-2
        if all(causal):
            np.testing.assert_array_equal(change[:-1], 0)
        else:
            assert change[:-1].min() > 1e-4


@pytest.mark.parametrize("name", ["sliding", "full"])
def test_only_distances_matter(name):
    """All positions shifted by a constant give the same block: cached keys and queries agree on where they are.

    Rows put in front of the context shift everything behind them; with a window in every layer they are out of sight.
    """
    model, gold = drafter(name), golden("drafters", name)
    config, params = dataclasses.replace(model.config, sliding_windows=(8,) * model.config.num_layers), model.params
    shift, lengths, anchors = 9, gold["lengths"][:, 0], gold["anchors"][:, 0]
    base = hidden_after(config, params, gold["features"], lengths, anchors)
    padding = np.random.default_rng(5).standard_normal((2, shift, gold["features"].shape[-1])).astype(np.float32)
    shifted = np.concatenate([padding, gold["features"]], axis=1)
    close(hidden_after(config, params, shifted, lengths + shift, anchors), base)


@pytest.mark.parametrize(
    "causal,window,expected",
    [
        (False, None, ["1111", "1111", "1111", "1111"]),
        (True, None, ["1000", "1100", "1110", "1111"]),
        (False, 2, ["1100", "1110", "0111", "0011"]),  # a window is two-sided unless the layer is causal
        (True, 2, ["1000", "1100", "0110", "0011"]),
    ],
)
def test_visibility_inside_the_block(causal, window, expected):
    seen = block_visibility(4, causal, window)
    assert ["".join(str(int(x)) for x in row) for row in seen] == expected
