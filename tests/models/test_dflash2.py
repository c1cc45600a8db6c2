"""DFlash 2: convolutions, selector and proposals. Its hidden states are compared in `test_dflash_parity`."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_models import DRAFTERS_TARGET, drafter, golden, target
from test_dflash_parity import close, empty_cache, functions, grow

from ddtree_jax import testing
from ddtree_jax.decode.proposers import Chain, DFlashProposer, MostProbable, Static
from ddtree_jax.models.abstract import init_params
from ddtree_jax.models.cache import KVCache
from ddtree_jax.models.decoder import Decoder
from ddtree_jax.models.dynamic_conv import DynamicConv, causal_conv
from ddtree_jax.models.selector import log_conditionals

SECOND = dict(conv_taps=2, conv_group_size=4, selector_rank=6, selector_top_k=16)


def block_conv(x, kernel):
    """The published sum, written out: x [S, E], kernel [S, T, E]."""
    y = np.zeros_like(x)
    for i in range(len(x)):
        for tap in range(min(kernel.shape[1], i + 1)):
            y[i] += kernel[i, tap] * x[i - tap]
    return y


def test_convolution_of_packed_blocks():
    rng = np.random.default_rng(0)
    x, kernel = rng.standard_normal((3, 6, 8), np.float32), rng.standard_normal((3, 6, 4, 8), np.float32)
    got = causal_conv(jnp.asarray(x), jnp.asarray(kernel))
    np.testing.assert_allclose(got, [block_conv(a, k) for a, k in zip(x, kernel)], atol=1e-6)


def test_taps_never_cross_the_start_of_a_block():
    """A kernel of the predecessor alone shifts to the right, with zero at slot 0 of every block."""
    x = np.random.default_rng(1).standard_normal((2, 5, 4), np.float32)
    kernel = np.zeros((2, 5, 2, 4), np.float32)
    kernel[:, :, 1] = 1
    got = np.asarray(causal_conv(jnp.asarray(x), jnp.asarray(kernel)))
    np.testing.assert_array_equal(got[:, 0], 0)
    np.testing.assert_array_equal(got[:, 1:], x[:, :-1])


def test_coefficients():
    """Channels of a group share what is predicted; sides and taps come in this order."""
    conv = DynamicConv(hidden_size=8, taps=3, group_size=4, dtype=jnp.float32)
    x = np.random.default_rng(2).standard_normal((1, 5, 8), np.float32)
    params = conv.init(jax.random.key(0), jnp.asarray(x), method=DynamicConv.kernels)["params"]
    for kernel in conv.apply({"params": params}, jnp.asarray(x), method=DynamicConv.kernels):
        np.testing.assert_array_equal(causal_conv(jnp.asarray(x), kernel), x)  # untrained: the identity
    rng = np.random.default_rng(3)
    base, weight = rng.standard_normal((2, 3, 8), np.float32), rng.standard_normal((12, 8), np.float32)
    params = {"base_kernel": jnp.asarray(base), "kernel_projection": {"weight": jnp.asarray(weight)}}
    sides = conv.apply({"params": params}, jnp.asarray(x), method=DynamicConv.kernels)
    predicted = (x[0] @ weight.T).reshape(5, 2, 3, 2)
    for side, kernel in enumerate(sides):
        for channel in range(8):
            expected = base[side, :, channel] + predicted[:, side, :, channel // 4]
            np.testing.assert_allclose(kernel[0, :, :, channel], expected, atol=1e-5)


def proposer_of(model, target_model, shape):
    return DFlashProposer(Decoder(target_model.config), model.config, model.config.depth, shape)


def log_softmax(x):
    x = x.astype(np.float64)
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


@pytest.fixture(scope="module")
def published():
    """The golden DFlash 2 with both blocks' caches."""
    model, gold = drafter("second"), golden("drafters", "second")
    caches = []
    for j in range(2):
        start = caches[-1] if caches else empty_cache(model.config)
        caches.append(grow(model.config, model.params, gold["features"], gold["lengths"][:, j], start, j))
    return model, gold, caches


def test_conditionals_are_those_of_the_published_scores(published):
    model, gold, caches = published
    t = target(DRAFTERS_TARGET)
    conditionals = jax.jit(proposer_of(model, t, Chain()).conditionals)
    for j, cache in enumerate(caches):
        root = jnp.asarray(gold["anchors"][:, j], jnp.int32)
        tokens, got = conditionals(model.params, t.params, cache, root)
        np.testing.assert_array_equal(tokens, gold["candidates"][:, j])
        # Candidates share the probability that the marginal gives them together.
        marginal = np.take_along_axis(gold["log_probs"][:, j], gold["candidates"][:, j], axis=-1).astype(np.float64)
        together = np.log(np.exp(marginal).sum(-1))[:, :, None, None]
        close(got, (log_softmax(gold["scores"][:, j]) + together).astype(np.float32))


