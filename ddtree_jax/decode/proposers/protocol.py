"""What the loop and a proposer say to each other.

A proposer is a frozen, hashable object (a static argument of the jitted loop). What it needs at run time, parameters
and cache, are pytrees that the loop hands over and takes back.

Shape letters: B slots, N nodes, R rows of a commit or of a prefill pass, T tapped layers, E the target's hidden size.
"""

from typing import Any, Protocol

import flax.struct
import jax

from ddtree_jax.tree import DraftTree


@flax.struct.dataclass
class TextRows:
    """Rows that have just become cache rows of the target: a chunk of the prompt, or the accepted path of a round.

    Row i holds the token at one position and what the target computed there. The token drawn at the last live row is
    the next root; it is not among the rows (it has no hidden state yet) and comes as `root` of `propose`.

    Attributes:
      tokens: [B, R] int32.
      hidden: [B, R, E], after the target's final norm.
      features: [B, R, T * E], the residual stream after the tapped blocks; None without taps.
      count: [B] int32, live rows of each slot; the rows after them are undefined. May be 0.
    """

    tokens: jax.Array
    hidden: jax.Array
    features: jax.Array | None
    count: jax.Array


class Proposer(Protocol):
    """What the loop asks of a drafter.

    Every committed token passes through `absorb` exactly once and in order, prompt first, before the `propose` that
    follows it: a proposer's cache can hold rows of its own for all of them, and what it does not use costs nothing.
    A drafter whose row needs the token after it (EAGLE, MTP) keeps the last row's state in its cache and completes
    the row when that token comes, as the first of the next rows or as `root`.

    Attributes:
      max_path: P, most rows one round can commit.
      taps: target blocks whose output the proposer wants to see.
      uses_drafter: whether it has parameters of its own; `params` is None otherwise.
    """

    max_path: int
    taps: tuple[int, ...]
    uses_drafter: bool

    def prepare(self, params: Any) -> Any:
        """The parameters as `propose` and `absorb` are quickest with them; they take those of a checkpoint too.

        Called inside each jitted entry point, outside its loops: what is derived from parameters alone is made here,
        not in every round. Prepared ones are returned as they are, for callers of many entry points.
        """

    def init_cache(self, batch: int, rows: int) -> Any:
        """An empty cache pytree, or None. `rows` leaves room for P rows after any text."""

    def propose(self, params: Any, target_params: Any, cache: Any, root: jax.Array) -> DraftTree:
        """The tree below the last committed tokens `root` [B]. It must not depend on anything but the text."""

    # Only of methods whose nodes come in order of probability, for loops of several widths.

    def of_width(self, num_nodes: int) -> "Proposer":
        """The proposer of the first `num_nodes` nodes, by the same parameters, caches and scores."""

    def draft(self, params: Any, target_params: Any, cache: Any, root: jax.Array) -> Any:
        """The scores that trees are built from: the drafter's part of `propose`."""

    def empty_scores(self, batch: int) -> Any:
        """Zeros of the shapes of `draft`."""

    def build(self, params: Any, scores: Any, root: jax.Array) -> DraftTree:
        """The tree of such scores, also those of the proposer of a wider tree: the rest of `propose`."""

    def absorb(self, params: Any, target_params: Any, cache: Any, rows: TextRows) -> Any:
        """The cache with `rows` appended."""
