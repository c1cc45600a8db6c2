"""The blocks of a target whose output a drafter reads, where its config names none."""

import itertools


def default_taps(num_layers: int, num_taps: int) -> tuple[int, ...]:
    """Taps spread evenly from block 1 to the third block from the end, as the z-lab reference spreads them.

    (36, 5) gives (1, 9, 17, 25, 33); one tap sits in the middle. `round` is Python's, to even at halves. The last
    blocks serve the target's own next token and help a drafter less.

    Raises:
      ValueError: the target has too few layers for so many taps.
    """
    if num_taps == 1:
        return (num_layers // 2,)
    taps = tuple(round(1 + i * (num_layers - 4) / (num_taps - 1)) for i in range(num_taps))
    if taps[0] < 0 or any(a >= b for a, b in itertools.pairwise(taps)):
        raise ValueError(f"{num_taps} taps do not fit a target of {num_layers} layers; name the taps instead")
    return taps


def eagle3_taps(num_layers: int) -> tuple[int, int, int]:
    """Blocks whose output EAGLE-3 reads where its config names none: what enters blocks 2, n / 2 and n - 3."""
    return 1, num_layers // 2 - 1, num_layers - 4
