"""Checkpoints on disk: a folder of config, parameters and tokenizer. The only module that knows Orbax.

```
OUT/config.json             what the parameters are: format, version, kind, config, source, parameter count
OUT/params/                 one Orbax checkpoint, the Flax "params" collection
OUT/files.json              the files of params/ and their sizes, see `inventory`
OUT/tokenizer.json, ...     files copied from the source (targets)
```
A checkpoint is written into a sibling folder and renamed at the end, so a folder with the final name is complete.
"""

import contextlib
import ctypes
import json
import math
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp

from ddtree_jax import inventory
from ddtree_jax.config import DraftConfig, TargetConfig, drafter_from_json, parameter_dtype

FORMAT = "ddtree_jax"
VERSION = 1
_READERS = {"target": TargetConfig.from_json, "drafter": drafter_from_json}
_RESERVED = ("config.json", "params", inventory.FILE)
# Small groups are written together: each write costs a few tenths of a second whatever its size.
_BATCH_BYTES = 32 * 2**20
# Orbax stages this much on the host at a time while it reads, or two tensors if that is more.
_READ_BYTES = 1024 * 2**20


class CheckpointError(ValueError):
    """A checkpoint that cannot be read or written; one line that names file, key, expected and found."""


def kind_of(config: TargetConfig | DraftConfig) -> str:
    """ "target" or "drafter"."""
    return "target" if isinstance(config, TargetConfig) else "drafter"


class CheckpointWriter:
    """Writes a checkpoint group by group, so that little more than one group need be in memory.

    Made by `open_checkpoint`. A group is a top-level entry of the parameter tree ("embed", "layers_0", ...).
    """

    def __init__(self, folder: Path, config: TargetConfig | DraftConfig):
        self._folder, self._config = folder, config
        self._groups: set[str] = set()
        self._waiting: dict[str, Any] = {}
        self._waiting_bytes = 0
        self._parameters = 0

    def add_group(self, name: str, tree: Mapping[str, Any]) -> None:
        """Takes `params[name]`: nested dicts of numpy or jax arrays in the dtype that
        `parameter_dtype` gives them."""
        if name in self._groups:
            raise CheckpointError(f"params/{name}: written twice")
        leaves = flatten({name: tree})
        for path, leaf in leaves.items():
            dtype = parameter_dtype(path.split("/")[-1], self._config.dtype)
            if str(leaf.dtype) != dtype:
                raise CheckpointError(f"params/{path}: dtype: expected {dtype}, found {leaf.dtype}")
            self._parameters += math.prod(leaf.shape)
        size = sum(leaf.nbytes for leaf in leaves.values())
        if self._waiting_bytes + size > _BATCH_BYTES:
            self._write()
        self._groups.add(name)
        self._waiting[name] = _plain(tree)
        self._waiting_bytes += size
        if self._waiting_bytes >= _BATCH_BYTES:
            self._write()

    def add_file(self, name: str, content: bytes | Path) -> None:
        """Writes an extra file, from bytes or as a copy."""
        if name in _RESERVED or Path(name).name != name:
            raise CheckpointError(f"extra file {name!r}: expected a plain file name other than {_RESERVED}")
        if isinstance(content, bytes):
            (self._folder / name).write_bytes(content)
        else:
            shutil.copyfile(content, self._folder / name)

    def _write(self) -> None:
        if not self._waiting:
            return
        ocp.partial.save(self._folder / "params", self._waiting)
        self._waiting, self._waiting_bytes = {}, 0

    def _finish(self, source: str | None) -> None:
        if not self._groups:
            raise CheckpointError("params: expected at least one group, found none")
        self._write()
        ocp.partial.finalize(self._folder / "params")
        inventory.write_inventory(self._folder, "params")
        description = {
            "format": FORMAT, "version": VERSION, "kind": kind_of(self._config), "config": self._config.to_json(),
            "source": source, "parameters": self._parameters,
        }  # fmt: skip
        with open(self._folder / "config.json", "w", encoding="utf-8") as file:
            json.dump(description, file, indent=2)
            file.flush()
            os.fsync(file.fileno())


