"""Evaluation on held-out answers without decoding: every position is an anchor, and the rounds are walked on the host.

Where the target would have written the held-out answer itself (its own draw at the same seed), the walk accepts what
decoding with the drafter's most probable chain would accept: the mean accepted length is the real one, up to ties.

Shape letters: b rows, S tokens a row, n blocks at a time, L labels a block.
"""

import dataclasses
import functools
import statistics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ddtree_jax.train.anchors import valid_anchors
from ddtree_jax.train.data import Rows
from ddtree_jax.train.loss import block_loss, prefix_length, report
from ddtree_jax.train.parallel import ROWS, SHARED, over_rows, total
from ddtree_jax.train.step import Batch, Models, features_of, score_blocks, to_device


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Scores on held-out answers.

    Attributes:
      loss: mean over batches of the weighted cross entropy, in nat.
      accuracy: per slot 1..L, all positions alike.
      accepted: mean over documents of tokens committed a round, the target's own token included.
      accepted_pooled: tokens of all documents over rounds of all documents.
      documents: how many.
    """

    loss: float
    accuracy: tuple[float, ...]
    accepted: float
    accepted_pooled: float
    documents: int


def score_rows(models: Models, params: Any, target_params: Any, batch: Batch) -> tuple[jax.Array, dict]:
    """Scores a block at every position of a batch.

    Returns:
      (correct prefix [b, S] int32, 0 where no anchor may stand; sums of `loss.block_loss`, stacked over groups).
    """
    return _score(models, params, target_params, batch, features_of(models, target_params, batch))


@functools.partial(jax.jit, static_argnums=0)
def _score(models, params, target_params, batch, features):
    score = functools.partial(_score_rows, models)
    specs = (SHARED, SHARED, ROWS, ROWS)
    return over_rows(models.mesh, score, specs, (ROWS, SHARED))(params, target_params, batch, features)


def _score_rows(models, params, target_params, batch, features):
    config = models.config
    b, length = batch.tokens.shape
    valid = valid_anchors(batch.ends, batch.labels, config.block_size, partial_blocks=True)
    group = min(config.anchors, length)
    groups = -(-length // group)
    index = jnp.arange(groups * group, dtype=jnp.int32)
    inside = index < length
    index = jnp.where(inside, index, 0).reshape(groups, group)

    def one(args):
        index, inside = args
        anchors = jnp.broadcast_to(index[None, :], (b, group))
        live = jnp.take(valid, index, axis=1) & inside[None, :]
        scores = score_blocks(models, params, target_params, batch, features, anchors, live)
        _, sums = block_loss(config.loss, config.slot_gamma, config.dpace_alpha, *scores, mesh=models.mesh)
        return prefix_length(*scores[1:]), total(models.mesh, sums)

    prefix, sums = jax.lax.map(one, (index, inside.reshape(groups, group)))
    return prefix.swapaxes(0, 1).reshape(b, -1)[:, :length], sums


def evaluate(models: Models, params: Any, target_params: Any, rows: Rows) -> Evaluation:
    """Scores all documents of `rows`."""
    size = models.config.batch_size
    sums, means, tokens, rounds = [], [], 0, 0
    for first in range(0, len(rows), size):
        part = rows.take(np.arange(first, first + size))
        prefix, stacked = jax.device_get(score_rows(models, params, target_params, to_device(part, models.mesh)))
        sums += [{k: v[i] for k, v in stacked.items()} for i in range(len(stacked["loss"]))]
        for lengths in walk(part, prefix):
            means.append(statistics.fmean(lengths))
            tokens, rounds = tokens + sum(lengths), rounds + len(lengths)
    # A group without any label has no loss to average.
    summary = report([s for s in sums if s["blocks"] > 0] or sums[:1])
    accepted = statistics.fmean(means) if means else float("nan")
    pooled = tokens / rounds if rounds else float("nan")
    return Evaluation(summary.loss, summary.accuracy, accepted, pooled, len(means))


def walk(rows: Rows, prefix: np.ndarray) -> list[list[int]]:
    """Accepted lengths of the rounds that decode each document, given the correct prefix [b, S] at each position.

    The first answer token is the first anchor: in decoding it comes from the prefill. A round commits the correct
    prefix and the target's next token, and nothing past the end of the text.
    """
    out = []
    for r in range(len(rows)):
        for start in np.unique(rows.starts[r]):
            end = int(rows.ends[r, start])
            inside = np.flatnonzero(rows.labels[r, start:end])
            if not len(inside):
                continue
            position, lengths = int(start + inside[0]), []
            while position < end - 1:
                lengths.append(min(int(prefix[r, position]) + 1, end - 1 - position))
                position += lengths[-1]
            if lengths:
                out.append(lengths)
    return out
