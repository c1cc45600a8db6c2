"""Autoregressive decoding: nothing is drafted."""

import dataclasses

from ddtree_jax.tree import root_tree


@dataclasses.dataclass(frozen=True)
class NoDraft:
    """The tree of one node."""

    max_path: int = 1
    taps: tuple[int, ...] = ()
    uses_drafter: bool = False

    def prepare(self, params):
        return params

    def init_cache(self, batch, rows):
        return None

    def propose(self, params, target_params, cache, root):
        return root_tree(root)

    def absorb(self, params, target_params, cache, rows):
        return cache
