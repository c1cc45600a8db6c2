"""The benchmark of a decode step runs end to end on a CPU at a tiny shape, and its floors are sums done by hand."""

import json

import numpy as np
import pytest

from benchmarks import decode_step, whole_text
from benchmarks._floor import pass_work, round_work, step_rows
from benchmarks._models import DRAFTER_KINDS, TARGETS, models
from benchmarks._rounds import Rounds
from benchmarks._variants import decode_config, variants
from ddtree_jax.decode.loop import DecodeLoop
from ddtree_jax.decode.plan import make_proposer
from ddtree_jax.decode.proposers import DynamicGrowth, StaticGrowth, chain
from ddtree_jax.models import layers
from ddtree_jax.models.abstract import check_fits
from ddtree_jax.models.decoder import Decoder


@pytest.fixture(autouse=True)
def restore_switch(monkeypatch):
    monkeypatch.setattr(layers, "MATMUL", layers.MATMUL)  # the benchmark sets it


@pytest.mark.parametrize("shape", ["tiny", pytest.param("tiny-hybrid", marks=pytest.mark.slow)])
def test_runs_and_writes_records(tmp_path, capsys, shape):
    path = tmp_path / "records.jsonl"
    records = decode_step.main(
        ["--shape", shape, "--contexts", "20", "--methods", "autoregressive,ddtree", "--nodes", "4", "--seconds",
         "0.01", "--matmul", "auto", "--json", str(path)]
    )  # fmt: skip
    assert [json.loads(line) for line in path.read_text().splitlines()] == records
    autoregressive, tree = records
    assert set(tree["parts_ms"]) == {"draft", "build", "verify", "accept+commit"}
    assert set(autoregressive["parts_ms"]) == {"verify", "accept+commit"}
    for record in records:
        assert all(ms > 0 for ms in record["parts_ms"].values())
        assert record["round_ms"] > 0
    assert autoregressive["projected_tokens_per_s"] == pytest.approx(1e3 / autoregressive["round_ms"])
    assert tree["ratio_to_autoregressive"] == pytest.approx(tree["round_ms"] / autoregressive["round_ms"])
    assert tree["projected_tokens_per_s"] is None  # nothing is published for this shape
    assert (autoregressive["drafter"], tree["drafter"]) == (None, "dflash")
    assert capsys.readouterr().out.count("ddtree") == 1


SPLIT, WHOLE = {"draft", "build", "verify", "accept+commit"}, {"draft", "verify", "accept+commit"}


@pytest.mark.parametrize(
    ("shape", "drafter", "methods", "parts", "nodes"),
    [
        ("tiny", "dflash", "lookup_tree", WHOLE, [6]),
        ("tiny", "dflash", "static_tree", SPLIT, [6]),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (
            ("tiny", "dflash2", "ddtree", SPLIT, [6]),
            ("tiny", "eagle3", "eagle2", WHOLE, [6]),
            ("tiny-hybrid", "mtp", "eagle2", WHOLE, [6]),
            ("tiny", "dflash", "lookup", WHOLE, [16]),
            ("tiny", "dflash2", "dflash,static_tree", SPLIT, [4, 6]),
            ("tiny", "eagle3", "best_path,static_tree", WHOLE, [8, 6]),
            ("tiny-hybrid", "mtp", "best_path,static_tree", WHOLE, [4, 6]),
        )),
    ],
)  # fmt: skip
def test_every_kind_of_round_runs(capsys, shape, drafter, methods, parts, nodes):
    records = decode_step.main(
        ["--shape", shape, "--drafter", drafter, "--methods", methods, "--contexts", "20", "--nodes", "6", "--seconds",
         "0.001"]
    )  # fmt: skip
    assert [record["method"] for record in records] == methods.split(",")
    assert [record["nodes"] for record in records] == nodes
    for record in records:
        assert set(record["parts_ms"]) == parts
        assert min(record["round_ms"], record["floor_ms"], *record["parts_ms"].values()) > 0
        assert record["projected_tokens_per_s"] is None


def tree_of(shape, drafter_kind, method, nodes, context):
    target, drafter = models(shape, drafter_kind)
    decoder = Decoder(target)
    proposer = make_proposer(decode_config(method, nodes, drafter), decoder, drafter)
    return Rounds(DecodeLoop(decoder, proposer, sample=False, chunk=1), context)


