"""What the pipeline needs of a place that holds tensors."""

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Protocol

import numpy as np

from convert.errors import mismatch


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """A tensor before it is read.

    Attributes:
      file: where it lies.
      shape: in Hugging Face layout ([out, in] for projections).
      dtype: name of the stored dtype, for messages.
    """

    file: Path
    shape: tuple[int, ...]
    dtype: str


class TensorSource(Protocol):
    """Named tensors; only `read` touches their bytes."""

    tensors: Mapping[str, TensorInfo]

    def read(self, name: str) -> np.ndarray:
        """The tensor, possibly as a view of a mapped file that lives as long as the array. Raises ConversionError.

        Sources of drafters also take `whole`, which asks for whole numbers or booleans.
        """
        ...


class Renamed:
    """A source under other names. Raises ConversionError if two names become one."""

    def __init__(self, source: TensorSource, rename: Callable[[str], str]):
        self._source = source
        self._names: dict[str, str] = {}
        for name, info in source.tensors.items():
            new = rename(name)
            if new in self._names:
                raise mismatch(info.file, new, expected="one tensor", found=f"both {self._names[new]} and {name}")
            self._names[new] = name
        self.tensors = {new: source.tensors[name] for new, name in self._names.items()}

    def read(self, name: str, **options: bool) -> np.ndarray:
        return self._source.read(self._names[name], **options)


class SplitExperts:
    """A source that stores the experts of a layer as one tensor, under a name for each expert.

    `mlp.experts.gate_up_proj` [X, 2F, E] holds gate rows, then up rows of every expert, `mlp.experts.down_proj`
    [X, E, F] the rest: the layout in memory of transformers, in which some checkpoints are saved. Tensors of other
    shapes keep their names, for the check of names to refuse.
    """

    _FUSED = re.compile(r"(?P<experts>.*\.mlp\.experts)\.(?P<kind>gate_up|down)_proj(\.weight)?")

    def __init__(self, source: TensorSource):
        self._source = source
        self._pieces: dict[str, tuple[str, int, slice]] = {}
        self.tensors: dict[str, TensorInfo] = {}
        for stored, info in source.tensors.items():
            pieces = list(self._cut(stored, info.shape))
            if not pieces:
                self._add(stored, info)
            for name, expert, rows in pieces:
                self._add(name, TensorInfo(info.file, (rows.stop - rows.start, info.shape[2]), info.dtype))
                self._pieces[name] = stored, expert, rows

    def read(self, name: str) -> np.ndarray:
        if name not in self._pieces:
            return self._source.read(name)
        stored, expert, rows = self._pieces[name]
        return self._source.read(stored)[expert, rows]

    def _cut(self, stored: str, shape: tuple[int, ...]) -> Iterator[tuple[str, int, slice]]:
        """(name, expert, rows) of each projection in a fused tensor; nothing for other tensors."""
        match = self._FUSED.fullmatch(stored)
        if match is None or len(shape) != 3:
            return
        rows = {"down": slice(0, shape[1])}
        if match["kind"] == "gate_up":
            rows = {"gate": slice(0, shape[1] // 2), "up": slice(shape[1] // 2, shape[1])}
        for expert in range(shape[0]):
            for part, part_rows in rows.items():
                yield f"{match['experts']}.{expert}.{part}_proj.weight", expert, part_rows

    def _add(self, name: str, info: TensorInfo) -> None:
        if name in self.tensors:
            raise mismatch(info.file, name, expected="one tensor", found="it alone and in a tensor of all experts")
        self.tensors[name] = info
