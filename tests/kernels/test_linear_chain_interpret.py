"""The steps of the chain's kernel interpreted on the CPU, a launch each: numbers, barriers and races.

The interpreter knows no counters between thread blocks, so the chain as one launch is for `test_linear_chain_gpu`.
"""

import jax
import pytest
from interpreter import PARAMS, interpreted
from linear_chain_suite import EPS, Case, LinearChainSuite

from pallas_kernels.linear_chain import api, mosaic_gpu
from pallas_kernels.linear_chain.config import Config, Cut


def config(out=(64, 1), gate_up=32, down=(64, 1), next=(32, 1), **fields):
    cuts = dict(out=Cut(*out), gate_up=Cut(gate_up, 1), down=Cut(*down), next=Cut(*next))
    return tuple(sorted((dict(workers=3, block=64, weight_stages=3, x_stages=2) | cuts | fields).items()))


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the interpreter runs on the CPU")
class TestInterpreted(LinearChainSuite):
    cases = (
        Case(rows=1, mixed=128, hidden=128, intermediate=128, projected=96, config=config()),
        # Uneven splits, tiles past the end, rows off the tiling; no next projection.
        Case(rows=13, mixed=320, hidden=256, intermediate=192, config=config(out=(96, 2), gate_up=80, down=(48, 3))),
        # A projection in splits; more thread blocks than items; a ring longer than the work.
        Case(
            rows=40, mixed=128, hidden=128, intermediate=64, projected=160, dtype="float16", zero_centred=True,
            config=config(next=(48, 2), workers=7, weight_stages=5, x_stages=4),
        ),
        # More rows than one warpgroup holds, and more than there are thread blocks.
        Case(rows=70, mixed=128, hidden=128, intermediate=128, projected=64, config=config(consumers=2)),
        Case(rows=128, mixed=64, hidden=128, intermediate=128, config=config(consumers=1, workers=2)),
    )  # fmt: skip

    def run(self, case, mixed, stream, weights):
        chain = api.make_chain(mixed, weights, EPS, case.zero_centred)
        operands = api.operands(chain, mixed, stream, weights)
        options = dict(chain=chain, config=Config(**dict(case.config)), interpret=PARAMS)
        return api.results(chain, interpreted(mosaic_gpu.run_by_steps, operands, **options), stream)
