"""Prompt look-up: what followed when the last tokens occurred before is what is drafted. Needs no weights.

The idea is that of prompt look-up decoding (n-gram drafting in the engines); here matching, ordering and merging run
on the device over the whole text of a slot, prompt and new tokens alike.

Shape letters: B slots, C rows of the text, W matches looked at, L draft depth, N nodes.
"""

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from ddtree_jax.decode.proposers.protocol import TextRows
from ddtree_jax.decode.state import write_rows
from ddtree_jax.tree import DraftTree, trie_tree

MAX_MATCHES = 32
TRUST_PER_TOKEN = 4.0  # how much more a match weighs for each further token that agrees


@flax.struct.dataclass
class History:
    """The text of each slot, its root excluded.

    Attributes:
      tokens: [B, C] int32; entries at and past `length` are undefined.
      length: [B] int32.
    """

    tokens: jax.Array
    length: jax.Array


@dataclasses.dataclass(frozen=True)
class LookupProposer:
    """Continuations of earlier occurrences of the last tokens, the longest match first and of these the latest.

    Attributes:
      depth: L, tokens drafted at most.
      num_nodes: N of the tree of several continuations; None for the chain of the first.
      ngram: longest run of last tokens to look for; shorter ones down to a single token serve where it is not found.
    """

    depth: int
    num_nodes: int | None
    ngram: int
    taps: tuple[int, ...] = ()
    uses_drafter: bool = False

    @property
    def max_path(self) -> int:
        return self.depth + 1

    def prepare(self, params: Any) -> Any:
        return params

    def init_cache(self, batch: int, rows: int) -> History:
        return History(tokens=jnp.zeros((batch, rows), jnp.int32), length=jnp.zeros((batch,), jnp.int32))

    def propose(self, params: Any, target_params: Any, cache: History, root: jax.Array) -> DraftTree:
        width = 1 if self.num_nodes is None else min(MAX_MATCHES, self.num_nodes - 1, cache.tokens.shape[1])
        text = write_rows(cache.tokens, root[:, None], cache.length)
        ends, lengths = find_matches(text, cache.length, ngram=self.ngram, width=width)
        tokens = continuations(text, cache.length, ends, depth=self.depth)
        # Among matches of one length the later of two weighs more, so that the order is that of the matches.
        recency = 1.0 + 1.0 / jnp.arange(1, width + 1, dtype=jnp.float32)[None]
        trust = TRUST_PER_TOKEN ** lengths.astype(jnp.float32)
        weights = jnp.where(lengths > 0, trust * recency, 0.0)
        return trie_tree(tokens, weights, self.num_nodes or self.depth + 1, root)

    def absorb(self, params: Any, target_params: Any, cache: History, rows: TextRows) -> History:
        tokens = write_rows(cache.tokens, rows.tokens, cache.length)
        return History(tokens=tokens, length=cache.length + rows.count)


def find_matches(text: jax.Array, last: jax.Array, *, ngram: int, width: int) -> tuple[jax.Array, jax.Array]:
    """Earlier places where the last tokens of the text occur.

    A place is the index of an earlier token equal to the last one; its match length counts how many tokens, that one
    included, agree with the end of the text, at most `ngram`.

    Args:
      text: [B, C] int32.
      last: [B] int32, index of the last token of each text.
      ngram: longest match (static).
      width: W, places to return (static), W <= C.

    Returns:
      (places [B, W] int32, match lengths [B, W] int32), longest matches first and of equal ones the latest first.
      Where there are fewer than W the match length is 0 and the place 0.
    """
    rows = text.shape[1]
    at = jnp.arange(rows, dtype=jnp.int32)[None]
    agrees = at < last[:, None]
    length = jnp.zeros_like(text)
    for back in range(ngram):
        token = jnp.take_along_axis(text, jnp.maximum(last - back, 0)[:, None], axis=1, mode="clip")
        shifted = jnp.pad(text, ((0, 0), (back, 0)))[:, :rows]  # text[at - back]
        agrees = agrees & (at >= back) & (shifted == token)
        length = length + agrees.astype(jnp.int32)
    key = jnp.where(length > 0, length * rows + at, 0)
    if width == 1:
        best = jnp.max(key, axis=1, keepdims=True)
    else:
        # Positive floats are ordered as their bits are, and only floats have a fast selection on GPUs. The smallest
        # normal number is added, since denormals may be flushed to zero.
        smallest = jnp.int32(1 << 23)
        best = lax.top_k(lax.bitcast_convert_type(key + smallest, jnp.float32), width, is_stable=False)[0]
        best = lax.bitcast_convert_type(best, jnp.int32) - smallest
    return best % rows, best // rows


def continuations(text: jax.Array, last: jax.Array, places: jax.Array, *, depth: int) -> jax.Array:
    """The tokens that followed each place, [B, W, L] int32.

    A continuation that reaches the end of the text goes on with itself: the text is taken to repeat with the period
    (end of the text - place), so that a loop is drafted to the full depth.

    Args:
      text: [B, C] int32.
      last: [B] int32, index of the last token.
      places: [B, W] int32, less than `last`.
      depth: L (static).
    """
    period = jnp.maximum(last[:, None] - places, 1)[:, :, None]
    steps = jnp.arange(depth, dtype=jnp.int32)[None, None]
    index = places[:, :, None] + 1 + steps % period
    flat = index.reshape(index.shape[0], -1)
    return jnp.take_along_axis(text, flat, axis=1, mode="clip").reshape(index.shape)
