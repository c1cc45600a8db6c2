"""The tokenizer layer on a tiny byte-level BPE: round trips, chat templates, streaming."""

import json
import random

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from ddtree_jax.tokenizer import IncrementalDecoder, Tokenizer

TEXT = "Grüße, 世界! 👩‍👩‍👧 naïve ﬁn — 3½\n\ttabs"
CHATML = (
    "{%- for message in messages %}\n"
    "    {%- if loop.first and message.role != 'system' %}"
    "{{ '<|im_start|>system\\nBe kind.<|im_end|>\\n' }}{% endif %}\n"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
    "{%- endif %}"
)
HELLO = [{"role": "user", "content": "Hello"}]


def byte_level(bos=False):
    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = [("l", "l"), ("H", "e"), ("He", "ll"), ("Ġ", "a")]
    for a, b in merges:
        vocab[a + b] = len(vocab)
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    if bos:
        special = [("<|im_start|>", backend.token_to_id("<|im_start|>"))]
        backend.post_processor = processors.TemplateProcessing("<|im_start|> $A", special_tokens=special)
    return backend


@pytest.fixture
def tokenizer():
    return Tokenizer(byte_level(), chat_template=CHATML, special_tokens={"eos_token": "<|im_end|>"})


def test_round_trip(tokenizer):
    ids = tokenizer.encode(TEXT)
    assert tokenizer.decode(ids) == TEXT
    assert tokenizer.vocab_size == 256 + 4 + 2


def test_special_tokens(tokenizer):
    start = tokenizer.token_to_id("<|im_start|>")
    assert tokenizer.encode("a<|im_start|>")[1] == start
    assert tokenizer.decode([start, *tokenizer.encode("a"), start]) == "a"
    with_bos = Tokenizer(byte_level(bos=True), chat_template="{{ messages[0].content }}")
    assert with_bos.encode("a")[0] == start  # the tokenizer's own post-processor
    assert with_bos.encode_chat([{"role": "user", "content": "a"}]) == tokenizer.encode("a")


def test_truncation_and_padding_of_the_file_are_off():
    backend = byte_level()
    backend.enable_truncation(4)
    backend.enable_padding(length=16)
    assert len(Tokenizer(backend).encode("123456")) == 6


def test_chat_template(tokenizer):
    expected = "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n"
    assert tokenizer.apply_chat_template(HELLO, add_generation_prompt=False) == expected
    assert tokenizer.apply_chat_template(HELLO) == expected + "<|im_start|>assistant\n"
    thinking_off = tokenizer.apply_chat_template(HELLO, enable_thinking=False)
    assert thinking_off == expected + "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert tokenizer.encode_chat(HELLO) == tokenizer.encode(tokenizer.apply_chat_template(HELLO))


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ eos_token }}", "<|im_end|>"),
        ("{{ bos_token }}|", "|"),
        ("{% if tools is none %}no tools{% endif %}", "no tools"),
        ("{{ {'a': '<é>'} | tojson }}", '{"a": "<é>"}'),
        ("{{ [1, 2] | tojson(indent=1) }}", "[\n 1,\n 2\n]"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{% for m in messages %}{% break %}x{% endfor %}y", "y"),
        ("{% if true %}\n  {% set x = 1 %}\n{{ x }}\n{% endif %}\n", "1\n"),  # trim_blocks, lstrip_blocks
    ],
)
def test_template_environment(template, expected):
    tokenizer = Tokenizer(byte_level(), chat_template=template, special_tokens={"eos_token": "<|im_end|>"})
    assert tokenizer.apply_chat_template(HELLO) == expected


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refused the messages: roles must alternate"),
        ("{% if %}", "refused the messages: "),
        ("{{ messages.append(1) }}", "refused the messages: .*unsafe|refused the messages: .*not safely"),
        ("{{ ''.__class__.__mro__ }}", "refused the messages: "),
        (None, "has no chat template"),
    ],
)
def test_template_errors(template, message):
    with pytest.raises(ValueError, match=message):
        Tokenizer(byte_level(), chat_template=template).apply_chat_template(HELLO)


def write(folder, config=None, template=None):
    byte_level().save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return Tokenizer.from_folder(folder)


