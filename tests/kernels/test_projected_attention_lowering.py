"""Lowering of the kernel that takes a raw projection for Hopper, with no GPU, at the shapes of real models."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.fused_norm import Heads
from pallas_kernels.mosaic_gpu_layouts import copied_rows
from pallas_kernels.streaming_matmul import PartialSums
from pallas_kernels.tree_attention import projected_tree_attention

QWEN3_8B = Heads(32, 8, 0, 128, 1e-6, False)
QWEN36_27B = Heads(24, 4, 24, 256, 1e-6, True)


def lower(heads, nodes, *, rotary=None, capacity=1280, slots=1, splits=1, layers=1, **options) -> str:
    def struct(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype)

    rows, features = copied_rows(slots * nodes), heads.count * heads.head_dim
    weight = struct(heads.head_dim) if heads.eps is not None else None
    table = struct(slots, nodes, (rotary or heads.head_dim) // 2, dtype=jnp.float32)
    cache = struct(layers, slots, heads.keys, capacity, heads.head_dim)
    length, words = struct(slots, dtype=jnp.int32), struct(slots, nodes, -(-nodes // 32), dtype=jnp.uint32)
    parts = struct(splits, rows, features, dtype=jnp.float32 if splits > 1 else jnp.bfloat16)

    def call(parts, q_weight, k_weight, cos, sin, *rest):
        results = []
        for layer in range(layers):
            projected = PartialSums(parts, (slots, nodes), "bfloat16")
            results += projected_tree_attention(
                projected, q_weight, k_weight, cos, sin, heads, *rest, scale=0.1, layer=layer,
                implementation="mosaic_gpu", **options,
            )  # fmt: skip
            # As between two layers: the next projection comes of this output.
            parts = parts + results[-4][0, 0, 0, 0].astype(parts.dtype)
        return results

    operands = (parts, weight, weight, table, table, cache, cache, length, words)
    return jax.jit(call).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    "heads,rotary,nodes,capacity",
    [
        (QWEN3_8B, None, 1, 1280),
        (QWEN3_8B, None, 16, 1280),
        (QWEN3_8B, None, 60, 8192),
        pytest.param(QWEN3_8B, None, 64, 1280, marks=pytest.mark.slow),
        (QWEN3_8B, None, 128, 8192),  # blocks of 128 keys: two tiles to norm
        pytest.param(QWEN3_8B, None, 16, 32768, marks=pytest.mark.slow),
        (QWEN36_27B, 64, 16, 1280),
        (QWEN36_27B, 64, 64, 8192),
        (Heads(9, 3, 0, 64, None, False), None, 20, 640),
        pytest.param(Heads(12, 4, 0, 96, 1e-6, False), None, 16, 640, marks=pytest.mark.slow),
    ],
)
def test_one_kernel_of_a_part(heads, rotary, nodes, capacity):
    text = lower(heads, nodes, rotary=rotary, capacity=capacity)
    assert text.count("custom_call @mosaic_gpu") == 2  # attention and merge


@pytest.mark.parametrize("nodes,splits", [(16, 2), (256, 1)])
def test_other_projections_are_normed_before(nodes, splits):
    assert lower(QWEN3_8B, nodes, splits=splits).count("custom_call @mosaic_gpu") == 3


def test_windows_and_slots_lower():
    assert lower(QWEN3_8B, 13, slots=3, sliding_window=100).count("custom_call @mosaic_gpu") == 2


def test_layers_share_one_lowering():
    text = lower(QWEN3_8B, 16, layers=3)
    assert text.count("custom_call @mosaic_gpu") == 2
    assert text.count("call @_projected_tree_attention") == 3
