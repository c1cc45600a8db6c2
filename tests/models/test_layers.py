"""The switch between XLA and the kernels of linear layers, and that all of them mean the same."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from ddtree_jax import testing
from ddtree_jax.config import DeltaConfig
from ddtree_jax.models import decoder, dflash, layers
from ddtree_jax.models.abstract import abstract_params
from ddtree_jax.models.cache import KVCache
from ddtree_jax.models.decoder import Decoder
from ddtree_jax.models.dflash import DFlash
from ddtree_jax.tree import static_bits
from pallas_kernels.linear_chain import config as chain_config
from pallas_kernels.linear_chain import linear_chain
from pallas_kernels.linear_chain import mosaic_gpu as chain_kernel
from pallas_kernels.linear_chain.config import Cut
from pallas_kernels.streaming_matmul import PartialSums, partial_sums
from pallas_kernels.streaming_matmul.config import Config
from pallas_kernels.tree_attention import projected_tree_attention


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


def test_a_greedy_draw_is_the_first_of_the_largest_logits():
    target = testing.tiny_target(hidden_size=64, num_layers=1, sliding_windows=(None,), tie_embeddings=True)
    params = dict(target.params)
    weight = params["embed"]["weight"]
    half = weight.shape[0] // 2
    params["embed"] = {"weight": weight.at[half : 2 * half].set(weight[:half])}  # each token's logit twice
    hidden = jax.random.normal(jax.random.key(1), (2, 9, 64), weight.dtype)
    decoder, variables = Decoder(target.config), {"params": params}
    logits = decoder.apply(variables, hidden, method=Decoder.logits)
    drawn = decoder.apply(variables, hidden, method=Decoder.greedy)
    assert drawn.dtype == jnp.int32 and (drawn < half).all()
    np.testing.assert_array_equal(drawn, jnp.argmax(logits, axis=-1))


@pytest.mark.parametrize("matmul,kernels", [(None, 0), ("xla", 0), ("mosaic_gpu", 1), ("chain", 0)])
def test_a_greedy_draw_writes_no_logits_where_the_kernel_does_it(monkeypatch, matmul, kernels):
    monkeypatch.setattr(layers, "MATMUL", matmul)
    x, weight = (jax.ShapeDtypeStruct(dims, jnp.bfloat16) for dims in ((2, 3, 256), (320, 256)))
    traced = jax.jit(lambda x, weight: layers.largest(x, weight)).trace(x, weight)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == kernels and ("streaming_argmax" in text) == (kernels == 1)
    assert ("x320xf32>" in text) == (kernels == 0)
    with layers.differentiable():
        text = jax.jit(lambda x, weight: layers.largest(x, weight)).trace(x, weight).lower().as_text()
    assert "mosaic_gpu" not in text


def test_products_between_mixers_are_one_kernel_if_asked(monkeypatch):
    monkeypatch.setattr(layers, "MATMUL", "chain")
    c = testing.tiny_target_config(
        hidden_size=256, intermediate_size=384, num_layers=3, sliding_windows=(None,) * 3, num_heads=4, num_kv_heads=4,
        head_dim=64, vocab_size=320, dtype="bfloat16",
    )  # fmt: skip
    tokens, ancestors = jnp.zeros((1, 4), jnp.int32), jnp.ones((1, 4, 1), jnp.uint32)

    def step(params):
        cache = KVCache.empty(c, batch=1, rows=8)
        return Decoder(c).apply({"params": params}, tokens, tokens, ancestors, cache)

    text = jax.jit(step).trace(abstract_params(c)).lower(lowering_platforms=("cuda",)).as_text()
    # One kernel with a projection after it, lowered once for all layers, one without; and the heads' norm, after it.
    assert text.count("custom_call @mosaic_gpu") == 3
    calls = re.findall(r"call @run\w*\(", text)
    assert len(calls) == 3
    # What is left to XLA: the first projection, and attention, which has two batch axes.
    products = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    assert sum("batching_dims = [0, 1]" not in line for line in products) == 1


SMALL = dict(
    hidden_size=256, intermediate_size=256, num_heads=4, num_kv_heads=2, head_dim=64, vocab_size=64, dtype="bfloat16"
)


def disturbed(params):
    """Random norms where they are ones, so that no two of them can change places unseen."""
    keys = iter(jax.random.split(jax.random.key(7), len(jax.tree.leaves(params))))

    def disturb(path, x):
        noise = jax.random.normal(next(keys), x.shape, x.dtype) * jnp.asarray(0.3, x.dtype)
        return x + noise if any("norm" in entry.key for entry in path) else x

    return jax.tree_util.tree_map_with_path(disturb, params)


def a_pass(target, nodes):
    """A function that runs a pass of two slots through a decoder in bfloat16."""
    model, params = Decoder(target.config), {"params": disturbed(target.params)}
    rng = np.random.default_rng(nodes)
    tokens = jnp.asarray(rng.integers(0, 64, (2, nodes)), jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(nodes, dtype=jnp.int32)[None], tokens.shape)
    causal = jnp.asarray(static_bits(np.tri(nodes, dtype=bool)))
    causal = jnp.broadcast_to(causal[None], (2, *causal.shape))
    cache = KVCache.empty(target.config, batch=2, rows=8)
    return lambda: model.apply(params, tokens, positions, causal, cache, (0, 1))


def dense_pass(nodes):
    return a_pass(testing.tiny_target(num_layers=2, sliding_windows=(None, None), **SMALL), nodes)


def hybrid_pass(nodes):
    heads = DeltaConfig(num_key_heads=2, num_value_heads=4, key_head_dim=64, value_head_dim=64)
    target = testing.tiny_target(
        hybrid=True, num_layers=2, sliding_windows=(None, None), delta_layers=(0,), delta=heads, rotary_dim=32, **SMALL
    )
    return a_pass(target, nodes)


def draft_pass(nodes):
    """A function that runs a drafter of two layers over a block of each of two slots, in bfloat16."""
    target = testing.tiny_target(num_layers=2, sliding_windows=(None, None), **SMALL)
    sizes = {name: size for name, size in SMALL.items() if name != "vocab_size"}
    drafter = testing.tiny_drafter(target, block_size=nodes, sliding_windows=(None, None), **sizes)
    model, params = DFlash(drafter.config), {"params": disturbed(drafter.params)}
    block = jax.random.normal(jax.random.key(1), (2, nodes, 256), jnp.bfloat16)
    cache = KVCache.empty(drafter.config, batch=2, rows=8)
    return lambda: model.apply(params, block, cache)


def assert_same_pass(got, wanted):
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        ours, theirs = (np.asarray(x, np.float32) for x in (ours, theirs))
        assert np.abs(ours - theirs).max() <= 0.03 * np.abs(theirs).max()


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the interpreter runs on the CPU")
@pytest.mark.parametrize("nodes", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_a_pass_of_interpreted_products_means_what_a_pass_of_xla_means(monkeypatch, nodes):
    """Sums that blocks leave to each other, splits added on the way, norms and rotations: the wiring of the kernels."""
    run = dense_pass(nodes)
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
    assert_same_pass(got, wanted)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the interpreter runs on the CPU")
@pytest.mark.parametrize(
    "make,projections",
    [
        (dense_pass, [512, 0]),
        pytest.param(hybrid_pass, [768, 0], marks=pytest.mark.slow),
        pytest.param(draft_pass, [512, 0], marks=pytest.mark.slow),
    ],
)
def test_a_pass_of_interpreted_chains_means_what_a_pass_of_xla_means(monkeypatch, make, projections):
    """Which weights go into which chain, and what comes out of it where."""
    run, interpret, calls = make(3), plgpu.InterpretGPUParams(), []
    wanted = run()

    def by_steps(operands, counters, turn, *, chain, config):
        calls.append(chain)
        cuts = {name: Cut(64, 1 if name == "gate_up" else 2) for name in chain.shapes}
        small = chain_config.Config(**cuts, workers=3, block=64, weight_stages=3, x_stages=2)
        return chain_kernel.run_by_steps(operands, chain=chain, config=small, interpret=interpret), counters

    def interpreted_heads(projected, *rest, **options):
        if isinstance(projected, PartialSums):
            projected = dataclasses.replace(projected, interpret=interpret)
        return projected_tree_attention(projected, *rest, **options)

    monkeypatch.setattr(layers, "MATMUL", "chain")
    monkeypatch.setattr(chain_kernel, "run", by_steps)
    monkeypatch.setattr(decoder, "projected_tree_attention", interpreted_heads)
    monkeypatch.setattr(dflash, "projected_tree_attention", interpreted_heads)
    monkeypatch.setattr(
        layers, "for_kernels", lambda x: PartialSums(x.reshape(1, -1, x.shape[-1]), x.shape[:-1], x.dtype.name)
    )
    got = run()
    assert [chain.projected for chain in calls] == projections
    assert_same_pass(got, wanted)


@pytest.mark.parametrize(
    "overrides,chains",
    [
        (dict(qkv_bias=True), [0]),  # no projection into a bias
        (dict(o_bias=True), []),
        (dict(moe=testing.tiny_moe(intermediate_size=128)), [768]),  # the first block is dense
    ],
)
def test_what_a_chain_does_not_know_is_left_to_the_products(monkeypatch, overrides, chains):
    c = testing.tiny_target_config(
        hidden_size=256, intermediate_size=384, num_layers=3, sliding_windows=(None,) * 3, num_heads=4, num_kv_heads=4,
        head_dim=64, vocab_size=320, dtype="bfloat16", **overrides,
    )  # fmt: skip
    tokens, ancestors = jnp.zeros((1, 4), jnp.int32), jnp.ones((1, 4, 1), jnp.uint32)
    params, seen = abstract_params(c), []
    monkeypatch.setattr(layers, "MATMUL", "chain")
    monkeypatch.setattr(layers.linear_chain, "linear_chain", record_chain(seen))

    def step(params):
        cache = KVCache.empty(c, batch=1, rows=8)
        return Decoder(c).apply({"params": params}, tokens, tokens, ancestors, cache).hidden

    jax.eval_shape(step, params)
    assert seen == chains
    with layers.differentiable():
        jax.eval_shape(lambda params: step(params), params)
    assert seen == chains


def record_chain(seen):
    """In place of `linear_chain`: notes the rows of the projection, and computes by XLA."""

    def chain(mixed, stream, weights, turns, *, implementation, **options):
        assert implementation == "mosaic_gpu"
        seen.append(0 if weights.next is None else weights.next.shape[0])
        return linear_chain(mixed, stream, weights, turns, implementation="xla", **options)

    return chain


def test_products_by_xla_go_to_kernels_only_where_kernels_run(monkeypatch):
    x = jnp.arange(24, dtype=jnp.bfloat16).reshape(2, 3, 4)
    assert layers.for_kernels(x) is x  # no Hopper GPU here
    monkeypatch.setattr(layers.choice, "on_hopper", lambda: True)
    parts = layers.for_kernels(x)
    assert isinstance(parts, PartialSums) and parts.shape == x.shape
    np.testing.assert_array_equal(parts.total(), x)
    wide = x.astype(jnp.float32)
    assert layers.for_kernels(wide) is wide
    with layers.differentiable():
        assert layers.for_kernels(x) is x
    monkeypatch.setattr(layers, "MATMUL", "xla")
    assert layers.for_kernels(x) is x
