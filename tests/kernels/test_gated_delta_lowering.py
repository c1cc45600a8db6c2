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
        (1, 1, 3),
        (64, 2, 3),
        *(pytest.param(*shape, marks=pytest.mark.slow) for shape in ((16, 1, 1), (32, 1, 1), (128, 1, 2), (256, 1, 4))),
    ],
)
def test_every_width_lowers_once_for_all_layers(nodes, slots, group):
    keys = struct(slots, nodes, 4, 128, dtype=jnp.bfloat16)
    gates = struct(slots, nodes, 4 * group)
    text = lower(
        lambda *operands: [mosaic_gpu.tree(*operands, layer=layer) for layer in range(3)],
        keys,
        keys,
        struct(slots, nodes, 4 * group, 128, dtype=jnp.bfloat16),
        gates,
        gates,
        struct(3, slots, 4 * group, 128, 128),
        struct(slots, nodes, -(-nodes // 32), dtype=jnp.uint32),
    )
    assert text.count("@mosaic_gpu") == 1, "layers should share one kernel"


def commit_operands(rows, dtype):
    gates = struct(3, 2, rows, 6)
    values = struct(3, 2, rows, 6, 128, dtype=dtype)
    return struct(3, 2, rows, 2, 128), values, gates, gates, struct(3, 2, 6, 128, 128), struct(2, dtype=jnp.int32)


@pytest.mark.parametrize("rows, dtype", [(1, jnp.float32), (16, jnp.bfloat16), (128, jnp.float32)])
def test_the_replay_lowers_and_updates_in_place(rows, dtype):
    text = lower(mosaic_gpu.replay, *commit_operands(rows, dtype), donate_argnums=4)
    assert "output_operand_alias" in text and "tf.aliasing_output" in text


def test_the_replay_lowers_inside_a_loop():
    def loop(k, v, log_decay, beta, states, count):
        def commit(carry):
            rounds, states = carry
            return rounds + 1, mosaic_gpu.replay(k, v, log_decay, beta, states, count)

        return jax.lax.while_loop(lambda carry: carry[0] < 3, commit, (jnp.int32(0), states))

    assert "output_operand_alias" in lower(loop, *commit_operands(16, jnp.bfloat16), donate_argnums=4)
