"""Settings out of range end in one clear error before anything compiles."""

import dataclasses

import jax
import numpy as np
import pytest

import ddtree_jax as dt
from ddtree_jax import testing
from ddtree_jax.config import METHODS, possible_methods
from ddtree_jax.decode.plan import bucket, make_plan
from ddtree_jax.decode.proposers import Static
from ddtree_jax.tree import PRESETS

TARGET = testing.tiny_target_config()
DRAFTER = testing.tiny_drafter_config(TARGET)
EAGLE = testing.tiny_eagle3_config(TARGET)
MTP = testing.tiny_mtp_config(TARGET)
# Every method that can be planned, with a drafter that it takes.
PAIRS = [(m, DRAFTER if METHODS[m].possible(DRAFTER) else EAGLE) for m in METHODS]
PAIRS += [(m, EAGLE) for m in ("best_path", "static_tree")]
PAIRS += [(m, MTP) for m in ("best_path", "static_tree", "eagle2")]


@pytest.mark.parametrize(
    "settings,message",
    [
        (dict(method="ddtree"), "'ddtree' cannot be had of a drafter of the kind 'eagle3'; possible: .*eagle2"),
        (dict(method="dflash"), "'dflash' cannot be had of a drafter of the kind 'eagle3'; possible: .*best_path"),
        (dict(method="eagle2", num_nodes=1), "num_nodes must be 2..512, root included, or 'auto'; found 1"),
        (dict(method="eagle2", branching=0), "branching must be 1..32; found 0"),
        (dict(method="eagle2", branching=True), "branching must be 1..32; found True"),
        (dict(method="eagle2", draft_depth=33), "draft_depth must be 1..32; found 33"),
        (dict(method="static_tree", tree_choices=((40,),)), r"\(40,\) is too wide: rank 40 of at most 39"),
        (dict(method="static_tree", tree_choices="eagle-1", draft_depth=4), "is too deep: 5 of at most 4"),
    ],
)
def test_refusals_of_a_drafter_that_runs_once_a_depth(settings, message):
    with pytest.raises(ValueError, match=message):
        make_plan(dt.DecodeConfig(**settings), TARGET, EAGLE, [3])


def test_a_prediction_layer_drafts_any_token_of_its_target():
    settings = dt.DecodeConfig(method="static_tree", tree_choices=((0,), (60,)))
    assert make_plan(settings, TARGET, MTP, [3]).loop.proposer.growth.choices == ((0,), (60,))
    with pytest.raises(ValueError, match=r"\(61,\) is too wide: rank 61 of at most 60"):
        make_plan(dataclasses.replace(settings, tree_choices=((61,),)), TARGET, MTP, [3])


def test_a_drafter_that_runs_once_a_depth_can_go_deeper_than_by_default():
    plan = make_plan(dt.DecodeConfig(method="static_tree", tree_choices="eagle-1"), TARGET, EAGLE, [3])
    assert EAGLE.depth == 4 and plan.loop.proposer.max_path == 6
    plan = make_plan(dt.DecodeConfig(method="best_path"), TARGET, EAGLE, [3])
    assert plan.loop.proposer.max_path == 5
    plan = make_plan(dt.DecodeConfig(method="eagle2", num_nodes=4, draft_depth=9), TARGET, EAGLE, [3])
    assert (plan.loop.proposer.growth.depth, plan.loop.proposer.growth.branching) == (3, 3)


