"""The promise on a Hopper GPU, with the attention kernel in the loop: JAX_PLATFORMS=cuda pytest ...; skipped elsewhere.

The kernel takes bfloat16, where the shape of a matrix product decides near-ties. So texts of two methods may part, but
only where a float32 copy of the target is undecided between the two tokens.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scripted import Scripted, scripted_run

import ddtree_jax as dt
from ddtree_jax import testing
from ddtree_jax.decode import run
from ddtree_jax.decode.loop import DecodeLoop
from ddtree_jax.decode.proposers import Chain, MostProbable
from ddtree_jax.decode.sampling import position_noise
from ddtree_jax.decode.width import RoundCosts
from ddtree_jax.models import layers
from ddtree_jax.models.cache import KVCache
from ddtree_jax.models.decoder import Decoder
from ddtree_jax.tree import static_bits
from pallas_kernels.choice import on_hopper
from pallas_kernels.linear_chain import Turns
from pallas_kernels.streaming_matmul import config as streaming_config

ROWS = 512
PROMPTS = [np.random.default_rng(i).integers(0, 500, n).tolist() for i, n in enumerate((5, 150, 330))]
SEEDS = (11, 12, 13)
NEW_TOKENS = 64
CHUNK = 64  # few kernels to compile: that takes longer than the decoding
# In standard deviations of the logits: what two bfloat16 passes of a tiny model may differ by.
MARGIN = 0.08
# Tokens before two texts part, in the mean: near-ties are a few in a hundred among the flat draws of a random model.
COMMON = 8


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not on_hopper(), reason="needs a Hopper GPU")]


@pytest.fixture(scope="module")
def pair():
    target = testing.tiny_target(
        seed=0, vocab_size=512, hidden_size=256, intermediate_size=384, num_heads=6, num_kv_heads=2, head_dim=64,
        num_layers=5, sliding_windows=(None,) * 5, max_position=1024, stop_token_ids=(),
        dtype="bfloat16",
    )  # fmt: skip
    return target, testing.random_dflash(target, mask_token_id=511, num_layers=2)


def decode(pair, temperature, **fields):
    config = dt.DecodeConfig(
        temperature=temperature, seed=SEEDS, max_new_tokens=NEW_TOKENS, prefill_chunk=CHUNK, **fields
    )
    return dt.generate(*pair, PROMPTS, config)


@pytest.fixture(scope="module")
def reference(pair):
    cache = {}

    def get(temperature):
        if temperature not in cache:
            cache[temperature] = decode((pair[0], None), temperature, method="autoregressive").tokens
        return cache[temperature]

    return get


@functools.partial(jax.jit, static_argnums=0)
def last_logits(decoder, params, tokens, length):
    """[V] float32 after the first `length` of tokens [1, ROWS]."""
    positions = jnp.arange(ROWS, dtype=jnp.int32)[None]
    causal = jnp.asarray(static_bits(np.tri(ROWS, dtype=bool)))[None]
    cache = KVCache.empty(decoder.config, batch=1, rows=8)
    hidden = decoder.apply({"params": params}, tokens, positions, causal, cache).hidden
    last = jax.lax.dynamic_slice_in_dim(hidden, length - 1, 1, axis=1)[:, 0]
    return decoder.apply({"params": params}, last, method=Decoder.logits)[0]


def margin(target, text, seed, temperature, tokens) -> float:
    """How far the worse of two tokens is from the best one, after `text`; in standard deviations of the logits."""
    wide = testing.with_dtype(target, "float32")
    padded = jnp.asarray(np.pad(text, (0, ROWS - len(text))), jnp.int32)[None]
    logits = last_logits(Decoder(wide.config), wide.params, padded, jnp.int32(len(text)))
    spread = float(jnp.std(logits))
    if temperature > 0:
        noise = position_noise(jnp.asarray([seed], jnp.uint32), jnp.asarray([[len(text)]], jnp.int32), logits.shape[-1])
        logits = logits + noise[0, 0] * temperature
    return float(jnp.max(logits) - min(float(logits[t]) for t in tokens)) / spread


def check(target, found, expected, temperature):
    """All but near-ties agree. Returns the mean number of tokens before two texts part."""
    common = []
    for prompt, ours, theirs, seed in zip(PROMPTS, found, expected, SEEDS, strict=True):
        assert len(ours) == len(theirs) == NEW_TOKENS
        parting = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), None)
        common.append(NEW_TOKENS if parting is None else parting)
        if parting is not None:
            text = [*prompt, *ours[:parting]]
            assert margin(target, text, seed, temperature, (ours[parting], theirs[parting])) < MARGIN
    return float(np.mean(common))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("method,num_nodes", [("dflash", 2), ("ddtree", 16), ("ddtree", 64), ("ddtree", 256)])
def test_methods_agree_but_for_near_ties(pair, reference, method, num_nodes, temperature):
    tokens = decode(pair, temperature, method=method, num_nodes=num_nodes).tokens
    assert check(pair[0], tokens, reference(temperature), temperature) >= COMMON


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_widths_that_change_agree_but_for_near_ties(pair, reference, temperature, monkeypatch):
    contexts = np.arange(0, ROWS, 3, dtype=np.float32)
    dear = np.where((np.arange(len(contexts)) % 2)[:, None] == np.arange(2), 1, 200).astype(np.float32)
    monkeypatch.setattr("ddtree_jax.prepare.round_costs", lambda *_: RoundCosts(contexts, dear))
    monkeypatch.setattr("ddtree_jax.decode.plan.DecodeLoop", functools.partial(DecodeLoop, look_every=2))
    found = decode(pair, temperature, num_nodes="auto", widths=(16, 64))
    assert {width for row in found.widths for width in row} == {16, 64}
    assert check(pair[0], found.tokens, reference(temperature), temperature) >= COMMON


def forget_programs():
    """Programs of these shapes were compiled with other kernels, and will be."""
    jax.clear_caches()
    run._executables.clear()


@pytest.fixture
def forgetful():
    yield
    forget_programs()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_streaming_products_agree_but_for_near_ties(pair, reference, temperature, monkeypatch, forgetful):
    """Products by the streaming kernel, with the fused norms, though nobody measured them at so small a shape."""
    expected = reference(temperature)
    monkeypatch.setattr(streaming_config, "measured_faster", lambda shape: True)
    forget_programs()
    tokens = decode(pair, temperature, method="ddtree", num_nodes=64).tokens
    assert check(pair[0], tokens, expected, temperature) >= COMMON


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_linear_chains_agree_but_for_near_ties(pair, reference, temperature, monkeypatch, forgetful):
    """All products between two mixers as one kernel, of the target (96 rows) and of the drafter."""
    expected, chains, run_chain = reference(temperature), set(), Turns.run

    def counted(self, operands, *, chain, config):
        chains.add((chain.rows, chain.projected > 0))
        return run_chain(self, operands, chain=chain, config=config)

    monkeypatch.setattr(Turns, "run", counted)
    monkeypatch.setattr(layers, "MATMUL", "chain")
    forget_programs()
    tokens = decode(pair, temperature, method="ddtree", num_nodes=32).tokens
    assert {(96, True), (96, False), (48, False)} <= chains
    assert check(pair[0], tokens, expected, temperature) >= COMMON


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("shape,rank_spread", [(Chain(), 0), (MostProbable(64), 2), (MostProbable(256), 3)])
def test_long_paths_agree_but_for_near_ties(pair, reference, shape, rank_spread, temperature):
    expected = reference(temperature)
    scripts = np.zeros((3, ROWS), np.int32)
    for i, (prompt, tokens) in enumerate(zip(PROMPTS, expected, strict=True)):
        scripts[i, : len(prompt) + len(tokens)] = prompt + tokens
    proposer = Scripted(depth=15, shape=shape, vocab_size=512, rank_spread=rank_spread)
    tokens, state = scripted_run(
        pair[0], proposer, scripts, temperature, PROMPTS, max_new_tokens=NEW_TOKENS, prefill_chunk=CHUNK, seeds=SEEDS
    )
    common = check(pair[0], tokens, expected, temperature)
    assert common >= COMMON
    if common == NEW_TOKENS:  # the script was followed to the end
        assert float(np.sum(state.num_tokens)) / float(np.sum(state.rounds)) > 1.8
