"""Row tiles, packed masks, and the choice of configuration."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.tree_attention import masks, packing
from pallas_kernels.tree_attention.config import choose


@pytest.mark.parametrize(
    "nodes, group, tiles",
    [(1, 4, 1), (1, 16, 2), (16, 4, 1), (16, 6, 2), (64, 4, 4), (64, 7, 7), (256, 4, 16), (9, 3, 1)],
)
def test_the_fewest_tiles_are_taken(nodes, group, tiles):
    plan = packing.plan_rows(nodes, group)
    assert plan.tiles == tiles
    assert plan.nodes_per_tile * plan.heads_per_tile == packing.TILE
    assert plan.node_tiles * plan.nodes_per_tile >= nodes and plan.head_tiles * plan.heads_per_tile >= group


def test_packing_bits_is_undone_by_unpacking():
    bits = np.random.default_rng(0).random((3, 70)) < 0.5
    words = masks.pack_bits(jnp.asarray(bits))
    assert words.shape == (3, 3) and words.dtype == jnp.uint32
    np.testing.assert_array_equal(masks.unpack_bits(words, 70), bits)


def test_row_words_follow_the_tiles():
    nodes, plan = 40, packing.plan_rows(40, 2)
    visible = np.random.default_rng(1).random((2, nodes, nodes)) < 0.5
    words = np.asarray(packing.row_words(masks.pack_bits(jnp.asarray(visible)), None, None, plan, 64))
    for row in range(packing.TILE):
        for node_tile in range(plan.node_tiles):
            node = node_tile * plan.nodes_per_tile + row % plan.nodes_per_tile
            bits = np.unpackbits(words[1, node_tile, :, row].copy().view(np.uint8), bitorder="little")[:nodes]
            np.testing.assert_array_equal(bits.astype(bool), visible[1, node] if node < nodes else False)


@pytest.mark.parametrize("slots", [1, 8])
@pytest.mark.parametrize("nodes", [1, 16, 64, 256, 512])
@pytest.mark.parametrize(
    "heads, kv_heads, head_dim", [(32, 8, 128), (24, 4, 256), (14, 2, 64), (9, 3, 96), (16, 1, 128)]
)
def test_configurations_stay_within_bounds(slots, nodes, heads, kv_heads, head_dim):
    for capacity in (64, 1024, 8192, 131072):
        config = choose((slots, nodes, heads, head_dim), kv_heads, capacity)
        assert config.stages >= 2 and config.consumers in (1, 2) and config.block % 64 == 0
        assert 1 <= config.splits <= max(1, -(-capacity // config.block) + -(-nodes // config.block))
