"""Width by measurement: how many nodes of its tree a round verifies.

The nodes of a best-first tree come in order of probability, so its first n are the tree of width n. A round verifies
the width that promises the most tokens a second: 1 + the probabilities of its nodes, each corrected by what came of such
promises before, over the measured time of a round of that width. Costs are a staircase (whole tiles, whole waves of
thread blocks), so all widths that were drafted are compared: all there are, every few rounds (`Reach`). A text never
depends on the choice.

Shape letters: B slots, N nodes of the widest tree, W widths, K measured contexts, P rows of a path.
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
# Rounds from one look at the widest tree to the next.
_LOOK = 8


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
class Calibration:
    """Tokens promised and accepted lately, by segment of the tree: what a width has and the width before it has not.

    Attributes:
      promised, accepted: [W] float32, sums over rounds that verified the segment, old rounds fading.
    """

    promised: jax.Array
    accepted: jax.Array

    @classmethod
    def empty(cls, widths: Sequence[int]) -> "Calibration":
        zeros = jnp.zeros((len(widths),), jnp.float32)
        return cls(zeros, jnp.copy(zeros))

    def rates(self) -> list[jax.Array]:
        """Accepted tokens for each promised one, W times [] float32; where little is known, as in the segment before."""
        rates, rate = [], jnp.float32(1)
        for segment in range(self.promised.shape[0]):
            rate = (_TRUST * rate + self.accepted[segment]) / (_TRUST + self.promised[segment])
            rates.append(rate)
        return rates


@flax.struct.dataclass
class Reach:
    """How wide trees are drafted, for nodes that no round verifies are drafted for nothing.

    Every `_LOOK`-th round drafts the widest tree and chooses among all widths. The rounds until the next look draft no
    wider than that round chose, or any of the rounds since the look before it.

    Attributes:
      limit: [] int32, number of the widest width drafted between looks.
      widest: [] int32, number of the widest width chosen since the last look, that round included.
      rounds: [] int32, rounds since the last look; 0 where the next round is one.
    """

    limit: jax.Array
    widest: jax.Array
    rounds: jax.Array

    @classmethod
    def empty(cls) -> "Reach":
        return cls(*(jnp.zeros((), jnp.int32) for _ in range(3)))

    def drafted(self, widths: Sequence[int]) -> jax.Array:
        """Number of the width to draft, [] int32."""
        return jnp.where(self.rounds == 0, len(widths) - 1, self.limit)

    def after(self, chosen: jax.Array) -> "Reach":
        """After a round that verified width number `chosen` [] int32."""
        looked = self.rounds == 0
        return Reach(
            limit=jnp.where(looked, jnp.maximum(chosen, self.widest), self.limit),
            widest=jnp.maximum(chosen, jnp.where(looked, 0, self.widest)),
            rounds=(self.rounds + 1) % _LOOK,
        )


def promises(tree: DraftTree, widths: Sequence[int], active: jax.Array) -> jax.Array:
    """Expected accepted tokens of each segment by the drafter's own probabilities, summed over active slots, [W]."""
    node = np.arange(widths[-1])
    probability = jnp.where(active[:, None], jnp.exp(tree.log_prob[:, : widths[-1]]), 0.0)
    return jnp.sum(jnp.where(_in_segment(node, widths)[:, None], probability[None], 0.0), axis=(1, 2))


def best_width(
    promised: jax.Array, calibration: Calibration, costs: RoundCosts, length: jax.Array, active: jax.Array,
    drafted: jax.Array,
) -> jax.Array:  # fmt: skip
    """Which width to verify, [] int32: the narrowest of those that promise the most tokens a second.

    Args:
      promised: [W] float32 (`promises`).
      calibration, costs: of W widths.
      length: [B] int32, committed tokens.
      active: [B] bool, slots that still decode.
      drafted: [] int32, the last width to compare.
    """
    slots = jnp.sum(active, dtype=jnp.float32)
    context = jnp.sum(jnp.where(active, length, 0)).astype(jnp.float32) / jnp.maximum(slots, 1.0)
    rates, seconds = calibration.rates(), costs.at(context)
    # Number by number, which XLA makes one kernel; a sum and a maximum over [W] would be kernels of their own.
    chosen, tokens, most = jnp.int32(0), slots, jnp.float32(-1)
    for segment in range(promised.shape[0]):
        tokens = tokens + rates[segment] * promised[segment]
        speed = tokens / seconds[segment]
        better = (segment <= drafted) & (speed > most)
        chosen, most = jnp.where(better, jnp.int32(segment), chosen), jnp.where(better, speed, most)
    return chosen


def observe(
    calibration: Calibration, widths: Sequence[int], chosen: jax.Array, promised: jax.Array, walk: Acceptance,
    active: jax.Array,
) -> Calibration:  # fmt: skip
    """The calibration after a round that verified width number `chosen` [] and accepted `walk`."""
    step = jnp.arange(1, walk.path.shape[1], dtype=jnp.int32)[None]
    accepted = (step < walk.length[:, None]) & active[:, None]
    taken = _in_segment(walk.path[:, 1:], widths) & accepted[None]
    tried = jnp.arange(len(widths), dtype=jnp.int32) <= chosen
    return Calibration(
        promised=_MEMORY * calibration.promised + jnp.where(tried, promised, 0.0),
        accepted=_MEMORY * calibration.accepted + jnp.sum(taken, axis=(1, 2), dtype=jnp.float32),
    )


def _in_segment(node: jax.Array | np.ndarray, widths: Sequence[int]) -> jax.Array:
    """[W, ...] bool: whether nodes [...] belong to each segment; the root belongs to none."""
    return jnp.stack([(node >= a) & (node < b) for a, b in itertools.pairwise((1, *widths))])
