"""The table of a drafter that knows only a part of its target's tokens.

`d2t` [V] holds, for each token of the drafter, how much its id must grow to be the target's; `t2d` [V_target], which
may be left out, marks the tokens that are named so.
"""

import numpy as np

from convert.errors import mismatch
from convert.source import TensorSource


def target_ids(source: TensorSource, name: str = "d2t") -> np.ndarray:
    """[V] int64: the target's id of each token. Raises ConversionError on a table of another dtype."""
    offsets = source.read(name, whole=True)
    return offsets.astype(np.int64) + np.arange(len(offsets))


def check_target_ids(source: TensorSource, target_vocabulary: int) -> None:
    """Raises ConversionError unless `d2t` names distinct tokens of the target, and `t2d`, where it is, the same."""
    file = source.tensors["d2t"].file
    ids = target_ids(source)
    outside = np.flatnonzero((ids < 0) | (ids >= target_vocabulary))
    if outside.size:
        row = int(outside[0])
        raise mismatch(file, f"d2t[{row}] + {row}", expected=f"0..{target_vocabulary - 1}", found=int(ids[row]))
    values, counts = np.unique(ids, return_counts=True)
    if (counts > 1).any():
        token = int(values[np.argmax(counts > 1)])
        rows = np.flatnonzero(ids == token)[:2].tolist()
        raise mismatch(file, "d2t", expected="each token of the target once", found=f"{token} at {rows}")
    if "t2d" not in source.tensors:
        return
    marked = np.zeros(target_vocabulary, bool)
    marked[ids] = True
    differs = np.flatnonzero(source.read("t2d", whole=True).astype(bool) != marked)
    if differs.size:
        token = int(differs[0])
        expected = f"{bool(marked[token])}, as d2t has it"
        raise mismatch(source.tensors["t2d"].file, f"t2d[{token}]", expected=expected, found=bool(not marked[token]))
