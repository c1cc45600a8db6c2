"""The gated delta kernels on a Hopper GPU, over every width: JAX_PLATFORMS=cuda pytest ...; skipped elsewhere."""

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

from pallas_kernels import choice
from pallas_kernels.gated_delta_tree import gated_delta_replay, gated_delta_tree

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not choice.on_hopper(), reason="needs a Hopper GPU")]

_tree = jax.jit(lambda *operands: gated_delta_tree(*operands, layer=1, implementation="mosaic_gpu"))
_replay = jax.jit(lambda *operands: gated_delta_replay(*operands, implementation="mosaic_gpu"))


class TestTree(TreeSuite):
    cases = (
        *(
            TreeCase(nodes=n, group=3, slots=2, dtype="bfloat16", inputs=inputs, dead=dead)
            for n in (16, 32, 64, 128, 256)
            for inputs, dead in (("usual", n // 5), ("mixed", 1), ("parallel", 0))
        ),
        *(TreeCase(nodes=n, dtype="bfloat16", mask="chain", inputs="mixed") for n in (16, 64, 256)),
        *(TreeCase(nodes=64, key_heads=3, group=g, dtype="bfloat16", slots=3) for g in (1, 2, 4)),
        *(TreeCase(nodes=n, group=3, dtype="bfloat16", dead=n // 5) for n in (1, 2, 7, 17, 33, 65, 100, 200)),
        TreeCase(nodes=32, dtype="bfloat16", mask="star"),
        TreeCase(nodes=64, dtype="bfloat16", dead=63),
        TreeCase(nodes=64, key_heads=16, group=3, dtype="bfloat16"),
    )

    def outputs(self, case, operands):
        return _tree(*operands)


class TestReplay(CommitSuite):
    cases = (
        CommitCase(rows=1, counts=(1, 0)),
        CommitCase(rows=16, counts=(16, 0, 5), group=3, inputs="mixed", dtype="bfloat16"),
        CommitCase(rows=17, counts=(17, 30), group=3, inputs="parallel"),
        CommitCase(rows=128, counts=(128, 77), key_heads=1),
    )

    def commit(self, case, operands):
        return _replay(*operands)


def test_committed_states_do_not_drift():
    rng = np.random.default_rng(7)
    state = 0.3 * rng.standard_normal((1, 1, 4, 128, 128), np.float32)
    exact, state, count = state.astype(np.float64), jnp.asarray(state), jnp.full(1, 4, jnp.int32)
    for _ in range(300):
        operands = draw(rng, (1, 1, 4), 2, 4, 128, "usual")[1:]
        exact = oracle.commit(*operands, exact, [4])
        state = _replay(*(jnp.asarray(x) for x in operands), state, count)
    for head in range(4):
        assert relative_error(state[0, 0, head], exact[0, 0, head]) <= 5e-6


def test_states_that_are_not_donated_stay_as_they_are():
    operands = make_commit(CommitCase(rows=4, counts=(3,)))
    before = np.asarray(operands[4]).copy()
    _replay(*operands).block_until_ready()
    np.testing.assert_array_equal(np.asarray(operands[4]), before)


def test_rows_past_the_count_leave_the_bits_alone():
    k, v, log_decay, beta, states, count = make_commit(CommitCase(rows=16, counts=(3, 0), key_heads=1))
    states = states.at[:, :, 0, 0, 0].set(-0.0)
    got = np.asarray(_replay(k, v, log_decay, beta, states, count)).view(np.uint32)
    np.testing.assert_array_equal(got[:, 1], np.asarray(states).view(np.uint32)[:, 1])
    short = [x[:, :, :3] for x in (k, v, log_decay, beta)]
    np.testing.assert_array_equal(got, np.asarray(_replay(*short, states, count)).view(np.uint32))


@pytest.mark.parametrize("nodes", [16, 64, 128, 256])
def test_the_same_bits_every_time(nodes):
    """Chains of calls, each fed with the last one's output: a race between warps would show."""
    q, k, v, *rest = make_tree(TreeCase(nodes=nodes, key_heads=16, group=3, dtype="bfloat16"))

    @jax.jit
    def chain(v):
        def call(_, v):
            return gated_delta_tree(q, k, v, *rest, layer=1, implementation="mosaic_gpu")

        return jax.lax.fori_loop(0, 50, call, v)

    first = np.asarray(chain(v)).view(np.uint16)
    for _ in range(20):
        np.testing.assert_array_equal(np.asarray(chain(v)).view(np.uint16), first)


def test_both_implementations_agree():
    operands = make_tree(TreeCase(nodes=64, group=3, slots=2, dtype="bfloat16"))
    xla = jax.jit(lambda *operands: gated_delta_tree(*operands, layer=1, implementation="xla"))(*operands)
    chosen = jax.jit(lambda *operands: gated_delta_tree(*operands, layer=1))(*operands)
    assert relative_error(chosen, np.asarray(xla).astype(np.float64)) <= 4e-3
    np.testing.assert_array_equal(np.asarray(chosen), np.asarray(_tree(*operands)))