@pytest.mark.parametrize(
    "settings,lengths,message",
    [
        (
            dict(method="medusa"),
            [3],
            "method 'medusa' is unknown; known: autoregressive, lookup, lookup_tree, dflash, ",
        ),
        (dict(num_nodes=1), [3], "num_nodes must be 2..512, root included, or 'auto'; found 1"),
        (dict(num_nodes=513), [3], "num_nodes must be 2..512"),
        (dict(num_nodes=16.0), [3], "num_nodes must be 2..512, root included, or 'auto'; found 16.0"),
        (dict(draft_depth=8), [3], "draft_depth must be 1..7; found 8"),
        (dict(draft_depth=0), [3], "draft_depth must be 1..7; found 0"),
        (dict(method="lookup", draft_depth=512), [3], "draft_depth must be 1..511; found 512"),
        (dict(method="lookup_tree", num_nodes=1), [3], "num_nodes must be 2..512"),
        (dict(ngram=0), [3], "ngram must be 1..16; found 0"),
        (dict(ngram=2.0), [3], "ngram must be 1..16; found 2.0"),
        (dict(method="static_tree", tree_choices="[(0,)"), [3], "tree_choices must be a list such as"),
        (dict(method="static_tree", tree_choices=((0,) * 8,)), [3], "is too deep: 8 of at most 7 drafted tokens"),
        (
            dict(method="static_tree", tree_choices="eagle-1", draft_depth=4),
            [3],
            r"\(0, 0, 0, 0, 0\) is too deep: 5 of at most 4",
        ),
        (dict(method="static_tree", tree_choices=((61,),)), [3], r"\(61,\) is too wide: rank 61 of at most 60"),
        (dict(max_new_tokens=0), [3], "max_new_tokens must be 1 or more; found 0"),
        (dict(temperature=-0.5), [3], r"temperature must be 0 .* or 0.001..1000; found -0.5"),
        (dict(temperature=float("nan")), [3], r"temperature must be 0 .* or 0.001..1000; found nan"),
        (dict(temperature=1e-9), [3], r"temperature must be 0 .* or 0.001..1000; found 1e-09"),
        (dict(temperature=10**400), [3], "temperature must be"),
        (dict(temperature=True), [3], "temperature must be 0 .*; found True"),
        (dict(stop_token_ids=5), [3], "stop_token_ids must be a list of token ids or None; found 5"),
        (dict(stop_token_ids=(i for i in (5, 6))), [3], "stop_token_ids must be a list .*; found <generator"),
        (dict(seed=b"a"), [3], "seed must be an integer"),
        (dict(seed=-1), [3], "seed must be an integer in 0..2\\^32-1"),
        (dict(seed=(1, 2)), [3], "2 seeds were given for 1 prompts"),
        (dict(stop_token_ids=(61,)), [3], "stop_token_ids must be in 0..60; found 61"),
        (dict(capacity=513), [3], "capacity must be 2..512 .*; found 513"),
        (dict(capacity=8), [3, 8], "prompt 1 has 8 tokens, which leaves no room in a capacity of 8"),
        (dict(), [512], "prompt 0 has 512 tokens, which leaves no room in a capacity of 512"),
        (dict(batch_size=0), [3], "batch_size must be 1 or more; found 0"),
        (dict(prefill_chunk=0), [3], "prefill_chunk must be 1..512; found 0"),
        (dict(), [], "no prompts were given"),
        (dict(), [2, 0], "prompt 1 is empty"),
    ],
)
def test_refusals(settings, lengths, message):
    with pytest.raises(ValueError, match=message):
        make_plan(dt.DecodeConfig(**settings), TARGET, DRAFTER, lengths)


def test_numpy_numbers_are_numbers():
    config = dt.DecodeConfig(
        num_nodes=np.int64(16), max_new_tokens=np.int32(5), temperature=np.float32(0.7), seed=np.uint32(3),
        stop_token_ids=[np.int64(7)], capacity=np.int64(40),
    )  # fmt: skip
    assert make_plan(config, TARGET, DRAFTER, [3]).limits == (5,)


def test_a_given_batch_size_is_kept():
    assert [make_plan(dt.DecodeConfig(batch_size=b), TARGET, DRAFTER, [3]).batch for b in (4, None)] == [4, 1]


def test_a_drafter_of_another_target():
    other = testing.tiny_drafter_config(testing.tiny_target_config(hidden_size=64))
    with pytest.raises(ValueError, match="does not fit the target: target_hidden_size: expected 32, found 64"):
        make_plan(dt.DecodeConfig(), TARGET, other, [3])


