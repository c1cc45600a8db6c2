import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tree_oracle import CASES, HAND, MARGINALS, check_tree, depth_by_depth, heap_tree, log, node_prefixes

from ddtree_jax.tree import build, build_from_top, build_tree, frontier, select, top_tokens, unpack_ancestors
from ddtree_jax.tree.select import largest_by_counting

compiled_build = jax.jit(build_tree, static_argnums=1)
jit_from_top = jax.jit(build_from_top, static_argnums=2)
jit_top_tokens = jax.jit(top_tokens, static_argnums=1)


def jit_build(*args, **kwargs):
    """`build_tree` in one compiled piece, result on the host."""
    return jax.device_get(compiled_build(*args, **kwargs))


def marginals(probs):
    """[L, V] probabilities to a batch of one, as the builder wants it."""
    return jnp.asarray(log(probs), jnp.float32)[None]


def check_case(case, tree):
    probs = MARGINALS[case["marginals"]]
    live = len(case["tokens"]) + 1
    assert tree.num_nodes == case["num_nodes"]
    assert int(tree.size[0]) == live
    prefixes = check_tree(tree, 0, log(probs))
    weight = np.exp(np.asarray(tree.log_prob[0, 1:live], np.float64))
    np.testing.assert_allclose(weight, case["q"], rtol=2e-5)
    np.testing.assert_allclose(1 + weight.sum(), case["expected_tau"], rtol=1e-5)
    if case["ties"]:
        assert {p for p, _ in heap_tree(log(probs), live - 1)} == set(prefixes[1:])
    else:
        for field in ("tokens", "depth", "parent"):
            np.testing.assert_array_equal(np.asarray(getattr(tree, field))[0, 1:live], case[field], err_msg=field)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_oracle_cases(case):
    check_case(case, jit_build(marginals(MARGINALS[case["marginals"]]), case["num_nodes"]))


@pytest.mark.parametrize(
    "case", [c for c in CASES if len(MARGINALS[c["marginals"]]) == 7], ids=lambda case: case["name"]
)
def test_oracle_case_with_the_selection_that_gpus_use(case, monkeypatch):
    for module in (build, select):
        monkeypatch.setattr(module, "largest_by_keys", largest_by_counting)
    fresh = jax.jit(lambda x: build_tree(x, case["num_nodes"]))  # not the trace that another test left in the cache
    check_case(case, fresh(marginals(MARGINALS[case["marginals"]])))


def test_the_gpu_form_lowers_without_a_gpu():
    shape = jax.ShapeDtypeStruct((2, 15, 1000), jnp.float32)
    exported = jax.export.export(jax.jit(lambda x: build_tree(x, 64)), platforms=["cuda"])(shape)
    assert exported.out_avals[0].shape == (2, 64)


def test_expected_length_of_growing_trees():
    sums = {1: 1.55, 2: 1.891, 3: 2.191, 4: 2.377, 5: 2.54068, 6: 2.65618, 8: 2.84825, 12: 3.1205, 16: 3.32566, 84: 4.0}
    tree = jit_build(marginals(HAND), 85)
    for drafted, expected in sums.items():
        assert np.exp(np.asarray(tree.log_prob[0, : drafted + 1], np.float64)).sum() == pytest.approx(expected)


def test_arrays_of_the_seven_node_tree():
    tree = jit_build(marginals(HAND), 7, root_tokens=jnp.array([9], jnp.int32))
    np.testing.assert_array_equal(tree.tokens, [[9, 0, 0, 1, 0, 0, 1]])
    np.testing.assert_array_equal(tree.parent, [[0, 0, 1, 0, 3, 2, 1]])
    np.testing.assert_array_equal(tree.depth, [[0, 1, 2, 1, 2, 3, 2]])
    rows = "1000000 1100000 1110000 1001000 1001100 1110010 1100001".split()
    np.testing.assert_array_equal(np.asarray(unpack_ancestors(tree))[0], [[bit == "1" for bit in row] for row in rows])
    np.testing.assert_array_equal(tree.ancestors[0, :, 0], [1, 3, 7, 9, 25, 39, 67])


