"""Rows of a fixed length from answers of any length, in an order that depends on (seed, epoch) alone.

Several short documents (a prompt and its answer) share a row; positions restart and attention stops at their borders.
"""

import bisect
import dataclasses
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class Document:
    """A prompt and the target's answer: `tokens` [n], of which the first `prompt_length` are the prompt's."""

    tokens: np.ndarray
    prompt_length: int


@dataclasses.dataclass(frozen=True)
class Rows:
    """Packed documents; R rows of S tokens. A token of padding is a document of its own, without label.

    Attributes:
      tokens: [R, S] int32.
      starts: [R, S] int32, first index of the token's document.
      ends: [R, S] int32, one past the last index of the token's document.
      labels: [R, S] bool, whether the token belongs to an answer.
    """

    tokens: np.ndarray
    starts: np.ndarray
    ends: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)

    def take(self, index: np.ndarray) -> "Rows":
        """The rows of `index`; an index past the end yields a row of padding."""
        real = index < len(self)
        index = np.where(real, index, 0)
        padding = np.arange(self.tokens.shape[1], dtype=np.int32)
        pick = lambda x, other: np.where(real[:, None], x[index], other)  # noqa: E731
        return Rows(
            tokens=pick(self.tokens, np.int32(0)), starts=pick(self.starts, padding),
            ends=pick(self.ends, padding + np.int32(1)), labels=pick(self.labels, False),
        )  # fmt: skip

    @property
    def fill(self) -> float:
        """Share of the tokens that are not padding."""
        return float(np.mean(self.ends - self.starts > 1)) if len(self) else 0.0


def pack(documents: Sequence[Document], length: int) -> Rows:
    """Packs documents into rows of `length` tokens, best fit with the longest first; longer ones are cut at the end.

    Raises ValueError where no document has an answer within `length`: there would be nothing to learn.
    """
    usable = [d for d in documents if d.prompt_length + 1 < min(len(d.tokens), length)]
    if not usable:
        raise ValueError(f"none of {len(documents)} answers has two tokens within a row of {length} tokens")
    rows: list[list[Document]] = []
    space: list[tuple[int, int]] = []  # (free tokens, row), sorted
    for document in sorted(usable, key=lambda d: -len(d.tokens)):  # sorting is stable: the result is deterministic
        size = min(len(document.tokens), length)
        place = bisect.bisect_left(space, (size, -1))
        free, row = space.pop(place) if place < len(space) else (length, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(document)
        bisect.insort(space, (free - size, row))

    shape = (len(rows), length)
    alone = np.broadcast_to(np.arange(length, dtype=np.int32), shape)
    packed = Rows(np.zeros(shape, np.int32), alone.copy(), alone + np.int32(1), np.zeros(shape, bool))
    for r, row in enumerate(rows):
        begin = 0
        for document in row:
            end = begin + min(len(document.tokens), length)
            packed.tokens[r, begin:end] = document.tokens[: end - begin]
            packed.starts[r, begin:end] = begin
            packed.ends[r, begin:end] = end
            packed.labels[r, begin + document.prompt_length : end] = True
            begin = end
    return packed


def steps_per_epoch(num_rows: int, batch_size: int) -> int:
    """Steps that see every row at least once."""
    return -(-num_rows // batch_size)


def batch_index(num_rows: int, batch_size: int, seed: int, step: int) -> np.ndarray:
    """Which rows step `step` (from 0) sees, [batch_size]; the last batch of an epoch is filled up from its beginning.

    A function of its arguments alone, so a run that resumes at a step sees what an uninterrupted one sees.
    """
    epoch, place = divmod(step, steps_per_epoch(num_rows, batch_size))
    order = np.random.default_rng([seed, epoch]).permutation(num_rows)
    return np.take(order, np.arange(place * batch_size, (place + 1) * batch_size), mode="wrap")
