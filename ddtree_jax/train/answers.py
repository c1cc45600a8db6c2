"""The target's answers on disk: shards of token ids, and a manifest that says what they answer.

```
FOLDER/manifest.json      format, fingerprint of the target, settings, digest and number of the prompts
FOLDER/shard-00000.npz    request [n], prompt_length [n], length [n], tokens (all of them one after another)
```
A request is a number: prompt index * samples + sample. A shard is written beside its place and renamed, so whatever has
a final name is complete and a killed run goes on after the last shard.
"""

import dataclasses
import hashlib
import json
import os
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ddtree_jax.config import TargetConfig
from ddtree_jax.files import write_whole
from ddtree_jax.train.data import Document

FORMAT = "ddtree_jax answers"


def fingerprint(config: TargetConfig, params: Any) -> str:
    """16 hex digits that tell targets apart: the config, and shape, dtype and first values of every parameter."""
    digest = hashlib.sha256(json.dumps(config.to_json(), sort_keys=True).encode())
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        digest.update(f"{jax.tree_util.keystr(path)} {leaf.shape} {leaf.dtype}".encode())
        # A slice along the first axis alone: nothing large is copied to the host.
        head = leaf[:1] if leaf.ndim else leaf
        digest.update(np.ascontiguousarray(np.asarray(head)).tobytes())
    return digest.hexdigest()[:16]


def digest_of(prompts: Sequence[Sequence[int]]) -> str:
    """16 hex digits of encoded prompts, order included."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(np.asarray([len(prompt), *prompt], np.int64).tobytes())
    return digest.hexdigest()[:16]


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a folder of answers answers; all of it must agree before answering goes on.

    Attributes:
      target: fingerprint of the target.
      prompts: digest of the encoded prompts. num_prompts: how many.
      samples: answers a prompt.
      temperature, max_new_tokens, seed: how they were drawn.
      vocab_size: decides whether token ids take two bytes or four.
    """

    target: str
    prompts: str
    num_prompts: int
    samples: int
    temperature: float
    max_new_tokens: int
    seed: int
    vocab_size: int

    @property
    def num_requests(self) -> int:
        return self.num_prompts * self.samples


@dataclasses.dataclass(frozen=True)
class Answer:
    """One answer: `request` number, `prompt` and `tokens` as ids."""

    request: int
    prompt: Sequence[int]
    tokens: Sequence[int]


class AnswerStore:
    """A folder of answers, opened for reading and appending.

    Raises ValueError if the folder holds answers to something else, naming the first difference, or is damaged.
    """

    def __init__(self, folder: str | Path, manifest: Manifest):
        self.folder, self.manifest = Path(folder), manifest
        self._dtype = np.uint16 if manifest.vocab_size <= 2**16 else np.uint32
        file = self.folder / "manifest.json"
        described = {"format": FORMAT, **dataclasses.asdict(manifest)}
        if file.is_file():
            try:
                found = json.loads(file.read_text(encoding="utf-8"))
            except ValueError as error:
                raise ValueError(f"{file}: not JSON: {error}") from None
            for key, value in described.items():
                if found.get(key) != value:
                    raise ValueError(f"{file}: {key}: expected {value!r}, found {found.get(key)!r}; "
                                     "these answers belong to another run, use another folder")  # fmt: skip
        else:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_whole(file, json.dumps(described, indent=2).encode())

    def shards(self) -> list[Path]:
        return sorted(self.folder.glob("shard-*.npz"))

    def append(self, answers: Sequence[Answer]) -> None:
        """Writes one shard. Raises OSError where it cannot; shards written before are untouched."""
        if not answers:
            return
        names = [int(p.stem.split("-")[1]) for p in self.shards()]
        number = max(names, default=-1) + 1
        arrays = dict(
            request=np.array([a.request for a in answers], np.uint32),
            prompt_length=np.array([len(a.prompt) for a in answers], np.uint32),
            length=np.array([len(a.prompt) + len(a.tokens) for a in answers], np.uint32),
            tokens=np.concatenate([np.asarray([*a.prompt, *a.tokens], self._dtype) for a in answers]),
        )
        temporary = self.folder / f".shard-{number:05d}.writing"
        try:
            with open(temporary, "wb") as file:
                np.savez(file, **arrays)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self.folder / f"shard-{number:05d}.npz")
        finally:
            temporary.unlink(missing_ok=True)

    def finished(self) -> set[int]:
        """Requests that have an answer."""
        return {int(r) for path in self.shards() for r in _read(path)["request"]}

    def documents(self) -> list[Document]:
        """All answers with their prompts, in order of their requests, whatever order they were finished in."""
        found: dict[int, Document] = {}
        for path in self.shards():
            shard = _read(path)
            ends = np.cumsum(shard["length"], dtype=np.int64)
            if len(shard["tokens"]) != (ends[-1] if len(ends) else 0):
                raise ValueError(f"{path}: damaged: expected {ends[-1]} tokens, found {len(shard['tokens'])}")
            for i, end in enumerate(ends):
                tokens = shard["tokens"][end - int(shard["length"][i]) : end].astype(np.int32)
                found[int(shard["request"][i])] = Document(tokens, int(shard["prompt_length"][i]))
        return [found[request] for request in sorted(found)]


def _read(path: Path) -> dict[str, np.ndarray]:
    try:
        with open(path, "rb") as file, np.load(file) as data:
            return {key: data[key] for key in ("request", "prompt_length", "length", "tokens")}
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path}: damaged: {error}") from None
