"""Width by measurement: how many nodes of its tree a round verifies.

The nodes of a best-first tree come in order of probability, so its first n are the tree of width n. What counts is the
width that promises the most tokens a second: 1 + the probabilities of its nodes, as trees had them lately, each
corrected by what came of such promises before, over the measured time of a round of that width. Costs are a staircase
(whole tiles, whole waves of thread blocks), so all widths are compared.

Every few rounds the widest tree is drafted and a width chosen. The rounds until the next look draft and verify that
width: nodes that no round verifies would be drafted for nothing. A text never depends on the choice.

Shape letters: B slots, N nodes of a tree, W widths, K measured contexts, P rows of a path.
"""

import itertools
from collections.abc import Sequence

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from ddtree_jax.tree import Acceptance, DraftTree

# Of each round's weight in the calibration, what is left a round later; and the drafted tokens' worth of trust in a
# segment before it was ever tried. A hundred rounds or so are a text; fewer would chase noise.
_MEMORY = 0.99
_TRUST = 8.0
# The same of a tree's promises; one tree alone says little of the rounds to come.
_RECENT = 0.9


@flax.struct.dataclass
class RoundCosts:
    """What a round takes, by the length of the text and the width of the tree.

    Attributes:
      contexts: [K] float32, rising, committed tokens.
      seconds: [K, W] float32; only ratios matter.
    """

    contexts: jax.Array
    seconds: jax.Array

    @classmethod
    def flat(cls, widths: Sequence[int]) -> "RoundCosts":
        """All widths cost the same, as host arrays: for decodes of no rounds."""
        return cls(np.zeros(1, np.float32), np.ones((1, len(widths)), np.float32))

    def at(self, context: jax.Array) -> jax.Array:
        """Seconds [W] at a context [] float32, linear between those that were measured."""
        return jax.vmap(lambda column: jnp.interp(context, self.contexts, column), in_axes=1)(self.seconds)


@flax.struct.dataclass
class WidthChoice:
    """The width in use, and what the next choice goes by.

    A segment of the tree is what a width has and the width before it has not.

    Attributes:
      number: [] int32, of the width in use, from 0.
      rounds: [] int32, rounds since the last look; 0 where the next round is one.
      promised, accepted: [W] float32, tokens of each segment promised and accepted, sums over rounds that verified it,
        old ones fading: the calibration.
      hoped, drafted: [W] float32, what a slot was promised of each segment, and how often the segment was drafted, sums
        that fade likewise.
    """

    number: jax.Array
    rounds: jax.Array
    promised: jax.Array
    accepted: jax.Array
    hoped: jax.Array
    drafted: jax.Array

    @classmethod
    def empty(cls, widths: Sequence[int]) -> "WidthChoice":
        number, rounds = (jnp.zeros((), jnp.int32) for _ in range(2))
        return cls(number, rounds, *(jnp.zeros((len(widths),), jnp.float32) for _ in range(4)))

    def to_draft(self, widths: Sequence[int]) -> jax.Array:
        """Number of the width that the round drafts, [] int32."""
        return jnp.where(self.rounds == 0, len(widths) - 1, self.number)

    def rates(self) -> list[jax.Array]:
        """Accepted tokens for each promised one, W times [] float32; little known, those of the segment before."""
        rates, rate = [], jnp.float32(1)
        for segment in range(self.promised.shape[0]):
            rate = (_TRUST * rate + self.accepted[segment]) / (_TRUST + self.promised[segment])
            rates.append(rate)
        return rates

    def look(self, promised: jax.Array, costs: RoundCosts, length: jax.Array, active: jax.Array) -> "WidthChoice":
        """With the width that the round verifies: the best, if it drafted all of them.

        Args:
          promised: [W] float32, of the drafted tree (`promises`).
          costs: of W widths.
          length: [B] int32, committed tokens.
          active: [B] bool, slots that still decode.
        """
        slots = jnp.maximum(jnp.sum(active, dtype=jnp.float32), 1.0)
        context = jnp.sum(jnp.where(active, length, 0)).astype(jnp.float32) / slots
        looked = self.rounds == 0
        seen = looked | (jnp.arange(promised.shape[0], dtype=jnp.int32) <= self.number)
        hoped = jnp.where(seen, _RECENT * self.hoped + promised / slots, self.hoped)
        drafted = jnp.where(seen, _RECENT * self.drafted + 1.0, self.drafted)
        best = best_width(self.rates(), hoped / jnp.maximum(drafted, 1.0), costs.at(context))
        return self.replace(number=jnp.where(looked, best, self.number), hoped=hoped, drafted=drafted)

    def observe(
        self, widths: Sequence[int], promised: jax.Array, walk: Acceptance, active: jax.Array, look_every: int
    ) -> "WidthChoice":
        """After a round that accepted `walk`; `look_every` rounds lie between looks."""
        step = jnp.arange(1, walk.path.shape[1], dtype=jnp.int32)[None]
        accepted = (step < walk.length[:, None]) & active[:, None]
        taken = _in_segment(walk.path[:, 1:], widths) & accepted[None]
        tried = jnp.arange(len(widths), dtype=jnp.int32) <= self.number
        return self.replace(
            rounds=(self.rounds + 1) % look_every,
            promised=_MEMORY * self.promised + jnp.where(tried, promised, 0.0),
            accepted=_MEMORY * self.accepted + jnp.sum(taken, axis=(1, 2), dtype=jnp.float32),
        )


def promises(tree: DraftTree, widths: Sequence[int], active: jax.Array) -> jax.Array:
    """Expected accepted tokens of each segment by the drafter's own probabilities, summed over active slots, [W]."""
    probability = jnp.where(active[:, None], jnp.exp(tree.log_prob), 0.0)
    segments = _in_segment(np.arange(tree.num_nodes), widths)
    return jnp.sum(jnp.where(segments[:, None], probability[None], 0.0), axis=(1, 2))


def best_width(rates: Sequence[jax.Array], expected: jax.Array, seconds: jax.Array) -> jax.Array:
    """Which width promises the most tokens a second, [] int32; the narrowest of equal ones.

    Args:
      rates: W times [] float32, accepted tokens for each promised one.
      expected: [W] float32, tokens promised by each segment.
      seconds: [W] float32, of a round.
    """
    # Number by number, which XLA makes one kernel; a sum and a maximum over [W] would be kernels of their own.
    chosen, tokens, most = jnp.int32(0), jnp.float32(1), jnp.float32(-1)
    for segment, rate in enumerate(rates):
        tokens = tokens + rate * expected[segment]
        speed = tokens / seconds[segment]
        chosen, most = jnp.where(speed > most, jnp.int32(segment), chosen), jnp.maximum(speed, most)
    return chosen


def _in_segment(node: jax.Array | np.ndarray, widths: Sequence[int]) -> jax.Array:
    """[W, ...] bool: whether nodes [...] belong to each segment; the root belongs to none."""
    return jnp.stack([(node >= a) & (node < b) for a, b in itertools.pairwise((1, *widths))])
