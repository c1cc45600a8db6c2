"""The short convolution along a tree: in XLA, by the kernel interpreted, lowered for Hopper, and on such a GPU."""

import functools

import jax
import jax.numpy as jnp
import pytest
from interpreter import PARAMS, interpreted
from tree_conv_suite import LAYER, TAPS, Case, TreeConvSuite, make_operands

from pallas_kernels.choice import on_hopper
from pallas_kernels.gated_delta_tree import tree_conv
from pallas_kernels.gated_delta_tree.conv import from_kernel


class TestXla(TreeConvSuite):
    cases = (
        Case(nodes=1),
        Case(nodes=13, slots=2),
        Case(nodes=64, mask="chain", dim=128),
        Case(nodes=40, heads=(2, 2), dim=32, spare=4),
    )

    def convolve(self, case, operands):
        dims = (case.dim, case.dim)
        return tree_conv(*operands, heads=case.heads, dims=dims, layer=LAYER, implementation="xla")


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the interpreter runs on the CPU")
class TestInterpreted(TreeConvSuite):
    cases = (
        Case(nodes=1),
        Case(nodes=16, slots=2, heads=(1, 1), mask="chain"),
        Case(nodes=72, heads=(1, 1)),
        Case(nodes=8, heads=(1, 1), dim=128, spare=0),
    )

    def convolve(self, case, operands):
        options = dict(heads=case.heads, dims=(case.dim, case.dim), interpret=PARAMS)
        return interpreted(from_kernel, *operands, jnp.array([LAYER], jnp.int32), **options)


@pytest.mark.gpu
@pytest.mark.skipif(not on_hopper(), reason="needs a Hopper GPU")
class TestGpu(TreeConvSuite):
    cases = (
        *(Case(nodes=n, heads=(16, 48), dim=128, spare=6240) for n in (1, 7, 16, 32, 64, 128, 256)),
        Case(nodes=200, heads=(16, 32), dim=128, slots=2),
        Case(nodes=64, slots=3, mask="chain"),
        Case(nodes=64, heads=(2, 3), spare=96),
    )

    def convolve(self, case, operands):
        dims = (case.dim, case.dim)
        options = dict(heads=case.heads, dims=dims, layer=LAYER, implementation="mosaic_gpu")
        return jax.jit(functools.partial(tree_conv, **options))(*operands)


@pytest.mark.parametrize("heads,width", [((16, 48), 16480), ((16, 32), 12352), ((16, 16), 8224)])
@pytest.mark.parametrize("nodes", [1, 64, 256])
def test_lowers_at_the_shapes_of_real_models(nodes, heads, width):
    channels = (2 * heads[0] + heads[1]) * 128

    def convolve(*operands):
        return tree_conv(*operands, heads=heads, dims=(128, 128), layer=5, implementation="mosaic_gpu")

    shapes = ((1, nodes, width), (48, 1, TAPS - 1, channels), (1, nodes, TAPS), (channels, TAPS))
    dtypes = (jnp.bfloat16, jnp.bfloat16, jnp.int32, jnp.bfloat16)
    operands = [jax.ShapeDtypeStruct(s, d) for s, d in zip(shapes, dtypes)]
    text = jax.jit(convolve).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 1


REFUSED = [(Case(nodes=13), "13 nodes"), (Case(nodes=16, spare=4), "columns"), (Case(nodes=4, dim=32), "Dk = 32")]


@pytest.mark.parametrize("refused,message", REFUSED)
def test_what_the_kernel_cannot_do_is_named(refused, message):
    operands, dims = make_operands(refused), (refused.dim, refused.dim)
    with pytest.raises(NotImplementedError, match=message):
        tree_conv(*operands, heads=refused.heads, dims=dims, layer=LAYER, implementation="mosaic_gpu")
