"""Arguments of the fused norms and of the tree's convolution that contradict each other are refused by name."""

import jax.numpy as jnp
import pytest
from tree_conv_suite import LAYER, Case, make_operands

from pallas_kernels.fused_norm import Heads, add_rms_norm, qk_norm_rope
from pallas_kernels.gated_delta_tree import tree_conv
from pallas_kernels.streaming_matmul import PartialSums
from pallas_kernels.streaming_matmul.config import (
    MEASURED,
    MEASURED_ARGMAX,
    Shape,
    candidates,
    choose,
    measured_faster,
    shared_bytes,
)


def ones(*shape, dtype=jnp.bfloat16):
    return jnp.ones(shape, dtype)


CONV = Case(nodes=8, heads=(1, 1))


@pytest.mark.parametrize("implementation", ["xla", "mosaic_gpu"])
@pytest.mark.parametrize(
    "name,position,value",
    [
        ("projected", 0, ones(1, 8, 128)),
        ("window", 1, ones(3, 1, 2, 192)),
        ("window", 1, ones(3, 1, 3, 256)),
        ("window", 1, ones(3, 2, 3, 192)),
        ("window", 1, ones(3, 1, 3, 192, dtype=jnp.float32)),
        ("rows", 2, ones(1, 4, 4, dtype=jnp.int32)),
        ("weight", 3, ones(128, 4)),
        ("weight", 3, ones(192, 5)),
    ],
)
def test_tree_conv(name, position, value, implementation):
    operands = list(make_operands(CONV))
    operands[position] = value
    with pytest.raises(ValueError, match=f"^{name} must be"):
        tree_conv(*operands, heads=CONV.heads, dims=(64, 64), layer=LAYER, implementation=implementation)


@pytest.mark.parametrize("layer", [-1, 3])
def test_tree_conv_of_a_layer_that_is_not_there(layer):
    with pytest.raises(ValueError, match="layer must be one of the 3"):
        tree_conv(*make_operands(CONV), heads=CONV.heads, dims=(64, 64), layer=layer)


@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("by_kernel", [False, True])
def test_an_update_of_other_rows(rows, by_kernel):
    update = PartialSums(ones(1, rows, 128), (1, rows), "bfloat16") if by_kernel else ones(1, rows, 128)
    with pytest.raises(ValueError, match="^update must be"):
        add_rms_norm(ones(1, 3, 128), update, ones(128), eps=1e-6)


@pytest.mark.parametrize("weight", [ones(1), ones(64), ones(128, dtype=jnp.float32)])
def test_a_norm_of_another_size_or_dtype(weight):
    with pytest.raises(ValueError, match="^weight must be"):
        add_rms_norm(ones(1, 3, 128), ones(1, 3, 128), weight, eps=1e-6)


@pytest.mark.parametrize(
    "name,fields",
    [
        ("cos", dict(cos=ones(1, 2, 32, dtype=jnp.float32))),
        ("cos", dict(cos=ones(1, 4, 64, dtype=jnp.float32))),
        ("cos", dict(cos=ones(1, 4, 32))),
        ("sin", dict(sin=ones(1, 4, 16, dtype=jnp.float32))),
        ("projected", dict(projected=ones(1, 4, 512))),
        ("q_weight", dict(q_weight=None)),
        ("k_weight", dict(k_weight=ones(32))),
    ],
)
def test_heads(name, fields):
    table = ones(1, 4, 32, dtype=jnp.float32)
    operands = dict(projected=ones(1, 4, 256), q_weight=ones(64), k_weight=ones(64), cos=table, sin=table) | fields
    with pytest.raises(ValueError, match=f"^{name} must be"):
        qk_norm_rope(*operands.values(), Heads(2, 1, 0, 64, 1e-6, False))


def test_partial_sums_hold_all_rows():
    with pytest.raises(ValueError, match="^parts must be"):
        PartialSums(ones(1, 3, 128), (2, 2), "bfloat16")


@pytest.mark.parametrize("key", [k for k, config in MEASURED.items() if config])
@pytest.mark.parametrize("out_dtype", ["bfloat16", "float32"])
def test_every_measured_size_fits_or_gives_way(key, out_dtype):
    features, inputs, panels, rows = key
    shape = Shape(rows=rows, features=features, inputs=inputs, panels=panels, out_dtype=out_dtype)
    chosen = choose(shape)
    chosen.check(shape)
    assert chosen == MEASURED[key] if measured_faster(shape) else chosen == candidates(shape)[0]
    assert shared_bytes(shape, chosen, chosen.stages) <= 227 * 1024
    assert measured_faster(shape) or out_dtype == "float32"


@pytest.mark.parametrize("key", [k for k, config in MEASURED_ARGMAX.items() if config])
def test_every_measured_size_of_an_argmax_fits(key):
    features, inputs, panels, rows = key
    shape = Shape(rows=rows, features=features, inputs=inputs, panels=panels, argmax=True)
    assert choose(shape) == MEASURED_ARGMAX[key]
    choose(shape).check(shape)
