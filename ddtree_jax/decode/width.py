"""Width by measurement: how many nodes of its tree a round verifies.

The nodes of a best-first tree come in order of probability, so its first n are the tree of width n. What counts is the
width that promises the most tokens a second: 1 + the probabilities of its nodes, as trees had them lately, each
corrected by what came of such promises before, over the measured time of a round of that width. Costs are a staircase
(whole tiles, whole waves of thread blocks), so all widths are compared.

A width is chosen every few rounds, in a look, and the rounds until the next one draft and verify that width. What wider
trees promise is seen at looks alone, from the widest tree that the last round's distributions give. A text begins with
a few rounds of the middle width, and never depends on the choice.

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

    @classmethod
    def all_but(cls, number: int, count: int, contexts: Sequence[float] = (0,)) -> "RoundCosts":
        """Of `count` widths all but one are too dear to be taken, as host arrays: to hold a loop at that one."""
        seconds = np.where(np.arange(count) == number, 1, 1e9)
        return cls(np.asarray(contexts, np.float32), np.tile(seconds.astype(np.float32), (len(contexts), 1)))

    def at(self, context: jax.Array) -> jax.Array:
        """Seconds [W] at a context [] float32, linear between those that were measured."""
        return jax.vmap(lambda column: jnp.interp(context, self.contexts, column), in_axes=1)(self.seconds)


@flax.struct.dataclass
class WidthChoice:
    """The width in use, and what the next choice goes by.

    A segment of the tree is what a width has and the width before it has not.

    Attributes:
      number: [] int32, of the width in use, from 0.
      left: [] int32, rounds before the next look.
      sums: [4, W] float32, of each segment, over rounds, old ones fading: `promised` and `accepted`, tokens in rounds
        that verified it (the calibration); `hoped`, tokens that a slot was promised, and `drafted`, rounds for which
        that is known. One array, so that a round updates it in one kernel.
    """

    number: jax.Array
    left: jax.Array
    sums: jax.Array

    @classmethod
    def empty(cls, widths: Sequence[int], look_every: int) -> "WidthChoice":
        """Before the first round: the middle width (the narrower of two), and soon a look."""
        middle, soon = (len(widths) - 1) // 2, max(1, look_every // 4)
        return cls(jnp.int32(middle), jnp.int32(soon), jnp.zeros((4, len(widths)), jnp.float32))

    def due(self) -> "WidthChoice":
        """With a look before the next round."""
        return self.replace(left=jnp.zeros_like(self.left))

    @property
    def promised(self) -> jax.Array:
        return self.sums[0]

    @property
    def accepted(self) -> jax.Array:
        return self.sums[1]

    @property
    def hoped(self) -> jax.Array:
        return self.sums[2]

    @property
    def drafted(self) -> jax.Array:
        return self.sums[3]

    def rates(self) -> list[jax.Array]:
        """Accepted tokens for each promised one, W times [] float32; little known, those of the segment before."""
        rates, rate = [], jnp.float32(1)
        for segment in range(self.promised.shape[0]):
            rate = (_TRUST * rate + self.accepted[segment]) / (_TRUST + self.promised[segment])
            rates.append(rate)
        return rates

    def look(
        self, promised: jax.Array, costs: RoundCosts, length: jax.Array, active: jax.Array, look_every: int
    ) -> "WidthChoice":
        """With the best width for `look_every` rounds, if none are left of the last one.

        Args:
          promised: [W] float32, of the widest tree for the last round (`promises`).
          costs: of W widths.
          length: [B] int32, committed tokens.
          active: [B] bool, slots that still decode.
        """
        slots = jnp.maximum(jnp.sum(active, dtype=jnp.float32), 1.0)
        context = jnp.sum(jnp.where(active, length, 0)).astype(jnp.float32) / slots
        looks = self.left == 0
        unseen = looks & (jnp.arange(promised.shape[0], dtype=jnp.int32) > self.number)
        nothing = jnp.zeros_like(promised)
        choice = self._add(1.0, promised=nothing, accepted=nothing, hoped=promised / slots, seen=unseen)
        best = best_width(self.rates(), choice.hoped / jnp.maximum(choice.drafted, 1.0), costs.at(context))
        return choice.replace(number=jnp.where(looks, best, self.number), left=jnp.where(looks, look_every, self.left))

    def observe(self, widths: Sequence[int], promised: jax.Array, walk: Acceptance, active: jax.Array) -> "WidthChoice":
        """After a round of the width in use, whose tree `promised` [W] float32 and which accepted `walk`.

        `left` stays: who counts the rounds of a stretch takes them off at its end.
        """
        step = jnp.arange(1, walk.path.shape[1], dtype=jnp.int32)[None]
        accepted = (step < walk.length[:, None]) & active[:, None]
        taken = _in_segment(walk.path[:, 1:], widths) & accepted[None]
        tried = jnp.arange(len(widths), dtype=jnp.int32) <= self.number
        slots = jnp.maximum(jnp.sum(active, dtype=jnp.float32), 1.0)
        accepted = jnp.sum(taken, axis=(1, 2), dtype=jnp.float32)
        tried_promised = jnp.where(tried, promised, 0.0)
        return self._add(_MEMORY, promised=tried_promised, accepted=accepted, hoped=promised / slots, seen=tried)

    def _add(self, memory: float, *, promised, accepted, hoped, seen) -> "WidthChoice":
        """With the sums [W] of a round, of which `hoped` counts for the segments `seen` [W] bool."""
        calibration, recent = jnp.full_like(promised, memory), jnp.where(seen, jnp.float32(_RECENT), 1.0)
        fade = jnp.stack([calibration, calibration, recent, recent])
        new = jnp.stack([promised, accepted, jnp.where(seen, hoped, 0.0), seen.astype(jnp.float32)])
        return self.replace(sums=fade * self.sums + new)


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
