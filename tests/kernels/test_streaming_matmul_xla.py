"""The streaming matmul in XLA, and what the public functions check and choose."""

import jax
import jax.numpy as jnp
import pytest
from streaming_matmul_suite import Case, StreamingMatmulSuite, make_operands, oracle

from pallas_kernels import choice
from pallas_kernels.streaming_matmul import api, config, streaming_matmul, streaming_swiglu
from pallas_kernels.streaming_matmul.config import Config, Shape, candidates, choose, shared_bytes


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


@pytest.mark.parametrize(
    "fields",
    [dict(tile=24), dict(block=96), dict(block=128), dict(splits=4), dict(cluster=3), dict(consumers=2),
     dict(stages=1), dict(limit=0)],
)  # fmt: skip
def test_sizes_that_do_not_fit_a_product_are_refused(fields):
    sizes = Config(**dict(tile=64, splits=1, cluster=1, consumers=1, block=64, stages=3) | fields)
    x, weight = jnp.zeros((8, 192), jnp.bfloat16), jnp.zeros((64, 192), jnp.bfloat16)
    with pytest.raises(ValueError, match=f"{next(iter(fields))} must be"):
        streaming_matmul(x, weight, implementation="mosaic_gpu", config=sizes)


def test_measurements_overrule_the_model(monkeypatch):
    measured = Config(tile=64, splits=1, cluster=1, consumers=1, block=64, stages=3)
    monkeypatch.setattr(config, "MEASURED", {(640, 1024, 1, 64): measured, (640, 1024, 1, 128): None})
    choose.cache_clear()
    monkeypatch.setattr(choice, "on_hopper", lambda: True)
    used = []
    monkeypatch.setattr(api, "from_kernel", lambda x, w, shape, config, **_: used.append(config) or x @ w.T)
    for rows in (10, 17, 64, 65, 128):
        streaming_matmul(jnp.zeros((rows, 1024), jnp.bfloat16), jnp.zeros((640, 1024), jnp.bfloat16))
    choose.cache_clear()
    assert used == [measured, measured]  # where nothing was measured, XLA


@pytest.mark.parametrize("rows", [1, 64, 100, 128, 256])
@pytest.mark.parametrize("features, inputs, panels", [(6144, 4096, 1), (12288, 4096, 2), (5120, 17408, 1)])
def test_every_candidate_fits_and_covers_the_product(rows, features, inputs, panels):
    shape = Shape(rows=rows, features=features, inputs=inputs, panels=panels)
    found = candidates(shape)
    assert found and choose(shape) is not None
    for c in found:
        c.check(shape)
        assert shared_bytes(shape, c, c.stages) <= 226 * 1024
        assert c.consumers * c.row_tiles(shape) * 64 >= rows
        assert c.groups(shape) * c.cluster * c.tile >= features
        assert c.blocks(shape) * c.block == inputs
        assert 1 <= c.workers(shape) * c.cluster <= 132
