"""EAGLE-3, MTP and the trees that grow from them, against numpy forms that know neither caches nor trees."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from step_oracle import Eagle3Oracle, MTPOracle, by_rank, eagle2

from ddtree_jax import testing
from ddtree_jax.decode.proposers import DynamicGrowth, StaticGrowth, StepProposer, TextRows, chain
from ddtree_jax.models.decoder import Decoder

TOLERANCE = 1e-4
ROWS, CAPACITY, LENGTHS = 6, 32, (9, 1, 14)
TREE = ((0,), (1,), (2,), (0, 0), (0, 2), (2, 1), (0, 2, 0), (2, 1, 3), (0, 2, 0, 1))


EXPERTS = testing.tiny_moe(1, sparse=(True,), experts_per_token=3)
KINDS = {
    "eagle3": lambda target: testing.tiny_eagle3(target, seed=3),
    "eagle3 with tables of its own": lambda target: testing.tiny_eagle3(
        target, seed=3, own_embedding=True, hidden_size=24
    ),
    "mtp": lambda target: testing.tiny_mtp(target, seed=3),
    # Qwen3.5-35B-A3B and Qwen3-Next: the prediction layer has experts too, and a shared one.
    "mtp with experts": lambda target: testing.tiny_mtp(target, seed=3, moe=EXPERTS),
    "mtp with experts, as they come": lambda target: testing.tiny_mtp(
        target, seed=3, moe=dataclasses.replace(EXPERTS, renormalise=False, shared_intermediate_size=0)
    ),
}
SLOW = pytest.mark.slow


@functools.cache
def models(kind):
    target = testing.tiny_target(num_layers=2, sliding_windows=(None,) * 2)
    drafter = KINDS[kind](target)
    # Norms of other weights than one, and sharper distributions, so that every factor counts.
    rng = np.random.default_rng(5)
    low, high = (-0.5, 0.5) if kind.startswith("mtp") else (0.5, 1.5)
    params = jax.tree_util.tree_map_with_path(
        lambda path, x: jnp.asarray(rng.uniform(low, high, x.shape), x.dtype) if "norm" in path[-2].key else x,
        drafter.params,
    )
    if "lm_head" in params:
        params["lm_head"]["weight"] = params["lm_head"]["weight"] * 3
    if drafter.config.moe is not None:
        params["mlp"]["gate"]["weight"] = params["mlp"]["gate"]["weight"] * 3
    return target, dataclasses.replace(drafter, params=params)


@functools.cache
def texts():
    """Tokens with the root, the target's taps and its hidden states (random: the drafter must not care)."""
    rng = np.random.default_rng(0)
    tokens = [rng.integers(0, 61, n + 1) for n in LENGTHS]
    return tokens, *([rng.standard_normal((n, width)).astype(np.float32) for n in LENGTHS] for width in (64, 32))


@functools.cache
def absorb(proposer):
    return jax.jit(proposer.absorb)


def cache_of(proposer, drafter, target, seed):
    """Absorbs the texts in steps of random sizes, another size in each slot; rows that nobody wrote are NaN."""
    rng, content = np.random.default_rng(seed), texts()
    cache = jax.tree.map(lambda x: x if x.dtype == jnp.int32 else x * jnp.nan, proposer.init_cache(3, CAPACITY))
    have = np.zeros(3, int)
    while (have < LENGTHS).any():
        count = np.minimum(rng.integers(0, ROWS + 1, 3), LENGTHS - have)
        # Rows past the live ones come from rejected tokens: anything.
        step = rng.integers(0, 61, (3, ROWS)), *(rng.standard_normal((3, ROWS, width)) for width in (64, 32))
        for b, n in enumerate(count):
            for new, text in zip(step, content):
                new[b, :n] = text[b][have[b] : have[b] + n]
        rows = TextRows(
            tokens=jnp.asarray(step[0], jnp.int32), features=jnp.asarray(step[1], jnp.float32),
            hidden=jnp.asarray(step[2], jnp.float32), count=jnp.asarray(count, jnp.int32),
        )  # fmt: skip
        cache = absorb(proposer)(drafter.params, target.params, cache, rows)
        have += count
    return cache


