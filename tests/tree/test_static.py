"""Static trees: the spelling, the published ones, and the filled tree against node-by-node look-up."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tree_oracle import naive_visible

from ddtree_jax.tree import (
    PRESETS,
    build_tree,
    default_choices,
    parse_choices,
    static_layout,
    static_tree,
    top_tokens,
    unpack_ancestors,
)

WRITTEN = "[(0,), (1,), (0, 0), (0, 1), (1, 0)]"


def parse(value, max_depth=15, max_rank=60, max_nodes=512):
    return parse_choices(value, max_depth=max_depth, max_rank=max_rank, max_nodes=max_nodes)


def test_order_and_spelling_do_not_matter():
    level_order = ((0,), (1,), (0, 0), (0, 1), (1, 0))
    shuffled = [[1, 0], [0, 1], (np.int64(1),), [0, 0], [0]]
    for value in (WRITTEN, level_order, level_order[::-1], shuffled):
        assert parse(value) == level_order
    assert parse(" [(0,)]\n") == ((0,),)


@pytest.mark.parametrize(
    "value,message",
    [
        ("[(0,), (1, 0)]", r"\(1, 0\) is there without its parent \(1,\)"),
        ("[(0, 0)]", r"\(0, 0\) is there without its parent \(0,\)"),
        ("[(0,), (1,), (0,)]", r"\(0,\) is there twice"),
        ("[(0,), (-1,)]", r"\(-1,\) has the negative rank -1"),
        ("[(0,), (1.0,)]", r"\(1.0,\) has the rank 1.0, which is not an integer"),
        ("[(0,), (True,)]", "has the rank True, which is not an integer"),
        ("[(0,), ('1',)]", "has the rank '1', which is not an integer"),
        ("[(0,), (0, 0), (0, 0, 0), (0, 0, 0, 0)]", r"\(0, 0, 0, 0\) is too deep: 4 of at most 3 drafted tokens"),
        ("[(0,), (5,)]", r"\(5,\) is too wide: rank 5 of at most 4"),
        ("[(0,), 1]", r"an entry must be a tuple of child ranks, such as \(0, 1\); found 1"),
        ("[(0,), ()]", r"an entry must be a tuple .*; found \(\)"),
        ("[(0,), (1,), (2,), (3,), (4,), (0, 0), (1, 0), (2, 0)]", "has 8 nodes; at most 7 below the root"),
        ("[]", "tree_choices is empty"),
        ("{0: 1}", r"must be a list of tuples of child ranks; found \{0: 1\}"),
        ("[(0,), __import__('os').abort()]", "must be a list such as .* or one of the presets eagle-1, medusa"),
        ("mc_sim_7b", "one of the presets eagle-1, medusa-vicuna-7b; found 'mc_sim_7b'"),
        ("[" * 500, "must be a list such as"),
        (5, "must be a list of tuples of child ranks; found 5"),
        (b"[(0,)]", "must be a list of tuples"),
    ],
)
def test_refusals_name_the_entry(value, message):
    with pytest.raises(ValueError, match=message):
        parse(value, max_depth=3, max_rank=4, max_nodes=8)


def test_published_trees():
    eagle, medusa = PRESETS["eagle-1"], PRESETS["medusa-vicuna-7b"]
    assert (len(eagle), max(map(len, eagle))) == (25, 5) and (len(medusa), max(map(len, medusa))) == (63, 4)
    for name, tree in PRESETS.items():
        assert parse(name) == parse(tree) == tree
    # Entries that tell them from each other and from a tree of full levels.
    assert {(3, 0), (0, 0, 0, 0, 1), (0, 0, 0, 2)} <= set(eagle) and (3, 1) not in eagle
    assert {(9, 0), (1, 6), (0, 7, 0), (0, 0, 9), (0, 0, 0, 1)} <= set(medusa) and (0, 8, 0) not in medusa
    per_depth = [[sum(len(c) == d for c in tree) for d in range(1, 6)] for tree in (eagle, medusa)]
    assert per_depth == [[4, 8, 8, 3, 2], [10, 28, 23, 2, 0]]
    assert default_choices(3) == parse([c for c in eagle if len(c) <= 3]) and default_choices(15) == eagle


def random_choices(rng, nodes):
    """Any prefix-closed tree, with gaps between sibling ranks."""
    tree = [(int(rng.integers(3)),)]
    while len(tree) < nodes:
        parent = () if rng.random() < 0.3 else tree[rng.integers(len(tree))]
        child = (*parent, int(rng.integers(6)))
        if child not in tree and len(child) <= 4:
            tree.append(child)
    return parse(tree)


@pytest.mark.parametrize("seed", range(3))
def test_every_node_holds_its_own_token(seed):
    rng = np.random.default_rng(seed)
    choices = random_choices(rng, 40)
    layout = static_layout(choices)
    log_probs = np.log(rng.dirichlet(np.ones(17), (2, len(layout.widths)))).astype(np.float32)
    picked = top_tokens(jnp.asarray(log_probs), max(layout.widths))
    tree = jax.jit(static_tree, static_argnums=2)(*picked, choices, jnp.array([7, 8], jnp.int32))
    order = np.argsort(-log_probs, axis=-1)
    visible = np.asarray(unpack_ancestors(tree))
    for slot in range(2):
        assert tree.size[slot] == 41 and tree.tokens[slot, 0] == 7 + slot
        for node, ranks in enumerate(choices, start=1):
            chain = [int(order[slot, d, r]) for d, r in enumerate(ranks)]
            assert (int(tree.tokens[slot, node]), int(tree.depth[slot, node])) == (chain[-1], len(ranks))
            assert int(tree.parent[slot, node]) == (choices.index(ranks[:-1]) + 1 if len(ranks) > 1 else 0)
            weight = sum(float(log_probs[slot, d, t]) for d, t in enumerate(chain))
            assert float(tree.log_prob[slot, node]) == pytest.approx(weight, rel=1e-5)
        np.testing.assert_array_equal(visible[slot], naive_visible(np.asarray(tree.parent[slot]), 41))
    assert layout.widths == tuple(
        1 + max(r[-1] for r in choices if len(r) == d) for d in range(1, tree.depth.max() + 1)
    )


def test_impossible_tokens_stay_nodes_of_probability_zero():
    values = jnp.array([[[0.0, -jnp.inf], [jnp.nan, -1.0]]], jnp.float32)
    tokens = jnp.array([[[3, 4], [5, 6]]], jnp.int32)
    tree = static_tree(values, tokens, ((0,), (1,), (0, 0), (0, 1), (1, 1)), jnp.zeros((1,), jnp.int32))
    assert tree.log_prob.tolist() == [[0, 0, -np.inf, -np.inf, -1, -np.inf]]


def test_it_is_the_tree_of_the_most_probable_prefixes_if_told_so():
    """The static tree that holds the best tree's ranks has the best tree's nodes."""
    rng = np.random.default_rng(4)
    log_probs = jnp.asarray(np.log(rng.dirichlet(np.ones(9), (1, 3))).astype(np.float32))
    best = build_tree(log_probs, 16, root_tokens=jnp.array([1], jnp.int32))
    order = np.argsort(-np.asarray(log_probs)[0], axis=-1)
    ranks = [()]
    for node in range(1, 16):
        depth = int(best.depth[0, node])
        ranks.append(
            (*ranks[int(best.parent[0, node])], int(np.nonzero(order[depth - 1] == best.tokens[0, node])[0][0]))
        )
    choices = parse(ranks[1:])
    depth = max(map(len, choices))
    tree = static_tree(*top_tokens(log_probs[:, :depth], 9), choices, jnp.array([1], jnp.int32))
    assert sorted(tree.log_prob[0].tolist()) == pytest.approx(sorted(best.log_prob[0].tolist()))


def test_arrays_that_do_not_fit():
    values, tokens, root = (
        jnp.zeros((1, 2, 2), jnp.float32),
        jnp.zeros((1, 2, 2), jnp.int32),
        jnp.zeros((1,), jnp.int32),
    )
    for args, message in (
        ((values, tokens, ((0,), (2,)), root), "1 deep and 3 ranks wide does not fit"),
        ((values, tokens, ((0,), (0, 0), (0, 0, 0)), root), "3 deep and 1 ranks wide does not fit"),
        ((values[0], tokens, ((0,),), root), r"tokens \[B, L, R\]"),
        ((values, tokens, ((0,),), root.astype(jnp.uint32)), "int32 root_tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            static_tree(*args)
