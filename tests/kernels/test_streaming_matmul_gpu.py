"""The streaming kernel on a Hopper GPU: JAX_PLATFORMS=cuda pytest ...; skipped elsewhere."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from streaming_matmul_suite import Case, StreamingArgmaxSuite, StreamingMatmulSuite, make_operands

from pallas_kernels.choice import on_hopper
from pallas_kernels.streaming_matmul import streaming_argmax, streaming_matmul, streaming_swiglu
from pallas_kernels.streaming_matmul.config import Config


def config(**fields):
    return tuple(sorted((dict(tile=64, splits=1, cluster=1, consumers=1, block=64, stages=3) | fields).items()))


@pytest.mark.gpu
@pytest.mark.skipif(not on_hopper(), reason="needs a Hopper GPU")
class TestGpu(StreamingMatmulSuite):
    cases = (
        # Widths of every kind at the layers of Qwen3-8B, by the default choice.
        *(Case(rows=m, features=6144, inputs=4096) for m in (1, 3, 8, 9, 16, 63, 64, 65, 100, 128, 129, 192, 256)),
        *(Case(rows=m, features=12288, inputs=4096, swiglu=True) for m in (1, 64, 128, 200, 256)),
        *(Case(rows=m, features=4096, inputs=12288) for m in (1, 16, 64, 128, 256)),
        *(Case(rows=m, features=38016, inputs=4096, out_dtype="float32") for m in (1, 64, 256)),
        Case(rows=64, features=17408, inputs=5120, swiglu=True, dtype="float16"),
        Case(rows=33, features=192, inputs=192),
        # Named configurations: tiles past the end, uneven splits, clusters, several tiles a thread block.
        Case(rows=16, features=320, inputs=256, out_dtype="float32", config=config(tile=256, limit=1)),
        Case(rows=24, features=128, inputs=320, config=config(splits=2, limit=3)),
        Case(rows=40, features=192, inputs=256, swiglu=True, config=config(tile=80, limit=2)),
        Case(rows=40, features=448, inputs=512, swiglu=True, config=config(tile=48, splits=2, block=128)),
        Case(rows=130, features=192, inputs=384, config=config(consumers=3, tile=48)),
        Case(rows=256, features=448, inputs=384, config=config(consumers=4, tile=48)),
        Case(rows=256, features=448, inputs=384, swiglu=True, config=config(consumers=2, tile=48)),
        Case(rows=16, features=192, inputs=256, config=config(cluster=2)),
        *(Case(rows=m, features=4160, inputs=1024, config=config(cluster=2, splits=2)) for m in (1, 7, 33)),
        Case(rows=70, features=320, inputs=512, config=config(cluster=2, consumers=2, splits=2, limit=4)),
        Case(rows=70, features=4160, inputs=1024, config=config(stagger=5, consumers=2, splits=2)),
        Case(rows=70, features=4160, inputs=1024, swiglu=True, config=config(cluster=2, consumers=2, limit=8)),
    )

    def multiply(self, case, x, weight):
        options = dict(out_dtype=case.out_dtype, implementation="mosaic_gpu")
        if case.config:
            options["config"] = Config(**dict(case.config))
        function = streaming_swiglu if case.swiglu else streaming_matmul
        return jax.jit(lambda x, weight: function(x, weight, **options))(x, weight)

    @pytest.mark.parametrize("early_weights", [False, True])
    @pytest.mark.parametrize("rows", [1, 64, 128, 256])
    def test_the_same_bits_every_time(self, rows, early_weights):
        """Chains of layers, each fed with the last one's output: a race between kernels or warpgroups would show."""
        x, gate_up = make_operands(Case(rows=rows, features=4096, inputs=2048, swiglu=True))
        _, down = make_operands(Case(rows=rows, features=2048, inputs=4096))
        options = dict(implementation="mosaic_gpu", early_weights=early_weights)

        @jax.jit
        def chain(x):
            def layer(_, x):
                y = x + streaming_matmul(streaming_swiglu(x, gate_up, **options), down, **options)
                return y / jnp.max(jnp.abs(y), axis=-1, keepdims=True)

            return jax.lax.fori_loop(0, 50, layer, x)

        first = np.asarray(chain(x)).view(np.uint16)
        assert np.isfinite(np.asarray(chain(x), np.float32)).all()
        for _ in range(20):
            np.testing.assert_array_equal(np.asarray(chain(x)).view(np.uint16), first)


@pytest.mark.gpu
@pytest.mark.skipif(not on_hopper(), reason="needs a Hopper GPU")
class TestArgmaxOnGpu(StreamingArgmaxSuite):
    cases = (
        # A quarter of the head of Qwen3-8B, and one as deep as that of Qwen3.6-27B, by the default choice.
        *(Case(rows=m, features=37984, inputs=4096) for m in (1, 16, 63, 64, 65, 128, 256)),
        *(Case(rows=m, features=31040, inputs=5120) for m in (64, 128)),
        Case(rows=33, features=208, inputs=192, dtype="float16"),
        # The sizes of the table; tiles past the end, several of a thread block, clusters.
        Case(rows=64, features=37984, inputs=4096, config=config(tile=192, block=128)),
        Case(rows=16, features=320, inputs=256, config=config(tile=256, limit=1)),
        Case(rows=100, features=4176, inputs=1024, config=config(tile=48)),
        Case(rows=100, features=4176, inputs=1024, config=config(consumers=2, cluster=2, limit=8)),
        Case(rows=70, features=4176, inputs=1024, config=config(stagger=5, tile=96, cluster=2, consumers=2, limit=4)),
    )

    def find(self, case, x, weight):
        sizes = Config(**dict(case.config)) if case.config else None
        options = dict(implementation="mosaic_gpu", config=sizes)
        return jax.jit(lambda x, weight: streaming_argmax(x, weight, **options))(x, weight)

    @pytest.mark.parametrize("early_weights", [False, True])
    @pytest.mark.parametrize("rows", [1, 64, 128])
    def test_the_same_bits_every_time(self, rows, early_weights):
        """Chains of draws, each row the embedding of the last one's: a race between kernels would show."""
        x, weight = make_operands(Case(rows=rows, features=38016, inputs=2048))

        @jax.jit
        def chain(x):
            def draw(x, _):
                tokens = streaming_argmax(x, weight, implementation="mosaic_gpu", early_weights=early_weights)
                return jnp.roll(weight[tokens], 7, axis=1) * 32 + x / 2, tokens

            return jax.lax.scan(draw, x, length=50)[1]

        first = np.asarray(chain(x))
        assert len(np.unique(first)) > first.size // 10
        for _ in range(20):
            np.testing.assert_array_equal(chain(x), first)
