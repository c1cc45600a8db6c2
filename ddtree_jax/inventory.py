"""The files of a checkpoint, so that one that is damaged or was replaced is noticed before anything reads it.

`files.json` beside the parameters lists each of their files with its size and, where it is small, its SHA-256. Large
files hold the tensors alone: to hash them would take as long as to load them, so of these only the size is known.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

FILE = "files.json"
_HASHED_BYTES = 2**20
_OWN = (".json", ".jinja", ".model")  # config and tokenizer


def list_files(folder: Path, below: str) -> dict[str, dict[str, Any]]:
    """The files that are not empty in `folder/below`, by their path in `folder`: {"bytes": size, "sha256": hex}."""
    files = {}
    for file in sorted(path for path in (folder / below).rglob("*") if path.is_file()):
        if size := file.stat().st_size:
            small = {"sha256": _sha256(file)} if size <= _HASHED_BYTES else {}
            files[file.relative_to(folder).as_posix()] = {"bytes": size} | small
    return files


def write_inventory(folder: Path, below: str) -> None:
    """Lists what is in `folder/below` now."""
    with (folder / FILE).open("w", encoding="utf-8") as file:
        json.dump(list_files(folder, below), file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def check_inventory(folder: Path) -> None:
    """Compares the files with the list, if there is one.

    Raises ValueError naming the first file that is missing, or that is truncated or damaged.
    """
    file = folder / FILE
    if not file.exists():  # written before there was one
        return
    try:
        listed = json.loads(file.read_text(encoding="utf-8"))
        entries = [(folder / name, entry["bytes"], entry.get("sha256")) for name, entry in listed.items()]
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{file}: damaged: expected a list of files, found {_brief(error)}") from None
    for path, size, digest in entries:
        if not path.is_file():
            raise ValueError(f"{path}: missing: expected {size} bytes")
        found = path.stat().st_size
        if found != size:
            raise ValueError(f"{path}: truncated or damaged: expected {size} bytes, found {found}")
        if digest is not None and _sha256(path) != digest:
            raise ValueError(f"{path}: damaged: expected the content that was written, found another")


def fingerprint(folder: str | Path) -> str:
    """12 hex digits that change when a checkpoint is written anew, and stay when its folder is copied or moved.

    The names of data files are drawn when they are written, so that their list tells even checkpoints of equal sizes
    apart without reading them. Notes beside a checkpoint, hidden files and the list itself are no part of it.
    """
    folder = Path(folder)
    files = (f for f in sorted(folder.iterdir()) if f.is_file() and f.suffix in _OWN and f.name != FILE)
    beside = {file.name: _sha256(file) for file in files if not file.name.startswith(".")}
    return hashlib.sha256(json.dumps([beside, list_files(folder, "params")]).encode()).hexdigest()[:12]


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _brief(error: BaseException) -> str:
    return f"{type(error).__name__} {error}".splitlines()[0][:200]
