"""The Mosaic GPU kernel interpreted on the CPU: numbers, barriers and races. Small cases; each takes seconds."""

import jax
import pytest
from interpreter import PARAMS, interpreted
from suite import Case, TreeAttentionSuite, in_layers, to_pages

from pallas_kernels.tree_attention import mosaic_gpu
from pallas_kernels.tree_attention.config import Config


def config(**fields):
    return tuple(sorted((dict(block=64, stages=2, consumers=2) | fields).items()))


def move_table_last(operands):
    q, k_pages, v_pages, table, *rest = operands
    return q, k_pages, v_pages, *rest, table


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the interpreter runs on the CPU")
class TestInterpreted(TreeAttentionSuite):
    cases = (
        # One tile, one consumer: two splits, three, one; a slot without context.
        Case(
            nodes=1,
            heads=4,
            kv_heads=1,
            head_dim=64,
            capacity=200,
            lengths=(0, 130),
            config=config(consumers=1, splits=2),
        ),
        Case(
            nodes=9,
            heads=3,
            kv_heads=1,
            head_dim=96,
            capacity=100,
            lengths=(77,),
            config=config(consumers=1, splits=3),
        ),
        Case(
            nodes=16,
            heads=4,
            kv_heads=1,
            head_dim=64,
            capacity=64,
            lengths=(64,),
            mask="full",
            dtype="float16",
            config=config(consumers=1, splits=1, stages=3),
        ),
        # Two consumers over the same ring; more tiles than fit, a group that fills no tile, dead nodes.
        Case(nodes=20, heads=6, kv_heads=2, head_dim=64, capacity=130, lengths=(129,), dead=3, config=config(splits=1)),
        Case(
            nodes=66,
            heads=1,
            kv_heads=1,
            head_dim=64,
            capacity=64,
            lengths=(50,),
            mask="causal",
            config=config(splits=2),
        ),
        Case(
            nodes=40,
            heads=5,
            kv_heads=1,
            head_dim=64,
            capacity=260,
            lengths=(259,),
            sliding_window=70,
            config=config(splits=2),
        ),
        Case(
            nodes=7,
            heads=2,
            kv_heads=1,
            head_dim=64,
            capacity=260,
            lengths=(200,),
            sliding_window=3,
            positions=True,
            softcap=2.0,
            config=config(consumers=1, splits=1),
        ),
        Case(
            nodes=12,
            heads=2,
            kv_heads=1,
            head_dim=256,
            capacity=70,
            lengths=(65,),
            config=config(consumers=1, splits=1),
        ),
        Case(
            nodes=30, heads=4, kv_heads=1, head_dim=64, capacity=300, lengths=(290,), config=config(block=128, splits=1)
        ),
        # A page table: pages smaller than a block, and larger.
        Case(
            nodes=10,
            heads=4,
            kv_heads=2,
            head_dim=64,
            capacity=200,
            lengths=(0, 150),
            page_rows=16,
            config=config(consumers=1, splits=2),
        ),
        Case(
            nodes=70,
            heads=1,
            kv_heads=1,
            head_dim=64,
            capacity=300,
            lengths=(290,),
            page_rows=128,
            config=config(splits=1),
        ),
        # One layer of several, with two slots.
        Case(
            nodes=9,
            heads=4,
            kv_heads=2,
            head_dim=64,
            capacity=200,
            lengths=(150, 0),
            layer=1,
            config=config(consumers=1, splits=2),
        ),
    )

    def attend(self, case, operands, options):
        if case.page_rows:
            *operands, table = move_table_last(to_pages(case, operands))
            options = options | dict(page_table=table)
        operands, options = in_layers(case, operands, options)
        config = Config(**dict(case.config))
        return interpreted(mosaic_gpu.tree_attention, *operands, **options, config=config, interpret=PARAMS)
