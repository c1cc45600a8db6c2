"""Drafters with an embedding, a head and a vocabulary of their own."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ddtree_jax import testing
from ddtree_jax.decode.proposers import Chain, DFlashProposer, MostProbable, Static
from ddtree_jax.models.cache import KVCache
from ddtree_jax.models.decoder import Decoder

ROOT = np.array([3, 57], np.int32)
IDS = np.array([44, 2, 17, 5, 60, 0, 31, 30, 29, 8, 51])
SHAPES = [Chain(), MostProbable(40), Static(((0,), (1,), (4,), (0, 0), (1, 2)))]
shapes = pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: type(shape).__name__)


@pytest.fixture(scope="module")
def target():
    return testing.tiny_target(num_layers=2, sliding_windows=(None, None))


@pytest.fixture(scope="module")
def shared(target):
    return testing.tiny_drafter(target, output_multiplier=1.5, logit_softcap=8.0)


def propose(target, config, params, shape):
    proposer = DFlashProposer(Decoder(target.config), config, config.depth, shape)
    cache = KVCache.empty(config, batch=2, rows=16)

    @jax.jit
    def run(params, target_params):
        root = jnp.asarray(ROOT)
        return (
            proposer.propose(params, target_params, cache, root),
            proposer.log_probs(params, target_params, cache, root),
        )

    return jax.device_get(run(params, target.params))


def with_tables(target, shared, ids, **changes):
    """The same drafter with copies of the target's tables, of the head the rows `ids`."""
    changes = dict(own_embedding=True, own_head=True) | changes
    head = np.asarray(target.params["lm_head"]["weight"])[ids]
    own = {"embed": target.params["embed"], "lm_head": {"weight": jnp.asarray(head)}}
    if changes.get("draft_vocab_size"):
        own["d2t"] = {"target_ids": jnp.asarray(ids, jnp.int32)}
    return dataclasses.replace(shared.config, **changes), shared.params | own


@shapes
def test_copies_of_the_tables_change_nothing(target, shared, shape):
    expected = propose(target, shared.config, shared.params, shape)
    jax.tree.map(
        np.testing.assert_array_equal,
        propose(target, *with_tables(target, shared, np.arange(61)), shape), expected,
    )  # fmt: skip


@shapes
def test_a_renamed_vocabulary_changes_nothing(target, shared, shape):
    """All tokens under other ids: the same tree of the target's tokens."""
    ids = np.random.default_rng(0).permutation(61)
    (expected, _), (tree, log_probs) = (
        propose(target, shared.config, shared.params, shape),
        propose(target, *with_tables(target, shared, ids, draft_vocab_size=61), shape),
    )
    assert log_probs.shape[-1] == 61
    np.testing.assert_allclose(tree.log_prob, expected.log_prob, rtol=1e-5)
    for name in ("tokens", "parent", "depth", "size", "ancestors"):
        np.testing.assert_array_equal(getattr(tree, name), getattr(expected, name), err_msg=name)


@shapes
def test_a_reduced_vocabulary(target, shared, shape):
    _, whole = propose(target, shared.config, shared.params, shape)
    tree, log_probs = propose(target, *with_tables(target, shared, IDS, draft_vocab_size=len(IDS)), shape)
    # The full vocabulary is nowhere: the distribution is that of the tokens which are left.
    kept = whole[..., IDS]
    np.testing.assert_allclose(log_probs, kept - np.log(np.exp(kept).sum(-1, keepdims=True)), atol=1e-5)
    np.testing.assert_array_equal(tree.tokens[:, 0], ROOT)  # neither is a token of the drafter
    drafted = np.arange(tree.tokens.shape[1])[None] < tree.size[:, None]
    drafted[:, 0] = False
    assert drafted.sum() >= 10
    assert np.isin(tree.tokens[drafted], IDS).all()
    own = {token: row for row, token in enumerate(IDS.tolist())}
    for slot, node in np.argwhere(drafted):
        above = tree.parent[slot, node]
        step = log_probs[slot, tree.depth[slot, node] - 1, own[int(tree.tokens[slot, node])]]
        np.testing.assert_allclose(tree.log_prob[slot, node], tree.log_prob[slot, above] + step, atol=1e-5)
    assert (tree.tokens[~drafted & (np.arange(tree.tokens.shape[1]) > 0)] == 0).all()


def test_a_head_of_another_width(target):
    """With both tables of its own, a drafter may have another hidden size than its target."""
    drafter = testing.tiny_drafter(target, hidden_size=24, own_embedding=True, own_head=True)
    tree, log_probs = propose(target, drafter.config, drafter.params, Chain())
    assert log_probs.shape == (2, 7, 61) and np.isfinite(log_probs).all()
    assert tree.tokens.shape == (2, 8)