@pytest.mark.parametrize(
    ("kind", "method", "nodes"), [("dflash", "lookup_tree", 64), ("dflash", "lookup", 16), ("eagle3", "eagle2", 64)]
)
def test_the_tree_that_is_verified_is_full_and_of_different_tokens(kind, method, nodes):
    tree = tree_of("tiny", kind, method, nodes, 1024)._tree()
    assert tree.size.tolist() == [nodes]
    assert len(np.unique(tree.tokens)) > 0.8 * nodes


def test_a_look_up_finds_its_root_whatever_the_target_drew():
    rounds = tree_of("tiny", "dflash", "lookup_tree", 64, 1024)
    state = rounds._state()
    for drawn in (0, 7, 511):
        state = rounds._reset(state.replace(root=state.root * 0 + drawn))
        tree = rounds.loop.proposer.propose(None, None, state.drafter_cache, state.root)
        assert tree.size.tolist() == [64]


def test_a_step_drafter_keeps_one_row_less_than_the_target():
    state = tree_of("tiny", "eagle3", "eagle2", 8, 20)._state()
    lengths = (state.target_cache.length, state.drafter_cache.length, state.drafter_cache.rows.length)
    assert [int(length[0]) for length in lengths] == [20, 20, 19]


def test_floor_of_qwen3_8b():
    """15.0 GB of weights and 151 MB of keys and values at 4.39 TB/s; from 185 rows on, arithmetic."""
    target, drafter = models("qwen3-8b")
    one = round_work(target, drafter, "autoregressive", 1, 1024)["verify"]
    assert one.bytes == pytest.approx(15.14e9 + 0.151e9, rel=0.002)
    assert one.floor_ms == pytest.approx(3.48, abs=0.01)
    wide = round_work(target, drafter, "ddtree", 256, 1024)
    attention = 4 * 36 * 256 * (1024 + 256) * 32 * 128
    assert wide["verify"].floor_ms == pytest.approx((2 * 256 * 7.57e9 + attention) / 790e9, rel=0.001)
    # `fc`, and the key and value projections of five layers.
    assert wide["accept+commit"].bytes == 5 * 4096 * 4096 * 2 + 5 * 2048 * 4096 * 2
    # Five layers of the target's own size, and the head once more.
    layer = 4096 * (6144 + 4096 + 3 * 12288) * 2
    draft = 5 * layer + 151936 * 4096 * 2 + 5 * 2 * 8 * 1024 * 128 * 2
    assert wide["draft"].bytes == pytest.approx(draft)
    # A look-up reads no drafter, and a static tree is verified at its own width.
    assert round_work(target, drafter, "lookup_tree", 64, 1024) == {"verify": pass_work(target, 64, 1024)}
    static = round_work(target, drafter, "static_tree", 64, 1024)
    assert static["verify"] == pass_work(target, 64, 1024)
    assert static["draft"].bytes == pytest.approx(draft)