def oracles(drafter, target):
    tables = [target.params[name]["weight"] for name in ("embed", "lm_head")]
    oracle = MTPOracle if drafter.config.family == "mtp" else Eagle3Oracle
    return [oracle(drafter.config, drafter.params, tables, *text) for text in zip(*texts())]


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=SLOW if kind == "mtp with experts, as they come" else ()) for kind in KINDS]
)
def test_the_cache_is_what_the_text_gives(kind):
    target, drafter = models(kind)
    proposer = StepProposer(Decoder(target.config), drafter.config, chain(1))
    for seed in (0, 1):
        cache = cache_of(proposer, drafter, target, seed)
        np.testing.assert_array_equal(cache.length, LENGTHS)
        np.testing.assert_array_equal(cache.rows.length, np.array(LENGTHS) - 1)
        for b, oracle in enumerate(oracles(drafter, target)):
            keys, values = oracle.keys_values(oracle.rows)
            live = len(oracle.rows) - 1  # the last row waits for the root
            for have, want in ((cache.rows.keys, keys), (cache.rows.values, values)):
                np.testing.assert_allclose(have[0][b, :, :live].swapaxes(0, 1), want[:live], atol=TOLERANCE)
            np.testing.assert_allclose(cache.context[b], oracle.rows[-1][1], atol=TOLERANCE)


GROWTHS = {  # with what numpy builds from an oracle
    "chain": (chain(5), lambda o: by_rank(o, [(0,) * d for d in range(1, 6)])),
    "static": (StaticGrowth(TREE), lambda o: by_rank(o, TREE)),
    "dynamic": (DynamicGrowth(24, 4, 3), lambda o: eagle2(o, 24, 4, 3)),
    "narrow": (DynamicGrowth(6, 4, 5), lambda o: eagle2(o, 6, 4, 5)),
    "all that was drafted": (DynamicGrowth(64, 2, 4), lambda o: eagle2(o, 64, 2, 4)),
}


def kinds_and_growths():
    for kind, growth in itertools.product(KINDS, GROWTHS):
        fast = kind == "eagle3" or (kind in ("mtp", "mtp with experts") and growth in ("static", "dynamic"))
        yield pytest.param(kind, *GROWTHS[growth], id=f"{kind}-{growth}", marks=() if fast else SLOW)


@pytest.mark.parametrize("kind,growth,build", list(kinds_and_growths()))
def test_trees(kind, growth, build):
    target, drafter = models(kind)
    proposer = StepProposer(Decoder(target.config), drafter.config, growth)
    cache = cache_of(proposer, drafter, target, 2)
    tokens = texts()[0]
    root = jnp.asarray([t[-1] for t in tokens], jnp.int32)
    tree = jax.device_get(jax.jit(proposer.propose)(drafter.params, target.params, cache, root))
    for b, oracle in enumerate(oracles(drafter, target)):
        expected = build(oracle)
        paths = {0: ()}
        for node in range(1, tree.size[b]):
            parent = tree.parent[b, node]
            paths[node] = (*paths[parent], int(tree.tokens[b, node]))
            assert tree.depth[b, node] == len(paths[node])
            np.testing.assert_allclose(tree.log_prob[b, node], expected[paths[node]], atol=TOLERANCE)
        assert tree.tokens[b, 0] == root[b]
        assert set(paths.values()) == {(), *expected}
        assert len(paths) == tree.size[b]


def test_every_part_of_the_experts_counts():
    """What the comparison above would notice: each of these changes the distribution by far more than it allows."""
    target, drafter = models("mtp with experts")
    after = oracles(drafter, target)[0].after(())
    for changes in (dict(renormalise=False), dict(experts_per_token=2), dict(shared_intermediate_size=0)):
        moe = dataclasses.replace(EXPERTS, **changes)
        other = dataclasses.replace(drafter, config=dataclasses.replace(drafter.config, moe=moe))
        assert np.abs(oracles(other, target)[0].after(()) - after).max() > 50 * TOLERANCE


def test_what_the_head_leaves_out_is_never_drafted():
    target, drafter = models("eagle3")
    proposer = StepProposer(Decoder(target.config), drafter.config, DynamicGrowth(40, 3, 32))
    cache = cache_of(proposer, drafter, target, 3)
    root = jnp.asarray([2, 5, 8], jnp.int32)  # which it leaves out
    tree = jax.device_get(jax.jit(proposer.propose)(drafter.params, target.params, cache, root))
    known = np.asarray(drafter.params["lm_head"]["target_ids"])
    assert len(set(known)) == 40 and known.max() < 61 and not np.isin(root, known).any()
    assert np.isin(tree.tokens[:, 1:], known).all() and (tree.size == 40).all()
