"""The steps of the chain's kernel interpreted on the CPU, a launch each: numbers, barriers and races.

The interpreter knows no counters between thread blocks, so the chain as one launch is for `test_linear_chain_gpu`.
"""

import jax
import pytest
from interpreter import PARAMS, interpreted
from linear_chain_suite import EPS, NAMED_SIZES, Case, LinearChainSuite, config

from pallas_kernels.linear_chain import api, mosaic_gpu
from pallas_kernels.linear_chain.config import Config


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the interpreter runs on the CPU")
class TestInterpreted(LinearChainSuite):
    cases = (
        *NAMED_SIZES,
        Case(rows=1, mixed=128, hidden=128, intermediate=128, projected=96, config=config(workers=3)),
        # A ring longer than the work.
        Case(
            rows=5, mixed=128, hidden=128, intermediate=64, projected=64, dtype="float16", zero_centred=True,
            config=config(workers=2, weight_stages=5, x_stages=4),
        ),
    )  # fmt: skip

    def run(self, case, mixed, stream, weights):
        chain = api.make_chain(mixed, weights, EPS, case.zero_centred)
        operands = api.operands(chain, mixed, stream, weights)
        options = dict(chain=chain, config=Config(**dict(case.config)), interpret=PARAMS)
        return api.results(chain, interpreted(mosaic_gpu.run_by_steps, operands, **options), stream)
