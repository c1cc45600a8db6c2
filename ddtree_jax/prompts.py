"""Prompts in the three forms that the decoder takes, and files of them."""

import dataclasses
import json
import numbers
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ddtree_jax.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Sequence[dict]
"""Text, token ids, or chat messages {"role": ..., "content": ...}."""

ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclasses.dataclass(frozen=True)
class PromptRecord:
    """One line of a prompt file.

    Attributes:
      id: name of the record.
      turns: what the user says, turn by turn; the assistant answers after each.
    """

    id: str
    turns: tuple[str, ...]


def encode_prompt(tokenizer: Tokenizer | None, prompt: Prompt, **template_kwargs: Any) -> list[int]:
    """Token ids of a prompt.

    Args:
      tokenizer: may be None for token ids.
      prompt: text (see `Tokenizer.encode`), token ids (taken as they are), or
        chat messages (rendered by the checkpoint's chat template, with the assistant's turn opened).
      template_kwargs: for the chat template, e.g. `enable_thinking=False`.

    Raises:
      ValueError: an empty prompt, a form that is none of the three, a bad message, an id outside the vocabulary.
    """
    if isinstance(prompt, str):
        if not prompt:
            raise ValueError("the prompt is empty")
        tokens = _need(tokenizer, "a text prompt").encode(prompt)
        if not tokens:
            raise ValueError(f"the prompt has no tokens: {prompt[:40]!r}")
        return tokens
    if isinstance(prompt, Mapping):
        raise ValueError("a prompt of chat messages is a list of messages; found a single message")
    try:
        items = list(prompt)
    except TypeError:
        kind = type(prompt).__name__
        raise ValueError(f"a prompt is text, a list of token ids or a list of chat messages; found {kind}") from None
    if not items:
        raise ValueError("the prompt is empty")
    if all(isinstance(item, Mapping) for item in items):
        for i, message in enumerate(items):
            _check_message(i, message)
        return _need(tokenizer, "a chat prompt").encode_chat(items, **template_kwargs)
    if all(isinstance(item, numbers.Integral) and not isinstance(item, bool) for item in items):
        tokens = [int(item) for item in items]
        limit = None if tokenizer is None else tokenizer.vocab_size
        for i, token in enumerate(tokens):
            if token < 0 or (limit is not None and token >= limit):
                expected = "0 or more" if limit is None else f"0..{limit - 1}"
                raise ValueError(f"token {i} of the prompt: expected an id in {expected}, found {token}")
        return tokens
    kinds = sorted({type(item).__name__ for item in items})
    raise ValueError(f"a prompt is text, a list of token ids or a list of chat messages; found a list of {kinds}")


def read_prompt_file(path: str | Path) -> list[PromptRecord]:
    """Reads JSON lines `{"id": ..., "turns": [...]}`; blank lines are skipped, other keys ignored.

    Raises ValueError naming file and line: a missing or empty file, a line that is not such a record, an id used twice.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ValueError(f"{path}: cannot be read: {reason}") from None
    records: list[PromptRecord] = []
    lines: dict[str, int] = {}
    # Not splitlines(): JSON text may hold U+2028 and its like unescaped.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        record = _parse_record(where, line)
        if record.id in lines:
            raise ValueError(f"{where}: id {record.id!r} was used in line {lines[record.id]}")
        lines[record.id] = number
        records.append(record)
    if not records:
        raise ValueError(f"{path}: expected at least one prompt, found none")
    return records


def _parse_record(where: str, line: str) -> PromptRecord:
    try:
        data = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where}: not JSON: {error}") from None
    if not isinstance(data, dict):
        raise ValueError(f'{where}: expected an object {{"id", "turns"}}, found {type(data).__name__}')
    for key in ("id", "turns"):
        if key not in data:
            raise ValueError(f"{where}: key {key!r} is missing; found {sorted(data)}")
    identifier, turns = data["id"], data["turns"]
    if isinstance(identifier, bool) or not isinstance(identifier, str | int) or identifier == "":
        raise ValueError(f"{where}: id: expected a name or a number, found {identifier!r}")
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn for turn in turns):
        raise ValueError(f"{where}: turns: expected a list of one or more texts, none empty, found {str(turns)[:80]!r}")
    return PromptRecord(str(identifier), tuple(turns))


def _check_message(index: int, message: Mapping[str, Any]) -> None:
    role = message.get("role")
    if role not in ROLES:
        raise ValueError(f"message {index}: role: expected one of {', '.join(ROLES)}, found {role!r}")
    if not isinstance(message.get("content"), str):
        found = type(message["content"]).__name__ if "content" in message else "none"
        raise ValueError(f"message {index}: content: expected text, found {found}")


def _need(tokenizer: Tokenizer | None, what: str) -> Tokenizer:
    if tokenizer is None:
        raise ValueError(f"{what} needs a tokenizer and this target has none; pass token ids")
    return tokenizer
