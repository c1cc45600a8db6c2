"""The best static tree against all trees there are, and the statistics that it is found from against counting."""

import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree_jax.tree import best_static_tree, parse_choices, rank_hits, replayed_length
from ddtree_jax.tree.best_static import MISSED, UNKNOWN


@functools.cache
def all_trees(depths, ranks, num_nodes):
    """Every prefix-closed set of at most num_nodes - 1 nodes."""
    found, frontier = {frozenset()}, {frozenset()}
    for _ in range(num_nodes - 1):
        grown = set()
        for tree in frontier:
            for parent in ((), *tree):
                if len(parent) < depths:
                    grown |= {tree | {(*parent, r)} for r in range(ranks) if (*parent, r) not in tree}
        found |= grown
        frontier = grown
    return found


def expected_length(tree, hits):
    return 1 + sum(np.prod([hits[d][r] for d, r in enumerate(node)]) for node in tree)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_no_tree_is_better(data):
    depths, ranks, num_nodes = data.draw(st.sampled_from([(3, 2, 6), (2, 3, 5), (4, 1, 4), (3, 3, 4)]))
    # Eighths: ties, zeros, certainties and ranks out of order are common.
    eighths = [
        data.draw(st.lists(st.integers(0, 8), min_size=ranks, max_size=ranks).filter(lambda row: sum(row) <= 8))
        for _ in range(depths)
    ]
    hits = np.array(eighths) / 8
    choices, expected = best_static_tree(hits, num_nodes)
    assert expected == pytest.approx(max(expected_length(t, hits) for t in all_trees(depths, ranks, num_nodes)))
    assert expected == pytest.approx(expected_length(choices, hits))
    assert len(choices) < num_nodes
    if choices:
        assert parse_choices(choices, max_depth=depths, max_rank=ranks - 1, max_nodes=num_nodes) == choices


def test_a_tree_in_hand():
    hits = [[0.6, 0.3], [0.5, 0.1]]
    assert best_static_tree(hits, 4) == (((0,), (1,), (0, 0)), pytest.approx(1 + 0.6 + 0.3 + 0.3))
    # A rank that is hit more often than a better one comes first.
    assert best_static_tree([[0.2, 0.7]], 2) == (((1,),), pytest.approx(1.7))
    # What never hits is left out.
    assert best_static_tree([[0.5, 0.0], [0.0, 0.0]], 8) == (((0,),), pytest.approx(1.5))


@pytest.mark.parametrize("hits", [[0.5], [[0.5, 0.6]], [[-0.1]], [[np.nan]], np.zeros((0, 2))])
def test_no_frequencies(hits):
    with pytest.raises(ValueError, match="hits must be frequencies"):
        best_static_tree(np.array(hits), 4)


def test_no_room():
    with pytest.raises(ValueError, match="at least 2, got 1"):
        best_static_tree([[0.5]], 1)


PATHS = np.array([[0, 0, 2], [0, 1, MISSED], [1, 0, 0], [MISSED, 0, 0], [0, MISSED, 0], [2, UNKNOWN, UNKNOWN]])


def test_hits_are_given_that_the_path_was_right():
    # Depth 1: 6 rounds. Depth 2: the 5 that were right so far, less the text that ends. Depth 3: 3 of these.
    np.testing.assert_allclose(rank_hits(PATHS, 3), [[3 / 6, 1 / 6, 1 / 6], [2 / 4, 1 / 4, 0], [1 / 3, 0, 1 / 3]])
    assert rank_hits(np.array([[MISSED, 0]]), 2).tolist() == [[0, 0], [0, 0]]


def test_replayed_length():
    assert replayed_length([(0,), (0, 0)], PATHS) == pytest.approx((3 + 2 + 1 + 1 + 2) / 5)
    assert replayed_length([(0,), (1,), (0, 0), (1, 0), (1, 0, 0)], PATHS) == pytest.approx((3 + 2 + 4 + 1 + 2) / 5)
