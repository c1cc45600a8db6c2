"""The Mosaic GPU kernels of the gated delta rule interpreted on the CPU: numbers, barriers and races. Small cases."""

import jax
import pytest
from gated_delta_suite import CommitCase, CommitSuite, TreeCase, TreeSuite
from interpreter import PARAMS, interpreted

from pallas_kernels.gated_delta_tree import mosaic_gpu

on_cpu = pytest.mark.skipif(jax.default_backend() != "cpu", reason="the interpreter runs on the CPU")


class InterpretedTree(TreeSuite):
    def outputs(self, case, operands):
        return interpreted(mosaic_gpu.tree, *operands, layer=1, interpret=PARAMS)


@on_cpu
class TestTree(InterpretedTree):
    cases = (
        TreeCase(nodes=13, key_heads=1, dim=64, dtype="bfloat16", dead=3, inputs="mixed"),
        TreeCase(nodes=64, key_heads=1, group=1, dim=64, dtype="bfloat16", inputs="parallel"),
    )


@on_cpu
@pytest.mark.slow
class TestTreeOfManyTiles(InterpretedTree):
    cases = (
        TreeCase(nodes=32, dim=64, slots=2, dtype="bfloat16", mask="chain"),
        TreeCase(nodes=64, key_heads=1, group=1, dtype="bfloat16", dead=63),
        TreeCase(nodes=128, key_heads=1, group=1, dim=64, dtype="bfloat16", inputs="mixed", dead=30),
    )


@on_cpu
class TestReplay(CommitSuite):
    cases = (
        CommitCase(rows=3, counts=(2, 0), key_heads=1, inputs="mixed"),
        CommitCase(rows=8, counts=(8,), key_heads=2, group=1, dtype="bfloat16"),
        CommitCase(rows=5, counts=(9,), key_heads=1, group=1),
    )

    def commit(self, case, operands):
        return interpreted(mosaic_gpu.replay, *operands, interpret=PARAMS)