@pytest.mark.parametrize(
    "changes,message",
    [
        (dict(target_vocab_size=62), "target_vocab_size: expected 61, found 62"),
        (dict(hidden_size=16), "hidden_size: expected 32, found 16"),
        (dict(draft_vocab_size=62), "draft_vocab_size: expected 1..61, found 62"),
        (dict(target_layer_ids=(0, 3)), "target_layer_ids: expected ascending block ids in 0..2"),
        (dict(depth=0), "depth: expected 1..32, found 0"),
    ],
)
def test_an_eagle3_drafter_of_another_target(changes, message):
    with pytest.raises(ValueError, match=f"does not fit the target: {message}"):
        make_plan(dt.DecodeConfig(method="eagle2"), TARGET, dataclasses.replace(EAGLE, **changes), [3])


def test_a_drafter_is_needed():
    with pytest.raises(ValueError, match="method 'ddtree' needs a drafter, and none was given"):
        make_plan(dt.DecodeConfig(), TARGET, None, [3])


def test_methods_of_a_pair():
    assert possible_methods(None) == ["autoregressive", "lookup", "lookup_tree"]
    assert possible_methods(DRAFTER) == [m for m in METHODS if m not in ("best_path", "eagle2")]
    assert possible_methods(EAGLE) == [m for m in METHODS if m not in ("dflash", "ddtree")]
    for method in possible_methods(None):
        make_plan(dt.DecodeConfig(method=method), TARGET, None, [3])


def test_two_names_of_the_chain_are_one_executable():
    chain, path = (make_plan(dt.DecodeConfig(method=m), TARGET, DRAFTER, [3]) for m in ("dflash", "best_path"))
    assert chain.loop == path.loop and hash(chain.loop) == hash(path.loop)


def test_spellings_of_a_static_tree_are_one_executable():
    texts = ("[(0,), (1,), (0, 0), (0, 1), (1, 0)]", [[1], [1, 0], [0, 1], [0], [0, 0]])
    loops = {make_plan(dt.DecodeConfig(method="static_tree", tree_choices=t), TARGET, DRAFTER, [3]).loop for t in texts}
    assert len(loops) == 1
    (loop,) = loops
    assert loop.proposer.shape == Static(((0,), (1,), (0, 0), (0, 1), (1, 0)))
    assert loop.proposer.max_path == 3  # the tree's depth, not the drafter's


def test_the_default_static_tree_ends_at_the_drafters_depth():
    shallow = testing.tiny_drafter_config(TARGET, block_size=4)
    plans = [make_plan(dt.DecodeConfig(method="static_tree"), TARGET, d, [3]) for d in (DRAFTER, shallow)]
    deep, cut = (plan.loop.proposer.shape.choices for plan in plans)
    assert deep == PRESETS["eagle-1"] and cut == tuple(c for c in deep if len(c) <= 3)


@pytest.mark.parametrize(
    "drafter,most",
    [
        (dict(own_head=True, draft_vocab_size=5), 4),
        (dict(selector_rank=4, selector_top_k=3), 2),
        (dict(selector_rank=4, selector_top_k=100), 60),
        (dict(), 60),
    ],
)
def test_ranks_end_with_the_drafters_candidates(drafter, most):
    config = testing.tiny_drafter_config(TARGET, **drafter)
    for rank in (most, most + 1):
        settings = dt.DecodeConfig(method="static_tree", tree_choices=((0,), (rank,)))
        if rank == most:
            make_plan(settings, TARGET, config, [3])
        else:
            with pytest.raises(ValueError, match=f"rank {rank} of at most {most}"):
                make_plan(settings, TARGET, config, [3])