def test_token_ids_follow_a_permutation():
    rng = np.random.default_rng(1)
    ids = np.stack([rng.permutation(4) for _ in range(3)])
    shuffled = np.empty_like(HAND)
    np.put_along_axis(shuffled, ids, HAND, axis=1)
    plain = node_prefixes(jit_build(marginals(HAND), 17), 0)
    renamed = node_prefixes(jit_build(marginals(shuffled), 17), 0)
    assert renamed == [tuple(int(ids[d, token]) for d, token in enumerate(prefix)) for prefix in plain]


def test_uniform_marginals_give_levels():
    tree = jit_build(marginals(np.full((2, 3), 1 / 3)), 13)
    assert node_prefixes(tree, 0)[1:] == [(a,) for a in range(3)] + [(a, b) for a in range(3) for b in range(3)]


def test_sums_with_a_real_tie():
    probs = np.array([[0.6, 0.3, 0.1], [0.5, 0.4, 0.1], [0.7, 0.2, 0.1]])
    tree = jit_build(marginals(probs), 11)
    check_tree(tree, 0, log(probs))
    total = np.cumsum(np.exp(np.asarray(tree.log_prob[0], np.float64)))
    np.testing.assert_allclose(total[[1, 2, 3, 4, 5, 6, 8, 10]], [1.6, 1.9, 2.2, 2.44, 2.65, 2.818, 3.088, 3.293], 1e-6)


@pytest.mark.parametrize("num_nodes", [2, 5, 16])
def test_certain_tokens_make_exact_ties_along_a_chain(num_nodes):
    # Parents and children of equal probability 1: the chain must still come out parents first.
    probs = np.zeros((15, 6))
    probs[np.arange(15), np.arange(15) % 6] = 1.0
    tree = jit_build(marginals(probs), num_nodes)
    check_tree(tree, 0, log(probs))
    np.testing.assert_array_equal(tree.parent[0], np.maximum(np.arange(num_nodes) - 1, 0))
    np.testing.assert_array_equal(tree.tokens[0, 1:], np.arange(num_nodes - 1) % 6)
    assert int(tree.size[0]) == num_nodes


def test_impossible_prefixes_become_padding():
    probs = np.array([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0], [0.5, 0.25, 0.25]])
    tree = jit_build(marginals(probs), 16)
    check_tree(tree, 0, log(probs))
    assert int(tree.size[0]) == 5  # root, two tokens, and one child each; depth 3 is dead and depth 4 under it


def test_nan_never_gets_in():
    clean = np.array(marginals(HAND))
    dirty = clean.copy()
    dirty[0, 1, 2] = np.nan
    clean[0, 1, 2] = -np.inf
    for got, want in zip(jax.tree.leaves(jit_build(dirty, 30)), jax.tree.leaves(jit_build(clean, 30))):
        np.testing.assert_array_equal(got, want)
    nothing = jit_build(jnp.full((1, 3, 4), jnp.nan, jnp.float32), 8)
    check_tree(nothing, 0)
    assert int(nothing.size[0]) == 1


def test_rounding_above_zero_cannot_put_a_child_before_its_parent():
    token_log_prob = jnp.full((1, 4, 2), 1e-7, jnp.float32)
    tokens = jnp.tile(jnp.arange(2, dtype=jnp.int32), (1, 4, 1))
    check_tree(jax.device_get(jit_from_top(token_log_prob, tokens, 12)), 0)


@pytest.mark.parametrize(("depths", "vocab"), [(1, 1), (1, 7), (6, 1), (2, 2)])
@pytest.mark.parametrize("num_nodes", [1, 2, 40])
def test_corner_shapes(depths, vocab, num_nodes):
    probs = np.random.default_rng(depths * vocab).dirichlet(np.ones(vocab), size=depths)
    tree = jit_build(marginals(probs), num_nodes)
    check_tree(tree, 0, log(probs))
    possible = sum(vocab**d for d in range(1, depths + 1))
    assert int(tree.size[0]) == 1 + min(num_nodes - 1, possible)


def test_slots_do_not_mix():
    rng = np.random.default_rng(3)
    logits = jnp.asarray(rng.normal(size=(5, 4, 20)) * np.array([0, 1, 2, 4, 8])[:, None, None], jnp.float32)
    roots = jnp.arange(5, dtype=jnp.int32) * 7
    log_probs = jax.nn.log_softmax(logits)
    together = jit_build(log_probs, 24, root_tokens=roots)
    for slot in range(5):
        alone = jit_build(log_probs[slot : slot + 1], 24, root_tokens=roots[slot : slot + 1])
        for got, want in zip(jax.tree.leaves(together), jax.tree.leaves(alone)):
            np.testing.assert_array_equal(got[slot], want[0])
        check_tree(together, slot, np.asarray(log_probs[slot], np.float64))


