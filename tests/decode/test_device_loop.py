"""The loop stays on the device: no recompilation inside a bucket, no host transfer, donated caches, honest state."""

import gc
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ddtree_jax as dt
from ddtree_jax import testing
from ddtree_jax.decode import run as device
from ddtree_jax.decode.loop import ALL_ROUNDS
from ddtree_jax.decode.plan import make_plan
from ddtree_jax.decode.width import RoundCosts
from ddtree_jax.models.abstract import check_fits
from ddtree_jax.models.dflash import DFlash
from ddtree_jax.prepare import inputs

DENSE_AND_HYBRID = pytest.mark.parametrize("pair", ["dense", "hybrid"], indirect=True)


@pytest.fixture(scope="module")
def pair(request):
    hybrid = getattr(request, "param", "dense") == "hybrid"
    layers = dict(hybrid=True, delta_layers=(0,)) if hybrid else {}
    target = testing.tiny_target(seed=5, num_layers=2, sliding_windows=(None, None), **layers)
    return target, testing.tiny_drafter(target, block_size=6)


def arguments(pair, prompts, **settings):
    config = dt.DecodeConfig(**dict(num_nodes=16, max_new_tokens=24, stop_token_ids=()) | settings)
    plan = make_plan(config, pair[0].config, pair[1].config, [len(p) for p in prompts])
    return plan, inputs(*pair, plan, prompts, 0, config.temperature)


# One executable a method serves the tests that take METHODS.
METHODS = pytest.mark.parametrize("method", ["ddtree", "static_tree", "lookup_tree"])


@METHODS
@DENSE_AND_HYBRID
def test_no_recompilation_within_a_bucket(pair, method):
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **__: compiled.append(name) if "backend_compile" in name else None
    )
    try:
        settings = dict(method=method, num_nodes=16)
        first = dt.generate(*pair, [[1, 2, 3]], dt.DecodeConfig(max_new_tokens=20, stop_token_ids=(), **settings))
        assert first.compile_seconds > 0 and compiled
        compiled.clear()
        # Other text, length, limit, seed and stop tokens; the same bucket.
        config = dt.DecodeConfig(max_new_tokens=31, seed=4, stop_token_ids=(7,), **settings)
        second = dt.generate(*pair, [list(range(14))], config)
        assert second.compile_seconds == 0.0 and not compiled
    finally:
        jax.monitoring.clear_event_listeners()


@METHODS
def test_no_transfer_in_the_loop(pair, method):
    plan, args = arguments(pair, [[1, 2, 3]], method=method)
    call, _ = device.executable(device.run, plan.loop, *args)
    with jax.transfer_guard("disallow"):
        state = call(*args)
    assert state.num_tokens.tolist() == [24]


def test_a_batch_is_gone_before_the_next_is_made(pair, monkeypatch):
    """So that CUDA graphs, which hold addresses, find the next one where it was."""
    config = dt.DecodeConfig(num_nodes=16, max_new_tokens=24, batch_size=1)
    prompts = [[1, 2, 3], [4, 5], [6]]
    dt.generate(*pair, prompts[:1], config)  # compiles
    gc.collect()  # so that none of what other tests left goes while this one counts
    alive = []

    def spy(*args):
        alive.append(sum(array.nbytes for array in jax.live_arrays()))
        return inputs(*args)

    monkeypatch.setattr("ddtree_jax.api.inputs", spy)
    dt.generate(*pair, prompts, config)
    assert len(alive) == 3 and len(set(alive)) == 1


