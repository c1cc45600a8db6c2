"""The streaming matmul in XLA, and what the public functions check and choose."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from streaming_matmul_suite import Case, StreamingArgmaxSuite, StreamingMatmulSuite, make_operands, oracle

from pallas_kernels import choice
from pallas_kernels.streaming_matmul import (
    api,
    config,
    reference,
    runs_kernel,
    streaming_argmax,
    streaming_matmul,
    streaming_swiglu,
)
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


class TestArgmaxByXla(StreamingArgmaxSuite):
    cases = (
        Case(rows=1, features=24, inputs=40, dtype="float32"),
        Case(rows=17, features=300, inputs=128),
        Case(rows=300, features=64, inputs=64, dtype="float16"),
    )

    def find(self, case, x, weight):
        return jax.jit(lambda x, weight: streaming_argmax(x, weight, implementation="xla"))(x, weight)


@pytest.mark.parametrize("seed", range(5))
def test_thread_blocks_are_compared_as_argmax_compares(seed):
    rng = np.random.default_rng(seed)
    values = rng.choice([-np.inf, -1.0, -0.0, 0.0, 1.0, np.nan], (9, 64), p=[0.5, 0.2, 0.1, 0.1, 0.05, 0.05])
    values[:, :5] = -np.inf
    columns = np.sort(rng.integers(0, 2**31 - 1, (9, 1), np.int32), axis=0) + np.zeros((9, 64), np.int32)
    order = rng.permutation(9)  # a thread block's tiles lie between another's
    got = jax.jit(reference.first_of_largest)(values[order].astype(np.float32), columns[order])
    np.testing.assert_array_equal(got, columns[values.argmax(axis=0), 0])


def test_leading_axes_are_rows():
    case = Case(rows=6, features=64, inputs=64)
    x, weight = make_operands(case)
    flat = streaming_matmul(x, weight)
    assert jnp.array_equal(streaming_matmul(x.reshape(2, 3, 64), weight), flat.reshape(2, 3, 64))
    assert jnp.array_equal(streaming_argmax(x.reshape(2, 3, 64), weight), flat.argmax(axis=-1).reshape(2, 3))


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
    if out_dtype is None:
        with pytest.raises(NotImplementedError, match=message):
            streaming_argmax(x, weight, implementation="mosaic_gpu")


@pytest.mark.parametrize(
    "weight, options, message",
    [
        (jnp.zeros((64, 32), jnp.bfloat16), {}, "weight must be"),
        (jnp.zeros((64, 64), jnp.float16), {}, "like x"),
        (jnp.zeros((64, 64), jnp.bfloat16), dict(implementation="cuda"), "implementation must be"),
    ],
)
def test_contradictions_are_refused(weight, options, message):
    for function in (streaming_matmul, streaming_argmax):
        with pytest.raises(ValueError, match=message):
            function(jnp.zeros((4, 64), jnp.bfloat16), weight, **options)


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


def test_an_argmax_is_of_one_split():
    sizes = Config(tile=64, splits=2, cluster=1, consumers=1, block=64, stages=3)
    x, weight = jnp.zeros((8, 192), jnp.bfloat16), jnp.zeros((64, 192), jnp.bfloat16)
    with pytest.raises(ValueError, match="splits must be 1, of one panel,"):
        streaming_argmax(x, weight, implementation="mosaic_gpu", config=sizes)


def test_an_argmax_has_measurements_of_its_own(monkeypatch):
    measured = Config(tile=64, splits=1, cluster=1, consumers=1, block=64, stages=3)
    monkeypatch.setattr(config, "MEASURED", {(640, 1024, 1, 64): measured})
    monkeypatch.setattr(config, "MEASURED_ARGMAX", {(640, 1024, 1, 128): measured})
    monkeypatch.setattr(choice, "on_hopper", lambda: True)
    choose.cache_clear()
    weight = jnp.zeros((640, 1024), jnp.bfloat16)
    chosen = [
        (runs_kernel(x, weight), runs_kernel(x, weight, argmax=True))
        for x in (jnp.zeros((rows, 1024), jnp.bfloat16) for rows in (16, 64, 65, 128))
    ]
    choose.cache_clear()
    assert chosen == [(False, False), (True, False), (False, True), (False, True)]


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
@pytest.mark.parametrize(
    "features, inputs, panels, argmax",
    [(6144, 4096, 1, False), (12288, 4096, 2, False), (5120, 17408, 1, False), (151936, 4096, 1, True)],
)
def test_every_candidate_fits_and_covers_the_product(rows, features, inputs, panels, argmax):
    shape = Shape(rows=rows, features=features, inputs=inputs, panels=panels, argmax=argmax)
    found = candidates(shape)
    assert found and choose(shape) is not None
    for c in found:
        c.check(shape)
        assert shared_bytes(shape, c, c.stages) <= 226 * 1024
        assert c.consumers * c.row_tiles(shape) * 64 >= rows
        assert c.groups(shape) * c.cluster * c.tile >= features
        assert c.blocks(shape) * c.block == inputs
        assert 1 <= c.workers(shape) * c.cluster <= 132
