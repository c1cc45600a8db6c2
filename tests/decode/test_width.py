"""Width by measurement: the choice, its calibration, the cost table, and decodes that use them."""

import dataclasses
import functools
import itertools
import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import Scripted, scripted_run

import ddtree_jax as dt
from ddtree_jax import round_costs, testing
from ddtree_jax.decode.loop import DecodeLoop
from ddtree_jax.decode.plan import make_plan
from ddtree_jax.decode.proposers import DFlashProposer, MostProbable
from ddtree_jax.decode.run import empty_state
from ddtree_jax.decode.width import RoundCosts, WidthChoice, best_width, promises
from ddtree_jax.models.decoder import Decoder
from ddtree_jax.tree import Acceptance, build_tree, only_first, unpack_ancestors

WIDTHS = (4, 8, 32)
PROMPTS = [[3, 1, 4, 1, 5], [9] * 19, [2, 7]]
KINDS = {
    "dense": dict(num_layers=2),
    "hybrid": dict(num_layers=3, hybrid=True, delta_layers=(0, 2)),
}
SLOW = pytest.mark.slow


@pytest.fixture(autouse=True)
def cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv(round_costs.CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(round_costs, "_known", {})
    return tmp_path / "round_costs"


@pytest.fixture(scope="module")
def pair(request):
    kind = KINDS[getattr(request, "param", "dense")]
    target = testing.tiny_target(seed=0, sliding_windows=(None,) * kind["num_layers"], **kind)
    return target, testing.tiny_drafter(target)


def random_tree(seed, batch=2, width=WIDTHS[-1]):
    rng = np.random.default_rng(seed)
    log_probs = jax.nn.log_softmax(jnp.asarray(rng.normal(size=(batch, 5, 40)) * 2, jnp.float32))
    return build_tree(log_probs, width, root_tokens=jnp.zeros((batch,), jnp.int32))


def test_the_first_nodes_are_the_narrower_tree():
    log_probs = jax.nn.log_softmax(jnp.asarray(np.random.default_rng(1).normal(size=(2, 5, 40)) * 2, jnp.float32))
    roots = jnp.array([7, 8], jnp.int32)
    wide = build_tree(log_probs, 40, root_tokens=roots)
    for width in (8, 33):
        narrow = build_tree(log_probs, width, root_tokens=roots)
        first = only_first(wide, jnp.int32(width))
        for field in ("tokens", "parent", "depth", "log_prob"):
            np.testing.assert_array_equal(getattr(first, field)[:, :width], getattr(narrow, field), err_msg=field)
        assert first.size.tolist() == [width, width]
        assert not first.tokens[:, width:].any() and np.all(np.isneginf(first.log_prob[:, width:]))
        sees = np.asarray(unpack_ancestors(first))
        np.testing.assert_array_equal(sees[:, :width, :width], unpack_ancestors(narrow))
        assert not sees[:, :width, width:].any()
        alone = sees[:, width:]
        np.testing.assert_array_equal(alone, np.broadcast_to(np.eye(40, dtype=bool)[width:], alone.shape))


def rates_of(promised, accepted, trust=8.0):
    rate, out = 1.0, []
    for p, a in zip(promised, accepted):
        rate = (trust * rate + a) / (trust + p)
        out.append(rate)
    return np.array(out)


def choice_of(seed, **fields):
    """With sums as after some rounds."""
    rng = np.random.default_rng(seed)
    sums = np.concatenate([rng.uniform(0, 20, (3, 3)), rng.uniform(1, 9, (1, 3))])
    return WidthChoice(
        **{"number": jnp.int32(0), "left": jnp.int32(0), "sums": jnp.asarray(sums, jnp.float32)} | fields
    )


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6))
def test_a_look_takes_the_full_argmax(seed):
    rng = np.random.default_rng(seed)
    tree = random_tree(seed)
    active = np.array([True, bool(rng.integers(2))])
    length = np.array([300, 900], np.int32)
    before = choice_of(seed)
    costs = RoundCosts(jnp.array([100.0, 1000.0]), jnp.asarray(rng.uniform(0.5, 2, (2, 3)), jnp.float32))
    promised = promises(tree, WIDTHS, jnp.asarray(active))
    after = before.look(promised, costs, jnp.asarray(length), jnp.asarray(active), 8)

    probability = np.exp(np.asarray(tree.log_prob, np.float64)) * active[:, None]
    segments = np.array([probability[:, a:b].sum() for a, b in itertools.pairwise([1, *WIDTHS])])
    np.testing.assert_allclose(promised, segments, rtol=1e-5)
    # The first segment was counted when the last round drafted it.
    hoped, drafted = (np.asarray(x, np.float64) for x in (before.hoped, before.drafted))
    hoped = np.append(hoped[:1], 0.9 * hoped[1:] + segments[1:] / active.sum())
    drafted = np.append(drafted[:1], 0.9 * drafted[1:] + 1)
    np.testing.assert_allclose([after.hoped, after.drafted], [hoped, drafted], rtol=1e-5)
    rates = rates_of(*(np.asarray(x, np.float64) for x in (before.promised, before.accepted)))
    tokens = 1 + np.cumsum(rates * hoped / drafted)
    share = (length[active].mean() - 100) / 900
    speeds = tokens / ((1 - share) * np.asarray(costs.seconds[0]) + share * np.asarray(costs.seconds[1]))
    assert speeds[int(after.number)] >= speeds.max() * (1 - 1e-5) and after.left == 8