def test_the_predecessor_is_the_picked_token(published):
    model, gold, caches = published
    t = target(DRAFTERS_TARGET)
    propose = jax.jit(proposer_of(model, t, Chain()).propose)
    for j, cache in enumerate(caches):
        tree = propose(model.params, t.params, cache, jnp.asarray(gold["anchors"][:, j], jnp.int32))
        np.testing.assert_array_equal(tree.tokens[:, 1:], gold["walk"][:, j])
    # That is not what follows the marginals' best tokens.
    others = np.argmax(gold["scores"][:, :, 1:, 0], axis=-1)[..., None]
    others = np.take_along_axis(gold["candidates"][:, :, 1:], others, axis=-1)[..., 0]
    assert (others != gold["walk"][:, :, 1:]).sum() >= 3


def test_a_tree_below_the_published_scores(published):
    """The best prefixes of the chain that the scores define; its best ones need not begin with the walk."""
    model, gold, caches = published
    t = target(DRAFTERS_TARGET)
    proposer = proposer_of(model, t, MostProbable(24))

    @jax.jit
    def run(params, target_params, cache, root):
        return proposer.propose(params, target_params, cache, root), proposer.conditionals(
            params, target_params, cache, root
        )

    root = jnp.asarray(gold["anchors"][:, 0], jnp.int32)
    tree, (tokens, values) = jax.device_get(run(model.params, t.params, caches[0], root))
    for slot in range(2):
        paths, everything = [((), 0, 0.0)], []
        for depth in range(tokens.shape[1]):
            paths = [
                ((*words, int(tokens[slot, depth, c])), c, total + float(values[slot, depth, last, c]))
                for words, last, total in paths
                for c in range(tokens.shape[2])
            ]
            everything += [total for _, _, total in paths]
        assert tree.size[slot] == 24
        np.testing.assert_allclose(tree.log_prob[slot, 1:], sorted(everything, reverse=True)[:23], atol=1e-5)


def test_zero_terms_leave_the_marginals_bit_by_bit():
    log_prob = -np.sort(np.random.default_rng(0).exponential(size=(2, 3, 5))).astype(np.float32)
    got = log_conditionals(jnp.asarray(log_prob), jnp.zeros((2, 3, 5, 5), jnp.float32))
    np.testing.assert_array_equal(got, np.broadcast_to(log_prob[:, :, None], got.shape))


@pytest.mark.slow
@pytest.mark.parametrize("anchor", [False, True], ids=["z-lab", "from the anchor"])
def test_untrained_it_is_dflash(anchor):
    """Identity convolutions and a zero selector: the same hidden states, chains and trees, bit by bit."""
    t = testing.tiny_target(num_layers=2, sliding_windows=(None, None))
    plain = testing.tiny_drafter(t, sample_from_anchor=anchor)
    config = dataclasses.replace(plain.config, **SECOND)

    fresh = jax.jit(init_params, static_argnums=0)(config, jax.random.key(5))
    added = {k: v for k, v in fresh.items() if k == "candidate_selector"}
    params = {
        k: v | {name: fresh[k][name] for name in ("attention_conv", "mlp_conv")} if k.startswith("layers_") else v
        for k, v in plain.params.items()
    } | added
    assert jax.tree.structure(params) == jax.tree.structure(fresh)
    second = dataclasses.replace(plain, config=config, params=params)
    features = np.random.default_rng(0).standard_normal((2, 8, 2 * t.config.hidden_size)).astype(np.float32)
    root = jnp.asarray([3, 57], jnp.int32)
    block = jnp.asarray(np.asarray(t.params["embed"]["weight"])[np.array([[3, 59, 59], [57, 59, 59]])])

    def all_of(model):
        cache = KVCache.empty(model.config, batch=2, rows=16)
        cache = functions(model.config)[0](model.params, jnp.asarray(features), jnp.asarray([8, 5], jnp.int32), cache)
        shapes = [Chain(), MostProbable(17), Static(((0,), (1,), (3,), (0, 0), (1, 2), (0, 0, 1)))]
        trees = [jax.jit(proposer_of(model, t, s).propose)(model.params, t.params, cache, root) for s in shapes]
        return jax.device_get((functions(model.config)[1](model.params, block, cache), trees))

    jax.tree.map(np.testing.assert_array_equal, all_of(second), all_of(plain))
