"""Lowering of the fused norms for Hopper, with no GPU, at the shapes of real models."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.fused_norm import Heads, add_rms_norm, qk_norm_rope
from pallas_kernels.mosaic_gpu_layouts import copied_rows
from pallas_kernels.streaming_matmul import PartialSums


def lower(function, *shapes) -> str:
    operands = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
    return jax.jit(function).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("features", [2048, 4096, 5120])
@pytest.mark.parametrize("rows,splits", [(1, 4), (16, 1), (256, 3)])
def test_add_rms_norm(rows, splits, features):
    dtype = jnp.float32 if splits > 1 else jnp.bfloat16

    def call(x, parts, weight):
        return add_rms_norm(x, PartialSums(parts, (1, rows), "bfloat16"), weight, eps=1e-6)

    text = lower(
        call, ((1, rows, features), jnp.bfloat16), ((splits, rows, features), dtype), ((features,), jnp.bfloat16)
    )
    assert text.count("custom_call @mosaic_gpu") == 1


@pytest.mark.parametrize(
    "heads,rotary",
    [
        (Heads(32, 8, 0, 128, 1e-6, False), 128),
        (Heads(9, 3, 0, 64, None, False), 64),
        (Heads(24, 4, 24, 256, 1e-6, True), 64),
    ],
)
@pytest.mark.parametrize("nodes,splits", [(1, 2), (60, 1), (256, 2)])
def test_qk_norm_rope(nodes, splits, heads, rotary):
    dtype, features = jnp.float32 if splits > 1 else jnp.bfloat16, heads.count * heads.head_dim
    rows = copied_rows(nodes)

    def call(parts, q_weight, k_weight, cos, sin):
        projected = PartialSums(parts, (1, nodes), "bfloat16")
        return qk_norm_rope(projected, q_weight, k_weight, cos, sin, heads)

    weight, table = ((heads.head_dim,), jnp.bfloat16), ((1, nodes, rotary // 2), jnp.float32)
    text = lower(call, ((splits, rows, features), dtype), weight, weight, table, table)
    assert text.count("custom_call @mosaic_gpu") == 1
