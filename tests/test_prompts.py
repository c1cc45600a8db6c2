"""The three forms of a prompt, and files of them."""

import re

import numpy as np
import pytest
import tokenizers

from ddtree_jax.prompts import PromptRecord, encode_prompt, read_prompt_file
from ddtree_jax.tokenizer import Tokenizer


@pytest.fixture
def tokenizer():
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate("abcdefgh")}, []))
    return Tokenizer(backend, chat_template="{% for m in messages %}{{ m.content }}{% endfor %}{{ tail }}")


def test_text(tokenizer):
    assert encode_prompt(tokenizer, "abc") == [0, 1, 2]


@pytest.mark.parametrize("prompt", [[3, 1, 7], (3, 1, 7), np.array([3, 1, 7], np.int32), [np.int64(3), 1, 7]])
def test_tokens(tokenizer, prompt):
    encoded = encode_prompt(tokenizer, prompt)
    assert encoded == [3, 1, 7] and all(type(token) is int for token in encoded)
    assert encode_prompt(None, prompt) == [3, 1, 7]


def test_chat(tokenizer):
    messages = [{"role": "system", "content": "ab"}, {"role": "user", "content": "c"}]
    assert encode_prompt(tokenizer, messages) == [0, 1, 2]
    assert encode_prompt(tokenizer, messages, tail="h") == [0, 1, 2, 7]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "the prompt is empty"),
        ([], "the prompt is empty"),
        ("?", "the prompt has no tokens: '?'"),
        ([0, 8], "token 1 of the prompt: expected an id in 0..7, found 8"),
        ([-1], "token 0 of the prompt: expected an id in 0..7, found -1"),
        ([0, True], "found a list of ['bool', 'int']"),
        ([0.5], "found a list of ['float']"),
        (["a", "b"], "found a list of ['str']"),
        ([{"role": "user", "content": "a"}, 3], "found a list of ['dict', 'int']"),
        (17, "a prompt is text, a list of token ids or a list of chat messages; found int"),
        ({"role": "user", "content": "a"}, "found a single message"),
        ([{"role": "boss", "content": "a"}], "message 0: role: expected one of system, developer, user"),
        ([{"content": "a"}], "message 0: role: expected one of"),
        ([{"role": "user", "content": "a"}, {"role": "user"}], "message 1: content: expected text, found none"),
        ([{"role": "user", "content": ["a"]}], "message 0: content: expected text, found list"),
    ],
)
def test_errors(tokenizer, prompt, message):
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        encode_prompt(tokenizer, prompt)
    assert "\n" not in str(caught.value)


def test_without_a_tokenizer():
    with pytest.raises(ValueError, match="a text prompt needs a tokenizer"):
        encode_prompt(None, "a")
    with pytest.raises(ValueError, match="a chat prompt needs a tokenizer"):
        encode_prompt(None, [{"role": "user", "content": "a"}])
    with pytest.raises(ValueError, match="expected an id in 0 or more, found -1"):
        encode_prompt(None, [-1])


def test_file(tmp_path):
    file = tmp_path / "prompts.jsonl"
    lines = '{"id": "x-0", "turns": ["a\u2028b", "c"], "more": 1}', "", '{"id": 7, "turns": ["d"]}'
    file.write_text("\n".join(lines), encoding="utf-8")
    assert read_prompt_file(file) == [PromptRecord("x-0", ("a\u2028b", "c")), PromptRecord("7", ("d",))]


GOOD = '{"id": "a", "turns": ["x"]}\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", ": expected at least one prompt, found none"),
        ("\n \n", ": expected at least one prompt, found none"),
        (GOOD + "{", ":2: not JSON"),
        (GOOD + "[1]", ":2: expected an object"),
        (GOOD + '\n{"turns": ["x"]}', ":3: key 'id' is missing; found ['turns']"),
        ('{"id": "a"}', ":1: key 'turns' is missing"),
        ('{"id": "", "turns": ["x"]}', ":1: id: expected a name or a number, found ''"),
        ('{"id": null, "turns": ["x"]}', ":1: id: expected a name or a number, found None"),
        ('{"id": "a", "turns": []}', ":1: turns: expected a list of one or more texts"),
        ('{"id": "a", "turns": "x"}', ":1: turns: expected a list of one or more texts"),
        ('{"id": "a", "turns": ["x", ""]}', ":1: turns: expected a list of one or more texts"),
        (GOOD + GOOD, ":2: id 'a' was used in line 1"),
    ],
)
def test_file_errors(tmp_path, text, message):
    file = tmp_path / "prompts.jsonl"
    file.write_text(text)
    with pytest.raises(ValueError, match=re.escape(f"{file}{message}")):
        read_prompt_file(file)


def test_unreadable_files(tmp_path):
    with pytest.raises(ValueError, match=r"none\.jsonl: cannot be read: No such file"):
        read_prompt_file(tmp_path / "none.jsonl")
    (tmp_path / "latin.jsonl").write_bytes(b'{"id": "\xe9"}')
    with pytest.raises(ValueError, match=r"latin\.jsonl: cannot be read: not UTF-8"):
        read_prompt_file(tmp_path / "latin.jsonl")
