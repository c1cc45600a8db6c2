"""Tensors of a folder of safetensors files, one or sharded: headers are parsed, bytes mapped one tensor at a time.

Format: https://github.com/huggingface/safetensors (8 bytes little-endian header length, JSON header, data).
"""

import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np

from convert.errors import ConversionError, mismatch
from convert.fields import Fields
from convert.source import TensorInfo

INDEX = "model.safetensors.index.json"
_DTYPES = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
}
# Tables of ids; never weights.
_WHOLE = {"I64": np.dtype(np.int64), "I32": np.dtype(np.int32), "BOOL": np.dtype(np.bool_)}
_MAX_HEADER = 100 * 2**20  # the limit of the format


class SafetensorsSource:
    """The tensors of all safetensors files that belong to a model.

    With an index (`model.safetensors.index.json`) the files are those that it names, and it must agree with their
    headers; without, they are all `*.safetensors` of the folder.
    """

    def __init__(self, folder: Path):
        self.tensors: dict[str, TensorInfo] = {}
        self._offsets: dict[str, tuple[int, int]] = {}
        index = folder / INDEX
        listed = _read_index(index) if index.is_file() else None
        files = sorted({p.name for p in folder.glob("*.safetensors")} if listed is None else set(listed.values()))
        if not files:
            raise mismatch(folder, "*.safetensors", expected="at least one file", found="none")
        for name in files:
            if not (folder / name).is_file():
                raise mismatch(index, "weight_map", expected=f"the file {name}", found="no such file")
            self._add(folder / name)
        if listed is not None:
            self._check_index(index, listed)

    def read(self, name: str, *, whole: bool = False) -> np.ndarray:
        """A read-only view of the mapped file; unmapped when the array goes. `whole`: ids or booleans, not weights."""
        info, (offset, _) = self.tensors[name], self._offsets[name]
        known = _WHOLE if whole else _DTYPES
        if info.dtype not in known:
            raise mismatch(info.file, f"{name}: dtype", expected=" or ".join(known), found=info.dtype)
        dtype = known[info.dtype]
        size = math.prod(info.shape)
        if size == 0:
            return np.empty(info.shape, dtype)
        # Mapped as bytes: data need not be aligned to its dtype.
        mapped = np.memmap(info.file, np.uint8, "r", offset, (size * dtype.itemsize,))
        return mapped.view(dtype).reshape(info.shape)

    def _add(self, file: Path) -> None:
        header, data_start = _read_header(file)
        data_size = file.stat().st_size - data_start
        for name, entry in header.items():
            try:
                shape, (begin, end) = tuple(entry["shape"]), entry["data_offsets"]
                dtype = entry["dtype"]
            except (KeyError, TypeError, ValueError):
                raise mismatch(file, name, expected="dtype, shape and data_offsets", found=repr(entry)) from None
            if name in self.tensors:
                found = f"it in {self.tensors[name].file.name} too"
                raise mismatch(file, name, expected="each tensor in one file", found=found)
            if not 0 <= begin <= end <= data_size:
                found = f"{data_size} (truncated file?)"
                raise mismatch(file, name, expected=f"{end} bytes of data", found=found)
            stored = _DTYPES.get(dtype, _WHOLE.get(dtype))
            if stored is not None and end - begin != math.prod(shape) * stored.itemsize:
                size = math.prod(shape) * stored.itemsize
                raise mismatch(file, name, expected=f"{size} bytes for {dtype} {shape}", found=end - begin)
            self.tensors[name] = TensorInfo(file, shape, dtype)
            self._offsets[name] = (data_start + begin, data_start + end)

    def _check_index(self, index: Path, listed: Mapping[str, str]) -> None:
        for name, info in self.tensors.items():
            if listed.get(name) != info.file.name:
                raise mismatch(index, name, expected=f"{info.file.name} (it lies there)", found=listed.get(name))
        for name, file in listed.items():
            if name not in self.tensors:
                raise mismatch(index.parent / file, name, expected="it here, by the index", found="no such tensor")


def _read_index(index: Path) -> dict[str, str]:
    weight_map = Fields.read(index).nested("weight_map").data
    for name, file in weight_map.items():
        # A path that leads out of the folder is no shard of this model.
        if not isinstance(file, str) or Path(file).name != file:
            raise mismatch(index, f"weight_map.{name}", expected="a file name", found=repr(file))
    return dict(weight_map)


def _read_header(file: Path) -> tuple[dict[str, dict], int]:
    """(name -> entry, where the data begins)."""
    try:
        with open(file, "rb") as stream:
            prefix = stream.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            if not 0 < length <= _MAX_HEADER:
                raise mismatch(file, "header", expected="a safetensors file", found=f"a header length of {length}")
            text = stream.read(length)
        if len(text) < length:
            raise mismatch(file, "header", expected=f"{length} bytes", found=f"{len(text)} (truncated file?)")
        header = json.loads(text)
    except (OSError, ValueError) as error:
        if isinstance(error, ConversionError):
            raise
        raise ConversionError(f"{file}: header: cannot be read: {error}") from None
    if not isinstance(header, dict):
        raise mismatch(file, "header", expected="a JSON object", found=type(header).__name__)
    header.pop("__metadata__", None)
    return header, 8 + length
