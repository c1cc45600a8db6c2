"""The fused norms interpreted on the CPU: numbers, barriers and races."""

import jax
import numpy as np
import pytest
from fused_norm_suite import Case, FusedNormSuite
from interpreter import PARAMS, interpreted

from pallas_kernels.fused_norm import add_rms_norm
from pallas_kernels.streaming_matmul import partial_sums
from pallas_kernels.streaming_matmul.config import Config


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the interpreter runs on the CPU")
class TestInterpreted(FusedNormSuite):
    interpret = PARAMS
    cases = (
        Case(nodes=1, splits=3, features=512),
        Case(nodes=13, splits=1, features=384, zero_centred=True),
        Case(batch=2, nodes=3, splits=2, features=256, dtype="float16"),
        # Rows off the tiling, more than a tile of them, several slots.
        Case(nodes=1, splits=2),
        Case(nodes=13, splits=2, norm=False),
        Case(nodes=70, splits=1, heads=(1, 1, 0)),
        Case(batch=2, nodes=3, splits=2, heads=(1, 1, 1), zero_centred=True),
        # Heads that rotate in part.
        Case(nodes=4, splits=1, head_dim=256, rotary=64, heads=(2, 1, 2), zero_centred=True),
        Case(nodes=4, splits=2, head_dim=96, dtype="float16"),
    )

    def call(self, function, *operands):
        return interpreted(function, *operands)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the interpreter runs on the CPU")
@pytest.mark.parametrize("rows,splits", [(1, 1), (3, 2), (13, 2)])
def test_takes_what_the_streaming_kernel_leaves(rows, splits):
    """Both kernels, one after the other: rows off the tiling are neither lost nor added."""
    rng = np.random.default_rng(rows)
    x, weight = (jax.numpy.asarray(rng.standard_normal(s), "bfloat16") for s in ((1, rows, 256), (128, 256)))
    stream, norm = (jax.numpy.asarray(rng.standard_normal(s), "bfloat16") for s in ((1, rows, 128), (128,)))
    config = Config(tile=64, splits=splits, cluster=1, consumers=1, block=64, stages=2)
    update = partial_sums(x, weight, config=config, interpret=PARAMS)
    got = add_rms_norm(stream, update, norm, eps=1e-6)
    wanted = add_rms_norm(stream, update.total(), norm, eps=1e-6)
    product = np.asarray(x, np.float64)[0] @ np.asarray(weight, np.float64).T
    np.testing.assert_allclose(np.asarray(update.total(), np.float64)[0], product, rtol=0.01, atol=0.1)
    for ours, theirs in zip(got, wanted, strict=True):
        np.testing.assert_allclose(np.asarray(ours, np.float32), np.asarray(theirs, np.float32), rtol=0.01, atol=0.01)