@pytest.mark.parametrize("num_nodes", [16, "auto"])
def test_a_round_copies_no_cache_and_no_weight(pair, num_nodes, monkeypatch):
    """Copies in the optimised program, by shape: caches are written in place, weights read where they lie."""
    monkeypatch.setattr("ddtree_jax.prepare.round_costs", lambda plan, _: RoundCosts.flat(plan.loop.widths))
    plan, args = arguments(pair, [[1, 2, 3]], num_nodes=num_nodes, widths=(8, 16))
    params, request, _, _, state = args
    # The tests' one thread an operation has products that copy their weights.
    options = {"xla_cpu_multi_thread_eigen": True}
    text = device.advance.lower(plan.loop, params, request, state, ALL_ROUNDS).compile(options).as_text()
    big = [x for x in jax.tree.leaves((params, state.target_cache, state.drafter_cache)) if x.ndim > 1]
    shapes = {f"f32[{','.join(map(str, x.shape))}]" for x in big}
    # The stacked weights of the drafter's context are copies, made before the first round.
    text = "\n".join(line for line in text.splitlines() if "context_weights" not in line)
    made = re.findall(r"= (\w+\[[\d,]*\])\S* (\S+)\(", text)
    assert {op for shape, op in made if shape in shapes} >= {"parameter", "get-tuple-element"}
    copies = {"copy", "copy-start", "transpose", "pad", "concatenate", "slice", "dynamic-slice", "convert"}
    assert [(shape, op) for shape, op in made if shape in shapes and op in copies] == []


def test_stacked_weights_are_made_before_the_rounds(pair):
    """The drafter's projections of the context, side by side: a copy a call, none in the body of the loop."""
    plan, (params, request, _, _, state) = arguments(pair, [[1, 2, 3]])
    prepared = plan.loop.prepare(params)
    assert plan.loop.prepare(prepared) == prepared  # as it is
    text = device.advance.lower(plan.loop, params, request, state, ALL_ROUNDS).compile().as_text()
    body = re.search(r" while\(.*body=%([\w.]+)", text)[1]
    once, every_round = (
        re.search(rf"^{name} .*?^}}", text, re.MULTILINE | re.DOTALL)[0] for name in ("ENTRY", f"%{body}")
    )
    assert "context_weights/concatenate" in once
    assert "absorb" in every_round and "context_weights" not in every_round


@METHODS
@DENSE_AND_HYBRID
def test_state_is_donated(pair, method):
    plan, args = arguments(pair, [[1, 2, 3]], method=method)
    call, _ = device.executable(device.run, plan.loop, *args)
    aliased = call.memory_analysis().alias_size_in_bytes
    caches = sum(x.nbytes for x in jax.tree.leaves((args[-1].target_cache, args[-1].drafter_cache)))
    call(*args)
    assert aliased >= caches
    assert all(x.is_deleted() for x in jax.tree.leaves((args[-1].target_cache.keys, args[-1].target_cache.recurrent)))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_stream_equals_generate(pair, temperature):
    config = dt.DecodeConfig(num_nodes=16, max_new_tokens=30, temperature=temperature, seed=3)
    whole = dt.generate(*pair, [[4, 2]], config).tokens[0]
    for step in (1, 4):
        pieces = list(dt.stream_tokens(*pair, [4, 2], config, rounds_per_step=step))
        assert sum(pieces, []) == whole
        assert all(pieces)


def test_trace_shows_what_generate_commits(pair):
    config = dt.DecodeConfig(num_nodes=16, max_new_tokens=24, stop_token_ids=())
    whole = dt.generate(*pair, [[4, 2]], config)
    rounds = list(dt.trace(*pair, [4, 2], config))
    text = [4, 2] + whole.tokens[0][:1]
    for seen, accepted in zip(rounds, whole.accepted_lengths[0], strict=True):
        assert seen.text_tokens == text
        assert int(seen.tree.tokens[0, 0]) == text[-1]
        text += seen.walk.tokens[0, :accepted].tolist()
    assert text[2:] == whole.tokens[0]


