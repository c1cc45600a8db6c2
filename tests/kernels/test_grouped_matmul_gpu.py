"""The Mosaic GPU kernel of the grouped matrix product: interpreted on the CPU, lowered for Hopper, run on one.

On a GPU: JAX_PLATFORMS=cuda pytest ...
"""

import functools

import jax
import jax.numpy as jnp
import pytest
from grouped_matmul_suite import Case, GroupedMatmulSuite
from interpreter import PARAMS, interpreted

from pallas_kernels.choice import on_hopper
from pallas_kernels.grouped_matmul import group_rows, mosaic_gpu, tile_rows


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the interpreter runs on the CPU")
class TestInterpreted(GroupedMatmulSuite):
    """Numbers, barriers and races. Small cases; each takes seconds."""

    cases = (
        Case(rows=5, groups=3, columns=128, depth=128),
        Case(rows=13, groups=3, columns=64, depth=128, dtype="float16", swiglu=True),
        Case(rows=20, groups=2, columns=64, depth=384, spread="one", tile=16),
    )

    def multiply(self, x, matrices, groups, swiglu):
        return interpreted(mosaic_gpu.grouped_matmul, x, matrices, groups, swiglu=swiglu, interpret=PARAMS)


@pytest.mark.gpu
@pytest.mark.skipif(not on_hopper(), reason="needs a Hopper GPU")
class TestGpu(GroupedMatmulSuite):
    cases = (
        # The experts of Qwen3-30B-A3B, at passes of 1, 16, 64, 128 and 256 tokens, and a popular one.
        *(Case(rows=8 * n, groups=128, columns=768, depth=2048, swiglu=True) for n in (1, 16, 64, 128, 256)),
        *(Case(rows=8 * n, groups=128, columns=2048, depth=768) for n in (1, 16, 64, 128, 256)),
        Case(rows=512, groups=128, columns=768, depth=2048, swiglu=True, spread="one"),
        # Those of Qwen3.5-35B-A3B.
        Case(rows=512, groups=256, columns=512, depth=2048, swiglu=True),
        Case(rows=512, groups=256, columns=2048, depth=512),
        *(Case(rows=300, groups=5, columns=192, depth=320, dtype="float16", tile=t) for t in (8, 24, 64, 128)),
    )

    def multiply(self, x, matrices, groups, swiglu):
        return jax.jit(functools.partial(mosaic_gpu.grouped_matmul, swiglu=swiglu))(x, matrices, groups)


def lower(rows, groups, columns, depth, *, swiglu, tile, dtype=jnp.bfloat16):
    def call(group, x, matrices):
        return mosaic_gpu.grouped_matmul(x, matrices, group_rows(group, groups, tile), swiglu=swiglu)

    padded = jax.eval_shape(lambda g: group_rows(g, groups, tile), jax.ShapeDtypeStruct((rows,), jnp.int32)).source
    operands = (
        jax.ShapeDtypeStruct((rows,), jnp.int32),
        jax.ShapeDtypeStruct((*padded.shape, depth), dtype),
        jax.ShapeDtypeStruct((groups, columns * (1 + swiglu), depth), dtype),
    )
    assert mosaic_gpu.unsupported(*operands[1:], tile, swiglu) is None
    text = jax.jit(call).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text


@pytest.mark.parametrize("tokens", [64, 256, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 128, 2048))])
@pytest.mark.parametrize("columns,depth,swiglu", [(768, 2048, True), (2048, 768, False)])
def test_the_experts_of_qwen3_30b_a3b_lower(tokens, columns, depth, swiglu):
    lower(8 * tokens, 128, columns, depth, swiglu=swiglu, tile=tile_rows(8 * tokens, 128))


@pytest.mark.parametrize("tile", [8, 24, 128])
@pytest.mark.parametrize("swiglu", [False, True])
def test_tiles_and_columns_of_every_kind_lower(tile, swiglu):
    lower(100, 3, 192, 128, swiglu=swiglu, tile=tile, dtype=jnp.float16)
