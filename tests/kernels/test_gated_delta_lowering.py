"""Lowering of the gated delta kernels for Hopper, with no GPU: layouts and shared memory of every width."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.gated_delta_tree import mosaic_gpu


def struct(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def lower(function, *operands, **options) -> str:
    text = jax.jit(function, **options).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text
    return text


@pytest.mark.parametrize(
    "nodes, slots, group",
    [
        (16, 1, 3),
        (64, 2, 3),
        *(pytest.param(nodes, 1, group, marks=pytest.mark.slow) for nodes, group in ((32, 1), (128, 2), (256, 4))),
    ],
)
def test_every_width_lowers(nodes, slots, group):
    keys = struct(slots, nodes, 4, 128, dtype=jnp.bfloat16)
    gates = struct(slots, nodes, 4 * group)
    lower(
        lambda *operands: mosaic_gpu.tree(*operands, layer=2),
        keys,
        keys,
        struct(slots, nodes, 4 * group, 128, dtype=jnp.bfloat16),
        gates,
        gates,
        struct(3, slots, 4 * group, 128, 128),
        struct(slots, nodes, -(-nodes // 32), dtype=jnp.uint32),
    )


@pytest.mark.parametrize("rows, dtype", [(1, jnp.float32), (16, jnp.bfloat16), (128, jnp.float32)])
def test_the_replay_lowers_and_updates_in_place(rows, dtype):
    text = lower(
        mosaic_gpu.replay,
        struct(3, 2, rows, 2, 128),
        struct(3, 2, rows, 6, 128, dtype=dtype),
        struct(3, 2, rows, 6),
        struct(3, 2, rows, 6),
        struct(3, 2, 6, 128, 128),
        struct(2, dtype=jnp.int32),
        donate_argnums=4,
    )
    assert "output_operand_alias" in text and "tf.aliasing_output" in text
