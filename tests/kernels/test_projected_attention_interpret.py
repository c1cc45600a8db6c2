"""The kernel that takes a raw projection, interpreted on the CPU: numbers, barriers and races."""

import jax
import pytest
from interpreter import PARAMS, interpreted
from projected_suite import Case, ProjectedSuite

from pallas_kernels.tree_attention import mosaic_gpu_projected
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
        # Two consumers, more tiles than they hold, dead nodes, rows past the last.
        Case(
            nodes=20, heads=(6, 2, 0), capacity=136, lengths=(129,), dead=3, norm=False, spare_rows=4,
            config=config(consumers=2, splits=1),
        ),
        Case(nodes=64, heads=(2, 1, 0), capacity=264, lengths=(250,), config=config(consumers=2, splits=2)),
        Case(
            nodes=70, heads=(1, 1, 0), capacity=200, lengths=(150,), mask="causal",
            config=config(consumers=2, splits=1, block=128),
        ),
        # Part of the head rotated, gates, weights about 0.
        Case(
            nodes=12, heads=(2, 1, 2), head_dim=256, rotary=64, zero_centred=True, capacity=72, lengths=(65,),
            config=config(splits=1),
        ),
        # Windows: whose edge lies in the cache, and past which no row of the cache is seen.
        Case(
            nodes=40, heads=(5, 1, 0), capacity=264, lengths=(259,), sliding_window=70,
            config=config(consumers=2, splits=2),
        ),
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