@contextlib.contextmanager
def open_checkpoint(
    path: str | Path, config: TargetConfig | DraftConfig, *, source: str | None = None, overwrite: bool = False
) -> Iterator[CheckpointWriter]:
    """A `CheckpointWriter` for a `with` block; the checkpoint appears at `path` when the block ends well.

    If the block raises, nothing of the new checkpoint remains and whatever was at `path` is untouched.

    Args:
      path: folder to create.
      config: what the parameters are of.
      source: where they came from, for the reader of config.json.
      overwrite: replace a checkpoint of the same kind at `path`. Anything else there is never removed.

    Raises:
      CheckpointError: `path` is taken or cannot be created.
    """
    path = Path(os.path.realpath(path))  # a link stays a link: its target is replaced
    check_free(path, kind_of(config), overwrite=overwrite)
    temporary = path.parent / f".{path.name}.writing-{secrets.token_hex(4)}"
    try:
        temporary.mkdir(parents=True)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be created: {error.strerror or error}") from None
    try:
        writer = CheckpointWriter(temporary, config)
        yield writer
        writer._finish(source)
        check_free(path, kind_of(config), overwrite=overwrite)
        _replace(temporary, path)
    except OSError as error:
        # A full disk and its like: one line that names the file.
        raise CheckpointError(f"{error.filename or path}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def check_free(path: str | Path, kind: str, *, overwrite: bool) -> None:
    """Raises CheckpointError unless a checkpoint of `kind` may be written to `path`."""
    path = Path(path)
    if not os.path.lexists(path):
        return
    if path.is_dir() and not any(path.iterdir()):
        return
    if not overwrite:
        raise CheckpointError(f"{path}: already exists; pass overwrite (--overwrite) to replace it")
    # Never delete what is not ours: overwrite replaces checkpoints of this kind only.
    try:
        load_config(path, kind=kind)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: will not be overwritten: {error}") from None


def save_checkpoint(
    path: str | Path,
    config: TargetConfig | DraftConfig,
    params: Mapping[str, Any],
    extra_files: Mapping[str, bytes | Path] | None = None,
    *,
    source: str | None = None,
    overwrite: bool = False,
) -> None:
    """Writes a whole parameter tree that is in memory.

    Args:
      path, config, source, overwrite: see `open_checkpoint`.
      params: the Flax "params" collection of the model of `config` (nested dicts of arrays), without an outer "params".
      extra_files: file name -> content or file to copy, e.g. tokenizer.json.
    """
    with open_checkpoint(path, config, source=source, overwrite=overwrite) as writer:
        for name, content in (extra_files or {}).items():
            writer.add_file(name, content)
        for name, tree in params.items():
            writer.add_group(name, tree)


def load_config(path: str | Path, kind: str | None = None) -> TargetConfig | DraftConfig:
    """Reads the config of a checkpoint; `kind` ("target" or "drafter") is checked if given.

    Raises CheckpointError: no such folder, not a checkpoint of this package, a newer version, the wrong kind.
    """
    file = Path(path) / "config.json"
    if not Path(path).is_dir():
        raise CheckpointError(f"{path}: expected a checkpoint folder, found {_what_is(Path(path))}")
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{file}: missing; this is not a checkpoint (python -m convert writes one)") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: cannot be read: {_first_line(error)}") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        found = data.get("format") if isinstance(data, dict) else type(data).__name__
        raise CheckpointError(f"{file}: format: expected {FORMAT!r}, found {found!r} (python -m convert makes one)")
    if data.get("version") != VERSION:
        raise CheckpointError(f"{file}: version: expected {VERSION}, found {data.get('version')!r}")
    if data.get("kind") not in _READERS or kind not in (None, data["kind"]):
        expected = repr(kind) if kind else f"one of {sorted(_READERS)}"
        raise CheckpointError(f"{file}: kind: expected {expected}, found {data.get('kind')!r}")
    try:
        return _READERS[data["kind"]](data["config"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{file}: config: {_first_line(error)}") from None


def load_params(path: str | Path, abstract_params: Any) -> Any:
    """Loads the parameters of a checkpoint onto devices.

    Args:
      path: a checkpoint folder.
      abstract_params: nested dicts of jax.ShapeDtypeStruct (`models.abstract.abstract_params`); a leaf's sharding
        says where it goes, without one it goes to the first device.

    Returns:
      the same tree of jax.Array.

    Raises:
      CheckpointError: a missing, extra or mis-shaped tensor, another dtype, truncated or damaged files.
    """
    load_config(path)
    folder = Path(os.path.abspath(path)) / "params"
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: missing")
    expected = flatten(abstract_params)
    try:
        inventory.check_inventory(Path(path))
    except ValueError as error:
        raise CheckpointError(str(error)) from None
    try:
        metadata = ocp.metadata(folder).metadata
        if not isinstance(metadata, Mapping):
            raise ValueError("the list of tensors cannot be read")
        found = flatten(metadata)
    except Exception as error:  # Orbax lets many types through for a damaged file
        raise CheckpointError(f"{folder}: truncated or damaged: {_first_line(error)}") from None
    anew = "; of another version of this package? python -m convert makes it anew"
    for key in sorted(expected.keys() | found.keys()):
        if key not in found:
            wanted = f"expected shape {tuple(expected[key].shape)}, found no such tensor"
            raise CheckpointError(f"{folder}: {key}: {wanted}{anew}")
        if key not in expected:
            wanted = f"expected no such tensor, found shape {tuple(found[key].shape)}"
            raise CheckpointError(f"{folder}: {key}: {wanted}{anew}")
        want, have = expected[key], found[key]
        if tuple(want.shape) != tuple(have.shape):
            raise CheckpointError(f"{folder}: {key}: shape: expected {tuple(want.shape)}, found {tuple(have.shape)}")
        if np.dtype(want.dtype) != np.dtype(have.dtype):
            raise CheckpointError(f"{folder}: {key}: dtype: expected {want.dtype}, found {have.dtype}")

    default = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    placed = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=getattr(x, "sharding", None) or default),
        abstract_params,
    )
    largest = max(math.prod(x.shape) * np.dtype(x.dtype).itemsize for x in expected.values())
    context = ocp.Context()
    context.memory_options.read_concurrent_bytes = max(_READ_BYTES, 2 * largest)  # a larger tensor would be refused
    try:
        with context:
            return ocp.load(folder, placed)
    except Exception as error:
        raise CheckpointError(f"{folder}: truncated or damaged: {_first_line(error)}") from None