@pytest.mark.parametrize(
    "drafter,message",
    [
        (dict(hidden_size=64, own_head=True), "hidden_size: expected 32, found 64"),
        (dict(conv_taps=2, conv_group_size=5), "conv_group_size: expected a divisor of hidden_size 32, found 5"),
        (
            dict(own_head=True, draft_vocab_size=9, selector_rank=4),
            "draft_vocab_size: expected none beside a candidate selector, found 9",
        ),
        (dict(draft_vocab_size=9), "own_head: expected True with draft_vocab_size, found False"),
    ],
)
def test_drafters_that_do_not_fit(drafter, message):
    with pytest.raises(ValueError, match=f"the drafter does not fit the target: {message}"):
        make_plan(dt.DecodeConfig(), TARGET, testing.tiny_drafter_config(TARGET, **drafter), [3])


def test_nothing_compiles_before_an_error(monkeypatch):
    target = testing.tiny_target()
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda *a, **k: pytest.fail("compiled"))
    with pytest.raises(ValueError, match="prompt 0: token ids must be in 0..60; found 61"):
        dt.generate(target, None, [[61]], dt.DecodeConfig(method="autoregressive"))
    with pytest.raises(ValueError, match="tokenizer"):
        dt.generate(target, None, ["text"], dt.DecodeConfig(method="autoregressive"))
    with pytest.raises(ValueError, match="prompt 1.*empty"):
        dt.generate(target, None, [[1], []], dt.DecodeConfig(method="autoregressive"))
    for prompts, message in (
        (None, "prompts must be a text or a list of prompts; found NoneType"),
        ({"role": "user"}, "prompts must be a text or a list of prompts; found dict"),
        ([1, 2, 3], "found one list of token ids: wrap it in a list"),
        ([{"role": "user", "content": "x"}], "found the messages of one chat: wrap them in a list"),
    ):
        with pytest.raises(ValueError, match=message):
            dt.generate(target, None, prompts, dt.DecodeConfig(method="autoregressive"))
    with pytest.raises(ValueError, match="rounds_per_step must be 1 or more; found 0"):
        dt.stream_tokens(target, None, [1], dt.DecodeConfig(method="autoregressive"), rounds_per_step=0)


@pytest.mark.parametrize("size,expected", [(1, 16), (16, 16), (17, 32), (512, 512), (513, 1024)])
def test_bucket(size, expected):
    assert bucket(size) == expected


@pytest.mark.parametrize("lengths", [[1], [16], [17], [200, 3], [300]])
@pytest.mark.parametrize("max_new_tokens", [1, 40, 10_000])
@pytest.mark.parametrize("method,drafter", PAIRS)
def test_shapes_leave_room_for_every_write(lengths, max_new_tokens, method, drafter):
    plan = make_plan(dt.DecodeConfig(method=method, max_new_tokens=max_new_tokens), TARGET, drafter, lengths)
    rows = plan.loop.proposer.max_path
    assert plan.prompt_rows % plan.loop.chunk == 0
    assert plan.prompt_rows >= max(lengths)
    assert plan.cache_rows >= plan.prompt_rows
    for length, limit in zip(lengths, plan.limits):
        assert 1 <= limit <= max_new_tokens
        # The last round may start when all but one token are written, and then writes `rows` rows.
        assert length + limit - 1 + rows <= plan.cache_rows
        assert limit + rows <= plan.output_rows


def test_limits_do_not_depend_on_the_method():
    plans = [
        make_plan(dt.DecodeConfig(method=m, max_new_tokens=10_000, num_nodes=n), TARGET, d, [200, 3])
        for m, d, n in (*((m, d, 2) for m, d in PAIRS), ("ddtree", DRAFTER, 256), ("eagle2", EAGLE, 256))
    ]
    assert {p.limits for p in plans} == {(312, 509)}


def test_a_prompt_bucket_need_not_be_a_power_of_two():
    """Its power of two may lie past the target's context, as with the longest prompt of a file."""
    target = testing.tiny_target_config(max_position=400)
    config = dt.DecodeConfig(method="autoregressive", prompt_bucket=300)
    long, short = (make_plan(config, target, None, [n]) for n in (300, 5))
    assert (long.prompt_rows, long.limits) == (512, (100,))
    assert (short.prompt_rows, short.cache_rows) == (long.prompt_rows, long.cache_rows)
