"""The cache of a drafter that runs once a depth follows from the committed text, whatever was drafted on the way."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ddtree_jax as dt
from ddtree_jax import testing
from ddtree_jax.decode import run as device
from ddtree_jax.decode.plan import make_plan
from ddtree_jax.decode.proposers import TextRows
from ddtree_jax.models.cache import KVCache
from ddtree_jax.models.decoder import Decoder
from ddtree_jax.prepare import inputs
from ddtree_jax.tree import static_bits


@pytest.mark.slow
@pytest.mark.parametrize("family", ["eagle3", "mtp"])
def test_drafter_cache_equals_a_full_recompute(family):
    """Prefill in chunks of 4 and rounds of several accepted tokens; prompts of one token, of a chunk, and longer."""
    target = testing.tiny_target(num_layers=2, sliding_windows=(None,) * 2, vocab_size=4, stop_token_ids=())
    drafter = testing.tiny_mtp(target) if family == "mtp" else testing.tiny_eagle3(target, draft_vocab_size=4)
    prompts = [[1], [1, 2, 3, 0], [2] * 9 + [3]]
    config = dt.DecodeConfig(
        method="eagle2", num_nodes=16, draft_depth=2, branching=3, max_new_tokens=24, temperature=1.0, prefill_chunk=4
    )
    plan = make_plan(config, target.config, drafter.config, [len(p) for p in prompts])
    params, request, prompt, lengths, state = inputs(target, drafter, plan, prompts, 0, 1.0)
    state = device.start(plan.loop, params, request, prompt, lengths, state)
    for _ in range(3):
        state = device.advance(plan.loop, params, request, state, jnp.int32(2))
        np.testing.assert_array_equal(state.target_cache.length, state.drafter_cache.length)
        np.testing.assert_array_equal(state.target_cache.length - 1, state.drafter_cache.rows.length)
    assert int(jnp.max(state.accepted)) > 1
    for slot, text in enumerate(prompts):
        committed = text + np.asarray(state.tokens[slot, : state.num_tokens[slot]]).tolist()
        assert committed[-1] == int(state.root[slot])
        expected = recompute(target, drafter, plan.loop.proposer, committed[:-1])
        live = int(state.drafter_cache.rows.length[slot])
        assert live == len(committed) - 2
        for got, want in ((state.drafter_cache.rows.keys, expected.rows.keys),
                          (state.drafter_cache.rows.values, expected.rows.values)):  # fmt: skip
            np.testing.assert_allclose(got[0][slot, :, :live], want[0][0, :, :live], atol=2e-5)
        np.testing.assert_allclose(state.drafter_cache.context[slot], expected.context[0], atol=2e-5)


def recompute(target, drafter, proposer, tokens):
    """The cache after all tokens at once."""
    count, c = len(tokens), target.config
    rows = jnp.asarray([tokens], jnp.int32)
    out = Decoder(c).apply(
        {"params": target.params}, rows, jnp.arange(count, dtype=jnp.int32)[None],
        jnp.asarray(static_bits(np.tri(count, dtype=bool)))[None], KVCache.empty(c, batch=1, rows=8), proposer.taps,
    )  # fmt: skip
    text = TextRows(rows, out.hidden, out.features, jnp.asarray([count], jnp.int32))
    cache = proposer.init_cache(1, count + 1)
    return jax.device_get(proposer.absorb(drafter.params, target.params, cache, text))
