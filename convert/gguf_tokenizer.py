"""tokenizer.json and tokenizer_config.json from the metadata of a GGUF file with a byte-level BPE vocabulary."""

import json
from typing import Any

from convert.errors import mismatch
from convert.gguf_source import GGUFSource

_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_DIGITS = {"type": "Digits", "individual_digits": True}
# How text is cut before merging. A wrong cut gives other tokens without an error, so unknown names are refused.
_PRE_TOKENIZERS: dict[str, dict[str, Any]] = {
    "gpt-2": _BYTE_LEVEL,
    "smollm": {"type": "Sequence", "pretokenizers": [_DIGITS, _BYTE_LEVEL]},
}
# Token types of GGUF.
_CONTROL, _USER_DEFINED = 3, 4
_NAMED = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}


def gguf_tokenizer_files(source: GGUFSource) -> dict[str, bytes]:
    """File name -> content. Raises ConversionError on another tokenizer model or pre-tokenizer."""
    key, model = "tokenizer.ggml.model", source.get("tokenizer.ggml.model")
    if model != "gpt2":
        raise mismatch(source.file, key, expected="'gpt2' (byte-level BPE)", found=repr(model))
    pre = source.get("tokenizer.ggml.pre")
    if pre not in _PRE_TOKENIZERS:
        expected = " or ".join(map(repr, _PRE_TOKENIZERS))
        raise mismatch(source.file, "tokenizer.ggml.pre", expected=expected, found=repr(pre))
    tokens: list[str] = source.require("tokenizer.ggml.tokens")
    types: list[int] = source.require("tokenizer.ggml.token_type")
    if len(types) != len(tokens):
        expected = f"{len(tokens)} entries"
        raise mismatch(source.file, "tokenizer.ggml.token_type", expected=expected, found=len(types))
    tokenizer = {
        "version": "1.0",
        "added_tokens": [
            _added_token(i, text, special=kind == _CONTROL)
            for i, (text, kind) in enumerate(zip(tokens, types))
            if kind in (_CONTROL, _USER_DEFINED)
        ],
        "normalizer": None,
        "pre_tokenizer": _PRE_TOKENIZERS[pre],
        "post_processor": _post_processor(source, tokens),
        "decoder": _BYTE_LEVEL,
        "model": {
            "type": "BPE",
            "vocab": {text: i for i, text in enumerate(tokens)},
            "merges": [merge.split(" ", 1) for merge in source.require("tokenizer.ggml.merges")],
        },
    }
    config = {name: tokens[i] for name, key in _NAMED.items() if (i := _token_id(source, key, tokens)) is not None}
    template = source.get("tokenizer.chat_template")
    if template is not None:
        config["chat_template"] = template
    return {
        "tokenizer.json": json.dumps(tokenizer, ensure_ascii=False).encode(),
        "tokenizer_config.json": json.dumps(config, ensure_ascii=False, indent=1).encode(),
    }


def _added_token(index: int, text: str, *, special: bool) -> dict[str, Any]:
    strips = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": index, "content": text, "special": special, **strips}


def _post_processor(source: GGUFSource, tokens: list[str]) -> dict[str, Any] | None:
    """Adds the tokens that the file wants around every text."""
    single: list[dict[str, Any]] = [{"Sequence": {"id": "A", "type_id": 0}}]
    special = {}
    for flag, key, at_front in (
        ("tokenizer.ggml.add_bos_token", "tokenizer.ggml.bos_token_id", True),
        ("tokenizer.ggml.add_eos_token", "tokenizer.ggml.eos_token_id", False),
    ):
        if not source.get(flag, False):
            continue
        source.require(key)
        index = _token_id(source, key, tokens)
        text = tokens[index]
        special[text] = {"id": text, "ids": [index], "tokens": [text]}
        single.insert(0 if at_front else len(single), {"SpecialToken": {"id": text, "type_id": 0}})
    if not special:
        return None
    pair = [*single, {"Sequence": {"id": "B", "type_id": 1}}]
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special}


def _token_id(source: GGUFSource, key: str, tokens: list[str]) -> int | None:
    value = source.get(key)
    if value is None:
        return None
    if not 0 <= value < len(tokens):
        raise mismatch(source.file, key, expected=f"an id in 0..{len(tokens) - 1}", found=value)
    return int(value)
