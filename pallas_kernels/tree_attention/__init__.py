"""Attention of draft-tree nodes over a cached prefix and the tree itself."""

from pallas_kernels.tree_attention.api import paged_tree_attention, tree_attention
from pallas_kernels.tree_attention.projected import projected_tree_attention

__all__ = ["paged_tree_attention", "projected_tree_attention", "tree_attention"]
