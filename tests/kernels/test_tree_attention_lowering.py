"""Lowering of the Mosaic GPU kernel for Hopper, with no GPU: layouts and shared memory of every configuration."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.tree_attention import mosaic_gpu
from pallas_kernels.tree_attention.config import Config, choose


def lower(config, *, nodes=32, heads=8, kv_heads=2, head_dim=128, capacity=512, dtype=jnp.bfloat16, **options):
    def struct(*shape, dtype=dtype):
        return jax.ShapeDtypeStruct(shape, dtype)

    cache, tree = struct(1, kv_heads, capacity, head_dim), struct(1, kv_heads, nodes, head_dim)
    words = struct(1, nodes, -(-nodes // 32), dtype=jnp.uint32)
    operands = (struct(1, nodes, heads, head_dim), cache, cache, struct(1, dtype=jnp.int32), tree, tree, words)
    traced = {"page_table": options.pop("page_table")} if "page_table" in options else {}

    def call(operands, traced):
        return mosaic_gpu.tree_attention(*operands, **traced, scale=0.1, config=config, **options)

    text = jax.jit(call).trace(operands, traced).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text


def shapes():
    """(nodes, heads, kv_heads, head_dim, capacity, dtype): every branch of the choice of configuration."""
    for nodes, capacity in ((1, 32768), (16, 1024), (16, 8192), (64, 1024), (64, 8192), (128, 8192), (256, 32768)):
        yield nodes, 32, 8, 128, capacity, jnp.bfloat16
        yield nodes, 24, 4, 256, capacity, jnp.float16
    for nodes in (16, 256):
        yield nodes, 12, 4, 64, 8192, jnp.float16
        yield nodes, 12, 4, 96, 8192, jnp.bfloat16
    yield 512, 32, 8, 128, 4096, jnp.bfloat16


# One lowering takes seconds, so only these run by default.
QUICK = {
    (64, 32, 8, 128, 1024),
    (64, 32, 8, 128, 8192),
    (16, 24, 4, 256, 8192),
    (256, 12, 4, 64, 8192),
    (16, 12, 4, 96, 8192),
}


@pytest.mark.parametrize(
    "nodes, heads, kv_heads, head_dim, capacity, dtype",
    [
        pytest.param(*s, marks=() if s[:5] in QUICK else pytest.mark.slow, id="-".join(map(str, s[:5])))
        for s in shapes()
    ],
)
def test_every_choice_of_configuration_lowers(nodes, heads, kv_heads, head_dim, capacity, dtype):
    config = choose((1, nodes, heads, head_dim), kv_heads, capacity)
    lower(
        config,
        nodes=nodes,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        capacity=capacity,
        dtype=dtype,
    )


def test_every_option_at_once_lowers():
    lower(Config(block=128, stages=2, consumers=2, splits=3), sliding_window=100, softcap=5.0)


@pytest.mark.parametrize("nodes", [3, 20, 100])
def test_widths_off_the_tiling_lower(nodes):
    lower(Config(block=64, stages=2, consumers=1, splits=2), nodes=nodes, capacity=504)


def test_too_much_shared_memory_is_refused_without_a_gpu():
    with pytest.raises(ValueError, match="shared memory"):
        lower(Config(block=128, stages=4, consumers=2, splits=1))


def test_pages_lower():
    table = jax.ShapeDtypeStruct((1, 16), jnp.int32)
    lower(Config(block=128, stages=2, consumers=1, splits=2), capacity=32, page_table=table)


def test_layers_share_one_lowering():
    def struct(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype)

    cache, tree = struct(3, 1, 2, 512, 128), struct(1, 2, 32, 128)
    words, length = struct(1, 32, 1, dtype=jnp.uint32), struct(1, dtype=jnp.int32)

    def layers(q, *rest):
        for layer in range(3):
            config = Config(block=128, stages=2, consumers=1, splits=2)
            q = mosaic_gpu.tree_attention(q, *rest, scale=0.1, layer=layer, config=config)
        return q

    operands = (struct(1, 32, 8, 128), cache, cache, length, tree, tree, words)
    text = jax.jit(layers).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 2  # attention and merge, called three times
    assert text.count("call @_tree_attention") == 3
