"""Prompts that the target writes itself."""

import json

import pytest
from tiny_train import tiny_target

from ddtree_jax import testing
from ddtree_jax.__main__ import main
from ddtree_jax.checkpoint import save_checkpoint
from ddtree_jax.loading import load_target
from ddtree_jax.prompts import encode_prompt, read_prompt_file
from ddtree_jax.train.selfprompt import PromptFilter, user_prefix, words_in_a_row, write_prompts


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("selfprompt")
    target = tiny_target()
    save_checkpoint(folder / "target", target.config, target.params, testing.tiny_tokenizer_files(), source="test")
    save_checkpoint(folder / "mute", target.config, target.params, {}, source="test")
    return folder


def test_the_prefix_is_the_template_up_to_the_users_words(folder):
    tokenizer = load_target(folder / "target").tokenizer
    prefix = user_prefix(tokenizer)
    whole = encode_prompt(tokenizer, [{"role": "user", "content": "Hello"}])
    words = tokenizer.encode("Hello")
    assert prefix and whole[: len(prefix) + len(words)] == prefix + words


def test_the_filter_drops_repeats_short_ones_and_what_is_to_be_kept_apart(tmp_path):
    file = tmp_path / "eval.jsonl"
    secret = "Natalia sold clips to 48 of her friends, and then she sold half as many."
    file.write_text(json.dumps({"id": 1, "turns": ["Two words", secret]}) + "\n")
    allowed = PromptFilter.without([file])
    assert allowed("What is a good name for a cat?")
    assert not allowed("What is a good name for a cat?")
    assert not allowed("Hi.")
    assert not allowed("Solve: natalia sold CLIPS to 48 of her friends... how many?")
    assert not allowed("two WORDS!")  # shorter than the run: only the same text counts
    assert allowed("Two words and some more of them, which is another prompt")
    assert allowed("Natalia sold clips to 9 of her friends")
    assert words_in_a_row("a b c", 2) == {("a", "b"), ("b", "c")} and words_in_a_row("!?") == set()


def test_draws_depend_on_seed_and_number_alone(folder):
    target = load_target(folder / "target")
    found = []
    for slots, seed in ((3, 1), (5, 1), (3, 2)):
        parts = write_prompts(
            target, 60, PromptFilter(), temperature=3.0, max_tokens=40, seed=seed, slots=slots, refill=2
        )
        found.append(dict(p for part in parts for p in part))
    assert len(found[0]) > 1 and found[0] == found[1] != found[2]


def test_the_command_writes_a_prompt_file_or_says_why_not(folder, capsys):
    args = ["prompts", "--target", str(folder / "target"), "--temperature", "3", "--slots", "4", "--max-tokens", "40"]
    out = folder / "new" / "prompts.jsonl"
    assert main([*args, "--count", "30", "--out", str(out), "--quiet"]) == 0
    records = read_prompt_file(out)
    assert records and all(r.id.startswith("self-") and len(r.turns[0]) >= 8 for r in records)
    for bad, message in (
        (["--out", str(out)], "exists already"),
        (["--out", str(folder / "x"), "--count", "0"], "--count must be 1 or more"),
        (["--out", str(folder / "x"), "--temperature", "0"], "--temperature must be"),
        (["--out", str(folder / "x"), "--exclude", str(folder / "none.jsonl")], "none.jsonl: cannot be read"),
        (["--out", str(folder / "x"), "--target", str(folder / "mute")], "chat template"),
        (["--out", str(folder / "x"), "--count", "3", "--max-tokens", "1"], "none of 3 draws"),
    ):
        assert main([*args, *bad]) == 2
        assert message in capsys.readouterr().err
    assert not (folder / "x").exists() and sorted(p.name for p in out.parent.iterdir()) == ["prompts.jsonl"]
