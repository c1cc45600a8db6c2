"""Lowering of the Mosaic GPU kernel for Hopper, with no GPU: layouts and the shared-memory budget of every configuration."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.tree_attention import mosaic_gpu
from pallas_kernels.tree_attention.config import Config


def lower(config, *, nodes=32, heads=8, kv_heads=2, head_dim=128, capacity=512, dtype=jnp.bfloat16, slots=1, **options):
    def struct(*shape, dtype=dtype):
        return jax.ShapeDtypeStruct(shape, dtype)

    operands = (
        struct(slots, nodes, heads, head_dim),
        struct(slots, kv_heads, capacity, head_dim),
        struct(slots, kv_heads, capacity, head_dim),
        struct(slots, dtype=jnp.int32),
        struct(slots, kv_heads, nodes, head_dim),
        struct(slots, kv_heads, nodes, head_dim),
        struct(slots, nodes, -(-nodes // 32), dtype=jnp.uint32),
    )
    call = jax.jit(lambda *a: mosaic_gpu.tree_attention(*a, scale=0.1, config=config, **options))
    text = call.trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text
    return text
