"""The XLA form of the gated delta rule, on any device, and the checks of the public functions."""

import gated_delta_oracle as oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gated_delta_suite import (
    CommitCase,
    CommitSuite,
    TreeCase,
    TreeSuite,
    draw,
    make_commit,
    make_tree,
    relative_error,
)

from pallas_kernels.gated_delta_tree import gated_delta_fold, gated_delta_replay, gated_delta_tree

_tree = jax.jit(gated_delta_tree, static_argnames=("layer", "implementation"))
_replay = jax.jit(gated_delta_replay, static_argnames="implementation")
_fold = jax.jit(gated_delta_fold)


class TestTree(TreeSuite):
    cases = (
        TreeCase(nodes=1),
        TreeCase(nodes=15, dim=32, group=1, dead=4),
        TreeCase(nodes=17, slots=2, group=3, dead=3, inputs="mixed"),
        TreeCase(nodes=33, mask="chain", inputs="mixed"),
        TreeCase(nodes=40, mask="star", dim=16, key_heads=1, group=4),
        TreeCase(nodes=64, group=3, dead=64 - 1),
        TreeCase(nodes=64, slots=2, dead=9, dtype="bfloat16"),
        TreeCase(nodes=101, key_heads=1, group=1, inputs="mixed"),
        TreeCase(nodes=256, key_heads=1, group=1, dead=5),
        TreeCase(nodes=100, key_heads=1, group=1, inputs="parallel", mask="chain"),
    )

    def outputs(self, case, operands):
        return _tree(*operands, layer=1, implementation="xla")


_COMMITS = (
    CommitCase(rows=1, counts=(1, 0)),
    CommitCase(rows=17, counts=(17, 0, 4), group=3, inputs="mixed"),
    CommitCase(rows=8, counts=(5,), dim=16, key_heads=1, group=4, dtype="bfloat16"),
)


class TestReplay(CommitSuite):
    cases = _COMMITS

    def commit(self, case, operands):
        return _replay(*operands, implementation="xla")


class TestFold(CommitSuite):
    cases = (
        *_COMMITS,
        CommitCase(rows=64, counts=(64,), inputs="parallel"),
        CommitCase(rows=130, counts=(130, 64, 65, 1), key_heads=1, inputs="mixed"),
    )

    def commit(self, case, operands):
        return _fold(*operands)


def test_tree_along_a_chain_then_commit_is_the_recurrence_of_one_token_at_a_time():
    """Nodes of a chain one by one, each committed, give what the whole chain gives at once."""
    shape = TreeCase(nodes=12, mask="chain", group=3)
    q, k, v, log_decay, beta, states, ancestors = make_tree(shape)
    at_once = np.asarray(_tree(q, k, v, log_decay, beta, states, ancestors, layer=1))
    alone, one = jnp.ones((1, 1, 1), jnp.uint32), jnp.ones(1, jnp.int32)
    state = states[1:2]
    for i in range(shape.nodes):
        row = [x[:, i : i + 1] for x in (q, k, v, log_decay, beta)]
        out = _tree(*row, state, alone, layer=0)
        assert relative_error(out[:, 0], at_once[:, i]) <= 2e-6
        state = _replay(*(x[None] for x in row[1:]), state, one)


@pytest.mark.parametrize("commit, rounds, rows", [(_replay, 300, 4), (_fold, 20, 64)])
def test_committed_states_do_not_drift(commit, rounds, rows):
    rng = np.random.default_rng(7)
    state = 0.3 * rng.standard_normal((1, 1, 4, 128, 128), np.float32)
    exact, state, count = state.astype(np.float64), jnp.asarray(state), jnp.full(1, rows, jnp.int32)
    for _ in range(rounds):
        operands = draw(rng, (1, 1, rows), 2, 4, 128, "usual")[1:]
        exact = oracle.commit(*operands, exact, [rows])
        state = commit(*(jnp.asarray(x) for x in operands), state, count)
    for head in range(4):
        assert relative_error(state[0, 0, head], exact[0, 0, head]) <= 5e-6