def test_from_folder(tmp_path):
    assert Tokenizer.from_folder(tmp_path) is None
    assert write(tmp_path).chat_template is None
    config = {"bos_token": {"content": "<|im_start|>"}, "eos_token": "<|im_end|>", "pad_token": None}
    loaded = write(tmp_path, {**config, "chat_template": "inside"})
    assert loaded.chat_template == "inside"
    assert loaded.special_tokens == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    assert write(tmp_path, {"chat_template": named}).chat_template == "d"
    assert write(tmp_path, {"chat_template": "inside"}, template="own file").chat_template == "own file"


def test_from_folder_errors(tmp_path):
    write(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json: not JSON"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": [{"name": "rag", "template": ""}]}))
    with pytest.raises(ValueError, match=r"chat_template: expected text or a list .*, found \['rag'\]"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json: cannot be read as a tokenizer"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("seed", range(20))
def test_incremental_decoder_adds_up(tokenizer, seed):
    rng = random.Random(seed)
    ids = tokenizer.encode(TEXT * 2)
    if seed % 2:  # any bytes, also such as are no UTF-8
        ids = [rng.randrange(tokenizer.vocab_size) for _ in range(200)]
    decoder, pieces, position = IncrementalDecoder(tokenizer), [], 0
    while position < len(ids):
        step = rng.choice([0, 1, 1, 2, 5])
        pieces.append(decoder.push(ids[position : position + step]))
        position += step
    pieces.append(decoder.flush())
    assert "".join(pieces) == tokenizer.decode(ids)
    if not seed % 2:
        assert all("\ufffd" not in piece for piece in pieces)


def test_incremental_decoder_holds_back_half_characters(tokenizer):
    decoder = IncrementalDecoder(tokenizer)
    a, *emoji = tokenizer.encode("a👧")
    assert [decoder.push([a, emoji[0]]), decoder.push(emoji[1:3]), decoder.push(emoji[3:])] == ["a", "", "👧"]
    assert decoder.push(emoji[:2]) == "" and decoder.flush() == "\ufffd"
    assert decoder.push([a]) == "a"  # usable again after flush


def test_incremental_decoder_skips_special_tokens(tokenizer):
    decoder = IncrementalDecoder(tokenizer)
    end = tokenizer.token_to_id("<|im_end|>")
    assert decoder.push([end]) == "" and decoder.push([*tokenizer.encode("x"), end]) == "x"
    assert decoder.flush() == ""


def test_incremental_decoder_keeps_word_boundaries():
    """Decoders of the SentencePiece kind drop the space before the first token, so a token needs its context."""
    vocab = {"▁the": 0, "▁cat": 1, "s": 2, "<end>": 3}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="s"))
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens(["<end>"])
    decoder = IncrementalDecoder(Tokenizer(backend))
    ids = [0, 1, 2, 3, 3, 1, 0]
    assert [decoder.push([i]) for i in ids] == ["the", " cat", "s", "", "", " cat", " the"]


def test_text_that_is_not_unicode(tokenizer):
    with pytest.raises(ValueError, match="not valid Unicode"):
        tokenizer.encode("a\ud800")


def test_a_chat_template_is_checked():
    Tokenizer(byte_level()).check_chat_template()
    with pytest.raises(ValueError, match="the chat template is not valid"):
        Tokenizer(byte_level(), chat_template="{% for %}").check_chat_template()


def test_incremental_decoder_waits_for_the_end_of_a_run_of_byte_tokens():
    """Byte-fallback decoders read a run of byte tokens as a whole: one bad byte spoils its good neighbours."""
    vocabulary = {"<unk>": 0, "x": 1} | {f"<0x{i:02X}>": i + 2 for i in range(256)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>"))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    byte_tokens = Tokenizer(backend)
    ids = [1, ord("C") + 2, 0xC3 + 2, 0x28 + 2, 1, ord("D") + 2, 1]
    decoder = IncrementalDecoder(byte_tokens)
    pieces = [decoder.push([i]) for i in ids]
    assert "".join(pieces) + decoder.flush() == byte_tokens.decode(ids)
    assert pieces[0] == "x" and pieces[1] == ""
