"""The streaming kernel interpreted on the CPU: numbers, barriers and races. Small cases; each takes seconds."""

import jax
import pytest
from interpreter import PARAMS, interpreted
from streaming_matmul_suite import Case, StreamingArgmaxSuite, StreamingMatmulSuite

from pallas_kernels.streaming_matmul import api
from pallas_kernels.streaming_matmul.config import Config, Shape


def config(**fields):
    return tuple(sorted((dict(tile=64, splits=1, cluster=1, consumers=1, block=64, stages=3) | fields).items()))


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the interpreter runs on the CPU")
class TestInterpreted(StreamingMatmulSuite):
    cases = (
        Case(rows=1, features=128, inputs=256, config=config()),
        # A ring longer than the work; rows off the tiling.
        Case(rows=13, features=64, inputs=128, dtype="float16", config=config(stages=4)),
        # One worker, several tiles, the last of them cut off; columns in several parts.
        Case(rows=16, features=320, inputs=256, out_dtype="float32", config=config(tile=256, limit=1, stages=2)),
        # Uneven splits: 5 blocks in 2 parts; items of several splits for one worker.
        Case(rows=24, features=128, inputs=320, config=config(splits=2, limit=3)),
        # Thread blocks that start at different places.
        Case(rows=8, features=192, inputs=448, config=config(stagger=3, splits=2, limit=4, cluster=2, stages=2)),
        # Gate and up: fused, and split.
        Case(rows=40, features=192, inputs=256, swiglu=True, config=config(tile=80, limit=2, stages=2)),
        Case(rows=40, features=128, inputs=256, swiglu=True, config=config(tile=48, splits=2)),
        # More rows than one warpgroup holds: a consumer each, two tiles a consumer, a consumer with an empty tile.
        Case(rows=128, features=128, inputs=192, config=config(consumers=2)),
        Case(rows=72, features=64, inputs=192, config=config(consumers=1)),
        Case(rows=130, features=64, inputs=128, swiglu=True, config=config(consumers=2, tile=32)),
        # Clusters: the last one has a tile past the end; with splits and several items a worker.
        Case(rows=16, features=192, inputs=256, config=config(cluster=2, stages=2)),
        Case(rows=70, features=320, inputs=256, config=config(cluster=2, consumers=2, splits=2, limit=4, stages=2)),
    )

    def multiply(self, case, x, weight):
        shape = Shape(
            rows=case.rows, features=case.features, inputs=case.inputs, panels=1 + case.swiglu, dtype=case.dtype,
            out_dtype=case.out_dtype or case.dtype,
        )  # fmt: skip
        return interpreted(api.from_kernel, x, weight, shape, Config(**dict(case.config)), interpret=PARAMS)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the interpreter runs on the CPU")
@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul:RuntimeWarning")  # infinity times 0
class TestInterpretedArgmax(StreamingArgmaxSuite):
    cases = (
        Case(rows=1, features=128, inputs=128, config=config()),
        # One worker, several tiles, the last of them cut off.
        Case(rows=5, features=208, inputs=192, dtype="float16", config=config(tile=96, limit=1)),
        # More rows than one warpgroup holds: a consumer each, two tiles a consumer, a consumer with an empty tile.
        Case(rows=100, features=64, inputs=128, config=config(consumers=2, tile=48)),
        Case(rows=100, features=64, inputs=128, config=config(tile=48)),
        Case(rows=130, features=64, inputs=128, config=config(consumers=2, tile=48)),
        # Clusters, the last one with a tile past the end; several items a worker.
        Case(rows=64, features=272, inputs=128, config=config(cluster=2, limit=2, stages=2)),
    )

    def find(self, case, x, weight):
        shape = Shape(rows=case.rows, features=case.features, inputs=case.inputs, dtype=case.dtype, argmax=True)
        return interpreted(api.argmax_from_kernel, x, weight, shape, Config(**dict(case.config)), interpret=PARAMS)