def test_floor_of_dflash2():
    """Five layers again, their convolutions (two of 16 rows by 16 channels each), the projection of the selector; of
    its codebooks only a few rows are read."""
    target, drafter = models("qwen3-8b", "dflash2")
    layer = 4096 * (6144 + 4096 + 3 * 12288) * 2
    convolutions = 5 * 2 * (2 * 2 * 4096 // 16) * 4096 * 2
    draft = 5 * layer + convolutions + 256 * 4096 * 2 + 151936 * 4096 * 2 + 5 * 2 * 8 * 1024 * 128 * 2
    assert round_work(target, drafter, "ddtree", 64, 1024)["draft"].bytes == pytest.approx(draft)


def test_floor_of_eagle3():
    """A layer whose attention takes 8192 inputs, and a head over 32000 tokens, once a step."""
    target, drafter = models("qwen3-8b", "eagle3")
    layer = (8192 * 6144 + 4096 * 4096 + 4096 * 3 * 12288) * 2
    step = layer + 32000 * 4096 * 2 + 2 * 8 * 1024 * 128 * 2
    work = round_work(target, drafter, "eagle2", 64, 1024)
    assert work["draft"].bytes == 7 * step
    assert work["verify"] == pass_work(target, 64, 1024)
    assert work["accept+commit"].bytes == (3 * 4096 * 4096 + 2048 * 8192) * 2
    assert round_work(target, drafter, "best_path", 8, 1024)["draft"].bytes == 7 * step
    assert round_work(target, drafter, "static_tree", 4, 1024)["draft"].bytes <= 3 * step  # not so deep


def test_floor_of_an_mtp_layer():
    """Three steps of the layer, `fc` over embedding and state included, and of the target's head."""
    target, drafter = models("qwen3.6-27b", "mtp")
    weights = 424_699_392 - 5 * 5120 - 2 * 256  # as published, less the norms
    step = (weights + 248320 * 5120) * 2 + 2 * 4 * 1024 * 256 * 2
    work = round_work(target, drafter, "eagle2", 64, 1024)
    assert work["draft"].bytes == 3 * step
    states = 2 * 4 * 48 * 48 * 128 * 128
    assert work["accept+commit"].bytes == (2 * 5120 * 5120 + 2 * 4 * 256 * 5120) * 2 + states


def test_rows_of_each_step():
    assert step_rows(chain(3)) == [1, 1, 1]
    assert step_rows(DynamicGrowth(num_nodes=64, depth=4, branching=10)) == [1, 10, 10, 10]
    assert step_rows(StaticGrowth(((0,), (1,), (2,), (0, 0), (1, 0), (0, 0, 0)))) == [1, 2, 1]


def test_one_token_of_qwen3_30b_a3b_reads_its_active_weights():
    """3.3e9 parameters are active, the embedding of 0.31e9 among them."""
    one = pass_work(TARGETS["qwen3-30b-a3b"], 1, 0)
    assert one.bytes / 2 == pytest.approx(3.35e9 - 0.31e9, rel=0.02)
    many = pass_work(TARGETS["qwen3-30b-a3b"], 256, 0)
    assert many.bytes / 2 == pytest.approx(30.5e9 - 0.31e9, rel=0.01)


@pytest.mark.parametrize("shape", TARGETS)
def test_every_shape_can_be_shortened(shape):
    for kind in DRAFTER_KINDS:
        if kind == "mtp" and not TARGETS[shape].delta_layers:
            continue
        for num_layers in (None, min(4, TARGETS[shape].num_layers)):
            target, drafter = models(shape, kind, num_layers)
            check_fits(drafter, target)
            for method, nodes in variants(decode_step.DEFAULT_METHODS[kind], [64], drafter):
                assert round_work(target, drafter, method, nodes, 1024)["verify"].bytes > 0


def test_static_trees_have_the_widths_asked_for():
    for shape, kind in (("qwen3-8b", "dflash"), ("qwen3-8b", "eagle3"), ("qwen3.5-4b", "mtp")):
        nodes = [n for _, n in variants(["static_tree"], [16, 64, 256], models(shape, kind)[1])]
        assert nodes == [16, 64, 256]


def test_methods_come_in_the_order_of_the_table():
    args = decode_step.parse(["--methods", "ddtree,autoregressive,lookup_tree"])
    assert args.methods == ["autoregressive", "lookup_tree", "ddtree"]
    assert decode_step.parse([]).methods == ["autoregressive", "dflash", "ddtree"]
    args = decode_step.parse(["--drafter", "eagle3"])
    assert args.methods == ["autoregressive", "best_path", "static_tree", "eagle2"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--methods", "magic"], "magic"),
        (["--methods", "eagle2"], "possible: autoregressive, lookup, lookup_tree, dflash, static_tree, ddtree"),
        (["--methods", "ddtree", "--drafter", "eagle3"], "possible: autoregressive, lookup, lookup_tree, best_path"),
        (["--drafter", "mtp"], "Qwen3.5 and Qwen3.6 only"),
    ],
)
def test_what_cannot_be_timed_is_said(capsys, arguments, message):
    with pytest.raises(SystemExit):
        decode_step.parse(arguments)
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_whole_texts_are_timed_at_each_width_and_as_it_changes(capsys):
    arguments = ["--shape", "tiny", "--prompt", "12", "--tokens", "60", "--nodes", "2,4", "--texts", "1"]
    rows = whole_text.main(arguments)
    assert [row["name"] for row in rows] == ["N = 2", "N = 4", "auto 2", "auto 4", "auto, changing"]
    assert all(row["ms"] > 0 and row["moved"] > 0 and 0 < row["rounds"] < 60 for row in rows)
    assert [set(row["widths"]) for row in rows] == [set(), set(), {2}, {4}, {2, 4}]
    assert [row["changes"] > 0 for row in rows] == [False] * 4 + [True]
    assert len(capsys.readouterr().out.splitlines()) == 7


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nodes", "16,8"], "widths must rise"),
        (["--nodes", "a"], "invalid"),
        (["--nodes", "4,8", "--texts", "0"], "--texts and --jobs"),
        (["--nodes", "4,8", "--layers", "3"], "1..2 layers, not to 3"),
    ],
)
def test_whole_texts_that_cannot_be_timed_are_said(capsys, arguments, message):
    with pytest.raises(SystemExit):
        whole_text.main(["--shape", "tiny", *arguments])
    assert message in capsys.readouterr().err
