"""Which rank of the drafter the target's tokens have: what the best static tree is found from.

Texts are decoded with a comb: the drafter's R best tokens of every depth hang below the chain of its best ones, so
that each round shows them all. The text that is written afterwards tells which of them were right.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from ddtree_jax.config import MAX_NODES, DecodeConfig
from ddtree_jax.loading import Drafter, Target
from ddtree_jax.prompts import Prompt
from ddtree_jax.stepwise import RoundTrace, trace
from ddtree_jax.tree import Choices
from ddtree_jax.tree.best_static import MISSED, UNKNOWN


def comb(depths: int, ranks: int) -> Choices:
    """The chain of rank 0 with all of `ranks` ranks at each depth, in level order."""
    return tuple((*(0,) * above, rank) for above in range(depths) for rank in range(ranks))


def comb_config(base: DecodeConfig, drafter: Drafter, ranks: int) -> DecodeConfig:
    """`base` with the comb as its tree. Raises ValueError if there are more ranks than a pass has room for."""
    depths = base.draft_depth or drafter.config.depth
    most = min((MAX_NODES - 1) // depths, drafter.config.max_candidates)
    if not 1 <= ranks <= most:
        raise ValueError(f"ranks must be 1..{most} with {depths} drafted tokens; found {ranks}")
    return DecodeConfig(**vars(base) | dict(method="static_tree", tree_choices=comb(depths, ranks)))


def measure_ranks(
    target: Target, drafter: Drafter, prompts: Sequence[Prompt], base: DecodeConfig, ranks: int
) -> Iterator[np.ndarray]:
    """Decodes the prompts and yields, prompt by prompt, the ranks of the text's tokens in each round's draft.

    Yields:
      [rounds, L] int64: the rank, `MISSED` below the `ranks` best, `UNKNOWN` past the end of the text.
    """
    config = comb_config(base, drafter, ranks)
    stops = target.config.stop_token_ids if config.stop_token_ids is None else config.stop_token_ids
    for prompt in prompts:
        rounds = list(trace(target, drafter, prompt, config))
        yield ranks_of_text(rounds, ranks, stops)


def ranks_of_text(rounds: Sequence[RoundTrace], ranks: int, stops: Sequence[int]) -> np.ndarray:
    """What `measure_ranks` yields for the traced rounds of one prompt, all of them."""
    if not rounds:
        return np.zeros((0, 0), np.int64)
    last = rounds[-1]
    ending = last.walk.tokens[0, : last.walk.length[0]].tolist()
    stop = next((i for i, token in enumerate(ending) if token in stops), len(ending))
    text = np.array(last.text_tokens + ending[: stop + 1])
    paths = []
    for seen in rounds:
        drafted = seen.tree.tokens[0, 1:].reshape(-1, ranks)  # level order: depth by depth
        path = np.full(len(drafted), UNKNOWN)
        following = text[len(seen.text_tokens) :][: len(drafted)]
        right = drafted[: len(following)] == following[:, None]
        path[: len(following)] = np.where(right.any(1), right.argmax(1), MISSED)
        paths.append(path)
    return np.stack(paths)
