"""Training forward passes against the decoder and the drafter of the decode loop."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_train import drafter_params, tiny_rows

from ddtree_jax import testing
from ddtree_jax.models.cache import KVCache
from ddtree_jax.models.decoder import Decoder
from ddtree_jax.models.dflash import DFlash
from ddtree_jax.train.forward import draft_blocks, target_features
from ddtree_jax.tree import static_bits

TARGET = testing.tiny_target(num_layers=2, sliding_windows=(None, None))
TIGHT = 4 * 4 * 4 * 8 * 40  # bytes: a few blocks a chunk


@functools.partial(jax.jit, static_argnums=(0, 3))
def whole_pass(config, params, tokens, taps):
    length = tokens.shape[1]
    cache = KVCache.empty(config, batch=1, rows=8)
    positions = jnp.arange(length, dtype=jnp.int32)[None]
    seen = jnp.asarray(static_bits(np.tri(length, dtype=bool)))[None]
    return Decoder(config).apply({"params": params}, tokens, positions, seen, cache, taps).features


def decoder_features(target, tokens, taps, room):
    """Features of one document [S] by the decode loop's own pass, over `room` tokens of which the last do not count."""
    padded = np.pad(tokens, (0, room - len(tokens)))[None]
    return np.asarray(whole_pass(target.config, target.params, padded, taps))[0, : len(tokens)]


HYBRID = dict(hybrid=True, delta_layers=(0,))


@pytest.mark.parametrize(
    "windows,chunk_bytes,kind",
    [
        ((None, None), 2**31, {}),
        ((5, None), 20000, {}),
        ((None, None), 2**31, dict(moe=testing.tiny_moe(2))),
        ((None, None), 2**31, HYBRID),
    ],
)
def test_features_of_packed_rows_are_those_of_each_document_alone(windows, chunk_bytes, kind):
    rows = tiny_rows()
    target = testing.tiny_target(num_layers=2, sliding_windows=windows, **kind)
    found = jax.jit(target_features, static_argnums=(0, 4, 5))(
        target.config, target.params, jnp.asarray(rows.tokens), jnp.asarray(rows.starts), (0, 1), chunk_bytes
    )
    for start, end in document_spans(rows, 0)[:2]:
        alone = decoder_features(target, rows.tokens[0, start:end], (0, 1), rows.tokens.shape[1])
        np.testing.assert_allclose(found[0, start:end], alone, atol=1e-5)


def document_spans(rows, r):
    starts = [s for s in np.unique(rows.starts[r]) if rows.ends[r, s] - s > 1]
    return [(int(s), int(rows.ends[r, s])) for s in starts]


@pytest.mark.parametrize(
    "causal,windows,chunk_bytes,remat",
    [
        ((False, False), (None, None), 2**31, False),
        ((True, False), (6, None), TIGHT, True),
        ((True, False), (3, 2), TIGHT, False),
    ],
)
def test_blocks_equal_the_drafter_of_the_decode_loop(causal, windows, chunk_bytes, remat):
    target, rows = TARGET, tiny_rows()
    config = testing.tiny_drafter_config(target.config, causal=causal, sliding_windows=windows, block_size=5)
    params = drafter_params(config)
    rng = np.random.default_rng(1)
    features = rng.normal(size=(*rows.tokens.shape, 2 * target.config.hidden_size)).astype(np.float32)
    anchors = np.stack([rng.permutation(rows.tokens.shape[1])[:9] for _ in range(len(rows))]).astype(np.int32)
    embedding = target.params["embed"]["weight"]
    found = jax.jit(draft_blocks, static_argnames=("config", "chunk_bytes", "remat"))(
        config, params, embedding, features, rows.tokens, rows.starts, anchors, chunk_bytes=chunk_bytes, remat=remat
    )

    @jax.jit
    def decode(features, count, block):
        cache = KVCache.empty(config, batch=1, rows=64)
        model, variables = DFlash(config), {"params": params}
        cache = model.apply(variables, features, count, cache, method=DFlash.absorb)
        return model.apply(variables, block, cache)

    for r in range(len(rows)):
        for i, anchor in enumerate(anchors[r]):
            start = rows.starts[r, anchor]
            ids = [int(rows.tokens[r, anchor])] + [config.mask_token_id] * 4
            context = np.full((1, rows.tokens.shape[1], features.shape[-1]), 7.0, np.float32)
            context[0, : anchor - start] = features[r, start:anchor]
            expected = decode(context, np.array([anchor - start], np.int32), embedding[np.array(ids)][None])
            np.testing.assert_allclose(found[r, i], expected[0], atol=1e-5)


def test_documents_longer_than_a_chunk_of_the_recurrence():
    """Rows of several chunks, documents that begin and end anywhere in them."""
    target = testing.tiny_target(num_layers=2, sliding_windows=(None, None), seed=4, **HYBRID)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 60, (2, 200)).astype(np.int32)
    spans = [[0, 64, 65, 190, 200], [0, 3, 150, 200]]
    starts = np.stack([np.repeat(s[:-1], np.diff(s)) for s in spans]).astype(np.int32)
    found = jax.jit(target_features, static_argnums=(0, 4))(
        target.config, target.params, jnp.asarray(tokens), jnp.asarray(starts), (0, 1)
    )
    for row, edges in enumerate(spans):
        for start, end in itertools.pairwise(edges):
            alone = decoder_features(target, tokens[row, start:end], (0, 1), 200)
            np.testing.assert_allclose(found[row, start:end], alone, atol=1e-4)
