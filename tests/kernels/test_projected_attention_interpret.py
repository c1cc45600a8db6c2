"""The kernel that takes a raw projection, interpreted on the CPU: numbers, barriers and races."""

import jax
import numpy as np
import pytest
from interpreter import PARAMS, interpreted
from projected_suite import Case, ProjectedSuite, make_call

from pallas_kernels.fused_norm import qk_norm_rope
from pallas_kernels.streaming_matmul import PartialSums
from pallas_kernels.tree_attention import mosaic_gpu_projected, projected_tree_attention
from pallas_kernels.tree_attention.config import Config


def config(**fields):
    return tuple(sorted((dict(block=64, stages=2, consumers=1) | fields).items()))


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the interpreter runs on the CPU")
class TestInterpreted(ProjectedSuite):
    cases = (
        # One tile: splits with and without the tree, and without anything; no context; deep and shallow rings.
        Case(nodes=1, capacity=200, lengths=(0, 130), config=config(splits=2, stages=4)),
        Case(nodes=5, heads=(3, 1, 0), head_dim=96, capacity=104, lengths=(77,), config=config(splits=3)),
        Case(nodes=16, capacity=64, lengths=(64,), mask="full", dtype="float16", config=config(splits=1, stages=3)),
        # Two consumers.
        Case(nodes=64, heads=(2, 1, 0), capacity=264, lengths=(250,), config=config(consumers=2, splits=2)),
        # Part of the head rotated, gates, weights about 0.
        Case(
            nodes=12, heads=(2, 1, 2), head_dim=256, rotary=64, zero_centred=True, capacity=72, lengths=(65,),
            config=config(splits=1),
        ),
        # A window past which no row of the cache is seen.
        Case(
            nodes=7, heads=(2, 1, 0), capacity=264, lengths=(200,), sliding_window=3, positions=True,
            config=config(splits=1),
        ),
        Case(nodes=9, heads=(4, 2, 0), capacity=200, lengths=(150, 0), layer=1, config=config(splits=2)),
    )  # fmt: skip

    def attend(self, case, call):
        options = call.options | dict(heads=case.described(), config=Config(**dict(case.config)), interpret=PARAMS)
        return interpreted(
            mosaic_gpu_projected.projected_tree_attention,
            self.projected(case, call).by_slot()[0], *call.weights, *call.rope, *call.cache, call.lengths,
            call.ancestors, **options,
        )  # fmt: skip


@pytest.mark.slow
class TestInterpretedOverTiles(TestInterpreted):
    """More tiles than consumers hold, dead nodes, rows past the last, two tiles of keys, an edge of a window."""

    cases = (
        Case(
            nodes=20, heads=(6, 2, 0), capacity=136, lengths=(129,), dead=3, norm=False, spare_rows=4,
            config=config(consumers=2, splits=1),
        ),
        Case(
            nodes=70, heads=(1, 1, 0), capacity=200, lengths=(150,), mask="causal",
            config=config(consumers=2, splits=1, block=128),
        ),
        Case(
            nodes=40, heads=(5, 1, 0), capacity=264, lengths=(259,), sliding_window=70,
            config=config(consumers=2, splits=2),
        ),
    )  # fmt: skip


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the interpreter runs on the CPU")
class TestPublicFunction(ProjectedSuite):
    """What it adds: the choice of sizes, values and gates."""

    cases = (
        Case(nodes=3, heads=(2, 1, 2), capacity=64, lengths=(50, 20), layer=2, rotary=32),
        Case(nodes=12, heads=(2, 2, 1), capacity=64, lengths=(40,), dead=2, zero_centred=True, spare_rows=4),
    )

    def attend(self, case, call):
        projected = PartialSums(call.parts, (len(case.lengths), case.nodes), case.dtype, PARAMS)
        return interpreted(
            projected_tree_attention, projected, *call.weights, *call.rope, case.described(), *call.cache, call.lengths,
            call.ancestors, **call.options, implementation="mosaic_gpu",
        )  # fmt: skip


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the interpreter runs on the CPU")
def test_keys_are_those_of_the_kernel_of_norms():
    """To the bit, also where a slot's rows are no whole tiles."""
    case = Case(nodes=10, heads=(2, 2, 0), capacity=64, lengths=(50, 3), config=config(splits=1))
    call, heads = make_call(case), case.described()
    projected = PartialSums(call.parts, (2, case.nodes), case.dtype, PARAMS)
    _, keys = TestInterpreted().attend(case, call)
    _, wanted, *_ = interpreted(qk_norm_rope, projected, *call.weights, *call.rope, heads)
    np.testing.assert_array_equal(keys, wanted)
