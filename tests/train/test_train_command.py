"""`python -m ddtree_jax train` on a tiny target, and what it says about bad input."""

import dataclasses
import errno
import json

import jax
import numpy as np
import pytest
from tiny_train import tiny_config, tiny_target

from ddtree_jax import testing
from ddtree_jax.__main__ import main
from ddtree_jax.checkpoint import save_checkpoint
from ddtree_jax.loading import load_drafter, load_target
from ddtree_jax.train import answers, checkpoints

PROMPTS = ["one", "two!", "three?"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A target of 2 layers, prompts and settings."""
    folder = tmp_path_factory.mktemp("train")
    for name, seed in (("target", 5), ("other", 6)):
        target = tiny_target(seed)
        save_checkpoint(folder / name, target.config, target.params, testing.tiny_tokenizer_files(), source="test")
    lines = [json.dumps({"id": str(i), "turns": [text]}) for i, text in enumerate(PROMPTS)]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "long.jsonl").write_text(json.dumps({"id": "novel", "turns": ["x" * 200]}) + "\n")
    (folder / "empty.jsonl").write_text("\n")
    config = tiny_config(checkpoint_every=3, temperatures=(0.0,))
    (folder / "config.json").write_text(json.dumps(config.to_json()))
    return folder


def run(folder, capsys, out, *extra, target="target", prompts="prompts.jsonl", config="config.json"):
    args = ["--target", target, "--prompts", prompts, "--config", config]
    args = [str(folder / a) if not a.startswith("--") else a for a in args]
    code = main(["train", *args, "--out", str(folder / out), "--quiet", *extra])
    return code, capsys.readouterr().err


def test_prompts_become_a_drafter_that_decodes(folder, capsys):
    held = str(folder / "prompts.jsonl")
    code, err = run(folder, capsys, "out", "--eval-prompts", held)
    assert (code, err) == (0, "")
    target = load_target(folder / "target")
    drafter = load_drafter(folder / "out" / "drafter", target)
    assert drafter.config.target_layer_ids == (0, 1)
    assert (folder / "out" / "z-lab" / "model.safetensors").is_file()
    lines = [json.loads(line) for line in (folder / "out" / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "train"] == [2, 4]
    assert lines[-1]["kind"] == "evaluation" and lines[-1]["documents"] == 3
    assert json.loads((folder / "out" / "drafter" / "training.json").read_text())["steps"] == 4

    # The run is complete: going on changes nothing, starting over is refused.
    code, err = run(folder, capsys, "out")
    assert code == 2 and "--resume" in err
    before = jax.device_get(drafter.params)
    assert run(folder, capsys, "out", "--resume")[0] == 0
    after = jax.device_get(load_drafter(folder / "out" / "drafter", target).params)
    jax.tree.map(np.testing.assert_array_equal, before, after)

    code, err = run(folder, capsys, "out", "--resume", target="other")
    assert code == 2 and "target" in err and "another run" in err and err.count("\n") == 1
    code, err = run(folder, capsys, "out", "--resume", "--answers", str(folder / "other-answers"), target="other")
    assert code == 2 and "belongs to another target" in err


@pytest.mark.parametrize(
    "kwargs,message",
    [
        ({"prompts": "empty.jsonl"}, "empty.jsonl"),
        ({"prompts": "missing.jsonl"}, "missing.jsonl"),
        ({"prompts": "long.jsonl"}, "prompt 'novel' has"),
        ({"target": "nowhere"}, "nowhere"),
        ({"config": "prompts.jsonl"}, "prompts.jsonl: not TOML"),
        ({"config": "missing.toml"}, "missing.toml: cannot be read"),
    ],
)
def test_bad_input_is_one_line(folder, capsys, kwargs, message):
    code, err = run(folder, capsys, "bad", **kwargs)
    assert code == 2 and message in err and err.startswith("error: ") and err.count("\n") == 1
    assert not (folder / "bad").exists()


def full_disk(*_args, **_kwargs):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_full_disk_while_answering_keeps_finished_shards(folder, capsys, monkeypatch):
    monkeypatch.setattr(answers.np, "savez", full_disk)
    code, err = run(folder, capsys, "full")
    assert code == 2 and "No space left" in err and "intact" in err
    monkeypatch.undo()
    assert not list((folder / "full").rglob("*.writing*"))
    assert run(folder, capsys, "full", "--answers-only")[0] == 0


def test_full_disk_while_training_keeps_the_last_checkpoint(folder, capsys, monkeypatch):
    real, calls = checkpoints.write_state, []

    def fails_later(*args):
        calls.append(args)
        return real(*args) if len(calls) == 1 else full_disk()

    monkeypatch.setattr(checkpoints, "write_state", fails_later)
    code, err = run(folder, capsys, "full", "--resume")
    assert code == 2 and "disk is full" in err and "step-00000003" in err and err.count("\n") == 1
    monkeypatch.undo()
    left = [p.name for p in (folder / "full" / "checkpoints").iterdir()]
    assert left == ["step-00000003"]
    assert run(folder, capsys, "full", "--resume")[0] == 0
    # The same as a run that nothing stopped.
    target = load_target(folder / "target")
    for name in ("out", "full"):
        params = load_drafter(folder / name / "drafter", target).params
        tree = jax.device_get(params) if name == "out" else tree  # noqa: F821
    jax.tree.map(np.testing.assert_array_equal, tree, jax.device_get(params))


def test_settings_are_checked_by_name():
    with pytest.raises(ValueError, match="unknown settings: lerning_rate"):
        type(tiny_config()).from_json({"mask_token_id": 1, "lerning_rate": 1.0})
    with pytest.raises(ValueError, match="mask_token_id is missing"):
        type(tiny_config()).from_json({})
    with pytest.raises(ValueError, match="batch_size must be"):
        type(tiny_config()).from_json({"mask_token_id": 1, "batch_size": "4"})
    config = dataclasses.replace(tiny_config(), gamma=3.0, temperatures=(0.0, 1.0))
    assert type(config).from_json(json.loads(json.dumps(config.to_json()))) == config


def test_a_prompt_that_is_not_unicode_is_named(folder, capsys):
    lines = [{"id": "good", "turns": ["fine"]}, {"id": "torn", "turns": ["half \ud800 of a pair"]}]
    (folder / "torn.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    code, err = run(folder, capsys, "bad", prompts="torn.jsonl")
    assert code == 2 and "torn.jsonl: prompt 'torn': the text is not valid Unicode" in err


def test_answers_to_reuse_must_be_there(folder, capsys):
    code, err = run(folder, capsys, "none", "--reuse-answers", "--answers", str(folder / "no-answers"))
    assert code == 2 and "no-answers/train-t0: holds no answers" in err and err.count("\n") == 1
    assert not (folder / "no-answers").exists()
    assert run(folder, capsys, "none", "--answers-only", "--answers", str(folder / "some"))[0] == 0
    code, err = run(folder, capsys, "none", "--reuse-answers", "--answers", str(folder / "some"))
    assert (code, err) == (0, "")


@pytest.mark.parametrize(
    "changes,message",
    [({"devices": 99}, "devices: 99 asked for"), ({"head_dim": 7}, "head_dim must be even"),
     ({"temperatures": [1e9]}, "temperatures must be 0 or 0.001..1000")],
)  # fmt: skip
def test_settings_are_refused_before_anything_is_answered(folder, capsys, changes, message):
    settings = json.loads((folder / "config.json").read_text()) | changes
    (folder / "changed.json").write_text(json.dumps(settings))
    code, err = run(folder, capsys, "early", config="changed.json")
    assert code == 2 and message in err and not (folder / "early").exists()