def test_between_looks_nothing_is_chosen():
    before = choice_of(3, number=jnp.int32(1), left=jnp.int32(5))
    costs = RoundCosts(jnp.zeros((1,)), jnp.array([[1.0, 1e9, 1e9]]))
    args = jnp.array([1.0, 0.5, 0.1]), costs, jnp.array([7], jnp.int32), jnp.array([True]), 8
    jax.tree.map(np.testing.assert_array_equal, before.look(*args), before)
    assert before.replace(left=jnp.int32(0)).look(*args).number == 0


@pytest.mark.parametrize("widths, number", [((4,), 0), ((4, 8), 0), ((4, 8, 32), 1), ((4, 8, 32, 64), 1)])
def test_a_text_begins_with_the_middle_width(widths, number):
    choice = WidthChoice.empty(widths, 16)
    assert choice.number == number and choice.left == 4
    assert WidthChoice.empty(widths, 2).left == 1


def test_a_dear_width_is_taken_where_it_pays_and_only_there():
    seconds, rates = jnp.array([1.0, 1.0, 1.5]), [jnp.float32(1)] * 3
    for promise, expected in ((0.0, 0), (0.3, 1), (2.0, 2)):
        promised = jnp.array([0.0, min(promise, 0.3), max(promise - 0.3, 0.0)])
        assert best_width(rates, promised, seconds) == expected
    assert best_width([jnp.float32(0.1)] * 3, promised, seconds) == 1


def test_calibration_counts_what_was_tried():
    walk = Acceptance(
        path=jnp.array([[0, 2, 5, 30], [0, 1, 1, 1]], jnp.int32), length=jnp.array([4, 2], jnp.int32),
        tokens=jnp.zeros((2, 4), jnp.int32),
    )  # fmt: skip
    before = WidthChoice.empty(WIDTHS, 8).replace(
        number=jnp.int32(2), sums=jnp.array([[10.0] * 3, [5.0] * 3, [0.0] * 3, [0.0] * 3])
    )
    promised, active = jnp.array([1.5, 0.5, 0.25]), jnp.array([True, False])
    after = before.observe(WIDTHS, promised, walk, active)
    np.testing.assert_allclose(after.promised, [11.4, 10.4, 10.15], rtol=1e-6)
    np.testing.assert_allclose(after.accepted, [5.95] * 3, rtol=1e-6)  # slot 1 decodes no more
    np.testing.assert_allclose([after.hoped, after.drafted], [promised, [1, 1, 1]], rtol=1e-6)
    assert after.left == before.left and after.number == 2
    narrow = dataclasses.replace(walk, length=jnp.array([2, 1], jnp.int32))
    after = before.replace(number=jnp.int32(0)).observe(WIDTHS, promised, narrow, active)
    np.testing.assert_allclose(after.promised, [11.4, 9.9, 9.9], rtol=1e-6)
    np.testing.assert_allclose(after.accepted, [5.95, 4.95, 4.95], rtol=1e-6)
    np.testing.assert_allclose([after.hoped, after.drafted], [[1.5, 0, 0], [1, 0, 0]], rtol=1e-6)
    rates = after.rates()
    assert rates[2] < rates[0] < 1  # the prior of a segment is the rate of the one before


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        pytest.param(dict(draft_vocab_size=40, own_head=True, embedding_scale=2.0), marks=SLOW),
        pytest.param(dict(selector_rank=6), marks=SLOW),
    ],
)
def test_a_narrower_draft_is_the_beginning_of_the_widest(overrides):
    target = testing.tiny_target(num_layers=2, sliding_windows=(None,) * 2)
    drafter = testing.tiny_drafter(target, **overrides)
    depth = drafter.config.depth
    propose = DFlashProposer(Decoder(target.config), drafter.config, depth, MostProbable(WIDTHS[-1]))
    cache = propose.init_cache(2, 128)
    given = drafter.params, target.params, cache, jnp.array([5, 9], jnp.int32)
    whole = jax.jit(propose.propose)(*given)
    scores = jax.jit(propose.draft)(*given)
    empty = propose.empty_scores(2)
    assert jax.tree.map(jnp.shape, empty) == jax.tree.map(jnp.shape, scores)
    assert [x.dtype for x in empty] == [x.dtype for x in scores]
    for width in WIDTHS:
        narrow = propose.of_width(width)
        expected = only_first(whole, jnp.int32(width))
        tree = jax.jit(narrow.build)(drafter.params, scores, given[-1])
        np.testing.assert_allclose(tree.log_prob, expected.log_prob[:, :width], rtol=1e-6)
        for field in ("tokens", "parent", "depth"):
            np.testing.assert_array_equal(getattr(tree, field), getattr(expected, field)[:, :width], err_msg=field)
        np.testing.assert_array_equal(tree.size, expected.size)
        np.testing.assert_array_equal(unpack_ancestors(tree), unpack_ancestors(expected)[:, :width, :width])


