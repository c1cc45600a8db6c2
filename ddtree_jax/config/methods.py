"""Decoding methods: which there are, and what each needs."""

import dataclasses

from ddtree_jax.config.drafters import DRAFTERS, DraftConfig


@dataclasses.dataclass(frozen=True)
class Method:
    """What a decoding method takes.

    Attributes:
      needs_drafter: whether it needs a drafter's checkpoint.
      has_width: whether `num_nodes` sets the width of its tree.
      best_first: whether its tree's nodes come in order of probability, so that a round can verify fewer ("auto").
      same_as: the method that it is another name of, for drafters that have both.
      families: drafters that can do it, if it needs one.
    """

    needs_drafter: bool
    has_width: bool = False
    best_first: bool = False
    same_as: str | None = None
    families: tuple[str, ...] = tuple(DRAFTERS)

    def possible(self, drafter: DraftConfig | None) -> bool:
        """Whether it can be done with this drafter, or without one."""
        return not self.needs_drafter or (drafter is not None and drafter.family in self.families)


METHODS = {
    "autoregressive": Method(needs_drafter=False),
    "lookup": Method(needs_drafter=False),
    "lookup_tree": Method(needs_drafter=False, has_width=True),
    "dflash": Method(needs_drafter=True, families=("dflash",)),
    "best_path": Method(needs_drafter=True, same_as="dflash"),
    "static_tree": Method(needs_drafter=True),
    "ddtree": Method(needs_drafter=True, has_width=True, best_first=True, families=("dflash",)),
    "eagle2": Method(needs_drafter=True, has_width=True, families=("eagle3", "mtp")),
}
MAX_NODES = 512


def possible_methods(drafter: DraftConfig | None) -> list[str]:
    """The methods that a target can be decoded with, given its drafter; no method under two names."""
    possible = [name for name, method in METHODS.items() if method.possible(drafter)]
    return [name for name in possible if METHODS[name].same_as not in possible]