def test_rows_past_the_count_leave_the_bits_alone():
    case = CommitCase(rows=70, counts=(3, 0), key_heads=1)
    k, v, log_decay, beta, states, count = make_commit(case)
    states = states.at[0, :, 0, 0, 0].set(-0.0)
    for commit in (_replay, _fold):
        got = np.asarray(commit(k, v, log_decay, beta, states, count)).view(np.uint32)
        np.testing.assert_array_equal(got[:, 1], np.asarray(states).view(np.uint32)[:, 1])
    short = [x[:, :, :3] for x in (k, v, log_decay, beta)]
    np.testing.assert_array_equal(_replay(k, v, log_decay, beta, states, count), _replay(*short, states, count))


def test_counts_out_of_range_are_clipped():
    operands = make_commit(CommitCase(rows=4, counts=(4, 0), key_heads=1, dim=16))
    beyond = (*operands[:5], jnp.asarray([9, -3], jnp.int32))
    for commit in (_replay, _fold):
        np.testing.assert_array_equal(commit(*beyond), commit(*operands))


_TREE_NAMES = ("q", "k", "v", "log_decay", "beta", "states", "ancestors")
_ROW_NAMES = ("k", "v", "log_decay", "beta", "states", "count")


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("q", lambda x: x[0], "q must be"),
        ("q", lambda x: x.astype(jnp.float16), "q must be float32 or bfloat16"),
        ("k", lambda x: x[:, :4], "k must have shape"),
        ("k", lambda x: x.astype(jnp.bfloat16), "k must be float32"),
        ("v", lambda x: x[:, :, :3], "value heads"),
        ("v", lambda x: x.astype(jnp.int32), "v must be floating"),
        ("log_decay", lambda x: x.astype(jnp.bfloat16), "log_decay must be float32"),
        ("beta", lambda x: x[..., None], "beta must have shape"),
        ("states", lambda x: x[0], "states must be"),
        ("states", lambda x: x.astype(jnp.bfloat16), "states must be float32"),
        ("ancestors", lambda x: x.astype(jnp.int32), "ancestors must be uint32"),
        ("layer", lambda _: 3, "layer must be"),
        ("implementation", lambda _: "cuda", "implementation must be"),
    ],
)
def test_bad_arguments_of_the_tree_are_named(name, change, message):
    arguments = dict(zip(_TREE_NAMES, make_tree(TreeCase(nodes=5, dim=16)))) | dict(layer=1)
    arguments[name] = change(arguments.get(name))
    with pytest.raises(ValueError, match=message):
        gated_delta_tree(**arguments)


@pytest.mark.parametrize("commit", [gated_delta_replay, gated_delta_fold])
@pytest.mark.parametrize(
    "name, change, message",
    [
        ("k", lambda x: x.astype(jnp.bfloat16), "k must be float32"),
        ("k", lambda x: x[0], "k must be"),
        ("k", lambda x: x[:, :, :0], "at least one row"),
        ("v", lambda x: x[:, :, :2], "v must have shape"),
        ("v", lambda x: x[:, :, :, :3], "value heads"),
        ("beta", lambda x: x.astype(jnp.bfloat16), "beta must be float32"),
        ("states", lambda x: x[:2], "states must have shape"),
        ("count", lambda x: x.astype(jnp.uint32), "count must be int32"),
    ],
)
def test_bad_arguments_of_a_commit_are_named(commit, name, change, message):
    arguments = dict(zip(_ROW_NAMES, make_commit(CommitCase(rows=4, counts=(2,), dim=16))))
    arguments[name] = change(arguments[name])
    with pytest.raises(ValueError, match=message):
        commit(**arguments)


@pytest.mark.parametrize(
    "shape, message",
    [
        (TreeCase(nodes=16), "float32"),
        (TreeCase(nodes=16, dtype="bfloat16", dim=64), "64"),
        (TreeCase(nodes=257, key_heads=1, group=1, dtype="bfloat16"), "257 nodes"),
        (TreeCase(nodes=16, dtype="bfloat16", key_heads=1, group=5), "5 value heads"),
    ],
)
def test_what_the_gpu_kernel_cannot_do_is_named(shape, message):
    with pytest.raises(NotImplementedError, match=message):
        gated_delta_tree(*make_tree(shape), layer=1, implementation="mosaic_gpu")


def test_what_the_gpu_replay_cannot_do_is_named():
    with pytest.raises(NotImplementedError, match="64"):
        gated_delta_replay(*make_commit(CommitCase(rows=4, counts=(2,), dim=64)), implementation="mosaic_gpu")