def test_smaller_trees_are_prefixes_and_more_tokens_change_nothing():
    log_probs = jax.nn.log_softmax(jnp.asarray(np.random.default_rng(4).normal(size=(2, 5, 50)) * 2, jnp.float32))
    big = jit_build(log_probs, 40)
    for num_nodes in (7, 39):
        small = jit_build(log_probs, num_nodes)
        for field in ("tokens", "parent", "depth", "log_prob"):
            np.testing.assert_array_equal(getattr(small, field), getattr(big, field)[:, :num_nodes])
    everything = jit_from_top(*jit_top_tokens(log_probs, 50), 40)
    for got, want in zip(jax.tree.leaves(everything), jax.tree.leaves(big)):
        np.testing.assert_array_equal(got, want)
    shifted = jax.nn.log_softmax(log_probs + jnp.arange(5, dtype=jnp.float32)[None, :, None])
    np.testing.assert_array_equal(jit_build(shifted, 40).tokens, big.tokens)


# Mean drafter entropies by depth as published for a 4B model on GSM8K, in nats.
ENTROPY = (0.378, 0.639, 0.870, 1.082, 1.254, 1.348, 1.402, 1.523, 1.652, 1.735, 1.797, 1.943, 2.095, 2.231, 2.387)


def realistic_log_probs(rng, slots, vocab):
    """Zipf marginals whose entropies are exponential around the published means."""
    rank = np.log(np.arange(1, vocab + 1))
    exponents = np.linspace(0.3, 12, 300)
    tables = -exponents[:, None] * rank
    tables -= np.log(np.exp(tables).sum(axis=1, keepdims=True))
    entropy = -(np.exp(tables) * tables).sum(axis=1)
    wanted = rng.exponential(ENTROPY, size=(slots, len(ENTROPY)))
    nearest = np.abs(wanted[:, :, None] - entropy).argmin(axis=2)
    return rng.permuted(tables[nearest], axis=2)


