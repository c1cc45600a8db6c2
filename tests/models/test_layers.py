"""The switch between XLA and the streaming kernel, and that both paths mean the same product."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ddtree_jax import testing
from ddtree_jax.models import layers
from ddtree_jax.models.abstract import abstract_params
from ddtree_jax.models.cache import KVCache
from ddtree_jax.models.decoder import Decoder


@pytest.fixture
def models():
    """A function that runs a fresh decoder (hidden states and logits) under a setting of the switch."""
    target = testing.tiny_target(hidden_size=64, intermediate_size=64, num_layers=1, sliding_windows=(None,))
    tokens = jnp.arange(5, dtype=jnp.int32)[None]
    causal = jnp.asarray([[[1], [3], [7], [15], [31]]], jnp.uint32)

    def run():
        decoder, params = Decoder(target.config), {"params": target.params}
        cache = KVCache.empty(target.config, batch=1, rows=8)
        hidden = decoder.apply(params, tokens, tokens, causal, cache).hidden
        return hidden, decoder.apply(params, hidden, method=Decoder.logits)

    return run


def test_both_settings_compute_the_same(models, monkeypatch):
    wanted = models()
    monkeypatch.setattr(layers, "MATMUL", None)  # off a Hopper GPU, and in float32, the op's own XLA form
    for got, expected in zip(models(), wanted):
        assert got.dtype == expected.dtype
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


def test_a_kernel_asked_for_by_name_refuses_what_it_cannot_do(models, monkeypatch):
    monkeypatch.setattr(layers, "MATMUL", "mosaic_gpu")
    with pytest.raises(NotImplementedError, match="float32"):
        models()


def test_every_linear_layer_of_a_decoder_uses_the_kernel_if_asked(monkeypatch):
    monkeypatch.setattr(layers, "MATMUL", "mosaic_gpu")
    c = testing.tiny_target_config(
        hidden_size=256, intermediate_size=512, num_layers=1, sliding_windows=(None,), num_heads=4, num_kv_heads=4,
        head_dim=64, vocab_size=320, dtype="bfloat16",
    )  # fmt: skip
    tokens, ancestors = jnp.zeros((1, 4), jnp.int32), jnp.ones((1, 4, 1), jnp.uint32)

    def step(params):
        cache = KVCache.empty(c, batch=1, rows=8)
        return Decoder(c).apply({"params": params}, tokens, tokens, ancestors, cache, method=Decoder._touch)

    text = jax.jit(step).trace(abstract_params(c)).lower(lowering_platforms=("cuda",)).as_text()
    # Query-key-value, output, gate-up, down and head, and between them the norms of the heads and two of the residual
    # stream; what is left to XLA is attention, which has two batch axes.
    assert text.count("custom_call @mosaic_gpu") == 8
    products = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    assert products and all("batching_dims = [0, 1]" in line for line in products)
