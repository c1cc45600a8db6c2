"""The switch between XLA and the streaming kernel, and that both paths mean the same product."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from ddtree_jax import testing
from ddtree_jax.models import layers
from ddtree_jax.models.abstract import abstract_params
from ddtree_jax.models.cache import KVCache
from ddtree_jax.models.decoder import Decoder
from ddtree_jax.tree import static_bits
from pallas_kernels.streaming_matmul import partial_sums
from pallas_kernels.streaming_matmul.config import Config


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


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the interpreter runs on the CPU")
@pytest.mark.parametrize("nodes", [1, 3])
def test_a_pass_of_interpreted_kernels_means_what_a_pass_of_xla_means(monkeypatch, nodes):
    """Sums that blocks leave to each other, splits added on the way, norms and rotations: the wiring of the kernels."""
    target = testing.tiny_target(
        hidden_size=256, intermediate_size=256, num_layers=2, sliding_windows=(None, None), num_heads=4, num_kv_heads=2,
        head_dim=64, vocab_size=64, dtype="bfloat16",
    )  # fmt: skip
    decoder, params = Decoder(target.config), {"params": target.params}
    rng = np.random.default_rng(nodes)
    tokens = jnp.asarray(rng.integers(0, 64, (2, nodes)), jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(nodes, dtype=jnp.int32)[None], tokens.shape)
    causal = jnp.asarray(static_bits(np.tri(nodes, dtype=bool)))
    causal = jnp.broadcast_to(causal[None], (2, *causal.shape))
    cache = KVCache.empty(target.config, batch=2, rows=8)

    def run():
        return decoder.apply(params, tokens, positions, causal, cache, (0, 1))

    wanted = run()
    interpret, calls = plgpu.InterpretGPUParams(), []

    def by_kernel(x, weight, **_):
        calls.append(weight.shape)
        config = Config(tile=64, splits=2, cluster=1, consumers=1, block=64, stages=2)
        return partial_sums(x, weight, config=config, interpret=interpret)

    monkeypatch.setattr(layers, "MATMUL", "mosaic_gpu")
    monkeypatch.setattr(layers, "partial_sums", by_kernel)
    monkeypatch.setattr(layers, "streaming_matmul", lambda x, weight, **_: by_kernel(x, weight).total())
    monkeypatch.setattr(layers, "streaming_swiglu", lambda x, weight, **_: layers.swiglu(by_kernel(x, weight).total()))
    got = run()
    assert len(calls) == 8
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        ours, theirs = (np.asarray(x, np.float32) for x in (ours, theirs))
        assert np.abs(ours - theirs).max() <= 0.03 * np.abs(theirs).max()
