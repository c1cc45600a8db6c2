"""Runs every (prompt file, method, width) and keeps one JSON line a prompt and turn, so that a killed run goes on.

A run is identified by its settings (`settings.json` beside the lines); a folder with other settings is refused.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ddtree_jax.api import generate
from ddtree_jax.config import DecodeConfig
from ddtree_jax.evaluation.variants import Variant
from ddtree_jax.files import write_whole
from ddtree_jax.inventory import fingerprint
from ddtree_jax.loading import Drafter, Target
from ddtree_jax.prompts import PromptRecord, encode_prompt, read_prompt_file

PROMPTS_PER_WRITE = 8
_FINGERPRINT = "_fingerprint"


class Results:
    """Lines of a folder: appended as they come, read back whole.

    Raises ValueError if the folder holds results of other settings, naming the first difference.
    """

    def __init__(self, folder: str | Path, settings: dict[str, Any]):
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        file = self.folder / "settings.json"
        settings = json.loads(json.dumps(settings))
        if file.exists():
            try:
                found = json.loads(file.read_text(encoding="utf-8"))
            except ValueError as error:
                raise ValueError(f"{file}: damaged: {error}; use another folder") from None
            _check_settings(file, found, settings)
        else:
            write_whole(file, json.dumps(settings, indent=2).encode())
        self._file = self.folder / "records.jsonl"
        self.records = self._read()
        self._keys = {record_key(r): r.get("prompt_digest") for r in self.records}

    def _read(self) -> list[dict]:
        if not self._file.exists():
            return []
        text = self._file.read_text(encoding="utf-8")
        whole = text[: text.rfind("\n") + 1]  # a killed run may leave half a line
        if len(whole) != len(text):
            self._file.write_text(whole, encoding="utf-8")
        # Not splitlines(): JSON text may hold U+2028 and its like unescaped.
        lines = enumerate(whole.split("\n"), start=1)
        return [self._parse(number, line) for number, line in lines if line]

    def _parse(self, number: int, line: str) -> dict:
        try:
            record = json.loads(line)
            record_key(record)
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{self._file}:{number}: damaged: {error}") from None
        return record

    def has(self, key: tuple, prompt: str | None = None) -> bool:
        """Whether (set, variant, turn, id) has been run.

        Raises ValueError if it was with another prompt (`prompt` is a digest, see `Question.digest`).
        """
        if key not in self._keys:
            return False
        found = self._keys[key]
        if prompt is not None and found is not None and found != prompt:
            raise ValueError(f"{self._file}: prompt {key[3]!r} of {key[0]} has changed since; use another folder")
        return True

    def append(self, records: Sequence[dict]) -> None:
        with self._file.open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records))
            file.flush()
            os.fsync(file.fileno())
        self.records += records
        self._keys |= {record_key(r): r.get("prompt_digest") for r in records}


def _check_settings(file: Path, found: dict[str, Any], settings: dict[str, Any]) -> None:
    for key in sorted(set(found) | set(settings)):
        if found.get(key) == settings.get(key):
            continue
        if key.endswith(_FINGERPRINT):
            if key not in found:  # a folder of before there were any
                continue
            name = key.removesuffix(_FINGERPRINT)
            raise ValueError(f"{file}: the {name} {settings.get(name)} has been replaced since; use another folder")
        raise ValueError(
            f"{file}: made with {key} = {found.get(key)!r}, this run has {settings.get(key)!r}; use another folder"
        )


def fingerprints(**checkpoints: str | Path | None) -> dict[str, str | None]:
    """Settings that tell whether a checkpoint has been written anew: {"target_fingerprint": 12 hex digits, ...}."""
    return {f"{k}{_FINGERPRINT}": None if path is None else fingerprint(path) for k, path in checkpoints.items()}


def record_key(record: dict) -> tuple:
    return record["set"], record["variant"], record["turn"], record["id"]


@dataclasses.dataclass(frozen=True)
class Question:
    """One turn of one prompt: the conversation so far, ending with the user's turn."""

    set: str
    id: str
    turn: int
    prompt: Any

    @property
    def digest(self) -> str:
        """12 hex digits of what is asked."""
        return hashlib.sha256(json.dumps(self.prompt, ensure_ascii=True).encode()).hexdigest()[:12]


