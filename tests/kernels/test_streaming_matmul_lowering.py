"""Lowering of the streaming kernel for Hopper, with no GPU: layouts and shared memory of every choice."""

import jax
import pytest

from pallas_kernels.streaming_matmul import api
from pallas_kernels.streaming_matmul.config import Config, Shape, candidates, choose

LAYERS = {
    "qkv": (6144, 4096, 1),
    "o": (4096, 4096, 1),
    "gate_up": (12288, 4096, 2),
    "down": (4096, 12288, 1),
    "head": (151936, 4096, 1),
    "27b_gate_up": (17408, 5120, 2),
    "27b_down": (5120, 17408, 1),
    "small": (1024, 1024, 1),
}


def lower(shape: Shape, config: Config, **options) -> None:
    x = jax.ShapeDtypeStruct((shape.rows, shape.inputs), shape.dtype)
    weight = jax.ShapeDtypeStruct((shape.panels * shape.features, shape.inputs), shape.dtype)

    def call(x, weight):
        compute = api.argmax_from_kernel if shape.argmax else api.from_kernel
        return compute(x, weight, shape, config, **options)

    assert "mosaic_gpu" in jax.jit(call).trace(x, weight).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("rows", [1, 64, 128, 256])
@pytest.mark.parametrize("layer", LAYERS)
def test_every_choice_of_configuration_lowers(layer, rows):
    features, inputs, panels = LAYERS[layer]
    out_dtype = "float32" if layer == "head" else "bfloat16"
    shape = Shape(rows=rows, features=features, inputs=inputs, panels=panels, out_dtype=out_dtype)
    lower(shape, choose(shape), early_weights=True)


@pytest.mark.parametrize("rows", [1, 64, 128])
@pytest.mark.parametrize("features, inputs", [(151936, 4096), (248320, 5120)])
def test_candidates_of_an_argmax_lower(features, inputs, rows):
    shape = Shape(rows=rows, features=features, inputs=inputs, argmax=True)
    for config in {choose(shape), *candidates(shape)[:3]}:
        lower(shape, config, early_weights=True)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 64, 100, 256])
@pytest.mark.parametrize("layer", ["qkv", "gate_up"])
def test_every_candidate_lowers(layer, rows):
    features, inputs, panels = LAYERS[layer]
    shape = Shape(rows=rows, features=features, inputs=inputs, panels=panels, dtype="float16", out_dtype="float16")
    for config in candidates(shape)[::31]:
        lower(shape, config)


def test_too_much_shared_memory_is_refused_without_a_gpu():
    with pytest.raises(ValueError, match="shared memory"):
        lower(
            Shape(rows=64, features=4096, inputs=4096),
            Config(tile=256, splits=1, cluster=1, consumers=1, block=128, stages=3),
        )
