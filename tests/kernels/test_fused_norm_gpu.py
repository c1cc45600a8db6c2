"""The fused norms on a Hopper GPU: JAX_PLATFORMS=cuda pytest ...; skipped elsewhere."""

import jax
import pytest
from fused_norm_suite import Case, FusedNormSuite

from pallas_kernels.choice import on_hopper
from pallas_kernels.streaming_matmul import PartialSums


@pytest.mark.gpu
@pytest.mark.skipif(not on_hopper(), reason="needs a Hopper GPU")
class TestGpu(FusedNormSuite):
    cases = (
        *(Case(nodes=n, splits=s, features=4096) for n, s in ((1, 1), (1, 4), (13, 2), (64, 3), (256, 2))),
        Case(batch=3, nodes=16, splits=2, features=5120, zero_centred=True),
        Case(batch=2, nodes=5, splits=2, features=576, dtype="float16"),
        *(Case(nodes=n, splits=2, heads=(32, 8, 0), head_dim=128) for n in (1, 16, 60, 64, 256)),
        *(
            Case(batch=b, nodes=n, splits=1, heads=(24, 4, 24), head_dim=256, rotary=64, zero_centred=True)
            for b, n in ((1, 64), (2, 13), (3, 1))
        ),
        Case(nodes=130, splits=3, heads=(9, 3, 0), norm=False),
        Case(nodes=40, splits=2, head_dim=96, dtype="float16"),
    )

    def call(self, function, *operands):
        def parts_of(x):
            return x.parts if isinstance(x, PartialSums) else x

        def run(*arrays):
            operands_ = [
                PartialSums(a, x.leading, x.dtype) if isinstance(x, PartialSums) else a
                for a, x in zip(arrays, operands)
            ]
            return function(*operands_)

        return jax.jit(run)(*map(parts_of, operands))