def _replace(new: Path, old: Path) -> None:
    """Renames `new` to `old`. An existing `old` is swapped with it at once where the system can, so that a kill at any
    moment leaves one or the other; elsewhere it is put aside first and comes back if the rename fails."""
    if not old.exists() or not any(old.iterdir()):
        os.rename(new, old)  # POSIX replaces an empty folder
        return
    if _exchange(new, old):
        shutil.rmtree(new, ignore_errors=True)
        return
    aside = old.parent / f".{old.name}.replaced-{secrets.token_hex(4)}"
    os.rename(old, aside)
    try:
        os.rename(new, old)
    except BaseException:
        os.rename(aside, old)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def _exchange(a: Path, b: Path) -> bool:
    """Swaps two paths atomically (renameat2 with RENAME_EXCHANGE of Linux); False where that is not to be had."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):
        return False
    at_cwd, exchange = -100, 2
    return renameat2(at_cwd, os.fsencode(a), at_cwd, os.fsencode(b), exchange) == 0


def _plain(tree: Any) -> Any:
    return {k: _plain(v) for k, v in tree.items()} if isinstance(tree, Mapping) else tree


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Nested dicts -> {"layers_0/mlp/down_proj/weight": leaf}."""
    if not isinstance(tree, Mapping):
        return {prefix: tree}
    return {k: v for key, sub in tree.items() for k, v in flatten(sub, f"{prefix}/{key}" if prefix else key).items()}


def _what_is(path: Path) -> str:
    return "a file" if path.is_file() else "nothing there"


def _first_line(error: BaseException) -> str:
    text = (str(error).strip() or type(error).__name__).splitlines()[0].split(" See full TensorStore")[0]
    return text if len(text) <= 300 else text[:300] + "..."
