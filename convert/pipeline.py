"""Streams tensors from a source into a checkpoint, one parameter group at a time."""

import itertools
import math
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from convert.errors import mismatch
from convert.names import Parameter, ignored, parameters, tied_head
from convert.source import TensorSource
from convert.vocabulary import target_ids
from ddtree_jax.checkpoint import open_checkpoint
from ddtree_jax.config import DraftConfig, TargetConfig

_CHUNK_BYTES = 16 * 2**20  # cast and checked at a time


def check_names(
    source: TensorSource, config: TargetConfig | DraftConfig, *, file: Path, unused: Iterable[tuple[str, tuple]] = ()
) -> None:
    """Raises ConversionError unless the source holds exactly the tensors of `config`, in their shapes.

    Args:
      file: the source, for the message of a tensor that is in no file.
      unused: (name, shape) of tensors that may be there besides.
    """
    optional = dict(unused)
    if head := tied_head(config):
        optional[head[0]] = head[1]
    required = {name: shape for parameter in parameters(config) for name, shape in parameter.sources}
    for name, shape in required.items():
        if name not in source.tensors:
            raise mismatch(file, name, expected=f"a tensor of shape {shape}", found="no such tensor")
    for name, info in source.tensors.items():
        if ignored(config, name):
            continue
        shape = required.get(name, optional.get(name))
        if shape is None:
            raise mismatch(info.file, name, expected="no such tensor", found=f"one of shape {info.shape}")
        if shape != info.shape:
            raise mismatch(info.file, f"{name}: shape", expected=shape, found=info.shape)


def write_checkpoint(
    out: str | Path,
    config: TargetConfig | DraftConfig,
    source: TensorSource,
    *,
    extra_files: Mapping[str, bytes | Path] | None = None,
    origin: str,
    overwrite: bool,
    progress: bool,
) -> None:
    """Writes the checkpoint at `out`. The names have been checked; values are checked on the way.

    Host memory: about twice a group of parameters (a layer, or the embedding table), whatever the size of the whole.
    """
    with (
        open_checkpoint(out, config, source=origin, overwrite=overwrite) as writer,
        progress_bar(progress, sum(p.size for p in parameters(config)) * config.jax_dtype.itemsize) as bar,
    ):
        for name, content in (extra_files or {}).items():
            writer.add_file(name, content)
        for group, members in itertools.groupby(parameters(config), key=lambda p: p.path.split("/")[0]):
            tree: dict[str, Any] = {}
            for parameter in members:
                dtype = parameter.dtype(config.jax_dtype)
                _insert(tree, parameter.path.split("/")[1:], read_parameter(source, parameter, dtype))
                bar.advance(parameter.size * config.jax_dtype.itemsize)
            writer.add_group(group, tree)


def read_parameter(source: TensorSource, parameter: Parameter, dtype: np.dtype) -> np.ndarray:
    """One parameter in `dtype`: its source tensors, one after the other, along rows, in the order of the parameter.

    Raises ConversionError naming a tensor that holds NaN or infinity, or that `dtype` cannot hold.
    """
    if parameter.target_ids:
        return target_ids(source, parameter.sources[0][0]).astype(dtype)  # checked to be small enough
    result = np.empty(parameter.rows_shape, dtype)
    row = 0
    for name, shape in parameter.sources:
        _cast_into(result[row : row + shape[0]], source.read(name), name, source.tensors[name].file)
        row += shape[0]
    if parameter.order is not None:
        result = np.concatenate([result[rows] for rows in parameter.order])
    return result.reshape(parameter.shape)


def _cast_into(out: np.ndarray, tensor: np.ndarray, name: str, file: Path) -> None:
    rows = max(1, _CHUNK_BYTES // max(1, math.prod(out.shape[1:]) * tensor.dtype.itemsize))
    for begin in range(0, out.shape[0], rows):
        chunk = tensor[begin : begin + rows]
        with np.errstate(over="ignore", invalid="ignore"):
            out[begin : begin + rows] = chunk.astype(out.dtype)
        if np.isfinite(out[begin : begin + rows]).all():
            continue
        if not np.isfinite(chunk).all():
            where = np.argwhere(~np.isfinite(chunk))[0]
            index = [begin + int(where[0]), *map(int, where[1:])]
            raise mismatch(file, name, expected="finite values", found=f"{chunk[tuple(where)]} at {index}")
        found = f"a magnitude of {float(np.abs(chunk).max()):.4g}"
        raise mismatch(file, name, expected=f"values that {out.dtype} can hold", found=found)


def _insert(tree: dict[str, Any], keys: list[str], value: np.ndarray) -> None:
    for key in keys[:-1]:
        tree = tree.setdefault(key, {})
    tree[keys[-1]] = value


class _Bar:
    """A progress bar that is not there when nobody looks."""

    def __init__(self, progress: Progress | None, total: int):
        self._progress = progress
        self._task = None if progress is None else progress.add_task("converting", total=total)

    def advance(self, amount: int) -> None:
        if self._progress is not None:
            self._progress.advance(self._task, amount)

    def __enter__(self) -> "_Bar":
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()


def progress_bar(enabled: bool, total: int) -> _Bar:
    """A bar of `total` bytes on standard error, if that is a terminal."""
    if not (enabled and sys.stderr.isatty()):
        return _Bar(None, total)
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn()
    return _Bar(Progress(*columns, console=Console(stderr=True)), total)
