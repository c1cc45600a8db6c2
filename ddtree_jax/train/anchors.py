"""Random anchors: where in each row the blocks of a step stand.

Shape letters: b rows, S tokens a row, n anchors a row, B slots a block.
"""

import jax
import jax.numpy as jnp


def valid_anchors(ends: jax.Array, labels: jax.Array, block_size: int, partial_blocks: bool) -> jax.Array:
    """Where an anchor may stand: [b, S] bool.

    The next token must be in the answer of the same document, as it is in decoding, where the anchor is the answer's
    newest token. Without `partial_blocks` all B - 1 labels must lie in the document.

    Args:
      ends: [b, S] int32, one past the last token of each token's document.
      labels: [b, S] bool, tokens of answers.
    """
    position = jnp.arange(labels.shape[1], dtype=jnp.int32)[None, :]
    following = jnp.pad(labels[:, 1:], ((0, 0), (0, 1)))
    reach = 1 if partial_blocks else block_size - 1
    return following & labels & (position + reach < ends)


def draw_anchors(key: jax.Array, valid: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Draws `count` anchors a row without replacement, uniformly among the valid ones.

    Args:
      key: PRNG key; the trainer folds it from (seed, step).
      valid: [b, S] bool.

    Returns:
      (anchors [b, n] int32, live [b, n] bool). Where a row has too few, the rest stand at 0 and are not live.
    """
    count = min(count, valid.shape[1])
    # The largest of independent uniform draws are a uniform sample without replacement.
    rank = jnp.where(valid, jax.random.uniform(key, valid.shape), jnp.float32(-1))
    best, anchors = jax.lax.top_k(rank, count)
    live = best >= 0
    return jnp.where(live, anchors, 0).astype(jnp.int32), live