@pytest.mark.slow
def test_drafter_cache_equals_a_full_recompute(pair):
    """After any number of rounds the drafter's cache holds the context of exactly the committed tokens."""
    target, drafter = pair
    prompts = [[1, 2, 3], list(range(20)), [9]]
    plan, (params, request, prompt, lengths, state) = arguments(pair, prompts, batch_size=3, prefill_chunk=16)
    start, _ = device.executable(device.start, plan.loop, params, request, prompt, lengths, state)
    state = start(params, request, prompt, lengths, state)
    steps = jnp.int32(3)
    step, _ = device.executable(device.advance, plan.loop, params, request, state, steps)
    for _ in range(3):
        state = step(params, request, state, steps)
        np.testing.assert_array_equal(state.target_cache.length, state.drafter_cache.length)
    for slot, text in enumerate(prompts):
        committed = text + np.asarray(state.tokens[slot, : state.num_tokens[slot]]).tolist()
        length = int(state.target_cache.length[slot])
        assert length == len(committed) - 1
        assert committed[-1] == int(state.root[slot])
        expected = full_context(target, drafter, committed[:-1])
        for i, (keys, values) in enumerate(zip(expected.keys, expected.values, strict=True)):
            for got, want in ((state.drafter_cache.keys[i], keys), (state.drafter_cache.values[i], values)):
                np.testing.assert_allclose(got[slot, :, :length], want[0], atol=2e-5)


def full_context(target, drafter, tokens):
    from ddtree_jax.models.cache import KVCache
    from ddtree_jax.models.decoder import Decoder
    from ddtree_jax.tree import static_bits

    c = target.config
    cache = KVCache.empty(c, batch=1, rows=8)
    positions = jnp.arange(len(tokens), dtype=jnp.int32)[None]
    out = Decoder(c).apply(
        {"params": target.params}, jnp.asarray([tokens], jnp.int32), positions,
        jnp.asarray(static_bits(np.tri(len(tokens), dtype=bool)))[None], cache, drafter.config.target_layer_ids,
    )  # fmt: skip
    variables = {"params": drafter.params}
    return DFlash(drafter.config).apply(variables, out.features, positions, method=DFlash.context_rows)


@DENSE_AND_HYBRID
def test_a_round_leaves_finished_slots_alone(pair):
    plan, (params, request, prompt, lengths, state) = arguments(pair, [[1, 2, 3], [4, 5]], batch_size=2)
    start, _ = device.executable(device.start, plan.loop, params, request, prompt, lengths, state)
    state = start(params, request, prompt, lengths, state)
    state = state.replace(done=jnp.array([True, False]))

    def slot(state):
        recurrent = jax.tree.map(lambda x: x[:, 0], state.target_cache.recurrent)
        kept = (state.root[0], state.num_tokens[0], state.rounds[0], state.target_cache.length[0], recurrent)
        return jax.device_get(kept)

    before = slot(state)
    step, _ = device.executable(device.advance, plan.loop, params, request, state, ALL_ROUNDS)
    after = step(params, request, state, ALL_ROUNDS)
    jax.tree.map(np.testing.assert_array_equal, before, slot(after))
    assert int(after.num_tokens[1]) == 24


@pytest.mark.parametrize(
    "field,value,message",
    [
        ("target_hidden_size", 64, "target_hidden_size: expected 32, found 64"),
        ("hidden_size", 64, "hidden_size: expected 32, found 64"),
        ("target_num_layers", 4, "target_num_layers: expected 2, found 4"),
        ("target_vocab_size", 60, "target_vocab_size: expected 61, found 60"),
        ("mask_token_id", 61, "mask_token_id: expected 0..60, found 61"),
        ("target_layer_ids", (0, 2), "target_layer_ids: expected ascending block ids in 0..1, found"),
        ("target_layer_ids", (1, 1), "target_layer_ids: expected ascending"),
    ],
)
def test_a_drafter_that_does_not_fit(pair, field, value, message):
    config = testing.tiny_drafter_config(pair[0].config, **{field: value})
    with pytest.raises(ValueError, match=message):
        check_fits(config, pair[0].config)


@pytest.mark.slow
def test_programs_are_forgotten_where_memory_maps_run_low(pair, monkeypatch):
    def decode(width):
        return dt.generate(*pair, [[1, 2, 3]], dt.DecodeConfig(num_nodes=width, max_new_tokens=4)).tokens

    first = decode(2)
    kept = len(device._executables)
    if not (before := device.memory_maps()):
        pytest.skip("this system does not tell")
    monkeypatch.setattr(device, "MOST_MEMORY_MAPS", before)
    assert all(decode(width) == first for width in (3, 4, 2))
    assert len(device._executables) < kept + 3
    assert device.memory_maps() < 1.5 * before + 1000
