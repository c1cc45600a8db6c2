"""The streaming matmul in XLA, and what the public functions check and choose."""

import jax
import jax.numpy as jnp
import pytest
from streaming_matmul_suite import Case, StreamingMatmulSuite, make_operands, oracle

from pallas_kernels.streaming_matmul import streaming_matmul, streaming_swiglu
from pallas_kernels.streaming_matmul.config import Shape, candidates, choose, shared_bytes


def call(case, x, weight, **options):
    function = streaming_swiglu if case.swiglu else streaming_matmul
    return function(x, weight, out_dtype=case.out_dtype, **options)


class TestXla(StreamingMatmulSuite):
    cases = (
        Case(rows=1, features=24, inputs=40, dtype="float32"),
        Case(rows=5, features=24, inputs=40, dtype="float32", swiglu=True),
        Case(rows=17, features=64, inputs=128),
        Case(rows=17, features=64, inputs=128, swiglu=True, out_dtype="float32"),
        Case(rows=300, features=64, inputs=64, dtype="float16"),
    )

    def multiply(self, case, x, weight):
        return jax.jit(lambda x, weight: call(case, x, weight, implementation="xla"))(x, weight)


def test_leading_axes_are_rows():
    case = Case(rows=6, features=64, inputs=64)
    x, weight = make_operands(case)
    flat = streaming_matmul(x, weight)
    assert jnp.array_equal(streaming_matmul(x.reshape(2, 3, 64), weight), flat.reshape(2, 3, 64))


def test_by_default_xla_runs_where_the_kernel_cannot():
    case = Case(rows=3, features=24, inputs=40)  # off the tiling
    x, weight = make_operands(case)
    error = jnp.max(jnp.abs(streaming_matmul(x, weight).astype(jnp.float32) - oracle(case, x, weight)))
    assert error < 0.05


@pytest.mark.parametrize(
    "shape, dtype, out_dtype, message",
    [
        ((257, 64, 64), "bfloat16", None, "257 rows"),
        ((0, 64, 64), "bfloat16", None, "0 rows"),
        ((8, 64, 96), "bfloat16", None, "64 x 96"),
        ((8, 96, 64), "bfloat16", None, "96 x 64"),
        ((8, 64, 64), "float32", None, "dtype float32"),
        ((8, 64, 64), "bfloat16", "float16", "result of float16"),
        ((8, 64, 64), "bfloat16", None, "no configuration fits"),  # one block of the inner dimension
    ],
)
def test_what_the_kernel_cannot_do_is_named(shape, dtype, out_dtype, message):
    rows, features, inputs = shape
    x, weight = jnp.zeros((rows, inputs), dtype), jnp.zeros((features, inputs), dtype)
    with pytest.raises(NotImplementedError, match=message):
        streaming_matmul(x, weight, out_dtype=out_dtype, implementation="mosaic_gpu")


@pytest.mark.parametrize(
    "weight, options, message",
    [
        (jnp.zeros((64, 32), jnp.bfloat16), {}, "weight must be"),
        (jnp.zeros((64, 64), jnp.float16), {}, "like x"),
        (jnp.zeros((64, 64), jnp.bfloat16), dict(implementation="cuda"), "implementation must be"),
    ],
)
def test_contradictions_are_refused(weight, options, message):
    with pytest.raises(ValueError, match=message):
        streaming_matmul(jnp.zeros((4, 64), jnp.bfloat16), weight, **options)


def test_an_odd_gate_up_is_refused():
    with pytest.raises(ValueError, match="even number"):
        streaming_swiglu(jnp.zeros((4, 64), jnp.bfloat16), jnp.zeros((65, 64), jnp.bfloat16))


@pytest.mark.parametrize("rows", [1, 64, 100, 128, 256])
@pytest.mark.parametrize("features, inputs, panels", [(6144, 4096, 1), (12288, 4096, 2), (5120, 17408, 1)])
def test_every_candidate_fits_and_covers_the_product(rows, features, inputs, panels):
    shape = Shape(rows=rows, features=features, inputs=inputs, panels=panels)
    found = candidates(shape)
    assert found and choose(shape) is not None
    for config in found:
        assert shared_bytes(shape, config, config.stages) <= 226 * 1024
        assert config.consumers * config.row_tiles(shape) * 64 >= rows
        assert config.groups(shape) * config.cluster * config.tile >= features
        assert config.blocks(shape) * config.block == inputs
        assert 1 <= config.workers(shape) * config.cluster <= 132
