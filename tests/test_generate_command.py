"""`python -m ddtree_jax generate` on a converted tiny pair."""

import argparse
import json

import jax
import pytest

import ddtree_jax as dt
from ddtree_jax import testing
from ddtree_jax.__main__ import main
from ddtree_jax.commands.generate import verdict
from ddtree_jax.commands.options import add_drafting, unused_options


@pytest.fixture(scope="module")
def pair(tiny_checkpoints):
    return ["--target", str(tiny_checkpoints / "target"), "--drafter", str(tiny_checkpoints / "drafter")]


def run(capsys, *args):
    code = main(["generate", *args])
    out = capsys.readouterr()
    return code, out.out, out.err


def test_json_lines(pair, capsys, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"id": "a", "turns": ["one two"]}\n{"id": "b", "turns": ["three"]}\n')
    code, out, _ = run(
        capsys, *pair, "--prompts", str(prompts), "--chat", "--method", "all", "--num-nodes", "16", "--max-new-tokens",
        "12", "--temperature", "1", "--seed", "5", "--json",
    )  # fmt: skip
    assert code == 0
    records = [json.loads(line) for line in out.splitlines()]
    assert [(r["method"], r["id"]) for r in records] == [
        (m, i)
        for m in ("autoregressive", "lookup", "lookup_tree", "dflash", "static_tree", "ddtree")
        for i in ("a", "b")
    ]
    # The drafter has three depths, so the default static tree is the upper part of EAGLE-1's.
    assert {r["method"]: r["num_nodes"] for r in records if r["num_nodes"]} == {
        "lookup_tree": 16, "static_tree": 21, "ddtree": 16,
    }  # fmt: skip
    assert {r["variant"] for r in records if r["method"] != "static_tree"} == {
        "autoregressive", "lookup", "lookup_tree-16", "dflash", "ddtree-16",
    }  # fmt: skip
    assert all(r["variant"].startswith("static_tree-21-") for r in records if r["method"] == "static_tree")
    for r in records:
        assert r["new_tokens"] == len(r["tokens"]) == 1 + sum(r["accepted_lengths"])
        assert r["rounds"] == len(r["accepted_lengths"])
        assert r["tokens"] == records[0 if r["id"] == "a" else 1]["tokens"]


def test_side_by_side(pair, capsys):
    # The settings of test_json_lines, so that the executables are at hand.
    code, out, _ = run(
        capsys, *pair, "--prompt", "hello", "--method", "all", "--num-nodes", "16", "--max-new-tokens", "12",
        "--temperature", "1",
    )  # fmt: skip
    assert code == 0
    assert "all methods wrote the same text" in out
    for column in ("autoregressive", "lookup_tree-16", "dflash", "static_tree-21-", "ddtree-16", "tokens/s", "rounds"):
        assert column in out


def test_without_a_drafter_at_the_best_width(pair, capsys):
    code, out, err = run(
        capsys, *pair[:2], "--prompt", "hello", "--method", "all", "--num-nodes", "16,2", "--best-width",
        "--max-new-tokens", "12", "--temperature", "1", "--json",
    )  # fmt: skip
    assert code == 0
    records = [json.loads(line) for line in out.splitlines()]
    assert [r["method"] for r in records] == ["autoregressive", "lookup", "lookup_tree"]
    assert records[2]["num_nodes"] in (16, 2)
    assert len({tuple(r["tokens"]) for r in records}) == 1


@pytest.mark.parametrize(
    "method,options,unused",
    [
        ("autoregressive", "--num-nodes 16 --draft-depth 2 --best-width", "--num-nodes, --best-width, --draft-depth"),
        # A value that is the default's was asked for none the less; abbreviations are options too.
        ("autoregressive", "--branching 10 --ngr 3 --tree-choices eagle-1", "--tree-choices, --branching, --ngram"),
        ("lookup", "--ngram 3 --draft-depth 15 --num-nodes 16", "--num-nodes"),
        ("lookup", "--ngram 3 --draft-depth 15", None),
    ],
)
def test_options_that_mean_nothing_here_are_named(pair, capsys, method, options, unused):
    code, out, err = run(
        capsys, *pair[:2], "--prompt", "hi", "--method", method, "--max-new-tokens", "2", "--json", *options.split()
    )
    assert code == 0 and len(out.splitlines()) == 1
    assert err == ("" if unused is None else f"note: {unused}: not used by {method}\n")


