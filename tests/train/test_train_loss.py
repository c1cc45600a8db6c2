"""Weights of slots, labels, cross entropy under the frozen head, and the leak test."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_train import drafter_params, tiny_config, tiny_rows, tiny_target

from ddtree_jax.train.anchors import draw_anchors, valid_anchors
from ddtree_jax.train.loss import HeadSpec, block_labels, block_loss, cross_entropy, prefix_length, slot_weights
from ddtree_jax.train.step import Models, features_of, init_state, learning_rate, score_blocks, to_device, train_step

TARGET = tiny_target()
MODELS = Models.of(tiny_config(), TARGET.config)


@pytest.mark.parametrize("spec", [HeadSpec(rows=4), HeadSpec(rows=100, multiplier=0.5, softcap=3.0)])
def test_cross_entropy_and_its_gradient_equal_the_plain_formula(spec):
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.normal(size=(10, 8)), jnp.float32)
    head, labels = jnp.asarray(rng.normal(size=(13, 8)), jnp.float32), jnp.asarray(rng.integers(0, 13, 10), jnp.int32)
    weights = jnp.asarray(rng.normal(size=10), jnp.float32)

    def plain(hidden):
        logits = spec.multiplier * jnp.einsum("re,ve->rv", hidden, head, precision="highest")
        logits = logits if spec.softcap is None else spec.softcap * jnp.tanh(logits / spec.softcap)
        log_probs = jax.nn.log_softmax(logits)
        return jnp.sum(-weights * jnp.take_along_axis(log_probs, labels[:, None], axis=1)[:, 0]), jnp.argmax(logits, -1)

    (expected, best), gradient = jax.value_and_grad(plain, has_aux=True)(hidden)

    def ours(hidden):
        loss, correct = cross_entropy(spec, hidden, head, labels)
        return jnp.sum(weights * loss), correct

    (found, correct), found_gradient = jax.value_and_grad(ours, has_aux=True)(hidden)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    np.testing.assert_allclose(found_gradient, gradient, atol=1e-5)
    np.testing.assert_array_equal(correct, best == labels)
    np.testing.assert_array_equal(cross_entropy(spec, hidden, head, labels)[1], correct)


def dpace(ce, valid, alpha):
    """arXiv 2605.18810, one block at a time."""
    out = np.zeros_like(ce)
    for block in np.ndindex(ce.shape[:-1]):
        product, survival = 1.0, []
        for k in range(ce.shape[-1]):
            product *= (1 - alpha) * np.exp(-ce[block][k]) + alpha if valid[block][k] else 1.0
            survival.append(product if valid[block][k] else 0.0)
        for k in range(ce.shape[-1]):
            out[block][k] = sum(survival[k:]) if valid[block][k] else 0.0
    return out


def test_slot_weights():
    rng = np.random.default_rng(1)
    ce, valid = rng.exponential(size=(2, 3, 7)).astype(np.float32), rng.random((2, 3, 7)) < 0.7
    decay = np.exp(-np.arange(7) / 4.0) * valid
    np.testing.assert_allclose(slot_weights("decay", 4.0, 0.5, ce, valid), decay, rtol=1e-6)
    np.testing.assert_allclose(slot_weights("dpace", 4.0, 0.3, ce, valid), dpace(ce, valid, 0.3), rtol=1e-5)
    both = slot_weights("decay+dpace", 4.0, 0.3, ce, valid)
    np.testing.assert_allclose(both, decay * dpace(ce, valid, 0.3), rtol=1e-5)
    gradient = jax.grad(lambda ce: jnp.sum(slot_weights("dpace", 4.0, 0.5, ce, jnp.asarray(valid))))(jnp.asarray(ce))
    assert not np.any(gradient), "weights are constants of the loss"


def test_prefix_ends_at_the_first_error_and_at_the_end_of_the_text():
    correct = jnp.array([[True, True, False, True], [True] * 4, [False, True, True, True]])
    valid = jnp.array([[True] * 4, [True, True, False, False], [True] * 4])
    assert prefix_length(correct, valid).tolist() == [2, 2, 0]


def test_labels_stand_at_their_own_positions():
    rows = to_device(tiny_rows())

    @jax.jit
    def draw(tokens, ends, labels):
        valid = valid_anchors(ends, labels, 5, partial_blocks=True)
        anchors, live = draw_anchors(jax.random.key(0), valid, 40)
        return anchors, live, *block_labels(tokens, ends, labels, anchors, live, 5)

    anchors, live, labels, ok = jax.device_get(draw(rows.tokens, rows.ends, rows.labels))
    rows = jax.device_get(rows)
    for r, n, k in np.ndindex(labels.shape):
        a = int(anchors[r, n])
        inside = bool(live[r, n]) and a + 1 + k < rows.ends[r, a]
        assert ok[r, n, k] == inside
        if inside:
            assert labels[r, n, k] == rows.tokens[r, a + 1 + k] and rows.labels[r, a + 1 + k]


def test_anchors_are_valid_distinct_and_redrawn():
    rows = tiny_rows()
    full = np.asarray(valid_anchors(rows.ends, rows.labels, 5, partial_blocks=False))
    part = np.asarray(valid_anchors(rows.ends, rows.labels, 5, partial_blocks=True))
    for r, s in np.ndindex(full.shape):
        answer = rows.labels[r, s] and s + 1 < rows.ends[r, s]
        assert part[r, s] == answer
        assert full[r, s] == (answer and s + 4 < rows.ends[r, s])
    first, live = draw_anchors(jax.random.key(0), part, 6)
    assert np.all(live) and all(part[r, a] for r, row in enumerate(first) for a in row.tolist())
    assert all(len(set(row.tolist())) == 6 for row in first)
    assert not np.array_equal(first, draw_anchors(jax.random.key(1), part, 6)[0])
    few, live = draw_anchors(jax.random.key(0), part, 48)
    np.testing.assert_array_equal(live.sum(1), part.sum(1))
    assert not np.any(np.asarray(few)[~np.asarray(live)])


@pytest.fixture(scope="module")
def scored():
    """Scores, as a function of features and anchors, on rows of several documents."""
    params = drafter_params(MODELS.drafter)
    batch = to_device(tiny_rows())
    features = features_of(MODELS, TARGET.params, batch)

    @jax.jit
    def score(features, anchors):
        live = jnp.ones(anchors.shape, bool)
        return score_blocks(MODELS, params, TARGET.params, batch, features, anchors, live)

    return score, features, batch


def test_no_gradient_flows_to_features_at_or_after_the_anchor(scored):
    score, features, batch = scored
    anchors = np.full((len(features), 3), 20, np.int32)
    anchors[:, 1], anchors[:, 2] = 9, 33
    gradient = jax.jit(jax.jacrev(lambda f: jnp.sum(score(f, anchors)[0], axis=(0, 2))))(features)  # [n, b, S, E]
    for n in range(3):
        reached = np.any(np.asarray(gradient[n]) != 0, axis=-1)
        for r in range(len(features)):
            anchor, start = int(anchors[r, n]), int(batch.starts[r, anchors[r, n]])
            assert not reached[r, anchor:].any(), "features at or after the anchor leak the labels"
            assert not reached[r, :start].any(), "another document leaks in"
            assert reached[r, start:anchor].all()


def test_other_anchors_change_nothing(scored):
    score, features, _ = scored
    many = np.tile(np.array([20, 9, 33, 21, 19, 2], np.int32), (len(features), 1))
    alone = np.tile(np.array([20], np.int32), (len(features), 1))
    np.testing.assert_allclose(score(features, many)[0][:, :1], score(features, alone)[0], atol=1e-5)


def test_batches_without_anchors_are_finite_and_change_no_weight():
    rows = tiny_rows()
    empty = to_device(rows.take(np.full(2, len(rows))))  # rows of padding
    state = init_state(MODELS, TARGET.params, 4)
    before = jax.device_get(state.params)
    state, sums = train_step(MODELS, state, TARGET.params, empty)
    assert sums["loss"] == 0 and sums["blocks"] == 0 and sums["gradient_norm"] == 0
    jax.tree.map(np.testing.assert_array_equal, before, jax.device_get(state.params))

    # One row of padding beside a real one: the real one trains, and dummies do not count.
    half = to_device(rows.take(np.array([0, len(rows)])))
    state, sums = train_step(MODELS, state, TARGET.params, half)
    assert np.isfinite(sums["loss"]) and sums["gradient_norm"] > 0 and sums["blocks"] <= 6
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(state.params))


def test_loss_of_nothing_is_zero():
    ce, no = jnp.ones((1, 2, 4)), jnp.zeros((1, 2, 4), bool)
    loss, sums = block_loss("dpace", 7.0, 0.5, ce, no, no)
    assert loss == 0 and sums["accepted"] == 0


def test_initial_weights_come_from_the_target_where_asked():
    theirs = TARGET.params
    norm = init_state(MODELS, theirs, 4).params
    np.testing.assert_array_equal(norm["norm"]["weight"], theirs["norm"]["weight"])
    assert not np.array_equal(
        norm["layers_0"]["self_attn"]["o_proj"]["weight"], theirs["layers_1"]["self_attn"]["o_proj"]["weight"]
    )
    # The drafter of these tests has the target's heads and another feed-forward width.
    layers = init_state(Models.of(tiny_config(init="layers"), TARGET.config), theirs, 4).params["layers_0"]
    last = theirs["layers_1"]
    np.testing.assert_array_equal(layers["self_attn"]["o_proj"]["weight"], last["self_attn"]["o_proj"]["weight"])
    np.testing.assert_array_equal(layers["self_attn"]["qkv_proj"]["weight"], last["self_attn"]["qkv_proj"]["weight"])
    assert layers["mlp"]["down_proj"]["weight"].shape == (32, 40)


def test_initial_weights_of_a_hybrid_target_are_made_plain():
    """Norms around zero become norms around one, queries lose their output gates, recurrent layers give the rest."""
    target = tiny_target(hybrid=True, delta_layers=(0,))
    theirs, shape = target.params, target.config
    config = tiny_config(init="layers", num_layers=2, head_dim=shape.head_dim)
    found = init_state(Models.of(config, shape), theirs, 4).params
    np.testing.assert_array_equal(found["norm"]["weight"], 1 + theirs["norm"]["weight"])
    own, last = found["layers_1"], theirs["layers_1"]
    np.testing.assert_array_equal(own["input_layernorm"]["weight"], 1 + last["input_layernorm"]["weight"])
    np.testing.assert_array_equal(own["self_attn"]["q_norm"]["weight"], 1 + last["self_attn"]["q_norm"]["weight"])
    q, kv = (n * shape.head_dim for n in (shape.num_heads, 2 * shape.num_kv_heads))
    fused = last["self_attn"]["qkv_proj"]["weight"]
    assert fused.shape[0] == 2 * q + kv
    np.testing.assert_array_equal(own["self_attn"]["qkv_proj"]["weight"], fused[: q + kv])
    np.testing.assert_array_equal(
        found["layers_0"]["input_layernorm"]["weight"], 1 + theirs["layers_0"]["input_layernorm"]["weight"]
    )
    assert "linear_attn" not in found["layers_0"]


def test_causal_head_is_causal_in_every_layer():
    models = Models.of(tiny_config(causal_head=True, num_layers=2), TARGET.config)
    assert models.drafter.causal == (True, True)


def test_learning_rate_warms_up_and_ends_near_zero():
    config = tiny_config(warmup_ratio=0.1)
    rates = [float(learning_rate(config, jnp.int32(s), jnp.int32(100))) for s in (0, 9, 10, 55, 99)]
    assert rates[0] == pytest.approx(config.learning_rate / 10)
    assert rates[1] == rates[2] == pytest.approx(config.learning_rate)
    assert rates[3] == pytest.approx(config.learning_rate / 2)
    assert 0 < rates[4] < 1e-3 * config.learning_rate


def test_attention_of_other_heads_is_not_taken_from_the_target():
    """Not even where one matrix of queries, keys and values has as many rows: 4 + 2 * 2 heads, and 6 + 2 * 1."""
    theirs, shape = TARGET.params, TARGET.config
    assert (shape.num_heads, shape.num_kv_heads) == (4, 2)
    found = init_state(Models.of(tiny_config(init="layers", num_heads=6, num_kv_heads=1), shape), theirs, 4).params
    own, last = found["layers_0"]["self_attn"], theirs["layers_1"]["self_attn"]
    assert own["qkv_proj"]["weight"].shape == last["qkv_proj"]["weight"].shape
    assert not np.any(own["qkv_proj"]["weight"] == last["qkv_proj"]["weight"])
    np.testing.assert_array_equal(
        found["layers_0"]["input_layernorm"]["weight"], theirs["layers_1"]["input_layernorm"]["weight"]
    )
