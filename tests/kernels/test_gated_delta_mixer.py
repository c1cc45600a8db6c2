"""A whole Gated DeltaNet mixer: in XLA, by the kernels interpreted, lowered for Hopper, and on such a GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreter import PARAMS, interpreted
from mixer_suite import EPS, LAYER, TAPS, Case, MixerSuite, make_operands

from pallas_kernels.choice import on_hopper
from pallas_kernels.gated_delta_tree import MixerWeights, gated_delta_mixer
from pallas_kernels.gated_delta_tree.mixer import from_kernels


class TestXla(MixerSuite):
    cases = (
        Case(nodes=1, dtype="float32"),
        Case(nodes=13, slots=2, dim=32, dtype="float32"),
        Case(nodes=24, heads=(2, 2), dim=64, mask="chain"),
    )

    def mix(self, case, operands):
        options = dict(heads=case.heads, eps=EPS, layer=LAYER, implementation="xla")
        return gated_delta_mixer(*operands, **options)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the interpreter runs on the CPU")
class TestInterpreted(MixerSuite):
    cases = (
        Case(nodes=1, slots=2),
        Case(nodes=1, heads=(2, 2)),
        Case(nodes=16, heads=(1, 1)),
    )

    def mix(self, case, operands):
        options = dict(heads=case.heads, eps=EPS, layer=LAYER, interpret=PARAMS)
        return interpreted(from_kernels, *operands, **options)


@pytest.mark.slow
class TestInterpretedOverTiles(TestInterpreted):
    cases = (Case(nodes=72, heads=(1, 1)),)


_kernels = jax.jit(
    functools.partial(gated_delta_mixer, eps=EPS, layer=LAYER, implementation="mosaic_gpu"), static_argnames="heads"
)


@pytest.mark.gpu
@pytest.mark.skipif(not on_hopper(), reason="needs a Hopper GPU")
class TestGpu(MixerSuite):
    cases = (
        *(Case(nodes=n, heads=(16, 48)) for n in (1, 2, 7, 16, 32, 64, 128, 256)),
        *(Case(nodes=n, heads=(16, 32), slots=2) for n in (1, 24, 64, 200)),
        *(Case(nodes=n, heads=(2, 8), slots=3, mask="chain") for n in (1, 64, 128)),
        Case(nodes=1, heads=(1, 3)),
    )

    def mix(self, case, operands):
        return _kernels(*operands, heads=case.heads)

    @pytest.mark.parametrize("nodes", [1, 16, 64, 256])
    def test_gives_the_same_bits_every_time(self, nodes):
        """A race between warps, or between the thread blocks of a head, would show."""
        operands = make_operands(Case(nodes=nodes, heads=(16, 48)))

        @jax.jit
        def chain(projected):
            def call(_, projected):  # the outputs become the next output gates
                # A kernel of its own writes them there: XLA must not let ours write into the middle of an array.
                out = jax.lax.optimization_barrier(_kernels(projected, *operands[1:], heads=(16, 48)))
                return projected.at[..., -out.shape[-1] :].set(out)  # none is spare at this shape

            return jax.lax.fori_loop(0, 50, call, projected)

        first = np.asarray(chain(operands[0])).view(np.uint16)
        for _ in range(10):
            np.testing.assert_array_equal(np.asarray(chain(operands[0])).view(np.uint16), first)


def lowered(nodes: int, heads: tuple[int, int]) -> str:
    """Two layers of a mixer, lowered for CUDA."""
    channels = (2 * heads[0] + heads[1]) * 128
    bf16, f32 = jnp.bfloat16, jnp.float32
    weights = MixerWeights(*(
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in (((channels, TAPS), bf16), ((heads[1],), f32), ((heads[1],), f32), ((128,), bf16))
    ))  # fmt: skip
    shapes = (
        ((1, nodes, channels + 130 * heads[1]), bf16), ((9, 1, TAPS - 1, channels), bf16),
        ((9, 1, heads[1], 128, 128), f32), ((1, nodes, TAPS), jnp.int32), ((1, nodes, -(-nodes // 32)), jnp.uint32),
    )  # fmt: skip
    operands = [jax.ShapeDtypeStruct(s, d) for s, d in shapes]

    def mix(*operands):
        options = dict(heads=heads, eps=EPS, implementation="mosaic_gpu")
        return [gated_delta_mixer(*operands, layer=layer, **options) for layer in (2, 5)]

    return jax.jit(mix).trace(*operands, weights).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("heads", [(16, 48), pytest.param((16, 32), marks=pytest.mark.slow)])
def test_a_token_is_one_kernel_and_a_tree_two_for_all_layers(heads):
    assert lowered(1, heads).count("custom_call @mosaic_gpu") == 1
    assert lowered(64, heads).count("custom_call @mosaic_gpu") == 2


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [16, 128, 256])
def test_every_width_lowers(nodes):
    assert lowered(nodes, (16, 48)).count("custom_call @mosaic_gpu") == 2


WRONG = [
    (dict(ancestors=jnp.ones((1, 1, 1), jnp.int32)), "ancestors must be"),
    (dict(states=jnp.ones((3, 1, 2, 128, 128), jnp.bfloat16)), "states must be"),
    (dict(layer=3), "layer must be"),
    (dict(heads=(1, 3)), "projected must be"),
    (dict(rate=jnp.zeros((3,), jnp.float32)), "decay_rate_log must be"),
    (dict(norm=jnp.ones((128,), jnp.float32)), "norm must be"),
    (dict(implementation="cuda"), "implementation"),
]


@pytest.mark.parametrize("wrong,message", WRONG)
def test_arguments_that_do_not_fit_are_named(wrong, message):
    projected, window, states, rows, ancestors, weights = make_operands(Case(nodes=1))
    wrong = dict(wrong)
    operands = projected, window, wrong.pop("states", states), rows, wrong.pop("ancestors", ancestors)
    weights = weights._replace(
        decay_rate_log=wrong.pop("rate", weights.decay_rate_log), norm=wrong.pop("norm", weights.norm)
    )
    with pytest.raises(ValueError, match=message):
        gated_delta_mixer(*operands, weights, **(dict(heads=(1, 2), eps=EPS, layer=LAYER) | wrong))


@pytest.mark.parametrize(
    "refused,message",
    [
        (Case(nodes=13, heads=(1, 8)), "13 nodes"),
        (Case(nodes=1, dim=64), "Dk = 64"),
        (Case(nodes=16), "2 value heads"),
    ],
)
def test_what_the_kernels_cannot_do_is_named(refused, message):
    with pytest.raises(NotImplementedError, match=message):
        gated_delta_mixer(
            *make_operands(refused), heads=refused.heads, eps=EPS, layer=LAYER, implementation="mosaic_gpu"
        )
