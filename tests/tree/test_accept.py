import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats
from tree_oracle import HAND, log, walk

from ddtree_jax.tree import accept, build_tree

jit_accept = jax.jit(accept, static_argnames="max_path")
jit_build = jax.jit(build_tree, static_argnums=1)


def hand_tree(slots=1, num_nodes=7):
    """Root, (0), (0,0), (1), (1,0), (0,0,0), (0,1): the first seven nodes of the hand-made marginals."""
    log_probs = jnp.asarray(log(HAND), jnp.float32)[None]
    return jit_build(jnp.broadcast_to(log_probs, (slots, *log_probs.shape[1:])), num_nodes)


@pytest.mark.parametrize(
    ("draws", "path", "bonus"),
    [
        ([0, 0, 2, 1, 3, 1, 0], [0, 1, 2], 2),
        ([1, 5, 9, 0, 2, 9, 9], [0, 3, 4], 2),
        ([3, 0, 0, 0, 0, 0, 0], [0], 3),
        ([0, 0, 0, 8, 8, 7, 8], [0, 1, 2, 5], 7),
    ],
    ids=["A: no data movement", "B: second branch", "C: nothing matches", "D: bonus of a leaf"],
)
def test_walks_with_known_answers(draws, path, bonus):
    result = jit_accept(hand_tree(), jnp.array([draws], jnp.int32), max_path=4)
    length = len(path)
    assert int(result.length[0]) == length
    np.testing.assert_array_equal(result.path[0], path + path[-1:] * (4 - length))
    np.testing.assert_array_equal(result.tokens[0, :length], [draws[node] for node in path])
    assert int(result.tokens[0, length - 1]) == bonus
    assert result.path.dtype == result.length.dtype == result.tokens.dtype == jnp.int32


@pytest.mark.parametrize(("num_nodes", "depths", "vocab"), [(2, 1, 2), (13, 3, 2), (33, 5, 3), (100, 9, 2)])
def test_matches_a_step_by_step_walk(num_nodes, depths, vocab):
    # A tiny vocabulary puts equal tokens on many branches and lets walks go deep.
    slots = 200
    rng = np.random.default_rng(num_nodes)
    logits = jnp.asarray(rng.normal(size=(slots, depths, vocab)), jnp.float32)
    logits = jnp.where(jnp.asarray(rng.random(logits.shape) < 0.1), -jnp.inf, logits)  # some padding too
    tree = jax.device_get(jit_build(jax.nn.log_softmax(logits), num_nodes))
    draws = rng.integers(0, vocab, size=(slots, num_nodes)).astype(np.int32)
    draws[:20] = draws[:20, :1]  # equal draws everywhere
    result = jax.device_get(jit_accept(tree, jnp.asarray(draws), max_path=depths + 1))
    seen = set()
    for slot in range(slots):
        expected = walk(tree, slot, draws[slot])
        length = int(result.length[slot])
        seen.add(length)
        assert length == len(expected)
        np.testing.assert_array_equal(result.path[slot, :length], expected)
        np.testing.assert_array_equal(result.path[slot, length:], expected[-1])
        np.testing.assert_array_equal(result.tokens[slot], draws[slot, np.asarray(result.path[slot])])
        # The committed text is what the path's nodes hold, shifted by one, and then the bonus.
        np.testing.assert_array_equal(result.tokens[slot, : length - 1], np.asarray(tree.tokens[slot])[expected[1:]])
    assert len(seen) > 1


def test_padding_never_matches():
    probs = np.array([[0.0, 1.0], [1.0, 0.0]])
    tree = jit_build(jnp.asarray(log(probs), jnp.float32)[None], 6)
    assert int(tree.size[0]) == 3
    # Padding nodes hold token 0 under the root: a draw of 0 at the root must not step onto one.
    result = jit_accept(tree, jnp.zeros((1, 6), jnp.int32), max_path=3)
    assert int(result.length[0]) == 1
    np.testing.assert_array_equal(result.path, [[0, 0, 0]])


def test_a_shorter_path_cuts_the_walk():
    draws = jnp.array([[0, 0, 0, 8, 8, 7, 8]], jnp.int32)
    result = jit_accept(hand_tree(), draws, max_path=2)
    assert int(result.length[0]) == 2
    np.testing.assert_array_equal(result.path, [[0, 1]])
    np.testing.assert_array_equal(result.tokens, [[0, 0]])


def test_sampling_law():
    """Independent draws at every node: where the walk ends, and what it emits, follow the target exactly."""
    slots = 20_000
    uniform = [0.25] * 4
    target = np.array(
        [[0.5, 0.35, 0.1, 0.05], [0.7, 0.1, 0.1, 0.1], [0.4, 0.3, 0.2, 0.1], [0.2, 0.5, 0.2, 0.1], *[uniform] * 3]
    )
    rng = np.random.default_rng(20)
    draws = np.stack([rng.choice(4, size=slots, p=row) for row in target], axis=1).astype(np.int32)
    result = jit_accept(hand_tree(slots), jnp.asarray(draws), max_path=4)
    last, length, tokens = np.asarray(result.path[:, -1]), np.asarray(result.length), np.asarray(result.tokens)

    ends = np.array([0.15, 0.10, 0.21, 0.28, 0.07, 0.14, 0.05])  # by node index
    assert ends.sum() == pytest.approx(1)
    assert stats.chisquare(np.bincount(last, minlength=7), ends * slots).pvalue > 1e-3
    accepted = length - 1
    assert abs(accepted.mean() - 1.46) < 4 * accepted.std() / slots**0.5

    def follows(emitted, law):
        return stats.chisquare(np.bincount(emitted, minlength=4), np.array(law) * len(emitted)).pvalue > 1e-3

    assert follows(tokens[:, 0], target[0])
    second = tokens[(length > 1) & (tokens[:, 0] == 0), 1]
    assert follows(second, target[1])
    third = tokens[(length > 2) & (tokens[:, 0] == 0) & (tokens[:, 1] == 0), 2]
    assert follows(third, target[2])
    assert follows(tokens[(length > 1) & (tokens[:, 0] == 1), 1], target[3])


def test_errors():
    tree = hand_tree()
    with pytest.raises(ValueError, match="draws"):
        accept(tree, jnp.zeros((1, 6), jnp.int32), max_path=4)
    with pytest.raises(ValueError, match="int32"):
        accept(tree, jnp.zeros((1, 7), jnp.float32), max_path=4)
    with pytest.raises(ValueError, match="max_path"):
        accept(tree, jnp.zeros((1, 7), jnp.int32), max_path=0)