def test_costs_are_what_more_rounds_add_to_a_call(pair, monkeypatch):
    config = dt.DecodeConfig(num_nodes="auto", widths=WIDTHS, max_new_tokens=8)
    plan = make_plan(config, pair[0].config, pair[1].config, [3])
    clock = 0.0

    def executable(function, loop, params, request, state, rounds):
        def call(params, request, state, rounds):
            nonlocal clock
            width = int(jnp.argmin(request.costs.seconds[0]))
            clock += 0.5 + int(rounds) * (1 + width) + (0.01 if state.target_cache.length[0] else 0)
            return state

        return call, 0.0

    monkeypatch.setattr(round_costs.device, "executable", executable)
    monkeypatch.setattr(round_costs, "time", types.SimpleNamespace(perf_counter=lambda: clock))
    params = {"target": pair[0].params, "drafter": pair[1].params}
    costs = round_costs.measure(plan, params)
    np.testing.assert_allclose(costs.seconds, [[1, 2, 3]] * len(costs.contexts), rtol=1e-6)


@SLOW
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_priced_out_of_the_others_it_is_the_fixed_width(pair, monkeypatch, temperature):
    """Tokens and accepted lengths of every round, whichever loop runs. The first look is at once, since a text begins
    with another width."""

    def looking(*args):
        state = empty_state(*args)
        return state if state.choice is None else state.replace(choice=state.choice.due())

    monkeypatch.setattr("ddtree_jax.prepare.empty_state", looking)
    shared = dict(temperature=temperature, max_new_tokens=24, seed=(1, 2, 3), stop_token_ids=())
    for width in WIDTHS if temperature else (4, 32):
        costs = RoundCosts.all_but(WIDTHS.index(width), len(WIDTHS))
        monkeypatch.setattr("ddtree_jax.prepare.round_costs", lambda *_, costs=costs: costs)
        auto = dt.generate(*pair, PROMPTS, dt.DecodeConfig(num_nodes="auto", widths=WIDTHS, **shared))
        fixed = dt.generate(*pair, PROMPTS, dt.DecodeConfig(num_nodes=width, **shared))
        assert fixed.widths is None and {n for row in auto.widths for n in row} == {width}
        assert (auto.tokens, auto.accepted_lengths) == (fixed.tokens, fixed.accepted_lengths)


def changing_costs():
    """The wide tree is cheap in some places of the text and dear in others."""
    contexts = np.arange(0, 80, 4, dtype=np.float32)
    cheap = (np.arange(contexts.size) % 3)[:, None] == np.arange(3)[None]
    return RoundCosts(contexts, np.where(cheap, 1, 200).astype(np.float32))


@pytest.fixture
def restless(monkeypatch):
    """Every other round chooses a width, and the costs change."""
    monkeypatch.setattr("ddtree_jax.decode.plan.DecodeLoop", functools.partial(DecodeLoop, look_every=2))
    monkeypatch.setattr("ddtree_jax.prepare.round_costs", lambda *_: changing_costs())


