"""The promise: every method writes, token by token, what autoregressive decoding writes with the same seed."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scripted import Conditional, Scripted, scripted_run

import ddtree_jax as dt
from ddtree_jax import testing
from ddtree_jax.decode.proposers import Chain, MostProbable, Static
from ddtree_jax.tree import PRESETS

PROMPTS = [[3, 1, 4, 1, 5], [9] * 19, [2, 7]]
TEMPERATURES = (0.0, 0.7, 1.0)
SLOW = pytest.mark.slow
SEED = (11, 12, 13)
KINDS = {
    "dense": dict(num_layers=2),
    "moe": dict(num_layers=2, moe=testing.tiny_moe(2)),
    "hybrid": dict(num_layers=3, hybrid=True, delta_layers=(0, 2)),
}
OTHERS_TOO = pytest.mark.parametrize(
    "pair", ["dense", *(pytest.param(kind, marks=SLOW) for kind in KINDS if kind != "dense")], indirect=True
)


@pytest.fixture(scope="module")
def pair(request):
    """A target of the kind that the test names, dense by default, and a drafter for it."""
    kind = KINDS[getattr(request, "param", "dense")]
    target = testing.tiny_target(seed=0, sliding_windows=(None,) * kind["num_layers"], **kind)
    return target, testing.tiny_drafter(target)


def decode(target, drafter, prompts, method, num_nodes=2, **settings):
    seeds = SEED[: len(prompts)]
    config = dt.DecodeConfig(method=method, num_nodes=num_nodes, seed=seeds, prefill_chunk=16, **settings)
    return dt.generate(target, drafter, prompts, config)


@pytest.fixture(scope="module")
def reference(pair):
    """Autoregressive text, one prompt at a time, so that batching is tested as well."""
    cache = {}

    def get(temperature, **settings):
        key = (temperature, tuple(sorted(settings.items())))
        if key not in cache:
            outs = []
            for prompt, seed in zip(PROMPTS, SEED):
                config = dt.DecodeConfig(method="autoregressive", temperature=temperature, seed=seed, **settings)
                outs.append(dt.generate(pair[0], None, [prompt], config))
            cache[key] = [(o.tokens[0], o.finish_reasons[0]) for o in outs]
        return cache[key]

    return get


def check(out, expected):
    assert out.tokens == [tokens for tokens, _ in expected]
    assert out.finish_reasons == [reason for _, reason in expected]
    for tokens, lengths, rounds in zip(out.tokens, out.accepted_lengths, out.rounds):
        assert len(tokens) == 1 + sum(lengths)
        assert len(lengths) == rounds
        assert all(n >= 1 for n in lengths)


# (method, width): temperatures of the first stage. Everything else runs in the second.
FIRST_STAGE = {
    ("dflash", 2): (0.0, 1.0),
    ("ddtree", 16): TEMPERATURES,
    ("static_tree", 2): (0.0,),
    ("lookup", 2): (0.0,),
    ("lookup_tree", 16): (0.7,),
}
FIRST_STAGE_OF_HYBRID = {("ddtree", 16): (1.0,)}
SECOND_STAGE = [("best_path", 2), ("lookup_tree", 64), ("ddtree", 2), ("ddtree", 64), ("ddtree", 256)]


def combinations():
    cases = [*FIRST_STAGE, *SECOND_STAGE]
    for kind, case, batch, temperature in itertools.product(KINDS, cases, (1, 3), TEMPERATURES):
        if batch == 1 and (kind != "dense" or temperature > 0):
            continue  # a batch of three holds one of one; alone it has a program of its own, tried once a method
        if kind != "dense" and temperature == 0.7:
            continue
        stage = {"dense": FIRST_STAGE, "hybrid": FIRST_STAGE_OF_HYBRID}.get(kind, {})
        fast = batch == 3 and temperature in stage.get(case, ())
        yield pytest.param(kind, *case, batch, temperature, marks=() if fast else SLOW)


@pytest.mark.parametrize("pair,method,num_nodes,batch,temperature", list(combinations()), indirect=["pair"])
def test_every_method(pair, reference, method, num_nodes, batch, temperature):
    # Prompt 0 runs to the limit, others meet the stop token: slots finish at different rounds.
    prompts = PROMPTS[:batch]
    out = decode(*pair, prompts, method, num_nodes, temperature=temperature, max_new_tokens=32)
    check(out, reference(temperature, max_new_tokens=32)[:batch])


DRAFTERS = {
    "own tables": dict(own_embedding=True, own_head=True, draft_vocab_size=23),
    "from the anchor": dict(sample_from_anchor=True),
    "DFlash 2": dict(conv_taps=2, conv_group_size=4, selector_rank=6, selector_top_k=8),
}


def combinations_of_drafters():
    cases = [("ddtree", 16), ("dflash", 2), ("static_tree", 2)]
    for kind, case, temperature in itertools.product(DRAFTERS, cases, TEMPERATURES):
        if temperature == 0.7 and case[0] != "ddtree":
            continue
        yield pytest.param(kind, *case, temperature, marks=() if (case[0], temperature) == ("ddtree", 0.7) else SLOW)


@pytest.mark.parametrize("kind,method,num_nodes,temperature", list(combinations_of_drafters()))
def test_every_kind_of_drafter(pair, reference, kind, method, num_nodes, temperature):
    drafter = testing.tiny_drafter(pair[0], **DRAFTERS[kind])
    out = decode(pair[0], drafter, PROMPTS, method, num_nodes, temperature=temperature, max_new_tokens=32)
    check(out, reference(temperature, max_new_tokens=32))


# Drafters that run once a depth, and (method, width).
STEP_DRAFTERS = {"eagle3": testing.tiny_eagle3, "mtp": testing.tiny_mtp}
STEP_METHODS = [("best_path", 2), ("static_tree", 2), ("eagle2", 16), ("eagle2", 64)]
STEP_FIRST_STAGE = [("eagle3", "best_path", 2, 0.0), ("eagle3", "eagle2", 16, 1.0), ("mtp", "eagle2", 16, 1.0)]


def step_combinations():
    for kind, family, case, batch, temperature in itertools.product(
        KINDS, STEP_DRAFTERS, STEP_METHODS, (1, 3), TEMPERATURES
    ):
        if batch == 1 and (kind, case, temperature) != ("dense", ("eagle2", 16), 0.0):
            continue
        if temperature == 0.7 or (kind != "dense" and temperature == 0.0):
            continue
        fast = kind == "dense" and batch == 3 and (family, *case, temperature) in STEP_FIRST_STAGE
        yield pytest.param(kind, family, *case, batch, temperature, marks=() if fast else SLOW)


@pytest.mark.parametrize("pair,family,method,num_nodes,batch,temperature", list(step_combinations()), indirect=["pair"])
def test_every_method_of_drafters_that_run_once_a_depth(pair, reference, family, method, num_nodes, batch, temperature):
    drafter = STEP_DRAFTERS[family](pair[0])
    settings = dict(temperature=temperature, max_new_tokens=32)
    out = decode(pair[0], drafter, PROMPTS[:batch], method, num_nodes, branching=6, **settings)
    check(out, reference(**settings)[:batch])


@SLOW
@pytest.mark.parametrize("method", ["eagle2", "static_tree"])
def test_long_paths_of_eagle3(method):
    """A vocabulary so small that trees hold most of what the target may draw."""
    target = testing.tiny_target(num_layers=2, sliding_windows=(None,) * 2, vocab_size=4, stop_token_ids=())
    drafter = testing.tiny_eagle3(target, draft_vocab_size=4)
    prompts, settings = [[3, 1, 2, 1, 0], [2] * 19, [1]], dict(temperature=1.0, max_new_tokens=40)
    plain = decode(target, None, prompts, "autoregressive", **settings)
    choices = tuple(c for d in (1, 2, 3) for c in itertools.product(range(4), repeat=d))
    out = decode(target, drafter, prompts, method, 64, branching=4, tree_choices=choices, **settings)
    assert out.tokens == plain.tokens
    assert out.mean_accepted_length > 2.5
    longest = max(map(max, out.accepted_lengths))
    assert longest >= 4  # all levels of the static tree and the token after it


@OTHERS_TOO
def test_the_reference_meets_stops_and_limits(reference):
    reasons = {reason for temperature in TEMPERATURES for _, reason in reference(temperature, max_new_tokens=32)}
    assert reasons == {"stop", "length"}


@OTHERS_TOO
@pytest.mark.parametrize(
    "method,num_nodes",
    [
        ("autoregressive", 2),
        pytest.param("dflash", 2, marks=SLOW),
        ("ddtree", 16),
        pytest.param("static_tree", 2, marks=SLOW),
        pytest.param("lookup", 2, marks=SLOW),
        pytest.param("lookup_tree", 16, marks=SLOW),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_capacity_end(pair, reference, method, num_nodes, temperature):
    settings = dict(capacity=24, max_new_tokens=100, stop_token_ids=())
    out = decode(*pair, PROMPTS, method, num_nodes, temperature=temperature, **settings)
    check(out, reference(temperature, **settings))
    assert [len(p) + len(t) for p, t in zip(PROMPTS, out.tokens)] == [24, 24, 24]
    assert out.finish_reasons == ["length"] * 3


LONG_PATHS = {  # with the temperatures of the first stage
    (Chain(), 0, ()): TEMPERATURES,
    (Static(PRESETS["eagle-1"]), 1, (60,)): (0.7, 1.0),
    (Static(PRESETS["medusa-vicuna-7b"]), 2, ()): (),
    (MostProbable(16), 1, ()): (),
    (MostProbable(64), 2, (60,)): TEMPERATURES,
    (MostProbable(256), 3, ()): (),
    (Conditional(MostProbable(64), 8), 1, ()): (0.7,),
    (Conditional(Static(PRESETS["eagle-1"]), 8), 1, (60,)): (),
}


@OTHERS_TOO
@pytest.mark.parametrize(
    "shape,rank_spread,stops,temperature",
    [
        pytest.param(*case, temperature, marks=() if temperature in first_stage else SLOW)
        for case, first_stage in LONG_PATHS.items()
        for temperature in TEMPERATURES
    ],
    ids=lambda value: type(value).__name__ if dataclasses.is_dataclass(value) else None,
)
def test_long_paths(pair, reference, shape, rank_spread, stops, temperature):
    target = pair[0]
    settings = dict(max_new_tokens=40, stop_token_ids=stops)
    expected = [tokens for tokens, _ in reference(temperature, **settings)]
    scripts = np.zeros((3, 80), np.int32)
    for i, (prompt, tokens) in enumerate(zip(PROMPTS, expected)):
        scripts[i, : len(prompt) + len(tokens)] = prompt + tokens
    proposer = Scripted(depth=7, shape=shape, vocab_size=61, rank_spread=rank_spread)
    tokens, state = scripted_run(target, proposer, scripts, temperature, PROMPTS, SEED, **settings)
    assert tokens == expected
    lengths = [state.accepted[i, : state.rounds[i]] for i in range(3)]
    longest = max(len(t) for t in tokens)
    if longest >= 24:  # the script must really have been followed, several tokens a round
        assert sum(map(sum, lengths)) / sum(map(len, lengths)) > 1.8
    if shape == Chain() and longest == 40:
        assert max(map(max, lengths)) == 8  # a whole block, the deepest commit there is


@pytest.mark.parametrize("method", [pytest.param("lookup", marks=SLOW), "lookup_tree"])
def test_lookup_follows_a_text_that_repeats_itself(method):
    """Without a drafter; the target walks in a circle."""
    target = circling_target(period=11)
    out = decode(target, None, [[3, 4, 5], [9]], method, 16, max_new_tokens=60, stop_token_ids=())
    check(out, [([(6 + i) % 11 for i in range(60)], "length"), ([(10 + i) % 11 for i in range(60)], "length")])
    # Once around, a token a round; from then on whole rounds of 15 drafted tokens and one of the target's own.
    assert out.accepted_lengths == [[1] * 8 + [16] * 3 + [3], [1] * 10 + [16] * 3 + [1]]


def circling_target(period):
    """Token t is followed by (t + 1) % period: blocks that add nothing, embedding and head one-hot."""
    target = testing.tiny_target(num_layers=1, sliding_windows=(None,))
    vocab, size = target.config.vocab_size, target.config.hidden_size
    params = jax.tree.map(jnp.zeros_like, target.params) | {"norm": target.params["norm"]}
    eye = jnp.eye(vocab, size, dtype=jnp.float32)
    head = jnp.zeros((vocab, size), jnp.float32).at[(jnp.arange(period) + 1) % period, jnp.arange(period)].set(9.0)
    return dt.Target(target.config, params | {"embed": {"weight": eye}, "lm_head": {"weight": head}})


@OTHERS_TOO
def test_bfloat16_differs_only_at_near_ties(pair):
    """In bfloat16 other matrix shapes may flip a near-tie: where texts part, the float32 margin must be tiny."""
    target = testing.with_dtype(pair[0], "bfloat16")
    drafter = testing.tiny_drafter(target)
    config = dict(max_new_tokens=32, stop_token_ids=())
    plain = decode(target, drafter, PROMPTS, "autoregressive", **config)
    tree = decode(target, drafter, PROMPTS, "ddtree", 16, **config)
    for prompt, a, b in zip(PROMPTS, plain.tokens, tree.tokens):
        parted = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), None)
        if parted is not None:
            margin = top2_margin(target, prompt + a[:parted])
            assert margin < 0.1, f"texts part at {parted} where the margin is {margin}"


def top2_margin(target, tokens):
    from ddtree_jax.models.cache import KVCache
    from ddtree_jax.models.decoder import Decoder
    from ddtree_jax.tree import static_bits

    c = target.config
    cache = KVCache.empty(c, batch=1, rows=8)
    n = len(tokens)
    variables = {"params": target.params}
    out = Decoder(c).apply(
        variables, jnp.asarray([tokens]), jnp.arange(n, dtype=jnp.int32)[None],
        jnp.asarray(static_bits(np.tri(n, dtype=bool)))[None], cache,
    )  # fmt: skip
    logits = Decoder(c).apply(variables, out.hidden[:, -1], method=Decoder.logits)[0]
    top = jax.lax.top_k(logits, 2)[0]
    return float(top[0] - top[1])
