"""The state that a round maps to the next state.

Shape letters: B slots, O rows of the output buffer, P rows committed a round at most, W stop tokens.
"""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from ddtree_jax.decode.width import RoundCosts, WidthChoice
from ddtree_jax.models.cache import KVCache


@flax.struct.dataclass
class Request:
    """What the caller asks of each slot; never changes during decoding.

    Attributes:
      limit: [B] int32, new tokens at most (0 marks an empty slot of a padded batch).
      seeds: [B] uint32.
      stop_tokens: [W] int32, padded with -1.
      temperature: [] float32.
      costs: of a round at each width, where the loop chooses among several; else None.
    """

    limit: jax.Array
    seeds: jax.Array
    stop_tokens: jax.Array
    temperature: jax.Array
    costs: RoundCosts | None = None


@flax.struct.dataclass
class DecodeState:
    """Everything that changes from round to round. Donated to each call that advances it.

    Attributes:
      target_cache: of the text up to, not including, `root`; its `length` is the root's position.
      drafter_cache: what the proposer keeps, or None; a DFlash cache has the same `length` as `target_cache`.
      root: [B] int32, the last committed token. It is text, but has no keys, values or features yet.
      tokens: [B, O] int32, new tokens; entries at and past `num_tokens` are undefined.
      num_tokens: [B] int32.
      accepted: [B, O] int32, tokens committed by each round, entries at and past `rounds` undefined.
      rounds: [B] int32, rounds that a slot took part in.
      done: [B] bool.
      widths: [B, O] int32, nodes verified by each round, as `accepted`; None where all rounds have the same width.
      choice: the width in use, and what its choice goes by; None likewise.
      scores: by which the last round drafted (`Proposer.draft`), zeros before it; None likewise.
    """

    target_cache: KVCache
    drafter_cache: Any
    root: jax.Array
    tokens: jax.Array
    num_tokens: jax.Array
    accepted: jax.Array
    rounds: jax.Array
    done: jax.Array
    widths: jax.Array | None = None
    choice: WidthChoice | None = None
    scores: Any = None

    def results(self) -> "DecodeState":
        """Without what only further rounds need: small."""
        return self.replace(target_cache=None, drafter_cache=None, scores=None)


def write_rows(buffer: jax.Array, rows: jax.Array, start: jax.Array) -> jax.Array:
    """Writes rows [B, P] into buffer [B, O] from column start [B] on; O >= start + P, so that nothing is clamped."""
    if len(buffer) == 1:  # batched, it is a scatter: more kernels
        return jax.lax.dynamic_update_slice(buffer, rows, (jnp.zeros_like(start[0]), start[0]))
    return jax.vmap(lambda b, r, s: jax.lax.dynamic_update_slice(b, r, (s,)))(buffer, rows, start)


def clip_commit(tokens: jax.Array, length: jax.Array, room: jax.Array, stop_tokens: jax.Array):
    """Cuts a round's tokens after the first stop token and at the end of the room.

    Args:
      tokens: [B, P] int32, tokens of the accepted path, `length` [B] of them live.
      room: [B] int32, tokens that the slot may still write.
      stop_tokens: [W] int32.

    Returns:
      (count [B] int32, stopped [B] bool): tokens kept, and whether the last of them ends the text.
    """
    rows = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
    kept = jnp.minimum(length, room)
    is_stop = jnp.any(tokens[:, :, None] == stop_tokens[None, None, :], axis=-1) & (rows < kept[:, None])
    first_stop = jnp.min(jnp.where(is_stop, rows, tokens.shape[1]), axis=1)
    count = jnp.minimum(kept, first_stop + 1)
    return count, (first_stop < tokens.shape[1]) | (count >= room)