@pytest.mark.parametrize("pair", ["dense", pytest.param("hybrid", marks=SLOW)], indirect=True)
@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=SLOW), 1.0])
@pytest.mark.usefixtures("restless")
def test_the_text_does_not_depend_on_the_widths(pair, temperature):
    shared = dict(temperature=temperature, max_new_tokens=32, seed=(11, 12, 13))
    plain = dt.generate(pair[0], None, PROMPTS, dt.DecodeConfig(method="autoregressive", **shared))
    auto = dt.generate(*pair, PROMPTS, dt.DecodeConfig(num_nodes="auto", widths=WIDTHS, **shared))
    assert auto.tokens == plain.tokens and auto.finish_reasons == plain.finish_reasons
    assert {n for row in auto.widths for n in row} == set(WIDTHS)
    assert [len(row) for row in auto.widths] == auto.rounds


@SLOW
@pytest.mark.parametrize("rounds_per_step", [3, 99])
@pytest.mark.usefixtures("restless")
def test_a_stream_is_the_whole_text(pair, rounds_per_step):
    """Also where its steps end between two looks."""
    config = dt.DecodeConfig(num_nodes="auto", widths=WIDTHS, temperature=1.0, max_new_tokens=32, seed=11)
    whole = dt.generate(*pair, PROMPTS[:1], config).tokens[0]
    pieces = list(dt.stream_tokens(*pair, PROMPTS[0], config, rounds_per_step=rounds_per_step))
    assert sum(pieces, []) == whole and all(pieces) and pieces[0] == whole[:1]
    assert (len(pieces) == 2) == (rounds_per_step == 99)


@pytest.mark.parametrize("pair", ["dense", pytest.param("hybrid", marks=SLOW)], indirect=True)
def test_long_paths_in_trees_of_every_width(pair):
    """With a proposer that knows the text, so that many tokens are committed from each branch of the switch."""
    settings = dict(max_new_tokens=40, stop_token_ids=())
    plain = dt.generate(pair[0], None, PROMPTS, dt.DecodeConfig(method="autoregressive", **settings)).tokens
    scripts = np.zeros((3, 80), np.int32)
    for i, (prompt, tokens) in enumerate(zip(PROMPTS, plain)):
        scripts[i, : len(prompt) + len(tokens)] = prompt + tokens
    proposer = Scripted(depth=7, shape=MostProbable(WIDTHS[-1]), vocab_size=61, rank_spread=1)
    tokens, state = scripted_run(
        pair[0], proposer, scripts, 0.0, PROMPTS, (0, 0, 0), widths=WIDTHS, costs=changing_costs(), **settings
    )
    assert tokens == plain
    rounds = [list(zip(state.widths[i, : state.rounds[i]], state.accepted[i])) for i in range(3)]
    accepted = {width: [n for row in rounds for w, n in row if w == width] for width in WIDTHS}
    assert all(max(lengths) > 1 for lengths in accepted.values()) and max(accepted[32]) > 2
    assert all(n <= width for width, lengths in accepted.items() for n in lengths)


@SLOW
def test_costs_are_measured_once_and_kept(pair, cache_folder, monkeypatch):
    config = dt.DecodeConfig(num_nodes="auto", widths=(2, 4), max_new_tokens=8)
    measured, calls = [], []
    measure, executable = round_costs.measure, round_costs.device.executable

    def watched(function, loop, *args):
        """Notes of each call which width was cheapest, and those that its rounds took."""
        call, compiling = executable(function, loop, *args)

        def noted(params, request, *rest):
            after = call(params, request, *rest)
            cheapest = loop.widths[int(np.argmin(request.costs.seconds[0]))]
            calls.append((function.__name__, cheapest, set(after.widths[0, : int(after.rounds[0])].tolist())))
            return after

        return noted, compiling

    monkeypatch.setattr(round_costs, "measure", lambda *args: measured.append(1) or measure(*args))
    with monkeypatch.context() as patch:
        patch.setattr(round_costs.device, "executable", watched)
        first = dt.generate(*pair, PROMPTS[:1], config)
    *held, _ = calls  # the last one is the text
    assert {(name, width) for name, width, _ in held} == {(f, n) for f in ("advance", "run") for n in (2, 4)}
    assert all(widths == {width} for _, width, widths in held)
    (file,) = cache_folder.iterdir()
    table = json.loads(file.read_text())
    assert np.shape(table["seconds"]) == (len(table["contexts"]), 2) and np.all(np.array(table["seconds"]) > 0)
    assert table["setting"]["batch"] == 1 and measured == [1]
    monkeypatch.setattr(round_costs, "_known", {})  # as in another process
    assert dt.generate(*pair, PROMPTS[:1], config).tokens == first.tokens and measured == [1]
    file.write_text("{")
    monkeypatch.setattr(round_costs, "_known", {})
    dt.generate(*pair, PROMPTS[:1], config)
    assert json.loads(file.read_text())["setting"] == table["setting"] and len(measured) == 2
    # A text of one token has no rounds, and another chunk of the prompt is no other round.
    monkeypatch.setattr(round_costs, "_known", {})
    assert dt.generate(*pair, PROMPTS[:1], dataclasses.replace(config, prefill_chunk=8)).tokens == first.tokens
    file.unlink()
    monkeypatch.setattr(round_costs, "_known", {})
    assert dt.generate(*pair, PROMPTS[:1], dataclasses.replace(config, max_new_tokens=1)).widths == [[]]
    assert len(measured) == 2