def read_sets(files: Sequence[str | Path], limit: int | None) -> dict[str, list[PromptRecord]]:
    """Prompt files by the name of their stem. Raises ValueError if two share one."""
    sets: dict[str, list[PromptRecord]] = {}
    for file in files:
        name = Path(file).stem
        if name in sets:
            raise ValueError(f"{file}: a prompt file named {name} was given already")
        if name == "all":
            raise ValueError(f"{file}: tables call the mean of the sets {name!r}; rename the file")
        sets[name] = read_prompt_file(file)[:limit]
    return sets


def questions(
    name: str, records: Sequence[PromptRecord], turn: int, answers: dict[tuple[str, int], str], chat: bool
) -> list[Question]:
    """Turn number `turn` (from 0) of every prompt that has one; earlier turns carry the `answers` given to them."""
    out = []
    for record in records:
        if turn >= len(record.turns):
            continue
        if not chat:
            out.append(Question(name, record.id, turn, record.turns[turn]))
            continue
        messages = []
        for t in range(turn):
            messages.append({"role": "user", "content": record.turns[t]})
            messages.append({"role": "assistant", "content": answers[record.id, t]})
        out.append(Question(name, record.id, turn, [*messages, {"role": "user", "content": record.turns[turn]}]))
    return out


def longest_prompt(
    target: Target, sets: dict[str, list[PromptRecord]], turns: int, chat: bool, max_new_tokens: int
) -> int:
    """Tokens of the longest prompt to come, answers to earlier turns counted at their longest."""
    longest = 0
    for name, records in sets.items():
        for turn in range(turns):
            answers = {(r.id, t): "" for r in records for t in range(len(r.turns))}
            for q in questions(name, records, turn, answers, chat):
                longest = max(longest, len(encode_prompt(target.tokenizer, q.prompt)) + turn * max_new_tokens)
    return longest


def unfinished(variant: Variant, sets: dict[str, list[PromptRecord]], results: Results, turns: int) -> bool:
    """Whether `results` lacks any turn of any prompt for this variant."""
    return any(
        not results.has((name, variant.name, turn, record.id))
        for name, records in sets.items()
        for record in records
        for turn in range(min(turns, len(record.turns)))
    )


def run_all(
    target: Target,
    drafter: Drafter | None,
    sets: dict[str, list[PromptRecord]],
    todo: Sequence[Variant],
    base: DecodeConfig,
    results: Results,
    *,
    turns: int,
    chat: bool,
    progress: Callable[[int], None] = lambda done: None,
) -> None:
    """Runs what `results` does not hold yet. The first variant's answers are the history of later turns."""
    for name, records in sets.items():
        for turn in range(turns):
            for variant in todo:
                answers = {
                    (r["id"], r["turn"]): r["text"]
                    for r in results.records
                    if r["set"] == name and r["variant"] == todo[0].name
                }
                asked = questions(name, records, turn, answers, chat)
                missing = [q for q in asked if not results.has((name, variant.name, turn, q.id), q.digest)]
                progress(len(asked) - len(missing))
                for group in _groups(missing, max(PROMPTS_PER_WRITE, base.batch_size or 1)):
                    results.append(_run_group(target, drafter, variant, base, group))
                    progress(len(group))


def _run_group(target, drafter, variant: Variant, base: DecodeConfig, group: Sequence[Question]) -> list[dict]:
    out = generate(target, drafter, [q.prompt for q in group], variant.config(base))
    return [
        {
            "set": q.set,
            "id": q.id,
            "turn": q.turn,
            "variant": variant.name,
            "method": variant.method,
            "num_nodes": variant.num_nodes,
            "prompt_digest": q.digest,
            "prompt_tokens": out.prompt_lengths[i],
            "tokens": out.tokens[i],
            "text": out.text[i] if out.text is not None else "",
            "finish_reason": out.finish_reasons[i],
            "accepted_lengths": out.accepted_lengths[i],
            **({} if out.widths is None else {"widths": out.widths[i]}),
            # Of its group: prompts are decoded batch_size at a time.
            "seconds": out.seconds * len(out.tokens[i]) / sum(map(len, out.tokens)),
        }
        for i, q in enumerate(group)
    ]


def _groups(items: Sequence, size: int) -> Iterator[Sequence]:
    for i in range(0, len(items), size):
        yield items[i : i + size]