@pytest.mark.parametrize("num_nodes", [64, 256])
def test_realistic_sizes_match_the_heap_and_the_rank_bound(num_nodes):
    exact = realistic_log_probs(np.random.default_rng(num_nodes), 3, 400)
    log_probs = jnp.asarray(exact, jnp.float32)
    tree = jit_build(log_probs, num_nodes)
    rank = np.argsort(np.argsort(-exact, axis=2), axis=2) + 1
    for slot in range(3):
        prefixes = check_tree(tree, slot, exact[slot])
        best = [weight for _, weight in heap_tree(exact[slot], num_nodes - 1)]
        np.testing.assert_allclose(np.asarray(tree.log_prob[slot, 1:]), best, rtol=1e-5)
        for prefix in prefixes:
            ranks = [rank[slot, d, token] for d, token in enumerate(prefix)]
            assert np.cumprod(ranks).sum() <= num_nodes - 1
    # Half the tokens are enough here.
    short = jit_top_tokens(log_probs, num_nodes // 2)
    half = jit_from_top(*short, num_nodes)
    np.testing.assert_array_equal(half.tokens, tree.tokens)
    np.testing.assert_array_equal(half.parent, tree.parent)


def sorted_log_probs(rng, kind, ranks):
    """[1, 15, R] float32, falling along R: "random", or with many ties of sums that float32 rounds."""
    if kind == "random":
        values = np.log(rng.dirichlet(np.full(ranks, 0.1), size=(1, 15)) + 1e-30)
    else:
        values = -1 - rng.integers(0, 4, size=(1, 15, ranks)) * 2.0**-23
    values[rng.random(values.shape) < 0.02] = -np.inf
    return -np.sort(-values.astype(np.float32), axis=2)


@pytest.mark.parametrize("kind", ["random", "ties"])
@pytest.mark.parametrize(("num_nodes", "ranks"), [(16, 15), (32, 31), (64, 63), (64, 3), (128, 127), (256, 100)])
def test_some_depths_at_a_time_give_the_tree_of_one_at_a_time(num_nodes, ranks, kind):
    """Node by node and to the last bit, by either selection."""
    values = sorted_log_probs(np.random.default_rng(num_nodes + ranks), kind, ranks)
    tokens = jnp.broadcast_to(jnp.arange(ranks, dtype=jnp.int32), values.shape)
    expected = depth_by_depth(values[0], num_nodes)
    tree = jax.device_get(jit_from_top(jnp.asarray(values), tokens, num_nodes))
    assert node_prefixes(tree, 0)[1:] == [ranks for ranks, _ in expected]
    np.testing.assert_array_equal(tree.log_prob[0, 1 : int(tree.size[0])], [weight for _, weight in expected])


@pytest.mark.parametrize("kind", ["random", "ties"])
def test_sorting_and_counting_agree_on_some_depths_at_a_time(kind, monkeypatch):
    values = jnp.asarray(sorted_log_probs(np.random.default_rng(7), kind, 20))
    tokens = jnp.broadcast_to(jnp.arange(20, dtype=jnp.int32), values.shape)
    sorting = jit_from_top(values, tokens, 64)
    for module in (build, select):
        monkeypatch.setattr(module, "largest_by_keys", largest_by_counting)
    counting = jax.jit(lambda *args: build_from_top(*args, 64))(values, tokens)
    jax.tree.map(np.testing.assert_array_equal, sorting, counting)


def test_steps_are_as_few_as_comparisons_allow():
    steps = {n: [len(step.widths) for step in frontier.frontier_plan(n, 15, n - 1).steps] for n in (2, 16, 32, 64, 256)}
    assert steps == {2: [1], 16: [15], 32: [8, 7], 64: [3] * 5, 256: [2] + [1] * 13}
    for nodes in (16, 32, 64, 256):
        for step in frontier.frontier_plan(nodes, 15, nodes - 1).steps:
            assert len(step.widths) == 1 or step.prefix.size**2 <= frontier.STEP_COMPARISONS


@pytest.mark.parametrize("depths,vocab,nodes", [(7, 20, 64), (15, 40, 33)])
def test_certain_tokens_of_either_zero_keep_parents_first(depths, vocab, nodes):
    """Some selections rank -0 below 0, though a probability of one is both."""
    rng = np.random.default_rng(nodes)
    log_probs = rng.choice(np.array([-0.0, 0.0, -1.0], np.float32), (2, depths, vocab), p=[0.1, 0.1, 0.8])
    tree, plain = (jax.jit(build_tree, static_argnums=1)(jnp.asarray(x), nodes) for x in (log_probs, log_probs + 0.0))
    jax.tree.map(np.testing.assert_array_equal, tree, plain)
    depth = np.asarray(tree.depth)
    assert np.all(np.take_along_axis(depth, np.asarray(tree.parent), axis=1)[:, 1:] == depth[:, 1:] - 1)


def test_one_compilation_serves_every_batch_of_a_shape():
    traces = []

    @jax.jit
    def counted(log_probs):
        traces.append(None)
        return build_tree(log_probs, 16)

    for seed in range(3):
        counted(jax.nn.log_softmax(jax.random.normal(jax.random.key(seed), (2, 3, 9))))
    assert len(traces) == 1


def test_errors():
    good = marginals(HAND)
    values, tokens = top_tokens(good, 4)
    with pytest.raises(ValueError, match="num_nodes"):
        build_tree(good, 0)
    with pytest.raises(ValueError, match="num_nodes"):
        build_from_top(values, tokens, -3)
    with pytest.raises(ValueError, match="rank 3"):
        build_tree(good[0], 4)
    with pytest.raises(ValueError, match="empty"):
        build_tree(good[:, :0], 4)
    with pytest.raises(ValueError, match="float32"):
        build_tree(good.astype(jnp.bfloat16), 4)
    with pytest.raises(ValueError, match="int32"):
        build_from_top(values, values, 4)
    with pytest.raises(ValueError, match="one shape"):
        build_from_top(values, tokens[:, :, :2], 4)
    with pytest.raises(ValueError, match=r"root_tokens must have shape \(1,\)"):
        build_tree(good, 4, root_tokens=jnp.zeros((2,), jnp.int32))
    with pytest.raises(ValueError, match="root_tokens"):
        build_tree(good, 4, root_tokens=jnp.zeros((1,), jnp.float32))
