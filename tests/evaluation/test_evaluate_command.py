"""`python -m ddtree_jax evaluate`: records, resuming, refusals."""

import json
import shutil

import pytest

from ddtree_jax.__main__ import main
from ddtree_jax.checkpoint import save_checkpoint
from ddtree_jax.evaluation.runs import Results
from ddtree_jax.loading import load_drafter, load_target


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluate")
    (folder / "one.jsonl").write_text('{"id": "a", "turns": ["hi", "why?"]}\n{"id": "b", "turns": ["yes"]}\n')
    (folder / "two.jsonl").write_text('{"id": "a", "turns": ["no"]}\n')
    return folder


@pytest.fixture
def run(tiny_checkpoints, folder):
    def call(*args, out="out", files=("one.jsonl", "two.jsonl")):
        pair = ["--target", str(tiny_checkpoints / "target"), "--drafter", str(tiny_checkpoints / "drafter")]
        prompts = ["--prompts", *(str(folder / f) for f in files)]
        return main(["evaluate", *pair, *prompts, "--out", str(folder / out), "--max-new-tokens", "10", *args])

    return call


VARIANTS = ("autoregressive", "ddtree-16", "static_tree-3-7b0d57")


def test_evaluate_and_resume(run, folder, monkeypatch):
    asked_for = ("--methods", "autoregressive,ddtree,static_tree", "--num-nodes", "16", "--turns", "2")
    asked_for = (*asked_for, "--tree-choices", "[(0,), (1,)]", "--best-width")
    assert run(*asked_for) == 0
    lines = (folder / "out" / "records.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    keys = {(r["set"], r["id"], r["turn"], r["variant"]) for r in records}
    asked = [("one", "a", 0), ("one", "a", 1), ("one", "b", 0), ("two", "a", 0)]
    assert keys == {(*q, v) for q in asked for v in VARIANTS}
    assert len(lines) == len(keys)
    texts = {}
    for r in records:
        assert texts.setdefault((r["set"], r["id"], r["turn"]), r["tokens"]) == r["tokens"]
        assert len(r["tokens"]) == 1 + sum(r["accepted_lengths"]) and r["seconds"] > 0
    second_turn = next(r for r in records if r["turn"] == 1)
    first_turn = next(r for r in records if (r["set"], r["id"], r["turn"]) == ("one", "a", 0))
    assert second_turn["prompt_tokens"] > first_turn["prompt_tokens"]  # the conversation goes on
    rows = json.loads((folder / "out" / "summary.json").read_text())
    assert {r["set"] for r in rows} == {"one", "two", "all"}
    assert all(r["same_text"] == r["compared"] for r in rows)
    for name in ("summary.md", "histogram.png", "accepted_length.png", "tokens_per_second.png"):
        assert (folder / "out" / name).stat().st_size > 0

    # A killed run: two lines and a half are there; only what is missing is run again.
    (folder / "out" / "records.jsonl").write_text("\n".join(lines[:2]) + "\n" + lines[2][:40])
    from ddtree_jax.evaluation import runs

    asked_again = []
    generate = runs.generate
    monkeypatch.setattr(runs, "generate", lambda t, d, p, c: asked_again.extend(p) or generate(t, d, p, c))
    assert run(*asked_for) == 0
    assert len(asked_again) == len(lines) - 2
    again = [json.loads(line) for line in (folder / "out" / "records.jsonl").read_text().splitlines()]
    assert {(r["set"], r["id"], r["turn"], r["variant"]) for r in again} == keys
    assert [r["tokens"] for r in again[:2]] == [r["tokens"] for r in records[:2]]


@pytest.mark.parametrize(
    "args,files,message",
    [
        (
            ["--temperature", "1"],
            ["two.jsonl"],
            "settings.json: made with temperature = 0.0, this run has 1.0; use another folder",
        ),
        (["--methods", "medusa"], ["two.jsonl"], "method 'medusa' is unknown"),
        (
            ["--ngram", "2", "--methods", "autoregressive"],
            ["two.jsonl"],
            "settings.json: made with ngram = None, this run has 2; use another folder",
        ),
        (["--tree-choices", "[(0,), (1,), (0,)]"], ["two.jsonl"], "tree_choices: (0,) is there twice"),
        (["--num-nodes", "16,x"], ["two.jsonl"], "--num-nodes must be comma-separated integers or auto; found '16,x'"),
        ([], ["missing.jsonl"], "missing.jsonl"),
        ([], ["two.jsonl", "two.jsonl"], "a prompt file named two was given already"),
    ],
)
def test_refusals(run, folder, capsys, args, files, message):
    out = "refused"
    if "settings.json" in message:
        out = "other"
        assert run("--methods", "autoregressive", out=out, files=files) == 0
        capsys.readouterr()
    assert run(*args, out=out, files=files) == 2
    err = capsys.readouterr().err
    assert message in err and err.startswith("error: ") and err.count("\n") == 1
    assert not (folder / "refused").exists()


def test_a_prompt_that_changed_is_not_taken_for_the_old_one(run, folder, capsys):
    (folder / "three.jsonl").write_text('{"id": "a", "turns": ["no"]}\n')
    args = dict(out="changed", files=("three.jsonl",))
    assert run("--methods", "autoregressive", **args) == 0
    assert run("--methods", "autoregressive", **args) == 0
    (folder / "three.jsonl").write_text('{"id": "a", "turns": ["yes"]}\n')
    assert run("--methods", "autoregressive", **args) == 2
    assert "prompt 'a' of three has changed since; use another folder" in capsys.readouterr().err


def test_a_checkpoint_that_was_replaced_is_noticed(tiny_checkpoints, tmp_path, folder, capsys):
    pair = {name: tmp_path / name for name in ("target", "drafter")}
    for name, path in pair.items():
        shutil.copytree(tiny_checkpoints / name, path)

    def call(out):
        args = ["--target", str(pair["target"]), "--drafter", str(pair["drafter"]), "--methods", "autoregressive"]
        return main(
            ["evaluate", *args, "--prompts", str(folder / "two.jsonl"), "--out", str(tmp_path / out),
             "--max-new-tokens", "10"]
        )  # fmt: skip

    assert call("first") == call("first") == 0
    drafter = load_drafter(pair["drafter"], load_target(pair["target"]))
    # The same numbers: what counts is that they were written again.
    save_checkpoint(pair["drafter"], drafter.config, drafter.params, overwrite=True)
    capsys.readouterr()
    assert call("first") == 2
    message = f"settings.json: the drafter {pair['drafter']} has been replaced since; use another folder"
    assert message in capsys.readouterr().err
    assert call("second") == 0

    shutil.rmtree(pair["target"])
    shutil.copytree(tiny_checkpoints / "target", pair["target"])
    assert call("second") == 0  # the same files put back
    with (pair["target"] / "tokenizer_config.json").open("a") as file:
        file.write("\n")
    assert call("second") == 2
    assert f"the target {pair['target']} has been replaced since" in capsys.readouterr().err


def test_a_folder_of_before_there_were_fingerprints_goes_on(tmp_path):
    Results(tmp_path, {"target": "t"})
    assert not Results(tmp_path, {"target": "t", "target_fingerprint": "0123456789ab"}).records


def test_a_folder_that_cannot_be_one_is_one_line(run, folder, capsys):
    assert run("--methods", "autoregressive", out="one.jsonl", files=("two.jsonl",)) == 2
    err = capsys.readouterr().err
    assert "one.jsonl: File exists" in err and err.startswith("error: ")


@pytest.mark.parametrize(
    "file,text,message",
    [
        ("settings.json", "", "settings.json: damaged"),
        ("records.jsonl", "{}\n", "records.jsonl:1: damaged: 'set'"),
        ("records.jsonl", '\n"text"\n', "records.jsonl:2: damaged"),
    ],
)
def test_a_damaged_folder_is_named(tmp_path, file, text, message):
    Results(tmp_path, {"a": 1})
    (tmp_path / file).write_text(text)
    with pytest.raises(ValueError, match=message):
        Results(tmp_path, {"a": 1})


def test_the_summary_is_of_what_was_asked_for(run, folder, capsys):
    args = dict(out="grown", files=("one.jsonl", "two.jsonl"))
    assert run("--methods", "autoregressive,lookup", **args) == 0
    capsys.readouterr()
    assert run("--methods", "lookup", "--branching", "10", "--ngram", "3", out="grown", files=("two.jsonl",)) == 0
    assert "note: --branching: not used by lookup\n" in capsys.readouterr().err
    rows = json.loads((folder / "grown" / "summary.json").read_text())
    assert {(r["set"], r["variant"], r["prompts"]) for r in rows} == {("two", "lookup", 1)}