@pytest.mark.parametrize(
    "options,methods,notes",
    [
        ("--widths 4,8", ["ddtree"], "note: --widths: not used without --num-nodes auto"),
        ("--widths 4,8 --num-nodes 16,auto", ["ddtree"], None),
        ("--widths 4,8", ["lookup"], "note: --widths: not used by lookup"),
        (
            "--widths 4,8 --ngram 2",
            ["ddtree"],
            "note: --ngram: not used by ddtree\nnote: --widths: not used without --num-nodes auto",
        ),
    ],
)
def test_widths_that_nothing_chooses_among_are_named(options, methods, notes):
    parser = argparse.ArgumentParser()
    add_drafting(parser, widths="64")
    assert unused_options(parser.parse_args(options.split()), methods) == notes


def test_the_widths_of_rounds_are_said_where_there_were_rounds():
    target = dt.Target(testing.tiny_target_config(), None)

    def lines(widths):
        out = dt.Generation([[1]], None, [[]], [len(widths[0])], widths, ["length"], [1], 1.0, 0.0)
        return [line for line in verdict(target, {"ddtree-auto": out}) if "ddtree-auto" in line]

    assert lines([[]]) == []
    assert lines([[16, 16, 64, 16]]) == ["ddtree-auto: 16 nodes in 75%, 64 nodes in 25% of rounds"]


@pytest.mark.parametrize(
    "args,message",
    [
        (["--prompt", ""], "prompt 0"),
        ([], "give --prompt or --prompts"),
        (["--prompt", "x", "--num-nodes", "1"], "num_nodes must be 2..512"),
        (["--prompt", "x", "--prompts", "missing.jsonl"], "missing.jsonl"),
        (["--prompt", "x", "--num-nodes", "16,"], "--num-nodes must be comma-separated integers or auto; found '16,'"),
        (
            ["--prompt", "x", "--method", "static_tree", "--tree-choices", "medusa-vicuna-7b"],
            "(0, 0, 0, 0) is too deep: 4 of at most 3 drafted tokens",
        ),
        (["--prompt", "x", "--tree-choices", "none.json"], "none.json: cannot be read: No such file"),
        (["--prompt", "x", "--method", "lookup", "--ngram", "0"], "ngram must be 1..16; found 0"),
    ],
)
def test_errors_are_one_line(pair, capsys, args, message):
    code, out, err = run(capsys, *pair, *args)
    assert code == 2
    assert err.startswith("error: ") and message in err and err.count("\n") == 1


def test_a_missing_checkpoint(capsys):
    code, _, err = run(capsys, "--target", "nowhere", "--method", "autoregressive", "--prompt", "x")
    assert code == 2 and "nowhere" in err and err.count("\n") == 1


def test_a_missing_drafter(pair, capsys):
    code, _, err = run(capsys, *pair[:2], "--prompt", "x")
    assert code == 2 and "--method ddtree needs --drafter" in err


def test_all_methods_are_checked_before_the_first_runs(pair, capsys, monkeypatch):
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda *a, **k: pytest.fail("compiled"))
    code, _, err = run(capsys, *pair, "--prompt", "x", "--method", "all", "--num-nodes", "1")
    assert code == 2 and "num_nodes must be 2..512" in err


def test_a_limit_below_one(pair, capsys):
    code, _, err = run(capsys, *pair, "--prompts", "any.jsonl", "--limit", "0")
    assert code == 2 and "--limit must be 1 or more; found 0" in err