@pytest.mark.parametrize(
    "table",
    [
        "{",
        "[" * 200_000,
        '{"contexts": [0], "seconds": [[1, 2, 3]]}',
        '{"contexts": [0], "seconds": [[1, -1]]}',
        '{"contexts": [0], "seconds": [[1, Infinity]]}',
        '{"contexts": [9, 1], "seconds": [[1, 2], [1, 2]]}',
        '{"contexts": [NaN], "seconds": [[1, 2]]}',
        '{"contexts": [1%s], "seconds": [[1, 2]]}' % ("0" * 400),
    ],
    ids=lambda text: text[:45],
)
def test_a_table_that_makes_no_sense_counts_as_missing(tmp_path, table):
    (tmp_path / "t.json").write_text(table)
    assert round_costs._read(tmp_path / "t.json", 2) is None


def test_the_folder_of_the_tables(monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.setenv(round_costs.CACHE_VARIABLE, "~/costs")
    assert str(round_costs._folder()) == "/home/somebody/costs"
    monkeypatch.delenv(round_costs.CACHE_VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert str(round_costs._folder()) == "/caches/ddtree_jax"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert str(round_costs._folder()) == "/home/somebody/.cache/ddtree_jax"


def test_a_folder_that_cannot_be_written_costs_a_warning(pair, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(round_costs.CACHE_VARIABLE, str(tmp_path / "file"))
    monkeypatch.setattr(round_costs, "measure", lambda *_: RoundCosts.all_but(0, 3))
    with pytest.warns(UserWarning, match=r"file/round_costs/\w+.json: round costs cannot be kept"):
        dt.generate(*pair, PROMPTS[:1], dt.DecodeConfig(num_nodes="auto", widths=WIDTHS, max_new_tokens=4))


@SLOW
@pytest.mark.usefixtures("restless")
def test_a_trace_shows_the_width_that_a_round_takes(pair):
    config = dt.DecodeConfig(num_nodes="auto", widths=WIDTHS, max_new_tokens=20, stop_token_ids=())
    rounds = list(dt.trace(*pair, PROMPTS[0], config))
    out = dt.generate(*pair, PROMPTS[:1], config)
    assert [int(r.tree.size[0]) for r in rounds] == out.widths[0]
    assert [int(r.walk.length[0]) for r in rounds][:-1] == out.accepted_lengths[0][:-1]
    assert rounds[0].tree.tokens.shape == (1, WIDTHS[-1])


@pytest.mark.parametrize(
    "settings, message",
    [
        (dict(num_nodes="auto", method="lookup_tree"), "'auto' needs a method whose nodes come in order .*ddtree"),
        (dict(num_nodes="wide"), "num_nodes must be 2..512, root included, or 'auto'; found 'wide'"),
        (dict(widths=()), r"widths must rise, each 2..512, root included; found \(\)"),
        (dict(widths=(16, 16)), "widths must rise"),
        (dict(widths=(1, 16)), "widths must rise"),
        (dict(widths="16"), "widths must rise"),
    ],
)
def test_refusals(pair, settings, message):
    with pytest.raises(ValueError, match=message):
        make_plan(dt.DecodeConfig(**settings), pair[0].config, pair[1].config, [3])
