"""The chain's kernel on a Hopper GPU: JAX_PLATFORMS=cuda pytest ...; skipped elsewhere."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from linear_chain_suite import EPS, NAMED_SIZES, Case, LinearChainSuite, make_operands

from pallas_kernels.choice import on_hopper
from pallas_kernels.linear_chain import ChainWeights, Turns, linear_chain
from pallas_kernels.linear_chain.config import Config
from pallas_kernels.streaming_matmul import PartialSums

QWEN3_8B = dict(mixed=4096, hidden=4096, intermediate=12288, projected=6144)


def total(projected):
    return projected.total() if isinstance(projected, PartialSums) else projected


@pytest.mark.gpu
@pytest.mark.skipif(not on_hopper(), reason="needs a Hopper GPU")
class TestGpu(LinearChainSuite):
    cases = (
        *(Case(rows=m, **QWEN3_8B) for m in (1, 3, 8, 9, 16, 63, 64, 65, 100, 128)),
        *(Case(rows=m, mixed=6144, hidden=5120, intermediate=17408, projected=16480, zero_centred=True)
          for m in (1, 64, 128)),
        Case(rows=16, mixed=2048, hidden=1024, intermediate=3072, dtype="float16"),
        *NAMED_SIZES,
    )  # fmt: skip

    def run(self, case, mixed, stream, weights):
        options = dict(eps=EPS, zero_centred=case.zero_centred, implementation="mosaic_gpu")
        if case.config:
            options["config"] = Config(**dict(case.config))

        @jax.jit
        def call(mixed, stream, weights):
            found = linear_chain(mixed, stream, ChainWeights(**weights), Turns(), **options)
            return found[0], total(found[1])

        return call(mixed, stream, vars(weights))

    @pytest.mark.parametrize("rows", [1, 64, 128])
    def test_the_same_bits_every_time(self, rows):
        """Passes of several chains, each fed with the last one's output: a race between thread blocks would show."""
        case = Case(rows=rows, mixed=1024, hidden=1024, intermediate=3072, projected=1024)
        mixed, stream, weights = make_operands(case)

        @jax.jit
        def passes(mixed, stream, weights):
            weights = ChainWeights(**weights)

            def one(_, carry):
                mixed, stream, turns = *carry, Turns()
                for _ in range(4):
                    stream, projected = linear_chain(
                        mixed, stream, weights, turns, eps=EPS, implementation="mosaic_gpu"
                    )
                    mixed, stream = total(projected) * jnp.bfloat16(0.5), stream * jnp.bfloat16(0.5)
                return mixed, stream

            return jax.lax.fori_loop(0, 20, one, (mixed, stream))

        first = np.asarray(passes(mixed, stream, vars(weights))[0]).view(np.uint16)
        for _ in range(20):
            again = passes(mixed, stream, vars(weights))[0]
            assert np.isfinite(np.asarray(again, np.float32)).all()
            np.testing.assert_array_equal(np.asarray(again).view(np.uint16), first)
