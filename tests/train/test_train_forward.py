"""Training forward passes against the decoder and the drafter of the decode loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_train import drafter_params, tiny_config, tiny_rows

from ddtree_jax import testing
from ddtree_jax.models.cache import KVCache
from ddtree_jax.models.decoder import Decoder
from ddtree_jax.models.dflash import DFlash
from ddtree_jax.train.config import drafter_config
from ddtree_jax.train.forward import draft_blocks, target_features
from ddtree_jax.tree import static_bits

TARGET = testing.tiny_target(num_layers=2, sliding_windows=(None, None))
TIGHT = 4 * 4 * 4 * 8 * 40  # bytes: a few blocks a chunk


def decoder_features(target, tokens, taps):
    """Features of one document [S] by the decode loop's own pass."""
    c, length = target.config, len(tokens)
    cache = KVCache.empty(c, batch=1, rows=8)
    positions = jnp.arange(length, dtype=jnp.int32)[None]
    seen = jnp.asarray(static_bits(np.tri(length, dtype=bool)))[None]
    variables = {"params": target.params}
    run = jax.jit(lambda *args: Decoder(c).apply(variables, *args, taps).features)
    return run(jnp.asarray(tokens)[None], positions, seen, cache)


@pytest.mark.parametrize(
    "windows,chunk_bytes,moe",
    [((None, None), 2**31, None), ((5, None), 20000, None), ((None, None), 2**31, testing.tiny_moe(2))],
)
def test_features_of_packed_rows_are_those_of_each_document_alone(windows, chunk_bytes, moe):
    rows = tiny_rows()
    target = testing.tiny_target(num_layers=2, sliding_windows=windows, moe=moe)
    found = jax.jit(target_features, static_argnums=(0, 4, 5))(
        target.config, target.params, jnp.asarray(rows.tokens), jnp.asarray(rows.starts), (0, 1), chunk_bytes
    )
    for start, end in document_spans(rows, 0)[:2]:
        alone = decoder_features(target, rows.tokens[0, start:end], (0, 1))
        np.testing.assert_allclose(found[0, start:end], alone[0], atol=1e-5)


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


def test_hybrid_targets_are_refused():
    """Rows of documents would need a state a document; nothing here may train on features that decoding never sees."""
    with pytest.raises(ValueError, match=r"Gated DeltaNet layers \(qwen3_5_text\)"):
        drafter_config(tiny_config(), testing.tiny_hybrid_config(vocab_size=testing.TINY_VOCABULARY))
