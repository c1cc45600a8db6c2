"""What the pipeline needs of a place that holds tensors."""

import dataclasses
from collections.abc import Callable, Mapping
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
        """The tensor, possibly as a view of a mapped file that lives as long as the array. Raises ConversionError."""
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

    def read(self, name: str) -> np.ndarray:
        return self._source.read(self._names[name])
